"""Speed of a packed linear layer against cuBLAS on the dense weight, over the shapes and numbers of rows of models, on one GPU.

    python benchmarks/matmul.py [--out FILE] [--seconds S] [--quick] [--commit HASH]
    python benchmarks/matmul.py --chart FILE.svg RESULT.json      (needs no GPU)

Cells are checked and timed by hf_sparse24/bench.py, which `hf-sparse24 bench` uses, too: every element first, within 2^-8 (bfloat16) or
2^-10 (float16) of |x| |W|^T; a wrong cell is recorded and not timed.  The file is written again after every step; what no time
was left for is listed in "skipped".
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparse24.bench import (
    BIG,
    DEVICE,
    LLAMA_8B,
    TOLERANCE,
    Copies,
    Time,
    environment,
    error_of,
    measure,
    num_copies,
    packed_layer,
    random_24,
    random_x,
    time_side_by_side,
)
from hf_sparse24.chart import draw_speedups
from hf_sparse24.kernel_report import ROWS

ROOT = Path(__file__).resolve().parents[1]
MAIN = list(LLAMA_8B)
UNTUNED = [(1024, 4096), (128256, 4096), (18944, 3584), (576, 1536)]
HALF_ROWS = [1, 16, 128, 1024]
TORCH_ROWS = [m for m in ROWS if m >= 64]
# Rows of x -> speed-up over dense that the geometric mean over MAIN should reach, up to the next number of rows.
TARGETS = {1: 1.75, 32: 1.6, 64: 1.5, 128: 1.3, 256: 1.25, 512: 1.2, 1024: 1.35, 4096: 1.45}
BYTES_PER_S, FLOP_PER_S = 4.3e12, 800e12  # of an H200, as measured; sparse tensor cores do twice the latter
HOST_CALLS = 300

# Compiles, or reads from the cache, all kernels of the shapes given; prints the seconds.
COMPILE = """
import json, sys, time
import torch
import hf_sparse24
from hf_sparse24.kernels import dispatch
torch.zeros(1, device="cuda").sum().item()
start = time.perf_counter()
reason = dispatch.prepare("sparse-24-bitmask", [tuple(shape) for shape in json.loads(sys.argv[1])], torch.bfloat16, torch.device("cuda"))
print(json.dumps({"seconds": round(time.perf_counter() - start, 3), "reason": reason}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", help="with --chart: what to draw")
    parser.add_argument("--chart", type=Path, help="draw RESULT.json and stop")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "matmul-h200.json")
    parser.add_argument("--seconds", type=float, default=240, help="leave out what does not fit")
    parser.add_argument("--quick", action="store_true", help="few cells, to see that it runs")
    parser.add_argument("--commit", help="of the source, where git does not know")
    parser.add_argument("--peer", choices=["graph", "eager"], help=argparse.SUPPRESS)  # this script calls itself
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    if arguments.chart:
        if arguments.result is None:
            parser.error("--chart needs a RESULT.json")
        arguments.chart.write_text(draw(json.loads(arguments.result.read_text())))
    elif not torch.cuda.is_available():
        print("matmul.py: no GPU is visible, nothing is measured")
    elif arguments.peer:
        time_torch(arguments.peer == "graph", arguments.quick, time.monotonic() + arguments.seconds)
    else:
        Benchmark(arguments).run()


class Benchmark:
    """One run: its steps in order, and the file that they fill."""

    def __init__(self, arguments: argparse.Namespace):
        self.out, self.quick = arguments.out, arguments.quick
        self.stop = time.monotonic() + arguments.seconds
        self.rows, self.half_rows = (HALF_ROWS, [16]) if self.quick else (list(ROWS), HALF_ROWS)
        self.main, self.untuned = (MAIN[:2], UNTUNED[-1:]) if self.quick else (MAIN, UNTUNED)
        self.result: dict[str, Any] = {"benchmark": "matmul", "environment": made_on(arguments.commit)}
        self.result |= {"cells": [], "means": [], "host": [], "memory": [], "compile": {}, "skipped": [], "errors": []}

    def run(self) -> None:
        """All steps; one that fails does not keep the others from running."""
        with tempfile.TemporaryDirectory() as cache, torch.no_grad():
            self.step("compile", lambda: self.compile(cache))
            gc.collect()
            gc.freeze()  # each capture collects garbage: of what there is until now, there is none
            for n, k in self.main:
                self.step(f"{n}x{k} bfloat16", lambda n=n, k=k: self.measure(n, k, torch.bfloat16, self.rows))
            self.step("host", self.host)
            self.step("memory", self.memory)
            self.step("torch", self.torch)
            for n, k in self.untuned:
                self.step(f"{n}x{k} bfloat16", lambda n=n, k=k: self.measure(n, k, torch.bfloat16, self.rows))
            for n, k in self.main:
                self.step(f"{n}x{k} float16", lambda n=n, k=k: self.measure(n, k, torch.float16, self.half_rows))
        print_result(self.result)

    def step(self, name: str, work: Callable[[], None]) -> None:
        """Do it if there is time, and write the file."""
        if self.left() <= 0:
            self.result["skipped"].append(name)
        else:
            start = time.monotonic()
            try:
                work()
            except Exception as error:
                traceback.print_exc(limit=4)
                self.result["errors"].append(f"{name}: {message(error)}")
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        self.result["means"] = means(self.result["cells"])
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def left(self) -> float:
        """Seconds."""
        return self.stop - time.monotonic()

    # ---- compiling -----------------------------------------------------------------------------------------------------------

    def compile(self, cache: str) -> None:
        """How long the kernels of the main shapes take, cold and warm; then build those of all other cells into the same cache."""
        import cuda.core  # noqa: F401  before threads do

        from hf_sparse24.kernels import dispatch
        from hf_sparse24.kernels.compile import arch_of, compile_all

        os.environ["HF_SPARSE24_CACHE"] = cache
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", COMPILE, json.dumps(self.main)],
                cwd=ROOT, env=environ(), capture_output=True, text=True, timeout=min(120, max(30, self.left())),
            )  # fmt: skip
            record = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-300:]}
            self.result["compile"][name] = record | {"kernels": len(list(Path(cache).rglob("*.cubin")))}
        print(f"compile: {self.result['compile']}", flush=True)
        cells = [(n, k, m, torch.bfloat16) for n, k in self.main + self.untuned for m in self.rows]
        cells += [(n, k, m, torch.float16) for n, k in self.main for m in self.half_rows]
        found = {(dispatch.explain(*cell).config, cell[3]) for cell in cells}
        arch = arch_of(torch.cuda.get_device_capability())
        compile_all([(config.source, arch, config.defines(dtype)) for config, dtype in found if config is not None])

    # ---- cells ---------------------------------------------------------------------------------------------------------------

    def measure(self, n: int, k: int, dtype: torch.dtype, rows: list[int]) -> None:
        """A record for each number of rows."""
        weights = Copies.random(n, k, dtype)
        for m in rows:
            if self.left() <= 0:
                self.result["skipped"].append(f"{n}x{k} {name_of(dtype)} M={m}")
                continue
            record: dict[str, Any] = {"n": n, "k": k, "m": m, "dtype": name_of(dtype)}
            try:
                record |= measure(weights, m).to_dict()
                record["limit_us"] = round(limit_us(n, k, m), 2)
                record |= {"target": "ratio >= 1.0", "met": record.get("ratio", 0) >= 1}
            except Exception as error:
                traceback.print_exc(limit=4)
                record["failure"] = message(error)
            self.result["cells"].append(record)

    def torch(self) -> None:
        """Times of torch's own semi-structured tensors, into the cells; in another process, which a failed capture may leave broken."""
        cells = {(c["n"], c["k"], c["m"]): c for c in self.result["cells"] if c["dtype"] == "bfloat16"}
        for mode in ("graph", "eager"):
            seconds = min(60.0, self.left() / 2)
            command = [sys.executable, __file__, "--peer", mode, "--seconds", str(seconds)] + ["--quick"] * self.quick
            try:
                done = subprocess.run(command, cwd=ROOT, env=environ(), capture_output=True, text=True, timeout=seconds + 30)
                output, problem = done.stdout, done.stderr[-300:] if done.returncode else None
            except subprocess.TimeoutExpired as error:
                told = error.stdout or b""
                output, problem = told.decode() if isinstance(told, bytes) else told, "timed out"
            timed = 0
            for line in output.splitlines():
                if line.startswith("{"):
                    record = json.loads(line)
                    timed += "torch_us" in record
                    if cell := cells.get(tuple(record.pop("cell"))):
                        cell.pop("torch_error", None)
                        cell.update(record)
            if problem:
                self.result["errors"].append(f"torch's tensors, {mode}: {problem}")
            if timed:
                break

    # ---- one layer -----------------------------------------------------------------------------------------------------------

    def host(self) -> None:
        """Microseconds that the caller of a layer is kept, of calls that nothing waits for."""
        for n, k in [(256, 256), *self.main]:
            dense, compressed, bitmask = random_24(n, k, torch.bfloat16, 0)
            layers = [packed_layer(n, k, compressed, bitmask), dense_layer(dense)]
            for m in (1, 16):
                x = random_x(m, k, torch.bfloat16)
                times: tuple[list[float], list[float]] = ([], [])
                for repeat in range(6):
                    for layer, found in zip(layers, times, strict=True):
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                        for _ in range(HOST_CALLS):
                            layer(x)
                        seconds = time.perf_counter() - start
                        if repeat:  # the first warms up
                            found.append(seconds * 1e6 / HOST_CALLS)
                torch.cuda.synchronize()
                ours, theirs = statistics.median(times[0]), statistics.median(times[1])
                record = {"n": n, "k": k, "m": m, "path": layers[0].explain(m).path}
                record |= {"us": round(ours, 2), "dense_us": round(theirs, 2), "spread": round((max(times[0]) - min(times[0])) / ours, 3)}
                self.result["host"].append(record | {"target": "us <= dense_us + 5", "met": ours <= theirs + 5})

    def memory(self) -> None:
        """Bytes that a layer holds once every path has run, over those of the dense weight."""
        for n, k in self.main:
            _, compressed, bitmask = random_24(n, k, torch.bfloat16, 0)
            F.linear(random_x(1, k, torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE))  # cuBLAS takes its workspace
            torch.cuda.synchronize()
            layer = x = None  # of the shape before
            before = torch.cuda.memory_allocated()
            layer = packed_layer(n, k, compressed.clone(), bitmask.clone())
            paths = []
            for m in self.rows:
                x = random_x(m, k, torch.bfloat16)
                layer(x)
                paths.append(layer.explain(m).path)
                x = None
            F.linear(random_x(1, k, torch.bfloat16), layer.unpack())
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            ratio = held / (n * k * 2)
            record = {
                "n": n,
                "k": k,
                "bytes": held,
                "metadata": layer.metadata is not None,
                "paths": sorted({*paths, "unpack"}),
                "ratio": round(ratio, 4),
            }
            self.result["memory"].append(record | {"target": "ratio <= 0.63", "met": ratio <= 0.63})


# ---- helpers -------------------------------------------------------------------------------------------------------------------


def dense_layer(weight: Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def limit_us(n: int, k: int, m: int) -> float:
    """What no kernel can beat: every byte moved once, or every multiplication done."""
    size_bytes = n * k * 1.125 + m * k * 2 + m * n * 2
    return max(size_bytes / BYTES_PER_S, 2 * m * n * k / (2 * FLOP_PER_S)) * 1e6


def time_torch(in_graph: bool, quick: bool, stop: float) -> None:
    """Print a record per cell of what torch's own 2:4 tensors take; in graphs, or called one by one."""
    torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = False
    with torch.no_grad():
        for n, k in MAIN[:2] if quick else MAIN:
            dense = [random_24(n, k, torch.bfloat16, seed)[0] for seed in range(num_copies(n, k))]
            try:
                sparse = [torch.sparse.to_sparse_semi_structured(weight) for weight in dense]
            except Exception as error:
                for m in TORCH_ROWS:
                    print(json.dumps({"cell": (n, k, m), "torch_error": message(error)}), flush=True)
                continue
            for m in [128, 1024] if quick else TORCH_ROWS:
                if time.monotonic() > stop:
                    return
                record: dict[str, Any] = {"cell": (n, k, m)}
                try:
                    x = random_x(m, k, torch.bfloat16)
                    record["torch_result_error"] = error_of(F.linear(x, sparse[0]), x, dense[0], TOLERANCE[x.dtype])
                    calls = [lambda i, x=x, sparse=sparse: F.linear(x, sparse[i]), lambda i, x=x, dense=dense: F.linear(x, dense[i])]
                    time_them = time_side_by_side if in_graph else time_eager
                    ours, theirs = time_them(calls, len(dense), n * k * m > BIG)
                    record |= {"torch_us": round(ours.us, 3), "torch_dense_us": round(theirs.us, 3), "torch_spread": round(ours.spread, 4)}
                    record |= {"torch_timing": "graph" if in_graph else "eager"}
                except Exception as error:
                    record["torch_error"] = message(error)
                    print(json.dumps(record), flush=True)
                    if in_graph:
                        return  # nothing after a failed capture can be trusted
                    continue
                print(json.dumps(record), flush=True)


def time_eager(calls: list[Callable[[int], Any]], copies: int, big: bool) -> list[Time]:
    """As `time_side_by_side`, without graphs: host time counts where it is longer than the device's."""
    num_calls = copies * (1 if big else max(1, 16 // copies))
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(4):
        for call, found in zip(calls, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for i in range(num_calls):
                call(i % copies)
            end.record()
            end.synchronize()
            if repeat:
                found.append(start.elapsed_time(end) * 1000 / num_calls)
    return [Time.of(found) for found in times]


# ---- results ---------------------------------------------------------------------------------------------------------------


def made_on(commit: str | None) -> dict[str, Any]:
    """The environment, and which commit was measured."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() if not commit else ""
    return environment() | {"commit": commit or git}


def environ() -> dict[str, str]:
    """For a process that finds the package whether it is installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def means(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of rows, the geometric mean over the main shapes in bfloat16, against its target."""
    records = []
    for m in ROWS:
        ratios = [c["ratio"] for c in cells if c["m"] == m and c["dtype"] == "bfloat16" and (c["n"], c["k"]) in MAIN and "ratio" in c]
        if ratios:
            mean, target = statistics.geometric_mean(ratios), TARGETS[max(rows for rows in TARGETS if rows <= m)]
            record = {"m": m, "shapes": len(ratios), "ratio": round(mean, 4), "target": target}
            records.append(record | {"met": mean >= target and len(ratios) == len(MAIN)})
    return records


def print_result(result: dict[str, Any]) -> None:
    print_table(result["cells"], result["means"])
    for r in result["host"]:
        print(f"host {r['n']}x{r['k']} M={r['m']}: {r['us']:.1f} us, nn.Linear {r['dense_us']:.1f}  {verdict(r)}")
    for r in result["memory"]:
        print(f"memory {r['n']}x{r['k']}: {r['ratio']:.4f} of dense after {', '.join(r['paths'])}  {verdict(r)}")
    print(f"compile: {result['compile']}")
    for c in result["cells"]:
        where = f"{c['n']}x{c['k']} M={c['m']} {c['dtype']}"
        if "failure" in c:
            print(f"FAILED {where}: {c['failure']}, errors {c.get('error')} and {c.get('graph_error')}, {c.get('config')}")
        elif not c["met"]:
            print(f"SLOWER THAN DENSE {where}: {c['ratio']:.3f} (spreads {c['spread']:.3f}, {c['dense_spread']:.3f}), {c['config']}")
    for name in ("errors", "skipped"):
        if result[name]:
            print(f"{name}: {result[name]}")


def print_table(cells: list[dict[str, Any]], found_means: list[dict[str, Any]]) -> None:
    """Speed-ups over dense: a row per number of rows, a column per shape."""
    columns = list(dict.fromkeys((c["n"], c["k"], c["dtype"]) for c in cells))
    short = {"bfloat16": "", "float16": " fp16"}
    labels = [f"{n}x{k}{short[dtype]}" for n, k, dtype in columns]
    mean_of = {r["m"]: r for r in found_means}
    print("    M  " + "  ".join(labels) + "   mean")
    for m in sorted({c["m"] for c in cells}):
        found = {(c["n"], c["k"], c["dtype"]): c.get("ratio", "WRONG") for c in cells if c["m"] == m}
        texts = [f"{r:.2f}" if isinstance(r := found.get(column, ""), float) else r for column in columns]
        row = "  ".join(text.rjust(len(label)) for text, label in zip(texts, labels, strict=True))
        mean = mean_of.get(m)
        print(f"{m:5}  {row}   " + (f"{mean['ratio']:.2f} of {mean['target']} {verdict(mean)}" if mean else ""))
    torch_cells = [c for c in cells if "torch_us" in c]
    if torch_cells:
        print("torch's semi-structured tensors: " + ", ".join(f"{c['n']}x{c['k']} M={c['m']} {speed_of_torch(c):.2f}" for c in torch_cells))


def speed_of_torch(cell: dict[str, Any]) -> float:
    return cell["torch_dense_us"] / cell["torch_us"]


def verdict(record: dict[str, Any]) -> str:
    return "met" if record["met"] else "MISSED"


def draw(result: dict[str, Any]) -> str:
    """The chart of a result: a line for each main shape, in bfloat16."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for n, k in MAIN:
        cells = [c for c in result["cells"] if (c["n"], c["k"], c["dtype"]) == (n, k, "bfloat16") and "ratio" in c]
        if cells:
            lines[f"{n} x {k}"] = [(c["m"], c["ratio"]) for c in cells]
    made = result["environment"]
    subtitle = f"{made['device']}, torch {made['torch']}, {made['date'][:10]}"
    return draw_speedups("Packed 2:4 layer, bfloat16: speed-up over dense cuBLAS", subtitle, lines)


if __name__ == "__main__":
    main()

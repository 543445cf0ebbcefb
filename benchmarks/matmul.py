"""Speed of a packed linear layer against cuBLAS on the dense weight, over the shapes and numbers of rows of models, on one GPU.

    python benchmarks/matmul.py [--out FILE] [--seconds S] [--quick] [--commit HASH]
    python benchmarks/matmul.py --chart FILE.svg RESULT.json      (needs no GPU)

Each cell is checked first, every element: |y - exact| <= c |x| |W|^T, exact in float32, c = 2^-8 in bfloat16 and 2^-10 in float16.
A wrong cell is recorded and not timed.  Times are of CUDA graphs that walk over copies of the weight beyond the L2; the replays of
ours and of dense alternate on a device that is never idle between them.  The file is written again after every step; what no time
was left for is listed in "skipped".
"""

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda"
MAIN = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
UNTUNED = [(1024, 4096), (128256, 4096), (18944, 3584), (576, 1536)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
HALF_ROWS = [1, 16, 128, 1024]
TORCH_ROWS = [m for m in ROWS if m >= 64]
# Rows of x -> speed-up over dense that the geometric mean over MAIN should reach, up to the next number of rows.
TARGETS = {1: 1.75, 32: 1.6, 64: 1.5, 128: 1.3, 256: 1.25, 512: 1.2, 1024: 1.35, 4096: 1.45}
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
BYTES_PER_S, FLOP_PER_S = 4.3e12, 800e12  # of an H200, as measured; sparse tensor cores do twice the latter
WALK_BYTES = 240e6  # of packed weights, four times the L2
BIG = 2**36  # multiply-adds
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
        self.rows, self.half_rows = (HALF_ROWS, [16]) if self.quick else (ROWS, HALF_ROWS)
        self.main, self.untuned = (MAIN[:2], UNTUNED[-1:]) if self.quick else (MAIN, UNTUNED)
        self.result: dict[str, Any] = {"benchmark": "matmul", "environment": environment(arguments.commit)}
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
        weights = Weights(n, k, dtype)
        for m in rows:
            if self.left() <= 0:
                self.result["skipped"].append(f"{n}x{k} {name_of(dtype)} M={m}")
                continue
            record: dict[str, Any] = {"n": n, "k": k, "m": m, "dtype": name_of(dtype)}
            try:
                self.measure_cell(weights, m, record)
            except Exception as error:
                traceback.print_exc(limit=4)
                record["failure"] = message(error)
            self.result["cells"].append(record)

    def measure_cell(self, weights: "Weights", m: int, record: dict[str, Any]) -> None:
        """Check, then time."""
        n, k, dtype = weights.n, weights.k, weights.dtype
        choice = choice_of(weights.layers[0], m)
        record |= {"path": choice.path, "config": None if choice.config is None else repr(choice.config)}
        x = random_x(m, k, dtype)
        poison = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
        del poison  # its memory is what y gets next
        y = weights.layers[0](x)
        record["error"] = round(error_of(y, x, weights.dense[0]), 4)
        record["limit_us"] = round(limit_us(n, k, m), 2)
        del y
        if record["error"] > 1:
            record |= {"failure": "wrong result", "met": False}
            return
        layers, dense_weights = weights.layers, weights.dense
        ours, dense = time_side_by_side(
            [lambda i: layers[i](x), lambda i: F.linear(x, dense_weights[i])], len(layers), n * k * m > BIG
        )  # fmt: skip
        # In a graph a kernel starts before the one before it has ended, and the last call's weight is another than that above.
        record["graph_error"] = round(error_of(ours.output, x, dense_weights[-1]), 4)
        if record["graph_error"] > 1:
            record |= {"failure": "wrong result in a graph", "met": False}
            return
        ratio = dense.us / ours.us
        record |= {"us": round(ours.us, 3), "dense_us": round(dense.us, 3), "ratio": round(ratio, 4)}
        record |= {"spread": round(ours.spread, 4), "dense_spread": round(dense.spread, 4), "target": "ratio >= 1.0", "met": ratio >= 1}

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
                record = {"n": n, "k": k, "m": m, "path": choice_of(layers[0], m).path}
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
                paths.append(choice_of(layer, m).path)
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


# ---- data ------------------------------------------------------------------------------------------------------------------


class Weights:
    """Random 2:4 weights, dense and in packed layers, so many that the packed ones exceed the L2 several times."""

    def __init__(self, n: int, k: int, dtype: torch.dtype):
        self.n, self.k, self.dtype = n, k, dtype
        self.dense: list[Tensor] = []
        self.layers: list[nn.Module] = []
        for seed in range(num_copies(n, k)):
            dense, compressed, bitmask = random_24(n, k, dtype, seed)
            self.dense.append(dense)
            self.layers.append(packed_layer(n, k, compressed, bitmask))


def num_copies(n: int, k: int) -> int:
    return max(2, int(WALK_BYTES / (n * k * 1.125)) + 1)


def random_24(n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """dense (n, k), compressed (n, k / 2), bitmask (n, k / 8); the mean is not zero."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=DEVICE)
    kept = pairs[torch.randint(6, (n, k // 4), device=DEVICE, generator=generator)]  # (n, k / 4, 2)
    compressed = ((torch.randn(n, k // 2, device=DEVICE, generator=generator) + 0.1) / 32).to(dtype)
    dense = torch.zeros(n, k // 4, 4, dtype=dtype, device=DEVICE).scatter_(2, kept, compressed.view(n, k // 4, 2)).view(n, k)
    nibbles = (1 << kept).sum(-1).view(n, k // 8, 2)
    return dense, compressed, (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)


def random_x(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(m, k, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(m)) + 0.1).to(dtype)


def packed_layer(n: int, k: int, compressed: Tensor, bitmask: Tensor) -> Any:
    """As it is after loading to a GPU: with what every path needs."""
    from hf_sparse24.linear import Sparse24Linear

    layer = Sparse24Linear.from_parts({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[n], [k]])})
    if reason := layer.prepare():
        warnings.warn(f"{n}x{k} has no cuSPARSELt: {reason}", stacklevel=2)
    return layer


def choice_of(layer: Any, m: int) -> Any:
    """What the layer runs for m rows of x."""
    from hf_sparse24.kernels import dispatch

    dtype, has_metadata = layer.compressed.dtype, layer.metadata is not None
    return dispatch.explain(layer.out_features, layer.in_features, m, dtype, DEVICE, has_metadata)


def dense_layer(weight: Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def error_of(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error of an element, over what is allowed; infinite for NaN."""
    exact_weight, worst = weight.float(), 0.0
    absolute = exact_weight.abs()
    for first in range(0, len(x), 1024):
        rows = x[first : first + 1024].float()
        bound = rows.abs() @ absolute.T * TOLERANCE[x.dtype]
        error = (y[first : first + 1024].float() - rows @ exact_weight.T).abs() / bound
        worst = max(worst, error.nan_to_num(float("inf")).max().item())
    return min(worst, 1e9)  # JSON has no infinity


def limit_us(n: int, k: int, m: int) -> float:
    """What no kernel can beat: every byte moved once, or every multiplication done."""
    size_bytes = n * k * 1.125 + m * k * 2 + m * n * 2
    return max(size_bytes / BYTES_PER_S, 2 * m * n * k / (2 * FLOP_PER_S)) * 1e6


# ---- timing ----------------------------------------------------------------------------------------------------------------


class Time:
    """Of repeated measurements: microseconds a call, and how far they lie apart; what the last call returned, if it was kept."""

    def __init__(self, times: list[float], output: Tensor | None = None):
        self.output = output
        self.us = statistics.median(times)
        self.spread = (max(times) - min(times)) / self.us


def time_side_by_side(calls: list[Callable[[int], Any]], copies: int, big: bool) -> list[Time]:
    """Times of functions of the number of a copy, whose graphs are replayed in turn."""
    num_calls = copies * (1 if big else max(1, 16 // copies))
    stream = _stream()
    torch.cuda.synchronize()  # what another stream still works on may lie where results do now
    graphs, outputs = [], []
    with torch.cuda.stream(stream):
        for call in calls:
            for i in range(copies):  # in a graph, ours reads a weight ahead only if it has been read before
                call(i)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(num_calls):
                    y = call(i % copies)
            graphs.append(graph)
            outputs.append(y)
        repeats = 3 if big else 5
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(graphs) + 1)]
        for graph in graphs:  # the first replay of each uploads it
            graph.replay()
        torch.cuda.synchronize()
        graphs[-1].replay()  # not timed: while it runs, the next ones are queued
        events[0].record()
        for i, event in enumerate(events[1:]):
            graphs[i % len(graphs)].replay()
            event.record()
        torch.cuda.synchronize()
    us = [start.elapsed_time(end) * 1000 / num_calls for start, end in itertools.pairwise(events)]
    return [Time(us[i :: len(graphs)], output) for i, output in enumerate(outputs)]


_STREAM: list[Any] = []


def _stream() -> Any:
    """One for all graphs: cuBLAS keeps a workspace for each stream."""
    if not _STREAM:
        _STREAM.append(torch.cuda.Stream())
    return _STREAM[0]


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
                    record["torch_result_error"] = round(error_of(F.linear(x, sparse[0]), x, dense[0]), 4)
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
    return [Time(found) for found in times]


# ---- results ---------------------------------------------------------------------------------------------------------------


def environment(commit: str | None) -> dict[str, Any]:
    import transformers

    import hf_sparse24
    from hf_sparse24.kernels.compile import compiler_version

    def known(tell: Callable[[], Any]) -> Any:
        try:
            return tell()
        except Exception as error:
            return message(error)

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() if not commit else ""
    return {
        "device": known(torch.cuda.get_device_name),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_core": known(lambda: metadata.version("cuda-core")),
        "nvrtc": known(compiler_version),
        "transformers": transformers.__version__,
        "hf_sparse24": hf_sparse24.__version__,
        "commit": commit or git,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


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


# ---- the chart -------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 56, 56
COLORS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2"]


def draw(result: dict[str, Any]) -> str:
    """An SVG: speed-up over dense against rows of x, a line for each main shape."""
    lines = {}
    for n, k in MAIN:
        points = [(c["m"], c["ratio"]) for c in result["cells"] if (c["n"], c["k"], c["dtype"]) == (n, k, "bfloat16") and "ratio" in c]
        if points:
            lines[f"{n} x {k}"] = sorted(points)
    if not lines:
        raise SystemExit("the result has no timed cell of a main shape")
    rows = sorted({m for points in lines.values() for m, _ in points})
    ratios = [ratio for points in lines.values() for _, ratio in points]
    low, high = min(0.8, math.floor(min(ratios) * 5) / 5), max(2.0, math.ceil(max(ratios) * 5) / 5)
    first, last = math.log2(rows[0]), max(math.log2(rows[-1]), math.log2(rows[0]) + 1)

    def px(m: float) -> float:
        return round(LEFT + (math.log2(m) - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)

    def py(ratio: float) -> float:
        return round(HEIGHT - BOTTOM - (ratio - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {more}>{escape(words)}</text>'

    end = WIDTH - RIGHT
    made = result["environment"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#333333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fcfcfa"/>',
        text(LEFT, 24, "Packed 2:4 layer, bfloat16: speed-up over dense cuBLAS", "start", 'font-size="16" font-weight="bold"'),
        text(LEFT, 43, f"{made['device']}, torch {made['torch']}, {made['date'][:10]}", "start", 'font-size="12" fill="#666666"'),
    ]
    for tenths in range(round(low * 10), round(high * 10) + 1, 2):
        y = py(tenths / 10)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{end}" y2="{y}" stroke="#e3e3de"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tenths / 10:.1f}x", "end"))
    for m in rows:
        parts.append(f'<line x1="{px(m)}" y1="{HEIGHT - BOTTOM}" x2="{px(m)}" y2="{HEIGHT - BOTTOM + 5}" stroke="#888888"/>')
        parts.append(text(px(m), HEIGHT - BOTTOM + 20, str(m)))
    parts.append(text((LEFT + end) / 2, HEIGHT - 12, "rows of x (M)"))
    parts.append(f'<line x1="{LEFT}" y1="{py(1)}" x2="{end}" y2="{py(1)}" stroke="#333333" stroke-width="1.5" stroke-dasharray="5 4"/>')
    parts.append(text(end + 10, py(1) + 4, "dense", "start"))
    for color, (label, points) in zip(COLORS, lines.items(), strict=False):
        path = " ".join(f"{px(m)},{py(ratio)}" for m, ratio in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-linejoin="round"/>')
        parts += [
            f'<circle cx="{px(m)}" cy="{py(ratio)}" r="3" fill="{color}"><title>{label}, M = {m}: {ratio:.2f}x</title></circle>'
            for m, ratio in points
        ]
    # The legend, in the order of the lines' right ends, so that it reads like labels beside them.
    in_order = sorted(zip(COLORS, lines.items(), strict=False), key=lambda item: -item[1][1][-1][1])
    for row, (color, (label, _)) in enumerate(in_order):
        y = TOP + 10 + 22 * row
        parts.append(f'<line x1="{end + 10}" y1="{y}" x2="{end + 30}" y2="{y}" stroke="{color}" stroke-width="3"/>')
        parts.append(text(end + 36, y + 4, label, "start"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()

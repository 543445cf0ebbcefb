"""Times every configuration of our kernels that could pay for a problem on this GPU: what kernels/configurations.py is made from.

    python benchmarks/tuning/tune.py OUT.json [--dtype bfloat16] [--rows 1 2 4 ...] [--shapes 4096x4096 ...] [--quick]

Each configuration is checked against float32 before it is timed.  Times are of a CUDA graph that walks over copies of the weight
beyond the L2, in microseconds, and the peer is `F.linear` on the dense weight in the same run.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import cuda.core  # noqa: F401  before threads do
import torch
from torch import Tensor

from hf_sparse24.kernels.compile import compile_kernel, load_kernel
from hf_sparse24.kernels.dispatch import few_tiles
from hf_sparse24.kernels.sparse_mma import MmaSp, WeightAt, WgmmaSp

SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
L2_BYTES = 60e6
SHARED_LIMIT = 227 * 1024
EARLY = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--kernels", nargs="+", default=["mma", "wgmma"])
    parser.add_argument("--late", action="store_true", help="start each kernel after the one before it")
    parser.add_argument("--seconds", type=float, default=500, help="stop after so long")
    arguments = parser.parse_args()
    global EARLY
    EARLY = not arguments.late
    stop = time.monotonic() + arguments.seconds
    dtype = getattr(torch, arguments.dtype)
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]

    problems = [(n, k, m) for m in arguments.rows for n, k in shapes]
    wanted = {}
    for n, k, m in problems:
        for config in candidates(n, k, m, arguments.kernels):
            wanted[config.source, tuple(sorted(config.defines(dtype).items()))] = config
    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda config: compile_kernel(config.source, "sm_90a", config.defines(dtype)), wanted.values()))
    print(f"{len(wanted)} kernels compiled in {time.monotonic() - start:.1f} s", flush=True)

    records = []
    weights = {}
    for n, k, m in problems:
        if time.monotonic() > stop:
            print("out of time")
            break
        if (n, k) not in weights:
            weights[n, k] = Weights(n, k, dtype)
        records += measure(weights[n, k], m, candidates(n, k, m, arguments.kernels))
        arguments.out.write_text(json.dumps({"benchmark": "tune", "environment": environment(), "records": records}) + "\n")


def candidates(n: int, k: int, m: int, kernels: list[str]) -> list[MmaSp | WgmmaSp]:
    """Configurations worth a try."""
    found: list[MmaSp | WgmmaSp] = []
    if m <= 8 and "mma" in kernels:
        for tiles, depth, row_warps, column_warps, steps, blocks in MMA_CANDIDATES:
            config = MmaSp(8, tiles, depth, row_warps, column_warps, steps, 1, blocks)
            found.append(config if k <= config.chunk else MmaSp(8, tiles, depth, row_warps, column_warps, steps, 2, blocks))
    if "wgmma" in kernels:
        smallest = next((bn for bn in (8, 16, 32, 64, 128) if bn >= m), 128)
        few = few_tiles(n, m)
        widths = [smallest] if m <= 64 else [64, 128] if m <= 128 else [64, 128] if few else [128, 192, 256]
        for bm, bn, bk, blocks in itertools.product((64, 128, 192), widths, (64, 128, 256), (1, 2)):
            if (bn > 128 and bm != 128) or (bk == 64) > (bn >= 128) or (bk == 256) > (bn <= 64) or (blocks == 2) > (bn <= 64):
                continue
            if (m >= 256 and bm == 64 and not few) or (bm == 192 and (n % 192 or bn < 64)):
                continue
            room = (SHARED_LIMIT // blocks - 1024 - bm * min(bn, 64) * 144 // 64) // (bm * bk + bn * bk * 2)
            stages = min(8, room)
            if stages < (2 if bk == 128 else 3):
                continue
            for split, multicast in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2)):
                ahead = 2 if bn == 256 or bk == 256 else 4
                config = WgmmaSp(bm, bn, bk, stages, ahead, split, multicast, blocks)
                tiles = -(-n // (bm * multicast)) * multicast * -(-m // bn)
                full = 132 * blocks
                if bn > 128 and split > 1:
                    continue
                if multicast > 1 and (bn < 32 or n < 2 * bm * multicast):
                    continue
                if (split > 1 and tiles * split > full * 1.05) or (tiles * split < 56 and split < 4 and tiles < 14):
                    continue
                if split == 1 and tiles < 56 and tiles * 2 <= full:
                    continue
                found.append(config)
                if bk < 256:
                    found.append(replace(config, window=256, ahead=2))
    return [c for c in found if (c.shared_bytes + 1024) * c.min_blocks <= SHARED_LIMIT and c.why_not(n, k) is None]


# tiles, depth, row_warps, column_warps, steps, min_blocks
MMA_CANDIDATES = [(1, 4, 1, 16, 4, 1), (1, 4, 1, 8, 8, 2), (1, 2, 1, 16, 4, 2), (2, 2, 1, 16, 4, 1), (1, 4, 1, 4, 8, 4), (1, 2, 1, 8, 2, 4)]


class Weights:
    """Enough random 2:4 weights, dense and packed, to exceed the L2 several times."""

    def __init__(self, n: int, k: int, dtype: torch.dtype):
        self.n, self.k, self.dtype = n, k, dtype
        self.dense, self.packed = [], []
        for seed in range(max(2, int(4 * L2_BYTES / (n * k * 1.125)) + 1)):
            dense, compressed, bitmask = random_24(n, k, dtype, seed)
            self.dense.append(dense)
            self.packed.append((compressed, bitmask))
        self.absolute = self.dense[0].float().abs()


def random_24(n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """dense (n, k), compressed (n, k / 2), bitmask (n, k / 8); mean not zero."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device="cuda")
    chosen = pairs[torch.randint(6, (n, k // 4), device="cuda", generator=generator)]  # (n, k / 4, 2)
    compressed = (torch.randn(n, k // 2, device="cuda", generator=generator) + 0.1).to(dtype) / 32
    dense = torch.zeros(n, k // 4, 4, dtype=dtype, device="cuda").scatter_(2, chosen, compressed.view(n, k // 4, 2)).view(n, k)
    nibbles = (1 << chosen).sum(-1).view(n, k // 8, 2)
    return dense, compressed, (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)


def measure(weights: Weights, m: int, configs: list) -> list[dict]:
    n, k, dtype = weights.n, weights.k, weights.dtype
    x = (torch.randn(m, k, device="cuda") + 0.1).to(dtype)
    bias = torch.randn(n, device="cuda").to(dtype)
    exact = x.float() @ weights.dense[0].float().T + bias.float()
    bound = (x.float().abs() @ weights.absolute.T + bias.float().abs()) * 2**-8
    y = torch.empty(m, n, dtype=dtype, device="cuda")
    big = m * n * k > 2**35
    dense_us = graph_time(lambda i: torch.mm(x, weights.dense[i].T, out=y), len(weights.dense), big)
    records = []
    for config in configs:
        record = {"n": n, "k": k, "m": m, "config": repr(config)}
        try:
            kernel = load_kernel(config.source, config.source, 0, config.defines(dtype), config.shared_bytes)
            y.fill_(float("nan"))
            config.starter(kernel, WeightAt.of(*weights.packed[0], bias), m)(x, y, EARLY)
            torch.cuda.synchronize()
            error = ((y.float() - exact).abs() / bound).nan_to_num(1e9).max().item()
            record["error"] = round(error, 3)
            if error <= 1:
                starters = [config.starter(kernel, WeightAt.of(*packed, None), m) for packed in weights.packed]
                record["us"] = graph_time(lambda i, starters=starters: starters[i](x, y, EARLY), len(starters), big)
        except Exception as failure:
            record["error"] = f"{type(failure).__name__}: {failure}"[:300]
            traceback.print_exc(limit=3)
        records.append(record)
    again_us = graph_time(lambda i: torch.mm(x, weights.dense[i].T, out=y), len(weights.dense), big)
    best = sorted((r for r in records if "us" in r), key=lambda r: r["us"])
    wrong = [(r["config"], r["error"]) for r in records if "us" not in r]
    least = min(dense_us, again_us)
    print(
        f"{n}x{k} M={m}: dense {dense_us:.1f}/{again_us:.1f}; "
        + "; ".join(f"{least / r['us']:.2f}x {r['us']:.1f} {r['config']}" for r in best[:1]),
        flush=True,
    )
    if wrong:
        print("    WRONG", len(wrong), wrong[:2], flush=True)
    for r in records:
        r["dense_us"], r["dense_again_us"] = round(dense_us, 2), round(again_us, 2)
    return records


def graph_time(call, copies: int, big: bool = False) -> float:
    """Microseconds a call, in a graph of calls on each copy."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what the default stream still works on may lie where y does now
    with torch.cuda.stream(stream):
        for i in range(min(2, copies)):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        calls = copies * (1 if big else max(1, 16 // copies))
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i % copies)
        graph.replay()
        times = []
        for _ in range(3 if big else 5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def environment() -> dict:
    import hf_sparse24

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "hf_sparse24": hf_sparse24.__version__, "commit": commit, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


if __name__ == "__main__":
    main()

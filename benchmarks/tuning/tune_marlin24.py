"""Times every sensible configuration of `marlin24.cu` on this GPU: what the choice in kernels/marlin24.py is made from.

    python3 benchmarks/tuning/tune_marlin24.py --out FILE [--seconds 90] [--commit HASH] [--late]

Each configuration is checked against float32 before it is timed, element by element.  Times are microseconds of a CUDA graph
that walks over weights beyond the L2 and starts kernels early; the peer is `F.linear` with dense float16 weights in the same run.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tune import environment, graph_time

from hf_sparse24.kernels import reference
from hf_sparse24.kernels.compile import KernelCompileError, arch_of, compile_kernel, load_kernel
from hf_sparse24.kernels.marlin24 import Marlin24, Marlin24At

SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
ROWS = [1, 8, 16, 32, 64]
FORMATS = [(4, True), (4, False), (8, True), (8, False)]  # num_bits, grouped; grouped scales are permuted
DTYPE = torch.float16
ROTATE_BYTES = 130e6  # of weights that take turns: more than twice the L2
SHARED_LIMIT = 227 * 1024
MULTIPROCESSORS = 132
# row_warps, column_warps, steps, depth
SHARES = [
    (1, 4, 1, 1), (1, 4, 2, 1), (1, 4, 2, 2), (1, 4, 4, 2), (1, 8, 1, 1), (1, 8, 2, 1), (1, 8, 2, 2), (1, 16, 1, 1), (1, 16, 2, 2),
    (2, 4, 1, 1), (2, 4, 2, 1), (2, 4, 2, 2), (2, 8, 1, 1), (2, 8, 2, 2), (4, 4, 1, 1), (4, 4, 2, 2),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90, help="no problem is begun after so long")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument("--late", action="store_true", help="start each kernel after the one before it has ended")
    arguments = parser.parse_args()
    stop = time.monotonic() + arguments.seconds
    conditions = environment() | {"dtype": str(DTYPE), "early": not arguments.late, "commit": arguments.commit}

    problems = [(n, k, m, *form) for form in FORMATS for m in ROWS for n, k in SHAPES]
    began = time.monotonic()
    failed = compile_side_by_side(problems)
    print(f"compiled in {time.monotonic() - began:.1f} s, {len(failed)} do not compile", flush=True)
    for message in sorted(set(failed.values()))[:3]:
        print("   ", message, flush=True)

    records: list[dict[str, Any]] = []
    weights: dict[tuple[int, ...], Weights] = {}
    dense: dict[tuple[int, int], list[Tensor]] = {}
    for n, k, m, num_bits, grouped in problems:
        if time.monotonic() > stop:
            print("out of time", flush=True)
            break
        if (n, k) not in dense:
            dense[n, k] = [torch.randn(n, k, device="cuda", dtype=DTYPE) for _ in range(copies_of(n * k * 2))]
        if (n, k, num_bits, grouped) not in weights:
            weights[n, k, num_bits, grouped] = Weights(n, k, num_bits, grouped)
        records += measure(weights[n, k, num_bits, grouped], dense[n, k], m, not arguments.late)
        measured = {"benchmark": "tune_marlin24", "environment": conditions, "records": records}
        arguments.out.write_text(json.dumps(measured) + "\n")
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def candidates(n: int, k: int, m: int) -> list[Marlin24]:
    """Configurations worth a try: none with blocks that find no columns, or that fill the chip many times with a split."""
    smallest = next((bn for bn in (8, 16, 32) if bn >= m), 32)
    found = []
    for bn, split, (row_warps, column_warps, steps, depth) in itertools.product({smallest, min(smallest, 16)}, (1, 2, 4, 8), SHARES):
        config = Marlin24(bn, depth, row_warps, column_warps, steps, split)
        warps = -(-n // (64 * row_warps)) * -(-m // bn) * split * row_warps * column_warps
        idle = (split - 1) * 128 * steps * column_warps >= k
        crowded = split > 1 and warps > 24 * MULTIPROCESSORS
        lonely = warps < 4 * MULTIPROCESSORS
        if not (idle or crowded or lonely) and config.shared_bytes <= SHARED_LIMIT:
            found.append(config)
    return found


def defines_of(config: Marlin24, num_bits: int, grouped: bool) -> dict[str, int]:
    return config.defines(DTYPE, num_bits=num_bits, grouped=grouped, scales_permuted=grouped)


def compile_side_by_side(problems: list[tuple[int, int, int, int, bool]]) -> dict[tuple[tuple[str, int], ...], str]:
    """Why what does not compile does not, by macros."""
    wanted = {
        tuple(sorted(defines_of(config, num_bits, grouped).items())): None
        for n, k, m, num_bits, grouped in problems
        for config in candidates(n, k, m)
    }
    arch = arch_of(torch.cuda.get_device_capability())

    def attempt(macros: tuple[tuple[str, int], ...]) -> str | None:
        try:
            compile_kernel("marlin24", arch, dict(macros))
        except KernelCompileError as error:
            return f"{error} {error.log}"[:300]
        return None

    print(f"{len(wanted)} kernels to compile", flush=True)
    attempt(next(iter(wanted)))  # alone: two first compilations at once did not find NVRTC's builtins once (13.0.88, 2026-12-01)
    with ThreadPoolExecutor(16) as pool:
        return {macros: why for macros, why in zip(wanted, pool.map(attempt, wanted), strict=True) if why is not None}


def copies_of(size_bytes: float) -> int:
    return max(2, int(ROTATE_BYTES / size_bytes) + 1)


def exact_weight(weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, num_bits: int, grouped: bool) -> Tensor:
    """The dense weight in float32."""
    return reference.dequantize_marlin24(weight_packed, meta, scale_packed.float(), num_bits, grouped)


class Weights:
    """Enough random weights in marlin-24's layout to exceed the L2 twice, and the first of them dense."""

    def __init__(self, n: int, k: int, num_bits: int, grouped: bool):
        self.n, self.k, self.num_bits, self.grouped = n, k, num_bits, grouped
        groups = k // 128 if grouped else 1
        legal = torch.tensor([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], device="cuda")
        self.packed = []
        for _ in range(copies_of(n * k * (num_bits / 16 + 1 / 8))):
            words = torch.randint(-(2**31), 2**31, (k // 32, num_bits * n // 2), device="cuda", dtype=torch.int64).int()
            codes = legal[torch.randint(6, (k // 32, 2 * n, 4), device="cuda")]
            meta = (codes << 4 * torch.arange(4, device="cuda")).sum(-1)
            meta = torch.where(meta < 2**15, meta, meta - 2**16).short()
            scales = ((torch.rand(groups, n, device="cuda") + 0.5) * 2.0**-num_bits / 8).half()
            self.packed.append((words, meta, scales))
        with torch.device("cuda"):
            self.dense = exact_weight(*self.packed[0], num_bits, grouped)


def measure(weights: Weights, dense: list[Tensor], m: int, early: bool) -> list[dict[str, Any]]:
    """Time of each configuration, or why there is none."""
    n, k, num_bits, grouped = weights.n, weights.k, weights.num_bits, weights.grouped
    x = (torch.randn(m, k, device="cuda") + 0.1).to(DTYPE)
    bias = torch.randn(n, device="cuda").to(DTYPE)
    exact = x.float() @ weights.dense.T + bias.float()
    bound = 2**-8 * (x.float().abs() @ weights.dense.abs().T + bias.float().abs())
    y = torch.empty(m, n, dtype=DTYPE, device="cuda")
    first_us = graph_time(lambda i: F.linear(x, dense[i]), len(dense))
    records: list[dict[str, Any]] = []
    for config in candidates(n, k, m):
        record: dict[str, Any] = {"n": n, "k": k, "m": m, "num_bits": num_bits, "grouped": grouped, "config": repr(config)}
        records.append(record)
        try:
            kernel = load_kernel("marlin24", "marlin24", 0, defines_of(config, num_bits, grouped), config.shared_bytes)
        except KernelCompileError as error:
            record["why_not"] = str(error)[:200]
            continue
        record["registers"] = kernel.attributes.num_regs
        if kernel.attributes.local_size_bytes:
            record["why_not"] = "spills"
            continue
        try:
            y.fill_(torch.nan)
            config.starter(kernel, Marlin24At.of(*weights.packed[0], bias), m)(x, y, False)
            record["error"] = round(((y.float() - exact).abs() / bound).nan_to_num(1e9).max().item(), 4)
            if record["error"] > 1:
                record["why_not"] = "wrong"
                continue
            starters = [config.starter(kernel, Marlin24At.of(*packed, None), m) for packed in weights.packed]
            record["us"] = round(graph_time(lambda i, starters=starters: starters[i](x, y, early), len(starters)), 3)
        except Exception:
            print("FAILED", record, flush=True)  # after an error of the GPU nothing can follow
            raise
    again_us = graph_time(lambda i: F.linear(x, dense[i]), len(dense))
    for record in records:
        record["dense_us"], record["dense_again_us"] = round(first_us, 3), round(again_us, 3)
    say(weights, m, records, min(first_us, again_us))
    return records


def say(weights: Weights, m: int, records: list[dict[str, Any]], dense_us: float) -> None:
    best = sorted((record for record in records if "us" in record), key=lambda record: record["us"])[:3]
    texts = [f"{dense_us / record['us']:.2f}x {record['us']:.2f} {record['config'].removeprefix('Marlin24')}" for record in best]
    reasons = dict(Counter(record["why_not"] for record in records if "why_not" in record))
    form = f"w{weights.num_bits} {'g128' if weights.grouped else 'channel'}"
    print(f"{weights.n}x{weights.k} M={m} {form}: dense {dense_us:.2f}; {'; '.join(texts)}; of {len(records)} {reasons or ''}", flush=True)


if __name__ == "__main__":
    main()

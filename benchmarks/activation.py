"""2:4 activations of squared-ReLU blocks on a GPU: the packing, the whole block, and the second projection for few rows.

    python3 benchmarks/activation.py [--out FILE] [--commit HASH] [--seconds 200] [--parts pack block decode train]

    pack    h of u, packed as 2:4, against a copy that moves as many bytes
    block   up, squared ReLU, down: 2:4 activations against the same block dense, in bfloat16 and in float8, both by torch.compile
    decode  the second projection for 1 to 8 rows with a share of zeros, against F.linear on h
    train   block forward and backward in bfloat16, against the dense one by torch.compile

Times are microseconds in CUDA graphs, alternating with the peer's (hf_sparse24/bench.py).  Results are checked before they are timed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse24 import bench
from hf_sparse24.kernels import activation, activation_plans, ops, reference
from hf_sparse24.kernels.activation import FP8

ROOT = Path(__file__).parents[1]
SHAPES = [(4096, 14336), (8192, 8192)]  # hidden, intermediate
TOKENS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
ZEROS = [0.5, 0.7, 0.8, 0.9, 0.95]
PARTS = ("pack", "block", "decode", "train")
BF16 = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "activation-h200.json")
    parser.add_argument("--seconds", type=float, default=240, help="leave out what does not fit")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--commit", help="of the source, where git does not know")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("activation.py: no GPU is visible, nothing is measured")
        return
    stop = time.monotonic() + arguments.seconds
    old = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result: dict[str, Any] = {"benchmark": "activation", "skipped": [], **{part: old.get(part, {"cells": []}) for part in PARTS}}
    for part in arguments.parts:
        result[part] = {"environment": {**bench.environment(), "commit": arguments.commit}, "cells": []}
        for problem in PROBLEMS[part]:
            if time.monotonic() > stop:
                result["skipped"].append([part, *problem])
                continue
            cell = MEASURE[part](*problem)
            result[part]["cells"].append(cell)
            print(part, cell, flush=True)
            torch.cuda.empty_cache()
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(BF16)


def side_by_side(calls: list[Any], copies: int, big: bool = True) -> list[float]:
    return [round(found.us, 3) for found in bench.time_side_by_side(calls, copies, big)]


def check(y: Tensor, h: Tensor, weight: Tensor, tolerance: float = 2**-8) -> float:
    error = bench.error_of(y, h, weight, tolerance)
    if error > 1:
        raise SystemExit(f"activation.py: a wrong result, {error} of what is allowed")
    return error


# ---- packing -------------------------------------------------------------------------------------------------------------------


def measure_pack(form: str, tokens: int, k: int) -> dict[str, Any]:
    """Copies of u beyond the L2; a copy moves half of the bytes each way."""
    fp8 = form == "fp8"
    moved = tokens * k * 2 + tokens * k * (1 if fp8 else 2) // 2 + tokens * k // 8 + (4 * tokens if fp8 else 0)
    copies = max(1, int(130e6 / moved) + 1)
    us = [random(tokens, k, seed=seed) for seed in range(copies)]
    start = activation_plans._squared_relu_starter(us[0], None, fp8=fp8, keep_two=True, packed=True)
    assert start is not None
    values, masks, scales = (
        torch.empty(copies, tokens, columns, dtype=torch.uint8, device="cuda") for columns in (k // 2 * (1 if fp8 else 2), k // 8, 4)
    )
    source, target = (torch.empty(copies, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))

    def pack(i: int) -> None:
        start(us[i].data_ptr(), 0, values[i].data_ptr(), masks[i].data_ptr(), scales[i].data_ptr())

    ours, copy = side_by_side([pack, lambda i: target[i].copy_(source[i])], copies, False)
    return {"form": form, "m": tokens, "k": k, "bytes": moved, "us": ours, "copy_us": copy, "ratio": round(copy / ours, 4)}


# ---- the block -----------------------------------------------------------------------------------------------------------------


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / 448, 1)
    return (x.float() / scale).clamp(-448, 448).to(FP8), scale


def dense_block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(torch.square(torch.relu(F.linear(x, up))), down)


def dense_fp8_block(x: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Tensor:
    rows, scale = round_rows(x)
    u = torch._scaled_mm(rows, up.t(), scale_a=scale, scale_b=up_scale, out_dtype=BF16)
    rows, scale = round_rows(torch.square(torch.relu(u)))
    return torch._scaled_mm(rows, down.t(), scale_a=scale, scale_b=down_scale, out_dtype=BF16)


def measure_block(form: str, hidden: int, intermediate: int, tokens: int) -> dict[str, Any]:
    x = random(tokens, hidden)
    torch._dynamo.reset()  # it stops after eight shapes of one function
    up, down = random(intermediate, hidden, seed=1) / hidden**0.5, random(hidden, intermediate, seed=2) / intermediate**0.5
    cell = {"form": form, "hidden": hidden, "intermediate": intermediate, "m": tokens}
    dense = torch.compile(dense_block, fullgraph=True, dynamic=False)
    if form == "bf16":

        def sparse(i):
            return ops.squared_relu_linear(F.linear(x, up), None, down, None, None, None, True)

        choice = activation.choose(hidden, intermediate, tokens, BF16, x.device, fp8=False, has_columns=False, gated=False, keep_two=True)
        error = check(sparse(0), reference.squared_relu(F.linear(x, up), None, choice.path != "dense" or True), down)
        ours, theirs = side_by_side([sparse, lambda i: dense(x, up, down)], 1)
        return {
            **cell,
            "path": choice.path,
            "config": repr(choice.config),
            "error": error,
            "us": ours,
            "dense_us": theirs,
            "ratio": round(theirs / ours, 4),
        }
    (up8, up_scale), (down8, down_scale) = round_rows(up), round_rows(down)

    def sparse(i):
        return ops.squared_relu_linear(ops.linear_fp8(x, up8, up_scale, None), None, down8, down_scale, None, None, True)

    u = ops.linear_fp8(x, up8, up_scale, None)
    h = bench.round_x(reference.squared_relu(u, None, True), FP8)
    error = check(sparse(0), h, down8.float() * down_scale, 2**-7)
    scales = up_scale.view(1, -1), down_scale.view(1, -1)
    dense8 = torch.compile(dense_fp8_block, fullgraph=True, dynamic=False)
    choice = activation.choose(hidden, intermediate, tokens, BF16, x.device, fp8=True, has_columns=False, gated=False, keep_two=True)
    start = activation_plans._squared_relu_starter(u, None, fp8=True, keep_two=True, packed=True)
    packed = [torch.empty(tokens * intermediate // size, dtype=torch.uint8, device="cuda") for size in (2, 8)]
    row_scales = torch.empty(tokens, device="cuda")
    rows, scale = round_rows(reference.squared_relu(u, None, False))

    def pack(i: int) -> None:
        start(u.data_ptr(), 0, packed[0].data_ptr(), packed[1].data_ptr(), row_scales.data_ptr())

    calls = [
        sparse,
        lambda i: dense8(x, up8, scales[0], down8, scales[1]),
        lambda i: dense(x, up, down),
        lambda i: ops.linear_fp8(x, up8, up_scale, None),
        pack,
        lambda i: ops.squared_relu_linear(u, None, down8, down_scale, None, None, True),
        lambda i: torch._scaled_mm(rows, down8.t(), scale_a=scale, scale_b=scales[1], out_dtype=BF16),
    ]
    us = side_by_side(calls, 1)
    names = ("us", "dense_us", "dense_bf16_us", "up_us", "pack_us", "down_us", "dense_down_us")
    return {
        **cell,
        "path": choice.path,
        "config": repr(choice.config),
        "error": error,
        **dict(zip(names, us, strict=True)),
        "ratio": round(us[1] / us[0], 4),
    }


# ---- few rows ------------------------------------------------------------------------------------------------------------------


def measure_decode(form: str, n: int, k: int, m: int, zeros: float) -> dict[str, Any]:
    """u is negative at that share of places, each row at others."""
    fp8 = form == "fp8"
    copies = max(4, int(130e6 / (n * k * (1 - zeros) * (1 if fp8 else 2))) + 1)
    copies = min(copies, 12)
    us, dense_weights, sparse = [], [], []
    for seed in range(copies):
        u = random(m, k, seed=seed).abs()
        u[torch.rand(m, k, device="cuda") < zeros] *= -1
        weight = random(n, k, seed=100 + seed) / k**0.5
        us.append(u)
        dense_weights.append(weight)
        if fp8:
            values, scale = round_rows(weight)
            sparse.append((values, scale, values.view(torch.uint8).t().contiguous().view(FP8)))
        else:
            sparse.append((weight, None, weight.t().contiguous()))
    hs = [reference.squared_relu(u, None) for u in us]

    def call(i):
        return ops.squared_relu_linear(us[i], None, *sparse[i], None, False)

    exact = sparse[0][0].float() * (1 if sparse[0][1] is None else sparse[0][1])
    error = check(call(0), hs[0], exact)
    choice = activation.choose(n, k, m, BF16, us[0].device, fp8=fp8, has_columns=True, gated=False, keep_two=False)
    ours, theirs = side_by_side([call, lambda i: F.linear(hs[i], dense_weights[i])], copies, False)
    cell = {"form": form, "n": n, "k": k, "m": m, "zeros": zeros, "read": round((torch.stack(hs) != 0).any(1).float().mean().item(), 4)}
    return {
        **cell,
        "path": choice.path,
        "config": repr(choice.config),
        "error": error,
        "us": ours,
        "dense_us": theirs,
        "ratio": round(theirs / ours, 4),
    }


# ---- training ------------------------------------------------------------------------------------------------------------------


def measure_train(hidden: int, intermediate: int, tokens: int) -> dict[str, Any]:
    x = random(tokens, hidden).requires_grad_()
    up, down = (
        (random(rows, columns, seed=seed) / columns**0.5).requires_grad_()
        for seed, (rows, columns) in enumerate(((intermediate, hidden), (hidden, intermediate)))
    )
    torch._dynamo.reset()
    grad = random(tokens, hidden, seed=5)
    compiled = torch.compile(dense_block, fullgraph=True, dynamic=False)
    ours = torch.compile(
        lambda x, up, down: ops.squared_relu_linear(F.linear(x, up), None, down, None, None, None, True), fullgraph=True, dynamic=False
    )
    calls = [lambda i, block=block: torch.autograd.grad(block(x, up, down), (x, up, down), grad) for block in (ours, compiled)]
    us, theirs = side_by_side(calls, 1)
    return {
        "form": "bf16",
        "hidden": hidden,
        "intermediate": intermediate,
        "m": tokens,
        "us": us,
        "dense_us": theirs,
        "ratio": round(theirs / us, 4),
    }


PROBLEMS: dict[str, list[Any]] = {
    "pack": [(form, tokens, k) for k in (14336, 8192) for form in ("fp8", "bf16") for tokens in (256, 1024, 4096, 16384)],
    "block": [(form, *shape, tokens) for tokens in reversed(TOKENS) for shape in SHAPES for form in ("fp8", "bf16")],
    "decode": [(form, n, k, m, zeros) for form in ("bf16", "fp8") for (n, k) in SHAPES for zeros in reversed(ZEROS) for m in (1, 2, 4, 8)],
    "train": [(*shape, tokens) for shape in SHAPES for tokens in (2048, 8192)],
}
MEASURE: dict[str, Any] = {"pack": measure_pack, "block": measure_block, "decode": measure_decode, "train": measure_train}

if __name__ == "__main__":
    main()

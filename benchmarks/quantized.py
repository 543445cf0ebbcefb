"""Products with 2:4 weights of 8 and 4 bits against cuBLAS on the dense 16-bit weight, and float8 also against dense float8.

    python3 benchmarks/quantized.py [--out FILE] [--seconds 120] [--commit HASH] [--earlier-work]

Times are microseconds of a call in a CUDA graph that walks over weights beyond the L2, of layers as they are after loading, the
rounding of x included where the path rounds it; `kernel_us` is the kernel alone on rows that are rounded already.  Each result is
checked, element by element, before it is timed.  `--earlier-work` takes the shapes of a 34B model that an earlier work was
measured on.  Measured by the functions of hf_sparse24/bench.py.
"""

import argparse
import json
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matmul
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sparse24 import bench
from hf_sparse24.compressors.marlin24 import order_scales, pack_integers
from hf_sparse24.kernels import dispatch
from hf_sparse24.kernels.sparse_mma import WeightAt, WgmmaSp
from hf_sparse24.quantized_linear import Marlin24Linear, QuantizedSparse24Linear

ROOT = Path(__file__).parents[1]
DEVICE = bench.DEVICE
MAIN, UNTUNED = matmul.MAIN, matmul.UNTUNED
EARLIER_WORK = [(9216, 7168), (7168, 7168), (40960, 7168), (7168, 20480)]  # q/k/v, o, gate/up, down of hidden 7168, 56 and 8 heads
ROWS = list(matmul.ROWS)
FEW_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
WALK_BYTES = 130e6
# Rows of x -> what the geometric mean over MAIN should reach, up to the next number of rows.
TARGETS = {
    "fp8": {1: 2.6, 32: 2.5, 64: 2.3, 128: 1.8, 256: 1.6, 512: 1.8, 1024: 1.9, 4096: 2.3},
    "int4-g128": {1: 3.3, 32: 2.7, 64: 2.0, 128: 1.3, 256: 1.0, 1024: 1.1, 4096: 1.2},
}
# name -> dtype of values, or bits in Marlin's order; whether scales are for groups; the dtype of x and of the dense peer
FORMS: dict[str, tuple[Any, bool, torch.dtype]] = {
    "fp8": (torch.float8_e4m3fn, False, torch.bfloat16),
    "int4-g128": (4, True, torch.float16),
    "int8": (torch.int8, False, torch.bfloat16),
    "int4-channel": (4, False, torch.float16),
    "int8-g128": (8, True, torch.float16),
    "int8-channel": (8, False, torch.float16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "quantized-h200.json")
    parser.add_argument("--seconds", type=float, default=240, help="leave out what does not fit")
    parser.add_argument("--commit", help="of the source, where git does not know")
    parser.add_argument("--earlier-work", action="store_true")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="only these; other cells of FILE stay")
    parser.add_argument("--untuned", action="store_true", help="float8 also with shapes that no table was made for")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("quantized.py: no GPU is visible, nothing is measured")
        return
    stop = time.monotonic() + arguments.seconds
    shapes = EARLIER_WORK if arguments.earlier_work else MAIN
    jobs = [(name, shape) for name in arguments.forms for shape in shapes if not arguments.earlier_work or FORMS[name][2] == torch.float16]
    jobs += [("fp8", shape) for shape in UNTUNED if arguments.untuned]
    result: dict[str, Any] = {"benchmark": "quantized", "environment": matmul.made_on(arguments.commit), "cells": [], "skipped": []}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text())["cells"]
        result["cells"] = [cell for cell in earlier if (cell["form"], (cell["n"], cell["k"])) not in jobs]
    with torch.no_grad():
        for name, (n, k) in jobs:
            if time.monotonic() > stop:
                result["skipped"].append(f"{name} {n}x{k}")
                continue
            result["cells"] += measure(name, n, k, stop, ROWS[:7] if arguments.earlier_work else ROWS if name == "fp8" else FEW_ROWS)
            result["means"] = means(result["cells"], MAIN if not arguments.earlier_work else EARLIER_WORK)
            write(arguments.out, result)
    write(arguments.out, result)  # with what was skipped
    for mean in result.get("means", []):
        print(mean)


def write(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, n: int, k: int, stop: float, rows: list[int]) -> list[dict[str, Any]]:
    """A record for each number of rows."""
    values, grouped, dtype = FORMS[name]
    copies = max(2, int(WALK_BYTES / (n * k * (0.39 if values == 4 else 0.625))) + 1)
    make = marlin_layer if isinstance(values, int) else layer_8bit
    layers = [make(n, k, values, grouped, dtype, seed) for seed in range(copies)]
    exact = [bench.exact_weight(layers[0]), bench.exact_weight(layers[-1])]
    num_dense = max(2, int(WALK_BYTES / (n * k * 2)) + 1)
    dense = [(exact[0] if i == 0 else bench.exact_weight(layers[i])).to(dtype) for i in range(min(num_dense, copies))]
    records = []
    for m in rows:
        if time.monotonic() > stop:
            break
        record: dict[str, Any] = {"form": name, "n": n, "k": k, "m": m, "dtype": matmul.name_of(dtype)}
        try:
            measure_cell(layers, exact, dense, m, dtype, values, record)
        except Exception as error:
            traceback.print_exc(limit=4)
            record["failure"] = matmul.message(error)
        records.append(record)
        print(
            {key: record.get(key) for key in ("form", "n", "k", "m", "path", "us", "kernel_us", "dense_us", "dense_fp8_us", "ratio")},
            flush=True,
        )
    return records


def measure_cell(
    layers: list[Any], exact: list[Tensor], dense: list[Tensor], m: int, dtype: torch.dtype, values: Any, record: dict[str, Any]
) -> None:
    """Check, then time."""
    n, k = exact[0].shape
    x = bench.random_x(m, k, dtype)
    choice = layers[0].explain(m, dtype)
    record["path"], rounds = choice.path, choice.path == "wgmma_sp"
    seen, tolerance = bench.x_as_seen(layers[0], choice, x), bench.tolerance_of(layers[0], choice, dtype)
    record["error"] = bench.error_of(layers[0](x), seen, exact[0], tolerance)
    if record["error"] > 1:
        record["failure"] = "wrong result"
        return
    calls: list[Callable[[int], Any]] = [lambda i: layers[i](x), lambda i: F.linear(x, dense[i % len(dense)])]
    names = ["us", "dense_us"]
    if rounds:
        calls.append(alone(layers, x, values))
        names.append("kernel_us")
    if values == torch.float8_e4m3fn and n % 16 == 0:
        calls += dense_fp8(dense, x)
        names += ["dense_fp8_us", "dense_fp8_rounding_us"]
    times = bench.time_side_by_side(calls, len(layers), n * k * m > bench.BIG)
    record["graph_error"] = bench.error_of(times[0].output, seen, exact[1], tolerance)
    if record["graph_error"] > 1:
        record["failure"] = "wrong result in a graph"
        return
    record |= {name: round(found.us, 3) for name, found in zip(names, times, strict=True)}
    record |= {"spread": round(times[0].spread, 4), "dense_spread": round(times[1].spread, 4)}
    record["ratio"] = round(times[1].us / times[0].us, 4)


def means(cells: list[dict[str, Any]], shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Geometric means over the main shapes of what a form gains over the dense weight, for each number of rows."""
    ratios = defaultdict(list)
    for cell in cells:
        if "ratio" in cell and (cell["n"], cell["k"]) in shapes:
            ratios[cell["form"], cell["m"]].append(cell["ratio"])
    return [
        {"form": form, "m": m, "ratio": round(statistics.geometric_mean(found), 4), "least": min(found)}
        for (form, m), found in ratios.items()
        if len(found) == len(shapes)
    ]


# ---- layers ------------------------------------------------------------------------------------------------------------------


def layer_8bit(n: int, k: int, values: torch.dtype, grouped: bool, dtype: torch.dtype, seed: int) -> nn.Module:
    """As a checkpoint has it: a scale for each row, activations rounded for each token."""
    _, compressed, bitmask = bench.random_24(n, k, torch.bfloat16, seed)
    scale = compressed.float().abs().amax(1, keepdim=True) / bench.LARGEST[values]
    quantised = compressed.float() / scale
    quantised = quantised.round().to(values) if values == torch.int8 else quantised.to(values)
    parts = {"compressed": quantised, "bitmask": bitmask, "weight_scale": scale, "shape": torch.tensor([[n], [k]])}
    layer = QuantizedSparse24Linear.from_parts(parts)
    layer.quantize_x = True
    return layer.requires_grad_(False)


def marlin_layer(n: int, k: int, num_bits: int, grouped: bool, dtype: torch.dtype, seed: int) -> nn.Module:
    """Random integers of each size; one weight is packed for all seeds, whose rows it takes in another order."""
    if (n, k, num_bits, grouped) not in _PACKED:
        _PACKED.clear()
        dense, _, _ = bench.random_24(n, k, torch.float32, 0)
        half = 2 ** (num_bits - 1)
        integers = (dense / dense.abs().max() * half).round().clamp(-half, half - 1).to(torch.int8)
        _PACKED[n, k, num_bits, grouped] = pack_integers(integers, num_bits)
    packed, meta = _PACKED[n, k, num_bits, grouped]
    groups = k // 128 if grouped else 1
    scale = (torch.rand(n, groups, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)) + 0.5).half() / 64
    shift = 64 * seed  # whole units of rows
    parts = {
        "weight_packed": packed.roll(shift * num_bits // 2, 1), "meta": meta.roll(2 * shift, 1),
        "scale_packed": order_scales(scale, grouped and k > 256),
    }  # fmt: skip
    return Marlin24Linear.from_parts(parts).requires_grad_(False)


_PACKED: dict[Any, tuple[Tensor, Tensor]] = {}


def alone(layers: list[Any], x: Tensor, values: torch.dtype) -> Callable[[int], Any]:
    """The kernel on rows that are rounded already."""
    m, k = x.shape
    layer, index = layers[0], x.get_device()
    config = dispatch.choose(layer.out_features, k, m, x.dtype, x.device, values=values, quantize_x=True).config
    assert isinstance(config, WgmmaSp)
    narrow, scales = torch.empty(m, k, dtype=values, device=DEVICE), torch.empty(m, device=DEVICE)
    dispatch.rounding_starter(m, k, x.dtype, values, index, None)(x.data_ptr(), narrow.data_ptr(), scales.data_ptr(), False)
    kernel = dispatch._kernel(config, x.dtype, index, values)
    starters = [config.starter(kernel, WeightAt.of(own.compressed, own.bitmask, None, own.weight_scale), m) for own in layers]
    y = torch.empty(m, layer.out_features, dtype=x.dtype, device=DEVICE)

    def call(i: int) -> Tensor:
        starters[i](narrow, y, torch.cuda.is_current_stream_capturing(), scales.data_ptr())
        return y

    return call


def dense_fp8(dense: list[Tensor], x: Tensor) -> list[Callable[[int], Any]]:
    """cuBLAS with float8 weights and scales for rows on both sides: on rows that are rounded already, and with our rounding of them."""
    weights = []
    for weight in dense:
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        weights.append(((weight.float() / scale).to(torch.float8_e4m3fn).t(), scale.t().contiguous()))
    m, k = x.shape
    narrow, scales = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(m, 1, device=DEVICE)
    rounding = dispatch.rounding_starter(m, k, x.dtype, torch.float8_e4m3fn, x.get_device(), None)

    def multiply(i: int) -> Tensor:
        weight, scale = weights[i % len(weights)]
        return torch._scaled_mm(narrow, weight, scale_a=scales, scale_b=scale, out_dtype=x.dtype, use_fast_accum=True)

    def both(i: int) -> Tensor:
        rounding(x.data_ptr(), narrow.data_ptr(), scales.data_ptr(), False)
        return multiply(i)

    both(0)
    return [multiply, both]


if __name__ == "__main__":
    main()

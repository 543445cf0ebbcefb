"""Is the binding of cuSPARSELt right, and how fast is it?  `PYTHONPATH=. python benchmarks/tuning/cusparselt_check.py out.json`

Every section stands alone: one that fails is recorded, and the others run.  Sections that may kill the CUDA context come last.
"""

import importlib.metadata
import json
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.kernels import cusparselt, reference
from hf_sparse24.kernels.cusparselt import DEFAULT, CusparseltError, CusparseltWeight, sample_bitmask
from hf_sparse24.kernels.semi_structured_tensor import from_torch, to_torch

START = time.monotonic()
TIMES_UNTIL_S, ALL_UNTIL_S = 58, 75
DEVICE = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
EPSILON = {BF16: 2**-8, FP16: 2**-10}  # one unit in the last place
CHECK_SHAPES = [(4096, 4096), (6144, 4096), (576, 1536), (1024, 4096), (1536, 576), (256, 320), (16, 16), (48, 80)]
CHECK_ROWS = [1, 7, 16, 64, 100, 256, 1024]
TIME_SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
TIME_ROWS = [64, 256, 1024, 4096, 512, 2048, 128, 8192]  # the last ones are skipped first
ROTATE_BYTES = 130e6  # packed bytes that take turns: more than twice the L2 cache
SECTIONS: list[Callable[[], Any]] = []


def section(function: Callable[[], Any]) -> Callable[[], Any]:
    SECTIONS.append(function)
    return function


def elapsed_s() -> float:
    return time.monotonic() - START


def draw_parts(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 0, deficient: bool = True) -> tuple[Tensor, Tensor]:
    """Packed tensors on the device; with stored zeros at every position, unless told otherwise."""
    dice = torch.Generator().manual_seed(seed)
    rows = min(out_features, 256)  # positions repeat every 256 rows, values do not
    bitmask, kept = sample_bitmask(rows, in_features, dice)
    repeats = -(-out_features // rows)
    bitmask = bitmask.repeat(repeats, 1)[:out_features].to(DEVICE)
    kept = kept.repeat(repeats, 1)[:out_features].to(DEVICE)
    values = torch.randn(out_features, in_features // 2, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    values = (values + 0.25) * in_features**-0.5  # the mean is not zero
    return (values * kept if deficient else values).to(dtype), bitmask


def draw_x(rows: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    dice = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(rows, in_features, generator=dice, device=DEVICE) + 0.25).to(dtype)


def poisoned(rows: int, out_features: int, dtype: torch.dtype) -> int:
    """Leave NaN in the memory that the allocator gives out next; its address."""
    y = torch.full((rows, out_features), float("nan"), dtype=dtype, device=DEVICE)
    return y.data_ptr()


def worst(y: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None = None) -> float:
    """The largest error in units of epsilon * (|x| |W|^T + |bias|); inf if anything is NaN.  Below 1 is right."""
    x64, w64 = x.double().flatten(0, -2), dense.double()
    expected, scale = x64 @ w64.t(), x64.abs() @ w64.abs().t()
    if bias is not None:
        expected, scale = expected + bias.double(), scale + bias.double().abs()
    ratio = (y.double().flatten(0, -2) - expected).abs() / (EPSILON[y.dtype] * scale + 1e-30)
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def check(condition: bool, message: str, problems: list[str]) -> None:
    if not condition:
        problems.append(message)


@section
def environment() -> dict[str, Any]:
    library = cusparselt._library()
    before = time.perf_counter()
    reasons = {str(dtype): cusparselt.check_layout(DEVICE, dtype) for dtype in (BF16, FP16)}
    result = {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cusparselt": library if isinstance(library, str) else library.version,
        "wheels": {d.name: d.version for d in importlib.metadata.distributions() if "cusparselt" in (d.name or "").lower()},
        "why_not": cusparselt.why_not(DEVICE),
        "check_layout": reasons,
        "self_test_s": time.perf_counter() - before,
    }
    result["facts"] = {str(dtype): vars(facts) for dtype, facts in cusparselt._context(DEVICE).facts.items()}
    return result


@section
def layout() -> dict[str, Any]:
    """The buffer's prefix for distinct values in large shapes, bit by bit; and which shapes are padded."""
    result: dict[str, Any] = {}
    for dtype in (BF16, FP16):
        for out_features, in_features in [*CHECK_SHAPES, (28672, 4096), (4096, 14336)]:
            name = f"{out_features}x{in_features} {dtype}"
            try:
                result[name] = layout_of(out_features, in_features, dtype)
            except CusparseltError as failure:
                result[name] = {"prefix_is_values": False, "failed": str(failure)}
    good = [name for name, found in result.items() if found["prefix_is_values"] and found["ones_give_same_buffer"]]
    others = {name: found for name, found in result.items() if name not in good}
    return {"summary": f"{len(good)} of {len(result)} shapes share their values", "others": others, "shapes": result}


def layout_of(out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    compressed, bitmask = draw_parts(out_features, in_features, dtype, deficient=False)
    compressed = compressed.where(compressed != 0, torch.ones((), dtype=dtype, device=DEVICE))
    buffer = cusparselt._context(DEVICE).compress(reference.unpack(compressed, bitmask, in_features))
    prefix = buffer[: 2 * compressed.numel()]
    exact = prefix.numel() == 2 * compressed.numel() and torch.equal(prefix, compressed.view(torch.uint8).flatten())
    weight = CusparseltWeight.from_parts(compressed, bitmask, in_features)
    return {
        **{"bytes": buffer.numel(), "expected_bytes": cusparselt.compressed_bytes(out_features, in_features), "prefix_is_values": exact},
        **{"ones_give_same_buffer": torch.equal(weight.buffer, buffer)},
    }


@section
def correctness() -> dict[str, Any]:
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for dtype in (BF16, FP16):
        for out_features, in_features in CHECK_SHAPES:
            try:
                correctness_of(out_features, in_features, dtype, records, problems)
            except CusparseltError as failure:
                problems.append(f"{out_features}x{in_features} {dtype}: {failure}")
    shown = max(records, key=lambda record: record["error"]) if records else None
    num_poisoned = sum(record["poisoned"] for record in records)
    return {"cases": len(records), "poisoned": num_poisoned, "worst": shown, "num_problems": len(problems), "problems": problems}


def correctness_of(out_features: int, in_features: int, dtype: torch.dtype, records: list[dict[str, Any]], problems: list[str]) -> None:
    compressed, bitmask = draw_parts(out_features, in_features, dtype)
    dense = reference.unpack(compressed, bitmask, in_features)
    weight = CusparseltWeight.from_parts(compressed, bitmask, in_features)
    if weight.values is not None:
        same = torch.equal(weight.values.view(torch.int16), compressed.view(torch.int16))
        check(same, f"{out_features}x{in_features}: stored values differ", problems)
    bias = torch.randn(out_features, device=DEVICE).to(dtype)
    for rows in CHECK_ROWS:
        x = draw_x(rows, in_features, dtype)
        for label, added in (("none", None), ("first", bias), ("second", -bias)):  # two pointers on one plan
            name = f"{out_features}x{in_features} M={rows} bias={label} {dtype}"
            address = poisoned(rows, out_features, dtype)
            y = weight.linear(x, added)
            error = worst(y, x, dense, added)
            records.append({"case": name, "error": error, "poisoned": y.data_ptr() == address})
            check(error <= 1, f"{name}: error {error:.3g}", problems)


@section
def traps() -> dict[str, Any]:
    problems: list[str] = []
    out_features, in_features = 1024, 576
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
    wide = draw_x(128, 2 * in_features, BF16)
    flat = draw_x(1, 64 * in_features + 1, BF16).flatten()
    inputs = {
        "strided": wide[:, ::2],
        "sliced": wide[:, :in_features],
        "transposed": draw_x(in_features, 64, BF16).t(),
        "misaligned": flat[1:].view(64, in_features),
        "1-D": draw_x(1, in_features, BF16)[0],
        "3-D": draw_x(60, in_features, BF16).view(3, 20, in_features),
        "4-D": draw_x(60, in_features, BF16).view(3, 2, 10, in_features),
    }
    for name, x in inputs.items():
        y = weight.linear(x)
        check(y.shape == (*x.shape[:-1], out_features), f"{name}: shape {tuple(y.shape)}", problems)
        error = worst(y.view(-1, out_features), x.reshape(-1, in_features), dense)
        check(error <= 1, f"{name}: error {error:.3g}", problems)
    check(weight.linear(wide[:0, :in_features]).shape == (0, out_features), "0 rows", problems)
    bias = torch.randn(out_features + 1, device=DEVICE).to(BF16)[1:]
    x = draw_x(64, in_features, BF16)
    check(worst(weight.linear(x, bias), x, dense, bias) <= 1, "misaligned bias", problems)
    # Infinity where no weight is kept must not reach y: columns 2 and 3 of every group are pruned in all rows.
    only_first = torch.full((64, in_features // 8), 0b00110011, dtype=torch.uint8, device=DEVICE)
    hidden = CusparseltWeight.from_parts(torch.ones(64, in_features // 2, dtype=BF16, device=DEVICE), only_first, in_features)
    x_inf = x.clone().unflatten(1, (-1, 4))
    x_inf[..., 2:] = float("inf")
    check(bool(hidden.linear(x_inf.flatten(1)).isfinite().all()), "inf at pruned columns", problems)
    special = compressed.clone()
    special[3, 5], special[4, 6], special[5, 7] = float("nan"), -0.0, float("inf")
    kept = CusparseltWeight.from_parts(special, bitmask, in_features)
    same = kept.values is None or torch.equal(kept.values.view(torch.int16), special.view(torch.int16))
    check(same, "NaN, -0.0 or inf changed", problems)
    y = kept.linear(x)
    clean = [row for row in range(16) if row not in (3, 5)]
    check(bool(y[:, 3].isnan().all()) and bool(y[:, clean].isfinite().all()), "NaN does not stay in its row", problems)
    for name, call in {
        "short buffer": lambda: cusparselt.linear(x, weight.buffer[:-16], out_features),
        "wrong out_features": lambda: cusparselt.linear(x, weight.buffer, out_features - 16),
        "float32 x": lambda: cusparselt.linear(x.float(), weight.buffer, out_features),
        "wrong bias": lambda: weight.linear(x, bias[:-1]),
    }.items():
        try:
            call()
            problems.append(f"{name}: no error")
        except (ValueError, CusparseltError):
            pass
    return {"problems": problems}


@section
def streams_and_threads() -> dict[str, Any]:
    problems: list[str] = []
    out_features, in_features = 4096, 4096
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
    biases = [torch.randn(out_features, device=DEVICE).to(BF16) for _ in range(4)]
    inputs = [draw_x(64 + 32 * number, in_features, BF16, seed=number) for number in range(4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(inputs[0])
        torch.cuda._sleep(20_000_000)  # x arrives late: another stream would read zeros
        late.copy_(inputs[0])
        y = weight.linear(late, biases[0])
    stream.synchronize()
    check(worst(y, inputs[0], dense, biases[0]) <= 1, "second stream", problems)
    results: list[Tensor | None] = [None] * 4

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                result = weight.linear(inputs[number % 2], biases[number])  # two threads share a plan, with two biases
            torch.cuda.current_stream().synchronize()
            results[number] = result

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in enumerate(results):
        right = result is not None and worst(result, inputs[number % 2], dense, biases[number]) <= 1
        check(right, f"thread {number}", problems)
    repeated = [weight.linear(inputs[0], biases[0]) for _ in range(20)]
    check(all(torch.equal(repeated[0], again) for again in repeated), "results differ from call to call", problems)
    return {"problems": problems}


@section
def graphs() -> dict[str, Any]:
    problems: list[str] = []
    for out_features, in_features, rows in ((4096, 4096, 100), (576, 1536, 64), (6144, 4096, 1024)):
        compressed, bitmask = draw_parts(out_features, in_features, BF16)
        dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
        bias, x = torch.randn(out_features, device=DEVICE).to(BF16), torch.zeros(rows, in_features, dtype=BF16, device=DEVICE)
        weight.linear(x, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weight.linear(x, bias)
        weight.linear(x, -bias)  # another pointer on the same plan afterwards
        for seed in range(3):
            x.copy_(draw_x(rows, in_features, BF16, seed=seed))
            y.fill_(float("nan"))
            graph.replay()
            error = worst(y, x, dense, bias)
            check(error <= 1, f"{out_features}x{in_features} M={rows} replay {seed}: error {error:.3g}", problems)
    return {"problems": problems}


@section
def memory() -> dict[str, Any]:
    result = {}
    for out_features, in_features in ((28672, 4096), (576, 1536)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        compressed, bitmask = draw_parts(out_features, in_features, BF16)
        packed = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        weight = CusparseltWeight.from_parts(compressed, bitmask, in_features)
        peak = torch.cuda.max_memory_allocated() - before
        if weight.values is not None:
            compressed = weight.values
        shared = torch.cuda.memory_allocated() - before
        y = weight.linear(draw_x(64, in_features, BF16))
        del y
        after = torch.cuda.memory_allocated() - before
        dense = 2 * out_features * in_features
        result[f"{out_features}x{in_features}"] = {
            **{"packed": packed / dense, "with_cusparselt": shared / dense, "after_a_call": after / dense},
            **{"peak_while_building": peak / dense},
        }
        del weight, compressed, bitmask
    return result


@section
def interchange() -> dict[str, Any]:
    problems: list[str] = []
    torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = False
    for dtype in (BF16, FP16):
        for out_features, in_features in ((256, 512), (576, 1536), (1024, 1600)):
            name = f"{out_features}x{in_features} {dtype}"
            compressed, bitmask = draw_parts(out_features, in_features, dtype)
            parts = {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[out_features], [in_features]])}
            dense, x = reference.unpack(compressed, bitmask, in_features), draw_x(64, in_features, dtype)
            theirs = torch.sparse.to_sparse_semi_structured(dense)
            ours = to_torch(parts)
            check(type(theirs) is type(ours) and theirs.shape == ours.shape, f"{name}: {type(theirs)} {type(ours)}", problems)
            check(theirs.packed.numel() == ours.packed.numel(), f"{name}: sizes of the packed tensors", problems)
            for label, tensor in (("ours", ours), ("theirs", theirs)):
                error = worst(F.linear(x, tensor), x, dense)
                check(error <= 1, f"{name}: F.linear with {label}: error {error:.3g}", problems)
                check(torch.equal(tensor.to_dense(), dense), f"{name}: to_dense of {label}", problems)
            back = from_torch(ours)
            check(all(torch.equal(back[part], parts[part]) for part in parts), f"{name}: to torch and back", problems)
            read = from_torch(theirs)
            check(torch.equal(Sparse24Compressor().decompress_weight(read), dense), f"{name}: from torch", problems)
            check(read["bitmask"].device == theirs.device, f"{name}: device", problems)
            special = {**parts, "compressed": compressed.clone()}
            special["compressed"][0, :3] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=dtype)
            back = from_torch(to_torch(special))["compressed"]
            check(torch.equal(back.view(torch.int16), special["compressed"].view(torch.int16)), f"{name}: NaN, -0.0, inf", problems)
    for label, wrong in (("dense", torch.ones(32, 32, device=DEVICE)), ("transposed", ours.t())):
        try:
            from_torch(wrong)
            problems.append(f"{label}: no error")
        except (TypeError, ValueError):
            pass
    return {"problems": problems}


def host_us(function: Callable[[], Any], calls: int = 200) -> float:
    for _ in range(20):
        function()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - before) / calls * 1e6)
    return best


@section
def host_time() -> dict[str, float]:
    out_features, in_features, rows = 1024, 1024, 64  # short kernels: the host is what counts
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    weight, dense = CusparseltWeight.from_parts(compressed, bitmask, in_features), reference.unpack(compressed, bitmask, in_features)
    parts = {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[out_features], [in_features]])}
    theirs, x = to_torch(parts), draw_x(rows, in_features, BF16)
    bias, odd = torch.zeros(out_features, dtype=BF16, device=DEVICE), draw_x(rows - 1, in_features, BF16)
    plan_times = []
    for extra in range(8):
        x_new = draw_x(2048 + 8 * extra, in_features, BF16)
        torch.cuda.synchronize()
        before = time.perf_counter()
        weight.linear(x_new)
        plan_times.append((time.perf_counter() - before) * 1e6)
    with torch.no_grad():
        return {
            "F.linear": host_us(lambda: F.linear(x, dense)),
            "F.linear bias": host_us(lambda: F.linear(x, dense, bias)),
            "cusparselt": host_us(lambda: weight.linear(x)),
            "cusparselt bias": host_us(lambda: weight.linear(x, bias)),
            "cusparselt 63 rows": host_us(lambda: weight.linear(odd)),
            "torch semi-structured": host_us(lambda: F.linear(x, theirs), 20),
            "first call of a size": sorted(plan_times)[4],
        }


@section
def times() -> dict[str, Any]:
    spin = torch.randn(8192, 8192, device=DEVICE).to(BF16)
    for _ in range(60):
        spin @ spin
    del spin
    torch.cuda.synchronize()
    records: list[dict[str, Any]] = []
    found: dict[str, Any] = {"records": records, "skipped": [], "table": []}
    print(f"{'N x K':>14} {'M':>5} {'dense us':>9} {'default':>9} {'best':>9} {'speed-up':>8} {'spread':>7}  algorithm")
    for out_features, in_features in TIME_SHAPES:
        compressed, bitmask = draw_parts(out_features, in_features, BF16, deficient=False)
        first = CusparseltWeight.from_parts(compressed, bitmask, in_features)
        copies = max(2, -(-int(ROTATE_BYTES) // first.size_bytes))
        weights = [first] + [CusparseltWeight(first.buffer.clone(), out_features, in_features, BF16) for _ in range(copies - 1)]
        dense = [reference.unpack(compressed, bitmask, in_features)]
        dense += [dense[0].clone() for _ in range(copies - 1)]
        budget_s = (TIMES_UNTIL_S - elapsed_s()) / (len(TIME_SHAPES) - TIME_SHAPES.index((out_features, in_features)))
        stop_s = elapsed_s() + budget_s
        for rows in TIME_ROWS:
            if elapsed_s() > stop_s:
                found["skipped"].append([out_features, in_features, rows])
                continue
            x = draw_x(rows, in_features, BF16)
            try:
                calls = [lambda w=w, x=x: F.linear(x, w) for w in dense]
                F.linear(x, dense[0])
                dense_us = min(cusparselt._replay_us(calls, 3)) / copies
                timings = cusparselt.search(weights, x)
                dense_us = min(dense_us, min(cusparselt._replay_us(calls, 3)) / copies)
            except Exception:
                found["skipped"].append([out_features, in_features, rows, traceback.format_exc()])
                continue
            best = timings[0]
            default = next(timing for timing in timings if timing.algorithm == DEFAULT)
            error = worst(weights[-1].linear(x[:256], None, best.algorithm), x[:256], dense[0])
            record = {
                **{"N": out_features, "K": in_features, "M": rows, "dtype": "bfloat16", "path": "cusparselt", "us": best.time_us},
                **{"default_us": default.time_us, "dense_us": dense_us, "spread": best.spread, "error": error},
                **{"algorithm": vars(best.algorithm), "num_algorithms": len(timings), "copies": copies},
                "top": [[vars(timing.algorithm), timing.time_us] for timing in timings[:5]],
            }
            records.append(record)
            print(
                f"{out_features:>6} x {in_features:>5} {rows:>5} {dense_us:>9.1f} {default.time_us:>9.1f} {best.time_us:>9.1f} "
                f"{dense_us / best.time_us:>7.2f}x {best.spread:>7.3f}  {best.algorithm.attributes()}{'' if error <= 1 else ' WRONG'}",
                flush=True,
            )
            if best.time_us * (1 + max(best.spread, default.spread)) < default.time_us:
                key = (out_features, in_features, rows)
                found["table"].append(f"{key}: {best.algorithm!r},")
        del weights, dense, first, compressed, bitmask
    records.sort(key=lambda record: (record["N"], record["K"], record["M"]))
    return found


@section
def plan_memory() -> dict[str, Any]:
    """Does a plan hold device memory?  If not, a destroyed plan cannot hurt a captured graph."""
    compressed, bitmask = draw_parts(1024, 1024, BF16)
    weight = CusparseltWeight.from_parts(compressed, bitmask, 1024)
    x = draw_x(8 * 400, 1024, BF16)
    weight.linear(x)
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    reserved_before = torch.cuda.memory_reserved()
    for rows in range(8, 8 * 200, 8):
        weight.linear(x[:rows])
    torch.cuda.synchronize()
    grown = free_before - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved_before)
    return {"bytes_of_199_plans_outside_torch": grown, "cached_plans": len(cusparselt._context(DEVICE).plans)}


@section
def more_than_2_31_elements() -> dict[str, Any]:
    out_features, in_features, rows = 28672, 256, 80000
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
    x = draw_x(rows, in_features, BF16)
    torch.full((rows, out_features), float("nan"), dtype=BF16, device=DEVICE)
    y = weight.linear(x)
    step = cusparselt._max_rows(in_features, out_features)
    parts = {"first": slice(0, 64), "seam": slice(step - 64, step + 64), "last": slice(rows - 64, rows)}
    return {"rows_per_call": step, **{name: worst(y[part], x[part], dense) for name, part in parts.items()}}


@section
def plan_made_while_capturing() -> dict[str, Any]:
    out_features, in_features, rows = 1024, 1024, 136
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
    x, graph = draw_x(rows, in_features, BF16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight.linear(x)
    y.fill_(float("nan"))
    graph.replay()
    return {"error": worst(y, x, dense)}


@section
def replay_after_its_plan_is_destroyed() -> dict[str, Any]:
    out_features, in_features, rows = 4096, 4096, 256
    compressed, bitmask = draw_parts(out_features, in_features, BF16)
    dense, weight = reference.unpack(compressed, bitmask, in_features), CusparseltWeight.from_parts(compressed, bitmask, in_features)
    bias, x, graph = torch.randn(out_features, device=DEVICE).to(BF16), draw_x(rows, in_features, BF16), torch.cuda.CUDAGraph()
    weight.linear(x, bias)
    with torch.cuda.graph(graph):
        y = weight.linear(x, bias)
    cusparselt.clear_plans()
    for other in range(8, 8 * 33, 8):  # other plans take the freed memory of the host, and of the device
        weight.linear(x[:other])
    scribble = [torch.full((1 << 16,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return {"error": worst(y, x, dense, bias), "scribbled": len(scribble)}


def main() -> None:
    path = Path(sys.argv[1])
    warnings.filterwarnings("ignore", message="The PyTorch API of SparseSemiStructuredTensor")
    results: dict[str, Any] = {}
    for function in SECTIONS:
        name, before = function.__name__, elapsed_s()
        if before > ALL_UNTIL_S:
            results[name] = {"skipped": f"{before:.0f} s are over"}
            continue
        try:
            results[name] = function()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        results[name]["section_s"] = round(elapsed_s() - before, 2)
        path.write_text(json.dumps(results, indent=1, default=str))
        shown = {key: value for key, value in results[name].items() if key not in ("records", "shapes", "table")}
        print(f"== {name}: {json.dumps(shown, default=str)[:1500]}", flush=True)
    path.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()

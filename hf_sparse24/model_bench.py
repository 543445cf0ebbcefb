"""`hf-sparse24 bench`: what the layers of a model gain on the GPU of this machine, measured and said plainly.

Each distinct layer of a checkpoint (its sizes and its form) is measured once, with the weight of the first layer that has it.  A
checkpoint whose weights are not packed is measured with random 2:4 weights of its sizes: the time does not depend on the values.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_sparse24.bench import DEVICE, LLAMA_8B, Cell, Copies, environment, measure
from hf_sparse24.chart import draw_speedups
from hf_sparse24.checkpoint import PackedSlice
from hf_sparse24.config import Sparse24Config
from hf_sparse24.integration.quantizer import prepare_kernels
from hf_sparse24.kernels.dispatch import DTYPES, SPARSE24, why_not_kept
from hf_sparse24.linear import PackedLinear
from hf_sparse24.modules import packable_modules, packed_layers
from hf_sparse24.quantized_linear import Marlin24Linear
from hf_sparse24.report import open_model, show_bytes
from hf_sparse24.table import render_columns

DEFAULT_ROWS = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class LayerKind:
    """Layers that take the same time."""

    n: int
    k: int
    format: str
    names: tuple[str, ...]
    """Of the modules; none of a model that is not there."""
    count: int = 1
    form: str | None = None
    """Of a quantised weight, as `benchmarks/quantized.py` calls it: fp8, int8, int4-g128, int4-channel, ..."""

    @property
    def label(self) -> str:
        """`4096 x 14336`, and the format if it is not the usual one."""
        return f"{self.n} x {self.k}" + ("" if self.format == SPARSE24 else f" {self.form or self.format}")


@dataclass(frozen=True)
class Measured:
    """A kind of layer, at several numbers of rows, and the bytes of one of its weights on the GPU."""

    kind: LayerKind
    cells: tuple[Cell, ...]
    packed_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class BenchReport:
    """All that was measured."""

    model: str | None
    dtype: str
    environment: dict[str, Any]
    layers: tuple[Measured, ...]
    notes: tuple[str, ...]
    """What to know: where weights are random, and what was left out."""

    @property
    def failures(self) -> list[str]:
        """Layers whose result was wrong."""
        return [f"{found.kind.label}, {cell.m} rows: {cell.failure}" for found in self.layers for cell in found.cells if cell.failure]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: `cells` as those of `benchmarks/matmul.py` and `benchmarks/quantized.py`."""
        layers = [{**asdict(found.kind), "packed_bytes": found.packed_bytes, "dense_bytes": found.dense_bytes} for found in self.layers]
        forms = [{"form": found.kind.form} if found.kind.form else {} for found in self.layers]
        cells = [{**form, **cell.to_dict()} for form, found in zip(forms, self.layers, strict=True) for cell in found.cells]
        totals = [{"m": m, "us": round(ours, 3), "dense_us": round(dense, 3)} for m, ours, dense in totals_us(self)]
        head = {"benchmark": "bench", "model": self.model, "dtype": self.dtype, "environment": self.environment, "notes": list(self.notes)}
        return {**head, "layers": layers, "cells": cells, "totals": totals}

    def to_svg(self) -> str:
        """The chart: speed-up over rows of x, a line for each kind of layer.

        Raises:
            ValueError: Nothing was timed.
        """
        names = [f"{found.kind.count} of {found.kind.label}" if found.kind.names else found.kind.label for found in self.layers]
        points = [[(cell.m, cell.ratio) for cell in found.cells if cell.ratio] for found in self.layers]
        made = self.environment
        title = f"Packed 2:4 layers{f' of {Path(self.model).name}' if self.model else ''}, {self.dtype}: speed-up over dense"
        return draw_speedups(title, f"{made['device']}, torch {made['torch']}, {made['date'][:10]}", dict(zip(names, points, strict=True)))


def bench_model(model: str | Path | None = None, rows: Sequence[int] = DEFAULT_ROWS) -> BenchReport:
    """Measure the layers of a checkpoint on the GPU of this machine.

    Args:
        model: Folder, or repository on the Hub; None takes the layers of an 8B Llama.
        rows: Numbers of rows of x: tokens that are computed at once.

    Raises:
        CheckpointError: The folder is damaged or in a form that cannot be read.
        ValueError: There is no GPU, or the model has no layer that could be packed.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU is visible, so that nothing can be measured; `hf-sparse24 doctor` says what is missing")
    notes = [f"no kernel runs here: {reason}"] if (reason := why_not_kept()) else []
    with torch.no_grad():
        if model is None:
            notes.append("no model was given: sizes are those of an 8B Llama with fused projections, weights are random")
            kinds: dict[LayerKind, Any] = {LayerKind(n, k, SPARSE24, ()): None for n, k in LLAMA_8B}
            return _report(None, torch.bfloat16, kinds, rows, notes)
        with open_model(model) as opened:
            dtype = _dtype(opened.checkpoint.config, notes)
            kinds = packed_kinds(opened.packed, packed_layers(opened.model), opened.kept, notes)
            if not opened.packed:
                kinds = dict.fromkeys(dense_kinds(opened.model))
                notes.append("no weight of this checkpoint is packed: measured with random 2:4 weights of its layers' sizes")
            if not kinds:
                raise ValueError(f"{model}: no layer stays packed on load, or could be; `hf-sparse24 inspect` says why")
            return _report(str(model), dtype, kinds, rows, notes)


def packed_kinds(
    packed: Mapping[str, PackedSlice], layers: Mapping[str, PackedLinear], kept: Mapping[str, str], notes: list[str]
) -> dict[LayerKind, tuple[PackedLinear, PackedSlice]]:
    """The distinct layers that stay packed, each with an empty layer and its weight in the file.

    Args:
        packed: The packed weights of a checkpoint.
        layers: Of the empty model, by module name; experts are none.
        kept: Parameter name -> module name.
        notes: Is added to.
    """
    if experts := [name for name, module in kept.items() if module not in layers]:
        notes.append(f"{len(experts)} weights of experts are left out: how many rows each is multiplied by, a router decides")
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, module in kept.items():
        if module not in layers:
            continue
        layer, dtypes = layers[module], tuple(dtype for dtype, _ in packed[name].specs.values())
        alike[layer.out_features, layer.in_features, layer.compressor.format, dtypes].append(name)
    kinds = {}
    for (n, k, format, _), names in alike.items():
        if reason := why_not_kept(format):
            notes.append(f"{len(names)} layers of {n} x {k} are left out: {reason}")
            continue
        first = layers[kept[names[0]]]
        kinds[LayerKind(n, k, format, tuple(kept[name] for name in names), len(names), _form(first))] = first, packed[names[0]]
    return kinds


def _form(layer: PackedLinear) -> str | None:
    if isinstance(layer, Marlin24Linear):
        return f"int{layer.num_bits}-{'g128' if layer.tensors[2].shape[0] > 1 else 'channel'}"
    return {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(layer.values.dtype)


def dense_kinds(model: Any) -> list[LayerKind]:
    """The distinct layers that `Sparse24Config()` would pack."""
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name in packable_modules(model, Sparse24Config()):
        n, k = model.get_submodule(name).weight.shape
        if k % 8 == 0:
            alike[n, k].append(name)
    return [LayerKind(n, k, SPARSE24, tuple(names), len(names)) for (n, k), names in alike.items()]


def _dtype(config: Mapping[str, Any], notes: list[str]) -> torch.dtype:
    """Of x: the model's, if kernels know it."""
    name = config.get("dtype", config.get("torch_dtype"))
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype in DTYPES:
        return dtype
    notes.append(f"config.json says dtype {name}: measured in bfloat16, as if it was loaded with dtype=torch.bfloat16")
    return torch.bfloat16


def _report(model: str | None, dtype: torch.dtype, kinds: Mapping[LayerKind, Any], rows: Sequence[int], notes: list[str]) -> BenchReport:
    found = []
    for kind, source in logging.tqdm(kinds.items(), desc="Measuring layers"):
        copies = Copies.random(kind.n, kind.k, dtype) if source is None else Copies.of(_load(source, dtype), dtype)
        prepare_kernels({kind.label: copies.layers[0]}, dtype)
        cells = tuple(measure(copies, m) for m in rows)
        tensors = [*copies.layers[0].parameters(), *copies.layers[0].buffers()]
        found.append(Measured(kind, cells, sum(tensor.nbytes for tensor in tensors), copies.dense[0].nbytes))
    return BenchReport(model, str(dtype).removeprefix("torch."), environment(), tuple(found), tuple(notes))


def _load(source: tuple[PackedLinear, PackedSlice], dtype: torch.dtype) -> PackedLinear:
    """A layer of the checkpoint on the GPU, without its bias."""
    empty, weight = source
    layer = type(empty).from_parts({part: value[...] for part, value in weight.parts.items()})
    if hasattr(empty, "quantize_x"):
        layer.quantize_x = empty.quantize_x
    return layer.to(dtype).to(DEVICE)


# ---- text ----------------------------------------------------------------------------------------------------------------------


def totals_us(report: BenchReport) -> list[tuple[int, float, float]]:
    """Rows of x, and the microseconds of all layers, packed and dense; rows at which a layer failed are left out."""
    rows = [cell.m for cell in report.layers[0].cells] if report.layers else []
    totals = []
    for place, m in enumerate(rows):
        cells = [(found.kind.count, found.cells[place]) for found in report.layers]
        if all(cell.ratio for _, cell in cells):
            ours, dense = (sum(count * getattr(cell, name) for count, cell in cells) for name in ("us", "dense_us"))
            totals.append((m, ours, dense))
    return totals


def render_bench(report: BenchReport) -> str:
    """The report as text: a table of speed-ups, then what is gained and what is lost."""
    made = report.environment
    rows = [cell.m for cell in report.layers[0].cells]
    header = ("layers", "out x in", *(f"{m} rows" if m > 1 else "1 row" for m in rows))
    table = [
        (str(found.kind.count), found.kind.label, *(f"{cell.ratio:.2f}x" if cell.ratio else "WRONG" for cell in found.cells))
        for found in report.layers
    ]
    head = f"{made['device']}, torch {made['torch']}, {report.dtype}: how many times faster than the dense layer (cuBLAS)"
    return "\n".join([head, "", render_columns(header, table, {"layers", *header[2:]}), "", *verdict(report)])


def verdict(report: BenchReport) -> list[str]:
    """Plain sentences: what is gained, what is lost, what it takes of memory, what to know."""
    count = sum(found.kind.count for found in report.layers)
    lines = []
    for m, ours, dense in totals_us(report):
        gain = f"{dense / ours:.2f}x, {dense - ours:.0f} us less" if ours < dense else f"{dense / ours:.2f}x, {ours - dense:.0f} us MORE"
        lines.append(f"{m} {'rows' if m > 1 else 'row'} of x: the {count} layers take {ours:.0f} us packed, {dense:.0f} us dense: {gain}")
    slower = [
        f"{found.kind.label} with {cell.m} rows ({cell.ratio:.2f}x by {cell.path}{', within the spread' if _is_close(cell) else ''})"
        for found in report.layers
        for cell in found.cells
        if cell.ratio and cell.ratio < 1
    ]
    lines.append(f"slower than dense: {'; '.join(slower)}" if slower else "no layer is slower than dense at these numbers of rows")
    packed, dense_bytes = (sum(f.kind.count * getattr(f, name) for f in report.layers) for name in ("packed_bytes", "dense_bytes"))
    lines.append(f"their weights take {show_bytes(packed)} of GPU memory instead of {show_bytes(dense_bytes)} ({packed / dense_bytes:.3f})")
    lines.append("attention, norms and sampling come on top of the layers' time: a whole model gains less")
    return [*lines, *(f"note: {note}" for note in report.notes), *(f"FAILED: {failure}" for failure in report.failures)]


def _is_close(cell: Cell) -> bool:
    assert cell.ratio is not None
    return 1 - cell.ratio < max(cell.spread or 0, cell.dense_spread or 0)

"""Which kernel multiplies by each kind of packed layer, at how many rows of x, and why the others do not: on this machine."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_sparse24.kernels.dispatch import with_index
from hf_sparse24.linear import PackedLinear

# Of one sequence being decoded to a long prompt.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class RowRange:
    """Neighbours in ROWS at which one path runs."""

    first: int
    last: int
    path: str
    reasons: dict[str, str]
    """Why each other path does not run, at the first of them."""


@dataclass(frozen=True)
class KernelReport:
    """Layers of one size and form."""

    shape: tuple[int, int]
    format: str
    names: tuple[str, ...]
    """Of the modules."""
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True)
class KernelsReport:
    """All kinds of packed layers of a model."""

    device: str | None
    """`cuda:0, NVIDIA H200`; None if no GPU is visible: everything is unpacked then."""
    dtype: str
    """Of x."""
    layers: tuple[KernelReport, ...]


def explain_layers(layers: Mapping[str, PackedLinear], dtype: torch.dtype) -> KernelsReport:
    """Ask each kind of layer which path it takes on the GPU of this machine; without one, on the CPU.

    Args:
        layers: By module name; they may be empty ones.
        dtype: Of x.
    """
    device = with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        dtypes = tuple(getattr(layer, part).dtype for part in layer.part_names)
        alike[(layer.out_features, layer.in_features), layer.compressor.format, dtypes].append(name)
    found = tuple(
        KernelReport(shape, format, tuple(names), _ranges(layers[names[0]], dtype, device)) for (shape, format, _), names in alike.items()
    )
    place = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else None
    return KernelsReport(place, str(dtype).removeprefix("torch."), found)


def _ranges(layer: PackedLinear, dtype: torch.dtype, device: torch.device) -> tuple[RowRange, ...]:
    choices = [(rows, layer.explain(rows, dtype, device)) for rows in ROWS]
    grouped = [list(group) for _, group in itertools.groupby(choices, key=lambda item: item[1].path)]
    return tuple(RowRange(group[0][0], group[-1][0], group[0][1].path, dict(group[0][1].reasons)) for group in grouped)

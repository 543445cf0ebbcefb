"""Two checkpoints, tensor by tensor as dense ones: the same bits, or, where one is quantised, no farther apart than rounding explains.

A quantised weight is `integers * scale`.  Rounding moves a weight by half a step at most: half a scale for integers; for float8 a
sixteenth of the weight, or 2^-10 of a scale where numbers are that small.  Scale and product are rounded to the scale's dtype,
which adds an epsilon of that dtype times the weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_sparse24.checkpoint import DTYPES, PackedSlice, Slice
from hf_sparse24.compressors import BaseQuantizedCompressor
from hf_sparse24.pattern import FLOAT_BITS
from hf_sparse24.quantization import FLOAT8, dequantize

# Elements that are compared at a time, in float32.
CHUNK = 1 << 22


@dataclass(frozen=True)
class RoundingError:
    """An element of a quantised weight, where it was, and how far it is from there."""

    name: str
    row: int
    column: int
    before: float
    after: float
    distance: float
    share: float
    """`distance` over the largest that rounding explains; above 1 it is something else."""

    def __str__(self) -> str:
        return f"{self.distance:.3g} ({self.name}, row {self.row}, column {self.column}: {self.before:.4g} became {self.after:.4g})"


@dataclass
class Comparison:
    """How many tensors were compared, and how alike they are."""

    num_tensors: int = 0
    num_equal: int = 0
    """With the same bits, but for signs of zeros."""
    num_rounded: int = 0
    num_lost_signs: int = 0
    """Elements that are -0.0 on one side and +0.0 on the other."""
    largest_error: RoundingError | None = None
    """The largest distance."""
    problems: list[str] = field(default_factory=list)


def compare_tensors(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> Comparison:
    """Compare two checkpoints.

    Args:
        tensors: Name -> open slice, packed or not, of the one that is looked at.
        others: The same of the one that it was made from.

    Returns:
        The counts, and a line for each tensor that one side lacks, or that differs by more than rounding.
    """
    found = Comparison()
    found.problems += [f"{name} is not in it" for name in others if name not in tensors]
    found.problems += [f"{name} is not in the other checkpoint" for name in tensors if name not in others]
    shared = [name for name in tensors if name in others]
    for name in logging.tqdm(shared, desc="Comparing weights"):
        found.num_tensors += 1
        try:
            problem = _compare(name, tensors[name], others[name], found)
        except ValueError as error:  # of a packed weight: its parts disagree
            problem = str(error)
        found.problems += [problem] if problem else []
    return found


def _compare(name: str, value: Slice, other: Slice, found: Comparison) -> str | None:
    """What is wrong with a tensor; the counts go into `found`."""
    if list(value.get_shape()) != list(other.get_shape()):
        return f"{name} has shape {tuple(value.get_shape())}, expected {tuple(other.get_shape())}"
    if isinstance(value, PackedSlice) and isinstance(value.compressor, BaseQuantizedCompressor):
        return _compare_rounded(name, value, other[...], found)
    if value.get_dtype() != other.get_dtype():
        return f"{name} is {value.get_dtype()}, expected {other.get_dtype()}"
    if DTYPES.get(value.get_dtype()) is None:
        return f"{name} is {value.get_dtype()}, which torch does not know: not compared"
    return _compare_bits(name, value[...], other[...], found)


def _compare_bits(name: str, tensor: Tensor, expected: Tensor, found: Comparison) -> str | None:
    num_different, num_lost, first = 0, 0, None
    as_bits = FLOAT_BITS.get(tensor.dtype, tensor.dtype)
    for start, ours, theirs in _chunks(tensor.reshape(-1), expected.reshape(-1)):
        differ = ours.view(as_bits) != theirs.view(as_bits)
        if not differ.any():
            continue
        zeros = (ours.float() == 0) & (theirs.float() == 0) if tensor.dtype in FLOAT_BITS else torch.zeros_like(differ)
        num_lost += int((differ & zeros).sum())
        wrong = (differ & ~zeros).nonzero()
        if len(wrong) and first is None:
            first = start + int(wrong[0])
        num_different += len(wrong)
    found.num_lost_signs += num_lost
    found.num_equal += not num_different
    if first is None:
        return None
    where, ours, theirs = _place(first, tensor), tensor.reshape(-1)[first].item(), expected.reshape(-1)[first].item()
    return f"{name}: {num_different} of {tensor.numel()} elements differ, the first {where}: {ours!r}, expected {theirs!r}"


def _compare_rounded(name: str, weight: PackedSlice, expected: Tensor, found: Comparison) -> str | None:
    assert isinstance(weight.compressor, BaseQuantizedCompressor)
    try:
        integers, scale = weight.compressor.decompress_integers({part: value[...] for part, value in weight.parts.items()})
    except ValueError as error:
        raise ValueError(f"{weight.where}: packed weight {name}: {error}") from None
    tensor, step = dequantize(integers, scale), _steps(integers, scale)
    found.num_rounded += 1
    outlier: RoundingError | None = None
    for start, ours, theirs in _chunks(tensor, expected):
        before, after = theirs.float(), ours.float()
        # Not a number, on either side, is as far as can be.
        distance = (after - before).abs().nan_to_num(nan=torch.inf)
        share = distance / (step(before, slice(start, start + len(ours))) + torch.finfo(scale.dtype).eps * before.abs())
        share = share.nan_to_num(nan=torch.inf)

        def at(place: int, start: int = start, numbers: tuple[Tensor, ...] = (before, after, distance, share)) -> RoundingError:
            row, column = divmod(place, tensor.shape[1])
            return RoundingError(name, start + row, column, *(float(number[row, column]) for number in numbers))

        farthest, strangest = at(int(distance.argmax())), at(int(share.argmax()))
        if found.largest_error is None or farthest.distance > found.largest_error.distance:
            found.largest_error = farthest
        if outlier is None or strangest.share > outlier.share:
            outlier = strangest
    if outlier is None or outlier.share <= 1:
        return None
    return f"{name}: farther from the other checkpoint than rounding explains, by a factor of {outlier.share:.3g}: {outlier}"


def _steps(integers: Tensor, scale: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Half a step at each of some rows of a weight."""
    num_rows, num_columns = integers.shape
    per_row = (scale.reshape(-1, 1) if scale.ndim < 2 else scale).float()
    per_row = per_row.expand(num_rows, -1) if len(per_row) != num_rows else per_row  # (out, groups)

    def step(before: Tensor, rows: slice) -> Tensor:
        unit = per_row[rows].repeat_interleave(num_columns // per_row.shape[1], 1)  # (rows, in)
        return torch.maximum(before.abs() / 16, unit / 1024) if integers.dtype == FLOAT8 else unit / 2

    return step


def _chunks(ours: Tensor, theirs: Tensor) -> Any:
    """Where each chunk of the first axis starts, and its part of both."""
    step = max(1, CHUNK // max(1, ours[:1].numel()))
    return ((start, ours[start : start + step], theirs[start : start + step]) for start in range(0, len(ours), step))


def _place(index: int, tensor: Tensor) -> str:
    if tensor.ndim < 2:
        return f"at {index}"
    return f"in row {index // tensor.shape[-1]}, column {index % tensor.shape[-1]}"

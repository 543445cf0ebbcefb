"""`sparse-bitmask`: every non-zero of a weight without a pattern, and one bit per weight that says where they were.

    bitmask      (R, ceil(C / 8))  uint8          bit k of byte j = element 8 j + k is non-zero
    compressed   (num_nonzeros,)   weight dtype   non-zeros, row-major
    row_offsets  (R,)              int64          where each row starts in `compressed`
    shape        (2,)              int64          [R, C]

compressed-tensors <= 0.8.1 wrote 1-D tensors this way too: the last axis is packed, row_offsets has the leading axes' shape.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_sparse24.compressors.base import (
    BaseSparsityCompressor,
    PackedTensorError,
    as_words,
    empty_words,
    pack_bits,
    pad_bits_are_zero,
    require_storable,
    row_chunks,
    shape_of,
    specs_of,
    unpack_bits,
)
from hf_sparse24.pattern import is_nonzero


class SparseBitmaskCompressor(BaseSparsityCompressor):
    """Stores any weight without its zeros.  -0.0 is a zero and comes back as +0.0; NaN is kept.

    Source: files of compressed-tensors 0.4.0 to 0.14.0.
    """

    format: ClassVar[str] = "sparse-bitmask"
    parts: ClassVar[tuple[str, ...]] = ("compressed", "bitmask", "row_offsets", "shape")

    def why_not(self, weight: Tensor) -> str | None:
        """None for every weight with at least one axis."""
        return None if weight.ndim else "a scalar has no axis to pack"

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each part.

        Raises:
            PackedTensorError: The shape has no axis.
        """
        if not shape:
            raise PackedTensorError("shape holds no sizes")
        return {
            "compressed": (dtype, (num_values,)),
            "bitmask": (torch.uint8, (*shape[:-1], -(-shape[-1] // 8))),
            "row_offsets": (torch.int64, shape[:-1]),
            "shape": (torch.int64, (len(shape),)),
        }

    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Store the non-zeros of a weight.

        Args:
            weight: (..., in_features), float32, float16, bfloat16, float8 or int8, on any device and of any strides.

        Returns:
            compressed: (num_nonzeros,), dtype and device of weight.
            bitmask: (..., ceil(in_features / 8)), uint8.
            row_offsets: (...,), int64, exclusive prefix sum of the non-zeros per row.
            shape: (ndim,), int64, on the CPU.

        Raises:
            ValueError: The dtype cannot be stored, or weight is a scalar.
        """
        require_storable(weight)
        if reason := self.why_not(weight):
            raise ValueError(reason)
        weight = weight.detach().contiguous()
        nonzero = is_nonzero(weight)
        per_row = nonzero.sum(-1, dtype=torch.int64)
        row_offsets = (per_row.flatten().cumsum(0) - per_row.flatten()).view(per_row.shape)
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
        return {
            "compressed": weight.view(word)[nonzero].view(weight.dtype),
            "bitmask": pack_bits(nonzero),
            "row_offsets": row_offsets,
            "shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The dense weight.

        Args:
            parts: As `compress_weight` returns them.

        Returns:
            weight: The shape that `shape` holds, dtype and device of compressed; left-out values are +0.0.

        Raises:
            PackedTensorError: The parts disagree in size or number, or row_offsets are not those of the bitmask.
        """
        shape = shape_of(parts["shape"])
        self.check_parts(specs_of(parts), shape)
        compressed, bitmask = parts["compressed"].detach().contiguous(), parts["bitmask"].detach().contiguous()
        self.check_values(parts, shape, compressed.numel())
        if compressed.device.type == "cpu":
            return _unpack_on_cpu(compressed, bitmask, parts["row_offsets"], shape)
        dense = torch.zeros(shape, dtype=compressed.dtype, device=compressed.device)
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[compressed.element_size()]
        dense.view(word)[unpack_bits(bitmask, shape[-1])] = compressed.view(word)
        return dense

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check that the bitmask has as many bits as there are values, row by row.

        Args:
            parts: bitmask, (..., ceil(columns / 8)), uint8, and row_offsets, (...,), int64.
            shape: Of the dense weight.
            num_values: How many values are stored.

        Raises:
            PackedTensorError: Names both numbers.
        """
        bitmask, row_offsets = parts["bitmask"], parts["row_offsets"].flatten()
        if not pad_bits_are_zero(bitmask, shape[-1]):
            raise PackedTensorError(f"bitmask sets bits beyond column {shape[-1] - 1}")
        per_row = _count_bits(bitmask).sum(-1, dtype=torch.int64).flatten()
        kept = int(per_row.sum())
        if kept != num_values:
            raise PackedTensorError(f"bitmask keeps {kept} values, but {num_values} are stored")
        expected = per_row.cumsum(0) - per_row
        wrong = (row_offsets.to(expected.device) != expected).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise PackedTensorError(f"row_offsets[{row}] is {int(row_offsets[row])}, but the bitmask puts row {row} at {int(expected[row])}")


def _count_bits(bitmask: Tensor) -> Tensor:
    pairs = bitmask - ((bitmask >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


def _unpack_on_cpu(compressed: Tensor, bitmask: Tensor, row_offsets: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Row by chunk of rows, so that the boolean mask stays in cache."""
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    values, kept = as_words(compressed), bitmask.numpy().reshape(rows, bitmask.shape[-1])
    starts = [*row_offsets.flatten().tolist(), values.size]
    dense, words = empty_words((rows, columns), compressed.dtype)
    words[...] = 0
    for chunk in row_chunks(rows, columns):
        mask = np.unpackbits(kept[chunk], axis=1, count=columns, bitorder="little").view(bool)
        words[chunk][mask] = values[starts[chunk.start] : starts[chunk.stop]]
    return dense.view(shape)

"""`sparse-bitmask`: every non-zero of a weight without a pattern, and one bit per weight that says where they were.

    bitmask      (R, ceil(C / 8))  uint8          bit k of byte j = element 8 j + k is non-zero
    compressed   (num_nonzeros,)   weight dtype   non-zeros, row-major
    row_offsets  (R,)              int64          where each row starts in `compressed`
    shape        (2,)              int64          [R, C]

compressed-tensors <= 0.8.1 wrote 1-D tensors this way too: the last axis is packed, row_offsets has the leading axes' shape.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparse24.compressors.base import (
    BaseSparsityCompressor,
    PackedTensorError,
    Spec,
    as_words,
    bits_per_nibble,
    empty_words,
    pack_bits,
    pad_bits_are_zero,
    require_storable,
    shape_of,
    specs_of,
    unpack_bits,
)
from hf_sparse24.pattern import is_nonzero, map_rows, nonzeros


class SparseBitmaskCompressor(BaseSparsityCompressor):
    """Stores any weight without its zeros.  -0.0 is a zero and comes back as +0.0; NaN is kept.

    Source: files of compressed-tensors 0.4.0 to 0.14.0.
    """

    format = config_format = "sparse-bitmask"
    parts = ("compressed", "bitmask", "row_offsets", "shape")
    key_parts = frozenset({"compressed", "bitmask", "row_offsets"})

    def why_not(self, weight: Tensor) -> str | None:
        """None for every weight with at least one axis."""
        return None if weight.ndim else "a scalar has no axis to pack"

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
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
        compressed, bitmask, per_row = (_pack_on_cpu if weight.device.type == "cpu" else _pack_anywhere)(weight)
        return {
            "compressed": compressed,
            "bitmask": bitmask,
            "row_offsets": (per_row.flatten().cumsum(0) - per_row.flatten()).view(per_row.shape),
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
        if compressed.device.type == "cpu" and compressed.numel():
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
        per_row = _bits_per_row(bitmask.flatten(0, -2) if bitmask.ndim > 1 else bitmask.unsqueeze(0))
        kept = int(per_row.sum())
        if kept != num_values:
            raise PackedTensorError(f"bitmask keeps {kept} values, but {num_values} are stored")
        expected = per_row.cumsum(0) - per_row
        wrong = (row_offsets.to(expected.device) != expected).nonzero()
        if len(wrong):
            row = int(wrong[0])
            found = f"row_offsets[{row}] is {int(row_offsets[row])}"
            raise PackedTensorError(f"{found}, but the bitmask puts row {row} at {int(expected[row])}")


def _bits_per_row(bitmask: Tensor) -> Tensor:
    """(rows, bytes) uint8 -> (rows,) int64."""
    if bitmask.device.type != "cpu":
        return _count_bits(bitmask).sum(1, dtype=torch.int64)
    rows = bitmask.numpy()
    counts = map_rows(lambda chunk: _count_bits(rows[chunk]).sum(1, dtype=np.int64), rows.shape)
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *counts]))


def _count_bits(bitmask: Any) -> Any:
    """Of each byte, of numpy or torch."""
    nibbles = bits_per_nibble(bitmask)
    return (nibbles + (nibbles >> 4)) & 0x0F


def _pack_on_cpu(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(compressed, bitmask, non-zeros per row)."""
    rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
    words = as_words(weight.view(rows, columns))
    bitmask, kept = empty_words((rows, -(-columns // 8)), torch.uint8)

    def mark(chunk: slice) -> None:
        kept[chunk] = np.packbits(nonzeros(words[chunk], weight.dtype), axis=1, bitorder="little")

    map_rows(mark, words.shape)
    per_row = _bits_per_row(bitmask)
    ends = [0, *per_row.cumsum(0).tolist()]
    compressed, values = empty_words((ends[-1],), weight.dtype)

    def gather(chunk: slice) -> None:
        np.take(words[chunk].reshape(-1), _places(kept[chunk], columns), out=values[ends[chunk.start] : ends[chunk.stop]], mode="clip")

    map_rows(gather, words.shape)
    leading = weight.shape[:-1]
    return compressed, bitmask.view(*leading, bitmask.shape[1]), per_row.view(leading)


def _unpack_on_cpu(compressed: Tensor, bitmask: Tensor, row_offsets: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    values, kept = as_words(compressed), bitmask.numpy().reshape(rows, bitmask.shape[-1])
    starts = [*row_offsets.flatten().tolist(), values.size]
    dense, words = empty_words((rows, columns), compressed.dtype)

    def scatter(chunk: slice) -> None:
        words[chunk] = 0
        words[chunk].reshape(-1)[_places(kept[chunk], columns)] = values[starts[chunk.start] : starts[chunk.stop]]

    map_rows(scatter, words.shape)
    return dense.view(shape)


def _places(bitmask: np.ndarray, columns: int) -> np.ndarray:
    """Where the kept elements of some rows lie, counted through all of their columns."""
    return np.flatnonzero(np.unpackbits(bitmask, axis=1, count=columns, bitorder="little").view(bool))


def _pack_anywhere(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nonzero = is_nonzero(weight)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
    return weight.view(word)[nonzero].view(weight.dtype), pack_bits(nonzero), nonzero.sum(-1, dtype=torch.int64)

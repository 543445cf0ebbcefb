"""`sparse-24-bitmask`: the two kept values of every group of four, and one bit per weight that says where they were.

    bitmask     (R, ceil(C / 8))  uint8          bit k of byte j = element 8 j + k is kept
    compressed  (R, C / 2)        weight dtype   kept values in column order
    shape       (2, 1)            int64          [[R], [C]]

Exactly two bits are set per group.  A group with fewer than two non-zeros also keeps zeros; which ones is arbitrary, but
files must be byte-identical to those of compressed-tensors, so `FILLERS` states its choice (docs/formats.md).
"""

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
from hf_sparse24.pattern import ONE_BYTE_FLOATS, find_bad_groups, is_nonzero

# Kept pair by the single non-zero of a group (None: there is none).
FILLERS = {None: (2, 3), 0: (0, 2), 1: (1, 3), 2: (2, 3), 3: (2, 3)}
# In fp8, compressed-tensors ranks +0.0 above -0.0.  Groups of ranks (0 = -0.0, 1 = +0.0, 2 = non-zero) in which the second
# place is tied; in all others the two highest ranks are kept.
FP8_TIES = {
    "0000": (2, 3), "0001": (2, 3), "0010": (2, 3), "0100": (1, 3), "0111": (2, 3), "0112": (2, 3), "0121": (2, 3),
    "0211": (1, 3), "1000": (0, 2), "1011": (2, 3), "1012": (2, 3), "1021": (2, 3), "1101": (1, 3), "1102": (1, 3),
    "1110": (1, 2), "1120": (1, 2), "1201": (1, 3), "1210": (1, 2), "2011": (0, 2), "2101": (0, 1), "2110": (0, 1),
}  # fmt: skip
# fp8 without the tie-break between zeros and with two non-zeros never reaches the table.
LEGAL = [nibble for nibble in range(16) if nibble.bit_count() == 2]


class Sparse24Compressor(BaseSparsityCompressor):
    """Stores a weight with at most two non-zeros in every group of four; 9/16 of the bytes of bfloat16.

    Source: files of compressed-tensors 0.9.0 to 0.14.0, which are byte-identical wherever that library loses nothing.
    """

    format: ClassVar[str] = "sparse-24-bitmask"
    parts: ClassVar[tuple[str, ...]] = ("compressed", "bitmask", "shape")

    def why_not(self, weight: Tensor) -> str | None:
        """Why the weight is not 2:4 (shape, dtype, or the first bad group), or None."""
        if weight.ndim != 2:
            return f"only 2-D weights can be 2:4, got shape {tuple(weight.shape)}"
        if weight.shape[1] % 4:
            return f"in_features must be a multiple of 4, got {weight.shape[1]}"
        bad = find_bad_groups(weight)
        return None if bad is None else f"not 2:4: {bad}"

    def part_specs(
        self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int | None = None
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each part; `num_values` follows from the shape.

        Raises:
            PackedTensorError: The shape is not that of a 2-D weight.
        """
        if len(shape) != 2:
            raise PackedTensorError(f"shape holds {len(shape)} sizes {shape}, expected 2")
        rows, columns = shape
        return {
            "compressed": (dtype, (rows, columns // 2)),
            "bitmask": (torch.uint8, (rows, -(-columns // 8))),
            "shape": (torch.int64, (2, 1)),
        }

    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Store a 2:4 weight as its kept values and a bitmask.

        Args:
            weight: (out_features, in_features), float32, float16, bfloat16, float8 or int8, on any device and of any
                strides; in_features is a multiple of 4, at most two non-zeros per group of four.

        Returns:
            compressed: (out_features, in_features // 2), dtype and device of weight, kept values in column order.
            bitmask: (out_features, ceil(in_features / 8)), uint8, exactly two bits per group of four.
            shape: (2, 1), int64, on the CPU.

        Raises:
            ValueError: A dtype or shape that cannot be stored, or a group with three or four non-zeros (NaN counts, -0.0
                does not); names the number of bad groups, and the row and columns of the first.
        """
        require_storable(weight)
        weight = weight.detach().contiguous()
        if weight.device.type == "meta":
            return {part: torch.empty(shape, dtype=dtype, device="meta") for part, (dtype, shape) in self._specs_for(weight).items()}
        if weight.ndim != 2 or weight.shape[1] % 4:
            raise ValueError(self.why_not(weight))
        packed = _pack_on_cpu(weight) if weight.device.type == "cpu" and weight.element_size() < 4 else _pack_anywhere(weight)
        if packed is None:
            raise ValueError(self.why_not(weight))
        compressed, bitmask = packed
        return {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor(weight.shape).view(2, 1)}

    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The dense weight.

        Args:
            parts: compressed, bitmask and shape as `compress_weight` returns them; shape may also be (2,).

        Returns:
            weight: (out_features, in_features), dtype and device of compressed; left-out values are +0.0.

        Raises:
            PackedTensorError: The parts disagree in size, a group does not keep exactly two, or a padding bit is set.
        """
        shape = shape_of(parts["shape"])
        self.check_parts(specs_of(parts), shape)
        compressed, bitmask = parts["compressed"].detach().contiguous(), parts["bitmask"].detach().contiguous()
        if compressed.device.type == "meta":
            return torch.empty(shape, dtype=compressed.dtype, device="meta")
        self.check_values({"bitmask": bitmask}, shape, compressed.numel())
        if shape[1] % 4 == 0 and compressed.device.type == "cpu" and compressed.element_size() < 4:
            return _unpack_on_cpu(compressed, bitmask, shape)
        dense = torch.zeros(shape, dtype=compressed.dtype, device=compressed.device)
        # Boolean indexing has no fp8 kernels: move the bytes.
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[compressed.element_size()]
        dense.view(word)[unpack_bits(bitmask, shape[1])] = compressed.view(word).flatten()
        return dense

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check that the bitmask keeps exactly two of every group of four and sets no padding bit.

        Args:
            parts: bitmask, (rows, ceil(columns / 8)), uint8.
            shape: Of the dense weight.  in_features not a multiple of 4: groups straddle rows, only the total is checked.
            num_values: How many values are stored.

        Raises:
            PackedTensorError: Names the first bad row and byte, or both counts.
        """
        bitmask, columns = parts["bitmask"], shape[-1]
        if not pad_bits_are_zero(bitmask, columns):
            raise PackedTensorError(f"bitmask sets bits beyond column {columns - 1}")
        if columns % 4:
            kept = int(unpack_bits(bitmask, columns).sum())
            if kept != num_values:
                raise PackedTensorError(f"bitmask keeps {kept} values, but {num_values} are stored")
            return
        bad = _bytes_without_two_bits_per_nibble(bitmask)
        if columns % 8 and bitmask.numel():
            bad[:, -1] = _bytes_without_two_bits_per_nibble(bitmask[:, -1] | 0x30)
        if bool(bad.any()):
            row, byte = (int(index) for index in bad.nonzero()[0])
            raise PackedTensorError(
                f"bitmask does not keep exactly two of each group of four: row {row}, byte {byte} is 0x{int(bitmask[row, byte]):02x}"
            )

    def _specs_for(self, weight: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return self.part_specs(tuple(weight.shape), weight.dtype)


def _bytes_without_two_bits_per_nibble(bitmask: Tensor) -> Tensor:
    pairs = bitmask - ((bitmask >> 1) & 0x55)  # bits per pair
    return ((pairs & 0x33) + ((pairs >> 2) & 0x33)) != 0x22


# ---- tables -------------------------------------------------------------------------------------------------------------


def _nibble(pair: tuple[int, ...]) -> int:
    return sum(1 << column for column in pair)


def _keep_table() -> np.ndarray:
    """Nibble of non-zeros -> nibble of kept columns; 0 marks a nibble with three or four."""
    table = np.zeros(16, np.uint8)
    for nonzero in range(16):
        columns = [column for column in range(4) if nonzero >> column & 1]
        if len(columns) < 2:
            table[nonzero] = _nibble(FILLERS[columns[0] if columns else None])
        elif len(columns) == 2:
            table[nonzero] = nonzero
    return table


def _fp8_keep_table() -> np.ndarray:
    """Nibble of non-zeros | nibble of -0.0 << 4 -> nibble of kept columns."""
    table = np.tile(_keep_table(), 16)
    for code in range(256):
        nonzero, negative_zero = code & 15, code >> 4
        if nonzero & negative_zero or nonzero.bit_count() >= 2 or not negative_zero:
            continue
        ranks = [2 if nonzero >> c & 1 else 0 if negative_zero >> c & 1 else 1 for c in range(4)]
        levels = sorted(set(ranks))
        tie = FP8_TIES.get("".join(str(levels.index(rank)) for rank in ranks))
        table[code] = _nibble(tie or tuple(sorted(range(4), key=lambda c: -ranks[c])[:2]))
    return table


def _by_byte(table: np.ndarray) -> np.ndarray:
    """A table over nibbles as one over bytes: two results side by side in memory, low nibble first."""
    return np.array([[table[byte & 15], table[byte >> 4]] for byte in range(256)], np.uint8).view(np.uint16).ravel()


KEEP = _keep_table()
KEEP_FP8 = _fp8_keep_table()
# First and second kept column of a legal nibble.
FIRST = np.array([(n & -n).bit_length() - 1 if n in LEGAL else 0 for n in range(16)], np.uint8)
SECOND = np.array([n.bit_length() - 1 if n in LEGAL else 0 for n in range(16)], np.uint8)


# ---- CPU: groups of four as words of 4 or 8 bytes ------------------------------------------------------------------------


def _shift_tables(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bit offsets of the two kept elements within the group's word, for both groups of a bitmask byte."""
    return _by_byte(FIRST * np.uint8(width)), _by_byte(SECOND * np.uint8(width))


def _pack_on_cpu(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """(compressed, bitmask), or None if a group has more than two non-zeros."""
    rows, columns = weight.shape
    words = as_words(weight)
    width = 8 * words.itemsize
    group_word = np.uint64 if width == 16 else np.uint32
    first_shift, second_shift = _shift_tables(width)
    compressed, values = empty_words((rows, columns // 2), weight.dtype)
    bitmask = np.empty((rows, -(-columns // 8)), np.uint8)
    signed_zero = weight.dtype != torch.int8
    for chunk in row_chunks(rows, columns):
        piece = words[chunk]
        kept = _kept_nibbles(piece, signed_zero, weight.dtype in ONE_BYTE_FLOATS)
        if not kept.all():
            return None
        bitmask[chunk] = _join_nibbles(kept)
        groups = piece.view(group_word)  # (rows, in/4)
        shifts = _join_nibbles(kept)
        first = first_shift[shifts].view(np.uint8)[:, : groups.shape[1]]
        second = second_shift[shifts].view(np.uint8)[:, : groups.shape[1]]
        values[chunk, 0::2] = groups >> first
        values[chunk, 1::2] = groups >> second
    return compressed, torch.from_numpy(bitmask)


def _kept_nibbles(piece: np.ndarray, signed_zero: bool, fp8: bool) -> np.ndarray:
    """(rows, C) words -> (rows, C / 4) nibbles of kept columns, 0 for a group with too many non-zeros."""
    magnitude = piece & piece.dtype.type((1 << (8 * piece.itemsize - 1)) - 1) if signed_zero else piece
    nonzero = _nibbles(magnitude != 0)
    if fp8:
        return KEEP_FP8[nonzero | _nibbles(piece == 0x80) << 4]
    return KEEP[nonzero]


def _nibbles(mask: np.ndarray) -> np.ndarray:
    """(rows, C) bool -> (rows, C / 4) uint8 in 0..15."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(mask.shape[0], -1)[:, : mask.shape[1] // 4]


def _join_nibbles(nibbles: np.ndarray) -> np.ndarray:
    """(rows, groups) -> (rows, ceil(groups / 2)) bytes, even groups in the low nibble."""
    joined = nibbles[:, 0::2].copy()
    joined[:, : nibbles.shape[1] // 2] |= nibbles[:, 1::2] << 4
    return joined


def _unpack_on_cpu(compressed: Tensor, bitmask: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = shape
    values, kept = as_words(compressed), bitmask.numpy()
    group_word = np.uint64 if values.itemsize == 2 else np.uint32
    first_shift, second_shift = _shift_tables(8 * values.itemsize)
    dense, words = empty_words((rows, columns), compressed.dtype)
    groups = words.view(group_word)
    for chunk in row_chunks(rows, columns):
        first, second = values[chunk, 0::2].astype(group_word), values[chunk, 1::2].astype(group_word)
        first <<= first_shift[kept[chunk]].view(np.uint8)[:, : groups.shape[1]]
        second <<= second_shift[kept[chunk]].view(np.uint8)[:, : groups.shape[1]]
        np.bitwise_or(first, second, out=groups[chunk])
    return dense


# ---- any device ----------------------------------------------------------------------------------------------------------


def _pack_anywhere(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    rows, columns = weight.shape
    bits = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=weight.device)
    code = (is_nonzero(weight).view(rows, columns // 4, 4) * bits).sum(-1, dtype=torch.uint8)  # (rows, in/4)
    table = KEEP
    if weight.dtype in ONE_BYTE_FLOATS:
        negative_zero = (weight.view(torch.uint8) == 0x80).view(rows, columns // 4, 4)
        code, table = code | (negative_zero * (bits << 4)).sum(-1, dtype=torch.uint8), KEEP_FP8
    kept = torch.from_numpy(table).to(weight.device)[code.int()]
    if not bool((kept != 0).all()):
        return None
    mask = ((kept.unsqueeze(-1) & bits) != 0).view(rows, columns)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
    return weight.view(word)[mask].view(weight.dtype).view(rows, columns // 2), pack_bits(mask)

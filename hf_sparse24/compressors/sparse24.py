"""`sparse-24-bitmask`: the two kept values of every group of four, and one bit per weight that says where they were.

    bitmask     (R, ceil(C / 8))  uint8          bit k of byte j = element 8 j + k is kept
    compressed  (R, C / 2)        weight dtype   kept values in column order
    shape       (2, 1)            int64          [[R], [C]]

Exactly two bits are set per group.  A group with fewer than two non-zeros also keeps zeros; which ones is arbitrary, but
files must be byte-identical to those of compressed-tensors, so `TIES` states its choice (docs/formats.md).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_sparse24.compressors.base import (
    BaseSparsityCompressor,
    Cuts,
    PackedTensorError,
    Scratch,
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
from hf_sparse24.pattern import ONE_BYTE_FLOATS, find_bad_groups, is_nonzero, map_rows, may_hold_negative_zero, nonzeros

# compressed-tensors keeps the two elements of highest rank: 0 = -0.0 (fp8 only, elsewhere it is a 1), 1 = +0.0, 2 = non-zero.
# These are the groups, in ranks without gaps, in which the second place is tied, and the pair that is kept.
TIES = {
    "0000": (2, 3), "0001": (2, 3), "0010": (2, 3), "0100": (1, 3), "0111": (2, 3), "0112": (2, 3), "0121": (2, 3),
    "0211": (1, 3), "1000": (0, 2), "1011": (2, 3), "1012": (2, 3), "1021": (2, 3), "1101": (1, 3), "1102": (1, 3),
    "1110": (1, 2), "1120": (1, 2), "1201": (1, 3), "1210": (1, 2), "2011": (0, 2), "2101": (0, 1), "2110": (0, 1),
}  # fmt: skip
# Nibbles that keep two, and the columns of these.
PAIRS = {1 << first | 1 << second: (first, second) for second in range(4) for first in range(second)}


class Sparse24Compressor(BaseSparsityCompressor):
    """Stores a weight with at most two non-zeros in every group of four; 9/16 of the bytes of bfloat16.

    Source: files of compressed-tensors 0.9.0 to 0.14.0, which are byte-identical wherever that library loses nothing.
    """

    format = config_format = "sparse-24-bitmask"
    parts = ("compressed", "bitmask", "shape")
    key_parts = frozenset({"compressed", "bitmask"})

    def why_not(self, weight: Tensor) -> str | None:
        """Why the weight is not 2:4 (shape, dtype, or the first bad group), or None."""
        if weight.ndim != 2:
            return f"only 2-D weights can be 2:4, got shape {tuple(weight.shape)}"
        if weight.shape[1] % 4:
            return f"in_features must be a multiple of 4, got {weight.shape[1]}"
        bad = find_bad_groups(weight)
        return None if bad is None else f"not 2:4: {bad}"

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int | None = None) -> dict[str, Spec]:
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

    def cut_rows(self, parts: Mapping[str, Any], rows: slice, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The parts of some rows, unless groups straddle rows."""
        if shape[1] % 4 or rows.step not in (None, 1):
            return None
        bitmask = parts["bitmask"][rows]
        return {"compressed": parts["compressed"][rows], "bitmask": bitmask, "shape": torch.tensor([len(bitmask), shape[1]])}

    def cuts(self, specs: Mapping[str, Spec]) -> Cuts:
        """Between any rows, and between bytes of the bitmask."""
        return Cuts({"compressed": (0, 1), "bitmask": (0, 1)}, rows=1, columns=8)

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
            specs = self.part_specs(tuple(weight.shape), weight.dtype)
            return {part: torch.empty(shape, dtype=dtype, device="meta") for part, (dtype, shape) in specs.items()}
        if weight.ndim != 2 or weight.shape[1] % 4:
            raise ValueError(self.why_not(weight))
        packed = _pack_on_cpu(weight) if weight.device.type == "cpu" else _pack_anywhere(weight)
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
        if shape[1] % 4 == 0 and compressed.device.type == "cpu" and compressed.numel():
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
        if not bitmask.numel():  # any number of rows without columns
            return
        rows = bitmask.numpy() if bitmask.device.type == "cpu" else bitmask
        if any(map_rows(lambda chunk: bool(_bad_bytes(rows[chunk], columns).any()), rows.shape, bitmask.device)):
            row, byte = (int(index) for index in _bad_bytes(bitmask, columns).nonzero()[0])
            raise PackedTensorError(
                f"bitmask does not keep exactly two of each group of four: row {row}, byte {byte} is 0x{int(bitmask[row, byte]):02x}"
            )


def _bad_bytes(bitmask: Any, columns: int) -> Any:
    """Which bytes hold a group that does not keep two; bitmask is (rows, bytes), of numpy or torch, and so is the result."""
    if columns % 8:
        bitmask = bitmask.copy() if isinstance(bitmask, np.ndarray) else bitmask.clone()
        bitmask[:, -1:] |= 0x30  # as if the group that is not there kept two
    return bits_per_nibble(bitmask) != 0x22


# ---- tables -------------------------------------------------------------------------------------------------------------


def _keep_table() -> np.ndarray:
    """Nibble of non-zeros | nibble of -0.0 << 4 (fp8 only) -> nibble of kept columns; 0 if more than two are non-zero."""
    table = np.zeros(256, np.uint8)
    for code in range(256):
        nonzero, negative_zero = code & 15, code >> 4
        if nonzero.bit_count() > 2 or nonzero & negative_zero:
            continue
        ranks = [2 if nonzero >> column & 1 else 0 if negative_zero >> column & 1 else 1 for column in range(4)]
        levels = sorted(set(ranks))
        tie = TIES.get("".join(str(levels.index(rank)) for rank in ranks))
        first, second = tie or sorted(range(4), key=lambda column: -ranks[column])[:2]
        table[code] = 1 << first | 1 << second
    return table


KEEP = _keep_table()


@functools.cache
def _keep_bytes() -> np.ndarray:
    """Byte of non-zeros | byte of -0.0 << 8 (fp8 only) -> byte of kept columns; 0 if one of the two groups has too many."""
    code = np.arange(1 << 16)
    low, high = KEEP[code & 15 | code >> 4 & 0xF0], KEEP[code >> 4 & 15 | code >> 8 & 0xF0]
    return np.where((low > 0) & (high > 0), low | high << 4, 0).astype(np.uint8)


def _by_byte(entry: Callable[[int, int], Sequence[int]], dtype: npt.DTypeLike) -> np.ndarray:
    """(256, 2 entries): byte of kept columns -> `entry(first, second)` of its two groups."""
    nibbles = np.zeros((16, len(entry(0, 1))), dtype)
    for nibble, pair in PAIRS.items():
        nibbles[nibble] = entry(*pair)
    return np.hstack((np.tile(nibbles, (16, 1)), np.repeat(nibbles, 16, axis=0)))


@functools.cache
def _columns_of_byte() -> np.ndarray:
    return _by_byte(lambda first, second: (first, second), np.intp)


@dataclass(frozen=True)
class _Lanes:
    """A group of 1- or 2-byte elements is one word, each element a lane of it.  Tables by byte of kept columns.

    `kept`: the bits of the kept lanes; `to_upper_half`: a factor that brings them there if the other lanes are 0; `first`,
    `second`: how many bits a kept lane is up.
    """

    group: np.dtype
    half: np.dtype
    kept: np.ndarray
    to_upper_half: np.ndarray
    first: np.ndarray
    second: np.ndarray


@functools.cache
def _lanes(itemsize: int) -> _Lanes:
    group, half = np.dtype(f"u{4 * itemsize}"), np.dtype(f"u{2 * itemsize}")
    width, lane = 8 * itemsize, (1 << 8 * itemsize) - 1
    kept = _by_byte(lambda first, second: (lane << first * width | lane << second * width,), group)
    # Multiplying by 2^a + 2^b adds up two shifted groups: one has the first lane in its place, one the second; the other lane
    # is then lower, or shifted out.  Neighbours are in place together: a = b, and once is enough.
    to_upper_half = _by_byte(lambda first, second: (1 << (2 - first) * width | 1 << (3 - second) * width,), group)
    shifts = [_by_byte(lambda *pair, place=place: (pair[place] * width,), group) for place in (0, 1)]
    return _Lanes(group, half, kept, to_upper_half, *shifts)


# ---- CPU ----------------------------------------------------------------------------------------------------------------


def _pack_on_cpu(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """(compressed, bitmask), or None if a group has more than two non-zeros."""
    rows, columns = weight.shape
    words, scratch = as_words(weight), Scratch()
    compressed, values = empty_words((rows, columns // 2), weight.dtype)
    bitmask, kept = empty_words((rows, -(-columns // 8)), torch.uint8)

    def pack(chunk: slice) -> bool:
        negative_zeros = may_hold_negative_zero(words[chunk], weight.dtype)
        index = scratch.cast("index", np.packbits(nonzeros(words[chunk], weight.dtype), axis=1, bitorder="little"), np.intp)
        if negative_zeros and weight.dtype in ONE_BYTE_FLOATS:
            index |= np.packbits(words[chunk] == 0x80, axis=1, bitorder="little").astype(np.intp) << 8
        np.take(_keep_bytes(), index, out=kept[chunk], mode="clip")
        if not kept[chunk].all():
            return False
        if columns % 8:
            kept[chunk, -1] &= 0x0F
        index[...] = kept[chunk]
        if words.itemsize == 4:
            _gather_elements(words[chunk], index, values[chunk], scratch)
        else:
            _gather_lanes(words[chunk], index, values[chunk], scratch, only_kept=negative_zeros)
        return True

    return (compressed, bitmask) if all(map_rows(pack, words.shape)) else None


def _unpack_on_cpu(compressed: Tensor, bitmask: Tensor, shape: tuple[int, ...]) -> Tensor:
    values, kept, scratch = as_words(compressed), bitmask.numpy(), Scratch()
    dense, words = empty_words(shape, compressed.dtype)
    scatter = _scatter_elements if values.itemsize == 4 else _scatter_lanes
    map_rows(lambda chunk: scatter(values[chunk], scratch.cast("index", kept[chunk], np.intp), words[chunk], scratch), words.shape)
    return dense


# `index` is the bitmask, (rows, ceil(C / 8)), as indices for the tables.


def _gather_lanes(words: np.ndarray, index: np.ndarray, values: np.ndarray, scratch: Scratch, only_kept: bool) -> None:
    lanes, num_groups = _lanes(words.itemsize), words.shape[1] // 4
    groups = words.view(lanes.group)
    if only_kept:
        groups = np.bitwise_and(groups, mask := scratch.look_up("mask", lanes.kept, index)[:, :num_groups], out=mask)
    moved = scratch.look_up("moved", lanes.to_upper_half, index)[:, :num_groups]
    moved *= groups
    values.view(lanes.half)[...] = moved.view(lanes.half)[:, 1::2]


def _scatter_lanes(values: np.ndarray, index: np.ndarray, words: np.ndarray, scratch: Scratch) -> None:
    lanes, num_groups = _lanes(words.itemsize), words.shape[1] // 4
    first, second = (scratch.cast(f"place {place}", values[:, place::2], lanes.group) for place in (0, 1))
    first <<= scratch.look_up("shift", lanes.first, index)[:, :num_groups]
    second <<= scratch.look_up("shift", lanes.second, index)[:, :num_groups]
    np.bitwise_or(first, second, out=words.view(lanes.group))


def _gather_elements(words: np.ndarray, index: np.ndarray, values: np.ndarray, scratch: Scratch) -> None:
    np.take(words.reshape(-1), _places(index, words.shape, scratch), out=values, mode="clip")


def _scatter_elements(values: np.ndarray, index: np.ndarray, words: np.ndarray, scratch: Scratch) -> None:
    words[...] = 0
    words.reshape(-1)[_places(index, words.shape, scratch)] = values


def _places(index: np.ndarray, shape: tuple[int, ...], scratch: Scratch) -> np.ndarray:
    """Where the kept elements lie in the flat dense chunk, (rows, C / 2)."""
    rows, columns = shape
    places = scratch.look_up("places", _columns_of_byte(), index)[:, : columns // 2]
    places += np.arange(columns // 2) // 2 * 4
    places += np.arange(rows)[:, None] * columns
    return places


# ---- any device ----------------------------------------------------------------------------------------------------------


def _pack_anywhere(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    rows, columns = weight.shape
    bits = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=weight.device)
    code = (is_nonzero(weight).view(rows, columns // 4, 4) * bits).sum(-1, dtype=torch.uint8)  # (rows, in/4)
    if weight.dtype in ONE_BYTE_FLOATS:
        negative_zero = (weight.view(torch.uint8) == 0x80).view(rows, columns // 4, 4)
        code |= (negative_zero * (bits << 4)).sum(-1, dtype=torch.uint8)
    kept = torch.from_numpy(KEEP).to(weight.device)[code.int()]
    if not bool((kept != 0).all()):
        return None
    mask = ((kept.unsqueeze(-1) & bits) != 0).view(rows, columns)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
    return weight.view(word)[mask].view(weight.dtype).view(rows, columns // 2), pack_bits(mask)

"""The layout of torch's semi-structured sparse tensors (CUTLASS backend), to and from the canonical packed form.

Values are the kept weights, (out, in/2), row-major. Metadata holds one nibble `c0 | c1 << 2` per group of four, kept
columns c0 < c1, earlier groups in lower nibbles; 4 nibbles an int16 word (16-bit weights), 8 an int32 word (8-bit weights).

float32 is 1:2: a pair of columns is coded as if it were four 16-bit halves, so its nibble is 0x4 (halves 0 and 1: the first
column is kept) or 0xE (halves 2 and 3: the second). One nibble per pair, int16 words.

The words are not stored in (row, word) order. Writing a row r and a word column w as bits (r0, w0 the lowest), a word lies at
the flat index whose bits are, from the highest down,

    int16:  w.. w1 | r.. r5 | r2 r1 r0 | r4 | w0 | r3        int32:  w.. w1 | r.. r4 | r2 r1 r0 | w0 | r3

which is one permutation of axes. Hence the limits: full bands of 32 (int16) or 16 (int32) rows and an even number of words a
row. `SparseSemiStructuredTensorCUTLASS` wants more of in_features for its product: multiples of 64 for 16-bit weights, 32 for
float32, 128 for int8. It has no float8; here float8 is laid out bytewise, as int8 is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparse24.compressors.base import pack_bits, unpack_bits
from hf_sparse24.pattern import ONE_BYTE_FLOATS, find_bad_groups, is_nonzero


@dataclass(frozen=True)
class _Layout:
    metadata_dtype: torch.dtype
    band_rows: int  # rows that are reordered together
    word_columns: int  # columns of the weight that one word of metadata describes


_LAYOUTS = {
    torch.float16: _Layout(torch.int16, 32, 16),
    torch.bfloat16: _Layout(torch.int16, 32, 16),
    torch.float32: _Layout(torch.int16, 32, 8),
    **dict.fromkeys((torch.int8, *ONE_BYTE_FLOATS), _Layout(torch.int32, 16, 32)),
}
# Indexed by nibbles; 0 is never a result, so it marks the nibbles that are not allowed. Bit i of a mask nibble: column i.
_CODE_OF_MASK = (0, 0, 0, 0x4, 0, 0x8, 0x9, 0, 0, 0xC, 0xD, 0, 0xE, 0, 0, 0)
_MASK_OF_CODE = (0, 0, 0, 0, 0b0011, 0, 0, 0, 0b0101, 0b0110, 0, 0, 0b1001, 0b1010, 0b1100, 0)
_PAIR_MASK_OF_CODE = (0, 0, 0, 0, 0b01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0b10, 0)
# Mask of the non-zeros -> mask to keep. With fewer than two non-zeros the choice is torch's, for equal bytes (column 1 alone
# keeps 1 and 2; sparse-24-bitmask keeps 1 and 3). In float32 an empty pair keeps its second column, and two non-zeros of one
# pair pass through, to be reported as such.
_KEPT_OF_NONZERO = (12, 5, 6, 3, 12, 5, 6, 0, 12, 9, 10, 0, 12, 0, 0, 0)
_KEPT_OF_NONZERO_FLOAT32 = (10, 9, 10, 3, 6, 5, 6, 0, 10, 9, 10, 0, 12, 0, 0, 0)


def to_semi_structured(compressed: Tensor, bitmask: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Lay out a canonical 2:4 weight as torch's values and metadata.

    The kept positions stay as they are, stored zeros included, so `from_semi_structured` gives the same bytes back. Exception:
    float32, where a pair of columns that keeps both (one a zero) or none stores its non-zero, else its second column.

    Args:
        compressed: (out_features, in_features // 2), float16, bfloat16, float32, int8, float8_e4m3fn or float8_e5m2; kept
            values in column order.
        bitmask: (out_features, in_features // 8), uint8; bit k of byte j = column 8j+k is kept, two per group of four.
        shape: (out_features, in_features); positive multiples of (32, 32) for 16-bit weights, (32, 16) for float32, (16, 64) for 8-bit.

    Returns:
        values: (out_features, in_features // 2), dtype of compressed; its memory too if contiguous and not float32.
        metadata: (out_features, in_features // 16) int16 for 16-bit weights, (out_features, in_features // 8) int16 for
            float32, (out_features, in_features // 32) int32 for 8-bit weights; reordered as the module describes.

    Raises:
        ValueError: A dtype or shape is wrong, a group does not keep two, or a float32 pair keeps two non-zeros; the message
            names the first offending row and columns.

    Source: torch.sparse._semi_structured_conversions; CUTLASS, host_reorder.h and layout::ColumnMajorInterleaved<2>.
    """
    layout = _layout_for(compressed.dtype, shape)
    out_features, in_features = shape
    _check("compressed", compressed, compressed.dtype, (out_features, in_features // 2))
    _check("bitmask", bitmask, torch.uint8, (out_features, in_features // 8))
    masks = _nibbles(bitmask)  # (out, in/4)
    codes = _lookup(_CODE_OF_MASK, masks)
    if bad := _first_true(codes == 0):
        row, group = bad
        kept = int(masks[row, group]).bit_count()
        raise ValueError(
            f"bitmask is not 2:4: row {row}, columns {4 * group}..{4 * group + 3} keep {kept} of 4 values, expected 2; "
            "compress the weight again as sparse-24-bitmask"
        )
    values = compressed.detach().contiguous()
    if values.dtype == torch.float32:
        values, codes = _one_of_two(values, unpack_bits(bitmask, in_features))  # codes (out, in/2)
    words = _bytes(codes).view(layout.metadata_dtype)  # (out, words a row), little-endian as every host of a CUDA device
    return values, _reorder(words, layout.band_rows)


def from_semi_structured(values: Tensor, metadata: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Read torch's values and metadata into the canonical 2:4 form.

    Args:
        values: (out_features, in_features // 2), a dtype of `to_semi_structured`.
        metadata: as `to_semi_structured` returns it, or the `meta` of a SparseSemiStructuredTensorCUTLASS.

    Returns:
        compressed: (out_features, in_features // 2), dtype of values, and their memory if contiguous.
        bitmask: (out_features, in_features // 8), uint8; bit k of byte j = column 8j+k is kept.
        shape: (out_features, in_features).

    Raises:
        ValueError: A dtype or shape is wrong, or a nibble of the metadata names no two ascending columns (float32: no column
            of the pair); the message names the first offending row and columns.

    Source: torch.sparse._semi_structured_conversions.
    """
    if values.dim() != 2:
        raise ValueError(f"values must have 2 dimensions, got {values.dim()}; pass (out_features, in_features // 2)")
    out_features, in_features = shape = (values.shape[0], 2 * values.shape[1])
    layout = _layout_for(values.dtype, shape)
    _check("metadata", metadata, layout.metadata_dtype, (out_features, in_features // layout.word_columns))
    codes = _nibbles(_restore(metadata, layout.band_rows).view(torch.uint8))  # (out, in/4), float32 (out, in/2)
    is_pair = values.dtype == torch.float32
    masks = _lookup(_PAIR_MASK_OF_CODE if is_pair else _MASK_OF_CODE, codes)
    if bad := _first_true(masks == 0):
        row, index = bad
        width = 2 if is_pair else 4
        legal = "0x4 0xE" if is_pair else "0x4 0x8 0x9 0xC 0xD 0xE"
        raise ValueError(
            f"metadata is not 2:4: row {row}, columns {width * index}..{width * index + width - 1} have the nibble "
            f"{int(codes[row, index]):#x}, expected one of {legal}; check that it belongs to these values and is reordered"
        )
    if is_pair:
        masks = masks[:, 0::2] | masks[:, 1::2] << 2  # (out, in/4)
    return values.detach().contiguous(), _bytes(masks), shape


def semi_structured_from_dense(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a dense 2:4 weight as torch's values and metadata, byte for byte as torch's own conversion does.

    -0.0 counts as a zero and NaN as a non-zero. Where a group has fewer than two non-zeros, torch's rule says which zeros are
    stored beside them; a -0.0 that is not stored reads back as +0.0. (float8's -0.0 is a zero too, unlike int8's -128.)

    Args:
        weight: (out_features, in_features), a dtype and shape of `to_semi_structured`; at most two non-zeros per group of four
            (float32: at most one per pair of columns).

    Returns:
        values: (out_features, in_features // 2), dtype of weight.
        metadata: as `to_semi_structured`.

    Raises:
        ValueError: A dtype or shape is wrong, or a group has too many non-zeros; the message names the first offending row
            and columns.

    Source: torch.sparse._semi_structured_conversions.
    """
    _layout_for(weight.dtype, weight.shape)
    nonzero_masks = _nibbles(pack_bits(is_nonzero(weight)))  # (out, in/4)
    masks = _lookup(_KEPT_OF_NONZERO_FLOAT32 if weight.dtype == torch.float32 else _KEPT_OF_NONZERO, nonzero_masks)
    if not masks.all():
        raise ValueError(f"weight is not 2:4: {find_bad_groups(weight)}; expected at most 2 non-zeros per group of four, prune it first")
    bitmask = _bytes(masks)
    out_features, in_features = weight.shape
    compressed = _raw(weight)[unpack_bits(bitmask, in_features)].view(weight.dtype)
    return to_semi_structured(compressed.view(out_features, in_features // 2), bitmask, (out_features, in_features))


def semi_structured_to_dense(values: Tensor, metadata: Tensor) -> Tensor:
    """Unpack torch's values and metadata.

    Args:
        values: (out_features, in_features // 2), a dtype of `to_semi_structured`.
        metadata: as `to_semi_structured` returns it.

    Returns:
        The weight, (out_features, in_features), dtype of values; +0.0 where nothing is kept.

    Raises:
        ValueError: As `from_semi_structured`.
    """
    compressed, bitmask, (_, in_features) = from_semi_structured(values, metadata)
    return _dense(compressed, unpack_bits(bitmask, in_features))


def _layout_for(dtype: torch.dtype, shape: tuple[int, ...]) -> _Layout:
    if dtype not in _LAYOUTS:
        names = ", ".join(str(known).removeprefix("torch.") for known in _LAYOUTS)
        raise ValueError(f"dtype must be one of {names}, got {dtype}; convert the weight first")
    if len(shape) != 2:
        raise ValueError(f"a weight must have 2 dimensions, got shape {tuple(shape)}; pass (out_features, in_features)")
    layout = _LAYOUTS[dtype]
    for name, size, multiple in zip(("out_features", "in_features"), shape, (layout.band_rows, 2 * layout.word_columns), strict=True):
        if size % multiple or not size:
            padded = -(-max(size, 1) // multiple) * multiple
            raise ValueError(
                f"{name} must be a positive multiple of {multiple} for {dtype} in the semi-structured layout, got {size}; "
                f"pad the weight with zeros to {padded} or keep it as sparse-24-bitmask"
            )
    return layout


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "pass the tensors of one layer, unchanged"
        )


def _reorder(words: Tensor, band_rows: int) -> Tensor:
    out_features, num_words = words.shape
    bits = words.view(out_features // band_rows, band_rows // 16, 2, 8, num_words // 2, 2)  # r.., r4 if in a band, r3, r2-0, w.., w0
    return bits.permute(4, 0, 3, 1, 5, 2).contiguous().view(out_features, num_words)


def _restore(metadata: Tensor, band_rows: int) -> Tensor:
    out_features, num_words = metadata.shape
    bits = metadata.reshape(num_words // 2, out_features // band_rows, 8, band_rows // 16, 2, 2)
    return bits.permute(1, 3, 5, 2, 0, 4).contiguous().view(out_features, num_words)


def _one_of_two(compressed: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The stored value and the code of each pair of columns of a float32 weight."""
    first, second = _dense(compressed, kept).unflatten(1, (-1, 2)).unbind(-1)  # (out, in/2) each
    if bad := _first_true((first != 0) & (second != 0)):
        row, pair = bad
        raise ValueError(
            f"float32 keeps 1 of 2 in the semi-structured layout: row {row}, columns {2 * pair}..{2 * pair + 1} keep two "
            "non-zeros, expected at most one; convert the weight to float16 or bfloat16, or prune it to 1:2"
        )
    keeps_first, keeps_second = kept.unflatten(1, (-1, 2)).unbind(-1)
    is_first = (first != 0) | (keeps_first & ~keeps_second)
    return torch.where(is_first, first, second), torch.where(is_first, 0x4, 0xE).to(torch.uint8)


def _dense(compressed: Tensor, kept: Tensor) -> Tensor:
    raw = _raw(compressed)
    return raw.new_zeros(kept.shape).masked_scatter_(kept, raw).view(compressed.dtype)


def _raw(weight: Tensor) -> Tensor:
    """float8 as int8: few operators take float8 itself."""
    return weight.view(torch.int8) if weight.dtype in ONE_BYTE_FLOATS else weight


def _lookup(table: tuple[int, ...], nibbles: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.uint8, device=nibbles.device)[nibbles.int()]


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)  # (out, 2n), low nibble first


def _bytes(nibbles: Tensor) -> Tensor:
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4  # (out, n)


def _first_true(bad: Tensor) -> list[int] | None:
    """Row and column of the first True in reading order."""
    return bad.nonzero()[0].tolist() if bad.any() else None

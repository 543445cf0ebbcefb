"""Oracle: torch's private conversions on CPU (float8 through its bytes, as int8), and numpy for the canonical form."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    _calculate_meta_reordering_scatter_offsets as torch_word_places,
)
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass as torch_from_dense,
)
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_to_dense_cutlass as torch_to_dense,
)

from hf_sparse24.compressors.semi_structured import (
    _reorder,
    _restore,
    from_semi_structured,
    semi_structured_from_dense,
    semi_structured_to_dense,
    to_semi_structured,
)
from hf_sparse24.compressors.sparse24 import Sparse24Compressor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES_16_BIT = [(32, 32), (64, 32), (32, 96), (96, 160), (64, 256)]
SHAPES_32_BIT = [(32, 16), (64, 16), (32, 48), (96, 80), (64, 128)]
SHAPES_8_BIT = [(16, 64), (32, 64), (16, 192), (48, 320), (64, 512)]
SHAPES = {
    torch.float16: SHAPES_16_BIT,
    torch.bfloat16: SHAPES_16_BIT,
    torch.float32: SHAPES_32_BIT,
    **dict.fromkeys((torch.int8, *FLOAT8), SHAPES_8_BIT),
}
DTYPES = list(SHAPES)
TWO_OF_FOUR = [dtype for dtype in DTYPES if dtype != torch.float32]
CASES = [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes]
PATTERNS = list(combinations(range(4), 2))
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def name(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def bits(tensor):
    """The stored bits: tells -0.0 from 0.0, and NaNs compare."""
    return tensor.view(INTEGER[tensor.dtype.itemsize])


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(bits(actual), bits(expected), rtol=0, atol=0)


def through_bytes(convert, *tensors):
    """Run a conversion of torch's, which takes no float8, on the bytes."""
    dtype = tensors[0].dtype
    if dtype not in FLOAT8:
        return convert(*tensors)
    result = convert(tensors[0].view(torch.int8), *tensors[1:])
    return (result[0].view(dtype), result[1]) if isinstance(result, tuple) else result.view(dtype)


def without_half_nans(weight):
    """torch's reader moves float32 as float16 halves, and torch 2.13 on CPU quietens those that look like signalling NaNs."""
    return weight.bfloat16().float() if weight.dtype == torch.float32 else weight


def random_mask(dtype, shape, seed):
    """Two True per group of four, for float32 one per pair of columns."""
    random = np.random.default_rng(seed)
    size, kept = (2, 1) if dtype == torch.float32 else (4, 2)
    order = random.random((shape[0], shape[1] // size, size)).argsort(-1)
    return torch.from_numpy((order < kept).reshape(shape))


def nonzero_values(dtype, shape, seed):
    random = np.random.default_rng(seed)
    if dtype == torch.int8:
        return torch.from_numpy(random.choice([*range(-128, 0), *range(1, 128)], shape).astype(np.int8))
    sign = random.choice([-1.0, 1.0], shape)
    return torch.from_numpy(sign * random.uniform(0.25, 4.0, shape)).to(dtype)


def random_weight(dtype, shape, seed=0, empty=0.0):
    """A 2:4 weight of which a share `empty` of the kept positions holds zeros as well."""
    mask = random_mask(dtype, shape, seed)
    mask &= torch.from_numpy(np.random.default_rng(seed + 1).random(shape) >= empty)
    raw = bits(nonzero_values(dtype, shape, seed + 2))
    return (raw * mask).view(dtype)


def canonical(weight, mask):
    bitmask = torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
    compressed = bits(weight)[mask].view(weight.dtype).view(len(weight), -1)
    return compressed, bitmask, tuple(weight.shape)


def assert_same_canonical(actual, expected):
    assert_same_bits(actual[0], expected[0])
    assert_same_bits(actual[1].view(torch.int8), expected[1].view(torch.int8))
    assert actual[1].dtype == torch.uint8
    assert actual[2] == expected[2]


@pytest.mark.parametrize("empty", [0.0, 0.5], ids=["full", "deficient"])
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_from_dense_gives_the_bytes_of_torch(dtype, shape, empty):
    weight = random_weight(dtype, shape, empty=empty)
    values, metadata = semi_structured_from_dense(weight)
    torch_values, torch_metadata = through_bytes(torch_from_dense, weight)
    assert_same_bits(values, torch_values)
    assert_same_bits(metadata, torch_metadata)
    assert values.is_contiguous() and metadata.is_contiguous()


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_to_dense_reads_what_torch_packed(dtype, shape):
    weight = random_weight(dtype, shape, empty=0.2)
    assert_same_bits(semi_structured_to_dense(*through_bytes(torch_from_dense, weight)), weight)


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_torch_reads_what_was_packed_from_the_canonical_form(dtype, shape):
    mask = random_mask(dtype, shape, 3)
    weight = without_half_nans((bits(nonzero_values(dtype, shape, 4)) * mask).view(dtype))
    packed = to_semi_structured(*canonical(weight, mask))
    assert_same_bits(through_bytes(torch_to_dense, *packed), weight)


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_what_torch_packed_reads_as_the_canonical_form(dtype, shape):
    mask = random_mask(dtype, shape, 5)
    weight = (bits(nonzero_values(dtype, shape, 6)) * mask).view(dtype)
    assert_same_canonical(from_semi_structured(*through_bytes(torch_from_dense, weight)), canonical(weight, mask))


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_canonical_form_survives_with_its_stored_zeros(dtype, shape):
    mask = random_mask(dtype, shape, 7)
    weight = random_weight(dtype, shape, seed=7, empty=0.5)  # same mask, half of the stored values are zero
    packed = to_semi_structured(*canonical(weight, mask))
    assert_same_canonical(from_semi_structured(*packed), canonical(weight, mask))
    assert_same_bits(semi_structured_to_dense(*packed), weight)


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=name)
def test_sparse24_parts_go_through_the_layout_unchanged(dtype, shape):
    weight = random_weight(dtype, shape, empty=0.3)
    parts = Sparse24Compressor().compress_weight(weight)
    packed = to_semi_structured(parts["compressed"], parts["bitmask"], tuple(parts["shape"].flatten().tolist()))
    compressed, bitmask, shape = from_semi_structured(*packed)
    read = Sparse24Compressor().decompress_weight({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor(shape)})
    assert_same_bits(read, weight)
    if dtype != torch.float32:
        assert_same_canonical((compressed, bitmask, shape), (parts["compressed"], parts["bitmask"], shape))


@pytest.mark.parametrize("band_rows", [16, 32])
@pytest.mark.parametrize("bands", [1, 2, 3, 8])
@pytest.mark.parametrize("num_words", [2, 4, 6, 10, 32])
def test_every_word_of_metadata_lies_where_torch_puts_it(band_rows, bands, num_words):
    rows = band_rows * bands
    places = torch_word_places(rows, num_words, torch.int16 if band_rows == 32 else torch.int32, "cpu")
    words = torch.arange(rows * num_words)
    expected = torch.empty_like(words).scatter_(0, places, words).view(rows, num_words)
    words = words.view(rows, num_words)
    torch.testing.assert_close(_reorder(words, band_rows), expected, rtol=0, atol=0)
    torch.testing.assert_close(_restore(expected, band_rows), words, rtol=0, atol=0)


@pytest.mark.parametrize("pattern", PATTERNS, ids=name)
@pytest.mark.parametrize("dtype", TWO_OF_FOUR, ids=name)
def test_each_pattern_is_exact_at_each_position(dtype, pattern):
    rows, columns = 32, 64
    background = torch.zeros(rows, columns, dtype=torch.bool).view(rows, -1, 4)
    background[..., [1, 3]] = True
    values = nonzero_values(dtype, (rows, columns), 8)
    for group in range(0, columns // 4):  # every row at once would hide a swap of rows: a different group in each
        mask = background.clone()
        for row in range(0, rows, 3):
            mask[row, (group + row) % (columns // 4)] = torch.tensor([column in pattern for column in range(4)])
        mask = mask.view(rows, columns)
        weight = (bits(values) * mask).view(dtype)
        packed = to_semi_structured(*canonical(weight, mask))
        torch_values, torch_metadata = through_bytes(torch_from_dense, weight)
        assert_same_bits(packed[0], torch_values)
        assert_same_bits(packed[1], torch_metadata)
        assert_same_canonical(from_semi_structured(*packed), canonical(weight, mask))


@pytest.mark.parametrize("dtype", TWO_OF_FOUR, ids=name)
def test_deficient_groups_store_the_zeros_that_torch_stores(dtype):
    weight = torch.zeros(32, 64, dtype=dtype)
    value = bits(torch.ones((), dtype=dtype))
    nonzero = [(), (0,), (1,), (2,), (3,)]
    for row in range(32):
        for group in range(16):
            for column in nonzero[(row + group) % 5]:
                bits(weight)[row, 4 * group + column] = value
    values, metadata = semi_structured_from_dense(weight)
    torch_values, torch_metadata = through_bytes(torch_from_dense, weight)
    assert_same_bits(values, torch_values)
    assert_same_bits(metadata, torch_metadata)
    assert_same_bits(semi_structured_to_dense(values, metadata), weight)


@pytest.mark.parametrize("dtype", FLOAT8, ids=name)
def test_every_float8_code_survives(dtype):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    weight = torch.zeros(16, 64, dtype=torch.uint8)
    weight.view(16, 16, 4)[..., 2] = codes.view(16, 16)
    weight.view(16, 16, 4)[..., 0] = codes.flip(0).view(16, 16)
    expected = torch.where(weight == 0x80, 0, weight).view(dtype)  # -0.0 is a zero
    values, metadata = semi_structured_from_dense(expected)
    torch_values, torch_metadata = torch_from_dense(expected.view(torch.int8))
    assert_same_bits(values, torch_values.view(dtype))
    assert_same_bits(metadata, torch_metadata)
    assert_same_bits(semi_structured_to_dense(values, metadata), expected)
    kept = torch.tensor([True, False, True, False]).repeat(16, 16)
    packed = to_semi_structured(*canonical(weight.view(dtype), kept))
    assert_same_bits(semi_structured_to_dense(*packed), weight.view(dtype))  # stored, -0.0 keeps its sign


def test_int8_minus_128_is_a_value_and_no_negative_zero():
    weight = torch.zeros(16, 64, dtype=torch.int8)
    weight[3, 9] = weight[3, 11] = -128
    assert_same_bits(semi_structured_to_dense(*semi_structured_from_dense(weight)), weight)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.int8], ids=name)
def test_negative_zero_is_a_zero_and_nan_is_not(dtype):
    nan, zero = float("nan"), -0.0
    weight = torch.tensor([zero, nan, zero, 1.0]).repeat(32, 16).to(dtype)
    values, metadata = semi_structured_from_dense(weight)
    assert_same_bits(values, torch.tensor([nan, 1.0]).repeat(32, 16).to(dtype))
    if dtype not in FLOAT8:
        assert_same_bits(metadata, torch_from_dense(weight)[1])
    assert semi_structured_to_dense(values, metadata).isnan().sum() == 32 * 16


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=name)
def test_torch_opens_the_tensors_as_its_own_sparse_class(dtype):
    weight = without_half_nans(random_weight(dtype, (32, 128)))
    values, metadata = semi_structured_from_dense(weight)
    sparse = torch.sparse.SparseSemiStructuredTensorCUTLASS(
        weight.shape, packed=values, meta=metadata, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None
    )
    assert_same_bits(sparse.to_dense(), weight)


def float32_of(kept):
    """A 32x16 canonical float32 weight: row 5, columns 8..11 hold `kept` {column: value}, every other group {0: 1, 2: 1}."""
    weight, mask = torch.zeros(32, 16), torch.zeros(32, 16, dtype=torch.bool)
    mask.view(-1, 4)[:, [0, 2]] = True
    weight[mask] = 1.0
    mask[5, 8:12], weight[5, 8:12] = False, 0.0
    for column, value in kept.items():
        mask[5, 8 + column], weight[5, 8 + column] = True, value
    return canonical(weight, mask), weight


@pytest.mark.parametrize(
    "kept",
    [{0: 1.0, 1: 0.0}, {0: 0.0, 1: 1.0}, {2: -0.0, 3: 2.0}, {2: 2.0, 3: -0.0}, {0: 0.0, 1: 0.0}],
    ids=["value-zero", "zero-value", "zero-value-second", "value-zero-second", "zeros"],
)
def test_float32_pair_that_keeps_a_stored_zero_beside_a_value_converts(kept):
    packed, weight = float32_of(kept)
    values, metadata = to_semi_structured(*packed)
    torch.testing.assert_close(semi_structured_to_dense(values, metadata), weight, rtol=0, atol=0)
    torch.testing.assert_close(torch_to_dense(values, metadata), weight, rtol=0, atol=0)


@pytest.mark.parametrize(("columns", "named"), [((0, 1), r"8\.\.9"), ((2, 3), r"10\.\.11")], ids=name)
def test_float32_pair_that_keeps_two_non_zeros_is_named(columns, named):
    packed, weight = float32_of(dict.fromkeys(columns, 1.0))
    with pytest.raises(ValueError, match=rf"row 5, columns {named} keep two non-zeros.*bfloat16"):
        to_semi_structured(*packed)
    with pytest.raises(ValueError, match=rf"row 5, columns {named} keep two non-zeros"):
        semi_structured_from_dense(weight)


def test_float32_pair_with_a_nan_and_a_value_is_named():
    packed, _ = float32_of({2: float("nan"), 3: 1.0})
    with pytest.raises(ValueError, match=r"row 5, columns 10\.\.11"):
        to_semi_structured(*packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_weight_with_three_non_zeros_in_a_group_names_the_first(dtype):
    weight = random_weight(dtype, (32, 64))
    weight[5, 8:11] = weight[9, 0:4] = torch.ones((), dtype=dtype)
    weight[5, 11] = 0
    with pytest.raises(ValueError, match=r"row 5, columns 8\.\.11 \(3 non-zeros\); expected at most 2"):
        semi_structured_from_dense(weight)


@pytest.mark.parametrize(("nibble", "kept"), [(0b0000, 0), (0b0100, 1), (0b0111, 3), (0b1111, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_bitmask_that_does_not_keep_two_names_row_and_columns(dtype, nibble, kept):
    bitmask = torch.full((32, 8), 0x55, dtype=torch.uint8)
    bitmask[5, 1] = 0x50 | nibble
    with pytest.raises(ValueError, match=rf"row 5, columns 8\.\.11 keep {kept} of 4 values, expected 2"):
        to_semi_structured(torch.zeros(32, 32, dtype=dtype), bitmask, (32, 64))


@pytest.mark.parametrize("code", sorted(set(range(16)) - {0x4, 0x8, 0x9, 0xC, 0xD, 0xE}), ids=hex)
@pytest.mark.parametrize("dtype", TWO_OF_FOUR, ids=name)
def test_metadata_that_names_no_two_ascending_columns_names_row_and_columns(dtype, code):
    values, metadata = semi_structured_from_dense(torch.zeros(32, 64, dtype=dtype))
    # Row 5 (bits 101) word 0 comes 5 * 2 * 2 words into the band of 16 rows, 5 * 2 * 2 * 2 into one of 32.
    metadata.view(-1)[20 if dtype.itemsize == 1 else 40] ^= (0xE ^ code) << 8  # third nibble: columns 8..11
    with pytest.raises(ValueError, match=rf"row 5, columns 8\.\.11 have the nibble {code:#x}"):
        from_semi_structured(values, metadata)


@pytest.mark.parametrize("code", sorted(set(range(16)) - {0x4, 0xE}), ids=hex)
def test_float32_metadata_that_names_no_column_of_the_pair_names_row_and_columns(code):
    values, metadata = semi_structured_from_dense(torch.zeros(32, 64))
    metadata.view(-1)[40] ^= (0xE ^ code) << 8
    with pytest.raises(ValueError, match=rf"row 5, columns 4\.\.5 have the nibble {code:#x}, expected one of 0x4 0xE;"):
        from_semi_structured(values, metadata)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.bfloat16, (48, 64), "out_features must be a positive multiple of 32 .* got 48; pad .* to 64"),
        (torch.float16, (32, 48), "in_features must be a positive multiple of 32 .* got 48; pad .* to 64"),
        (torch.float32, (16, 64), "out_features must be a positive multiple of 32 .* got 16"),
        (torch.float32, (32, 24), "in_features must be a positive multiple of 16 .* got 24"),
        (torch.int8, (24, 64), "out_features must be a positive multiple of 16 .* got 24"),
        (torch.int8, (16, 96), "in_features must be a positive multiple of 64 .* got 96"),
        (torch.bfloat16, (0, 64), "out_features must be a positive multiple of 32 .* got 0; pad .* to 32"),
        (torch.int8, (16, 0), "in_features must be a positive multiple of 64 .* got 0; pad .* to 64"),
        (torch.float8_e5m2, (16, 32), "in_features must be a positive multiple of 64 .* got 32"),
    ],
    ids=name,
)
def test_shape_outside_the_layout_is_refused_by_every_function(dtype, shape, message):
    rows, columns = shape
    values = torch.zeros(rows, columns // 2, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        semi_structured_from_dense(torch.zeros(shape, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        to_semi_structured(values, torch.full((rows, columns // 8), 0x55, dtype=torch.uint8), shape)
    with pytest.raises(ValueError, match=message):
        semi_structured_to_dense(values, torch.zeros(rows, columns // 16, dtype=torch.int16))


def test_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16, .*, got torch.float64"):
        semi_structured_from_dense(torch.zeros(32, 64, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(64,), (1, 32, 64)], ids=name)
def test_weight_that_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="a weight must have 2 dimensions"):
        semi_structured_from_dense(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="values must have 2 dimensions"):
        from_semi_structured(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(32, 8, dtype=torch.int16))


def test_tensors_that_do_not_belong_together_are_refused():
    weight = random_weight(torch.bfloat16, (32, 64))
    compressed, bitmask, shape = from_semi_structured(*semi_structured_from_dense(weight))
    values, metadata = to_semi_structured(compressed, bitmask, shape)
    with pytest.raises(ValueError, match=r"compressed must be torch.bfloat16 of shape \(32, 64\), got .* \(32, 32\)"):
        to_semi_structured(compressed, bitmask, (32, 128))
    with pytest.raises(ValueError, match=r"bitmask must be torch.uint8 of shape \(32, 8\), got torch.uint8 of shape \(32, 7\)"):
        to_semi_structured(compressed, bitmask[:, :7], shape)
    with pytest.raises(ValueError, match=r"bitmask must be torch.uint8 .* got torch.int8"):
        to_semi_structured(compressed, bitmask.view(torch.int8), shape)
    with pytest.raises(ValueError, match=r"metadata must be torch.int16 of shape \(32, 4\), got torch.int32"):
        from_semi_structured(values, metadata.int())
    with pytest.raises(ValueError, match=r"metadata must be torch.int16 of shape \(32, 4\), got .* \(32, 2\)"):
        from_semi_structured(values, metadata[:, :2])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_strided_tensors_give_the_same_result(dtype):
    def strided(tensor):
        return bits(tensor).t().contiguous().t().view(tensor.dtype)

    weight = random_weight(dtype, (32, 128))
    values, metadata = semi_structured_from_dense(weight)
    again = semi_structured_from_dense(strided(weight))
    assert_same_bits(again[0], values)
    assert_same_bits(again[1], metadata)
    assert_same_bits(semi_structured_to_dense(strided(values), strided(metadata)), weight)
    compressed, bitmask, shape = from_semi_structured(strided(values), strided(metadata))
    assert_same_bits(compressed, values)
    assert compressed.is_contiguous() and bitmask.is_contiguous()
    strided_bitmask = bitmask.t().contiguous().t()
    again = to_semi_structured(strided(compressed), strided_bitmask, shape)
    assert_same_bits(again[0], values)
    assert_same_bits(again[1], metadata)
    assert again[0].is_contiguous() and again[1].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_parameters_convert_without_a_gradient(dtype):
    values, metadata = semi_structured_from_dense(torch.nn.Parameter(random_weight(dtype, (32, 32))))
    compressed, bitmask, shape = from_semi_structured(torch.nn.Parameter(values), metadata)
    packed, _ = to_semi_structured(torch.nn.Parameter(compressed), bitmask, shape)
    dense = semi_structured_to_dense(torch.nn.Parameter(values), metadata)
    assert not any(tensor.requires_grad for tensor in (values, compressed, packed, dense))

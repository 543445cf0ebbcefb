"""Oracle: plain Python, element by element; and files of compressed-tensors 0.12.2 and 0.8.1."""

import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24 import pattern
from hf_sparse24.compressors import PackedTensorError, SparseBitmaskCompressor
from hf_sparse24.compressors.base import unpack_bits
from hf_sparse24.compressors.sparse_bitmask import _pack_anywhere
from tests.conftest import GOLDEN

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, *FLOAT8, torch.int8]
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPRESSOR = SparseBitmaskCompressor()
NEGATIVE_ZERO = -0.0


def name(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value).replace(" ", "")


def bits(tensor):
    return tensor.view(INTEGER[tensor.dtype.itemsize])


def raw(tensor):
    return tensor.dtype, tuple(tensor.shape), bits(tensor).numpy().tobytes()


def assert_same_parts(actual, expected):
    assert {part: raw(tensor) for part, tensor in actual.items()} == {part: raw(tensor) for part, tensor in expected.items()}


def random_weight(dtype, shape, share=0.5, seed=0):
    """Of random bits; about `share` of them non-zero, the zeros of random signs."""
    random = np.random.default_rng(seed)
    word = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    codes = random.integers(np.iinfo(word).min, np.iinfo(word).max, shape, dtype=word, endpoint=True)
    zeros = 0 if dtype == torch.int8 else np.where(random.random(shape) < 0.5, 0x80 if word == np.uint8 else np.iinfo(word).min, 0)
    return torch.from_numpy(np.where(random.random(shape) < share, codes, zeros).astype(word)).view(dtype)


def parts_from_definition(weight):
    """Element by element."""
    rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
    codes, numbers = bits(weight).reshape(rows, columns).tolist(), weight.double().reshape(rows, columns).tolist()
    values, bytes_, offsets = [], [], []
    for row, row_numbers in zip(codes, numbers, strict=True):
        offsets.append(len(values))
        row_bytes = [0] * -(-columns // 8)
        for column, (code, number) in enumerate(zip(row, row_numbers, strict=True)):
            if number != 0:
                values.append(code)
                row_bytes[column // 8] |= 1 << column % 8
        bytes_.append(row_bytes)
    return {
        "compressed": torch.tensor(values, dtype=bits(weight).dtype).view(weight.dtype),
        "bitmask": torch.tensor(bytes_, dtype=torch.uint8).view(*weight.shape[:-1], -(-columns // 8)),
        "row_offsets": torch.tensor(offsets, dtype=torch.int64).view(weight.shape[:-1]),
        "shape": torch.tensor(weight.shape),
    }


@pytest.fixture(params=[1, 2], ids="{}threads".format)
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(pattern, "CPU_CHUNK", 1 << 16)  # enough chunks for every thread
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (4, 17), (9,), (16,), (2, 3, 10), (0, 8), (8, 0), (0,), (2, 0, 4)], ids=name)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_packs_as_the_definition_says(dtype, shape, share):
    weight = random_weight(dtype, shape, share)
    parts = COMPRESSOR.compress_weight(weight)
    assert_same_parts(parts, parts_from_definition(weight))
    specs = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()}
    assert specs == COMPRESSOR.part_specs(shape, dtype, len(parts["compressed"]))
    zero = (weight.double() == 0).view(shape)
    assert_same_parts({"weight": COMPRESSOR.decompress_weight(parts)}, {"weight": bits(weight).masked_fill(zero, 0).view(dtype)})


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_code_survives_but_the_sign_of_zero(dtype):
    codes = torch.arange(256).to(torch.uint8) if dtype.itemsize == 1 else torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    if dtype.itemsize == 4:
        codes = codes.int() << 16
    weight = codes.view(16, -1).view(dtype)
    zeros = weight.double() == 0
    parts = COMPRESSOR.compress_weight(weight)
    assert (int(zeros.sum()), len(parts["compressed"])) == (zeros_of := 1 if dtype == torch.int8 else 2, len(codes) - zeros_of)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(parts)), bits(weight).masked_fill(zeros, 0))


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=name)
def test_nan_is_stored_and_negative_zero_is_not(dtype):
    parts = COMPRESSOR.compress_weight(torch.tensor([[NEGATIVE_ZERO, float("nan"), 0.0, 1.0]]).to(dtype))
    assert parts["bitmask"].tolist() == [[0b1010]]
    assert parts["compressed"].float().isnan().tolist() == [True, False]


# ---- files of the old library --------------------------------------------------------------------------------------------


def units():
    """[(dense, {part: tensor})] of units_0122.txt."""
    text = (GOLDEN / "units" / "units_0122.txt").read_text().split("== sparse-bitmask\n")[1]
    found = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(dense|   m\.(\w+)) torch\.(\w+) (\(.*?\)) ((?:[0-9a-f]{2} ?)*)", line):
            shape = [int(size) for size in re.findall(r"\d+", match[4])]
            data = torch.frombuffer(bytearray.fromhex(match[5]), dtype=torch.uint8).view(getattr(torch, match[3])).view(shape)
            if match[2]:
                found[-1][1][match[2]] = data
            else:
                found.append((data, {}))
    return found


@pytest.mark.parametrize("unit", range(5))
def test_worked_examples(unit):
    weight, parts = units()[unit]
    packed = COMPRESSOR.compress_weight(weight)
    if weight.ndim == 1:
        parts["row_offsets"] = torch.tensor(0)  # the script that wrote the file could not print it
    assert_same_parts(packed, parts)
    assert torch.equal(COMPRESSOR.decompress_weight(parts).float(), weight.float())


def test_the_worked_example_of_the_specification_is_among_them():
    parts = next(parts for weight, parts in units() if weight.dtype == torch.bfloat16)
    assert parts["bitmask"].numpy().tobytes().hex(" ") == "12 01 00 00 fd 03"
    assert bits(parts["compressed"]).numpy().tobytes().hex(" ") == "80 3f 00 40 40 c0 80 3f 40 40 80 40 a0 40 c0 40 e0 40 00 41 10 41 20 41"
    assert (parts["row_offsets"].tolist(), parts["shape"].tolist(), len(units())) == ([0, 3, 3], [3, 10], 5)


@pytest.mark.parametrize(("folder", "suffix", "count"), [("sparse-bitmask", "", 14), ("sparse-bitmask-ct0.8.1", ".weight", 21)], ids=name)
def test_golden_weights_pack_to_the_same_bytes(folder, suffix, count):
    tensors = load_file(GOLDEN / folder / "model.safetensors")
    dense = load_file(GOLDEN / folder / "dense_original.safetensors")
    names = [key.removesuffix(f"{suffix}.bitmask") for key in tensors if key.endswith(".bitmask")]
    assert len(names) == count
    for key in names:
        parts = {part: tensors[f"{key}{suffix}.{part}"] for part in COMPRESSOR.parts}
        weight = dense[f"{key}.weight"]
        assert_same_parts(COMPRESSOR.compress_weight(weight), parts)
        assert torch.equal(COMPRESSOR.decompress_weight(parts), weight)
    if suffix:  # 1-D norms and embeddings too
        assert {dense[f"{key}.weight"].ndim for key in names} == {1, 2}
        assert "model.embed_tokens" in names


def test_golden_fp8_parts_unpack_and_pack_to_the_same_bytes():
    tensors = load_file(GOLDEN / "float-quantized+sparse-bitmask" / "model.safetensors")
    names = [key.removesuffix(".bitmask") for key in tensors if key.endswith(".bitmask")]
    assert len(names) == 14
    for key in names:
        parts = {part: tensors[f"{key}.{part}"] for part in COMPRESSOR.parts}
        assert_same_parts(COMPRESSOR.compress_weight(COMPRESSOR.decompress_weight(parts)), parts)


# ---- any weight ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(700, 4093), (30, 40, 1000), (3_000_000,)], ids=name)
def test_large_weight_packs_as_on_any_device(dtype, shape, threads):
    weight = random_weight(dtype, shape)
    parts = COMPRESSOR.compress_weight(weight)
    compressed, bitmask, per_row = _pack_anywhere(weight)
    row_offsets = (per_row.flatten().cumsum(0) - per_row.flatten()).view(per_row.shape)
    assert_same_parts(parts, {"compressed": compressed, "bitmask": bitmask, "row_offsets": row_offsets, "shape": torch.tensor(shape)})
    restored = torch.zeros(shape, dtype=bits(weight).dtype)
    restored[unpack_bits(bitmask, shape[-1])] = bits(compressed)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(parts)), restored)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_strided_weights_and_parts(dtype):
    weight = random_weight(dtype, (24, 41))
    expected = COMPRESSOR.compress_weight(weight)
    wide = bits(torch.zeros(26, 48, dtype=dtype))
    wide[1:25, 3:44] = bits(weight)
    for strided in (bits(weight).t().contiguous().t(), wide[1:25, 3:44], bits(weight).flip(1).flip(1)):
        assert_same_parts(COMPRESSOR.compress_weight(strided.view(dtype)), expected)
    one_row = COMPRESSOR.compress_weight(weight[:1].expand(24, 41))
    assert_same_parts(one_row, COMPRESSOR.compress_weight(bits(weight)[:1].repeat(24, 1).view(dtype)))
    parts = {**expected, "bitmask": expected["bitmask"].t().contiguous().t()}
    parts["compressed"] = torch.stack([bits(expected["compressed"])] * 2, dim=1)[:, 0].view(dtype)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(parts)), bits(COMPRESSOR.decompress_weight(expected)))


def test_input_is_not_changed_and_shares_no_memory():
    weight = random_weight(torch.bfloat16, (8, 64), share=1.0)
    before = weight.clone()
    parts = COMPRESSOR.compress_weight(weight)
    bits(COMPRESSOR.decompress_weight(parts)).zero_()
    bits(parts["compressed"]).zero_()
    assert torch.equal(bits(weight), bits(before))


def test_parameters_pack_without_a_gradient():
    parts = COMPRESSOR.compress_weight(torch.nn.Parameter(torch.eye(8)))
    parts["compressed"] = torch.nn.Parameter(parts["compressed"])
    assert not COMPRESSOR.decompress_weight(parts).requires_grad


def test_a_scalar_and_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="a scalar has no axis to pack"):
        COMPRESSOR.compress_weight(torch.tensor(1.0))
    assert COMPRESSOR.why_not(torch.zeros(3)) is None
    with pytest.raises(ValueError, match=r"torch\.float64 cannot be stored sparse, expected one of torch.float32"):
        COMPRESSOR.compress_weight(torch.zeros(2, 8, dtype=torch.float64))


# ---- parts that disagree -------------------------------------------------------------------------------------------------


def parts_of():
    """16 non-zeros in 5 rows of 10: 4, 0, 3, 2, 7."""
    weight = torch.zeros(5, 10, dtype=torch.bfloat16)
    for row, count in enumerate((4, 0, 3, 2, 7)):
        weight[row, :count] = torch.arange(1, count + 1)
    return COMPRESSOR.compress_weight(weight)


@pytest.mark.parametrize(("row", "bit", "kept"), [(0, 0, 15), (1, 0, 17), (4, 6, 15), (4, 7, 17)])
def test_bitmask_with_one_bit_flipped_is_refused_with_both_counts(row, bit, kept):
    parts = parts_of()
    parts["bitmask"][row, 0] ^= 1 << bit
    with pytest.raises(PackedTensorError, match=f"bitmask keeps {kept} values, but 16 are stored"):
        COMPRESSOR.decompress_weight(parts)


def test_bit_that_moved_to_another_row_is_refused_with_both_offsets(threads):
    parts = parts_of()
    parts["bitmask"][2, 0] ^= 1
    parts["bitmask"][1, 0] ^= 1
    with pytest.raises(PackedTensorError, match=r"row_offsets\[2\] is 4, but the bitmask puts row 2 at 5"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize(("row", "value"), [(0, 1), (3, 8), (4, -1), (4, 1 << 40)])
def test_wrong_row_offset_is_refused_with_both_numbers(row, value):
    parts = parts_of()
    expected = int(parts["row_offsets"][row])
    parts["row_offsets"][row] = value
    with pytest.raises(PackedTensorError, match=rf"row_offsets\[{row}\] is {value}, but the bitmask puts row {row} at {expected}"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize("bit", range(2, 8))
def test_padding_bit_is_refused(bit):
    parts = parts_of()
    parts["bitmask"][3, 1] |= 1 << bit
    with pytest.raises(PackedTensorError, match="bitmask sets bits beyond column 9"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("compressed", torch.zeros(15, dtype=torch.bfloat16), "bitmask keeps 16 values, but 15 are stored"),
        ("compressed", torch.zeros(4, 4, dtype=torch.bfloat16), r"compressed is .* shape \(4, 4\), .* of shape \(16,\)"),
        ("compressed", torch.zeros(16, dtype=torch.int16), "compressed has dtype torch.int16, expected one of"),
        ("bitmask", torch.zeros(5, 1, dtype=torch.uint8), r"bitmask is torch.uint8 of shape \(5, 1\), .* of shape \(5, 2\)"),
        ("bitmask", torch.zeros(5, 2, dtype=torch.int8), "bitmask is torch.int8 .* torch.uint8"),
        ("row_offsets", torch.zeros(6, dtype=torch.int64), r"row_offsets is torch.int64 of shape \(6,\), .* of shape \(5,\)"),
        ("row_offsets", torch.zeros(5, dtype=torch.int32), "row_offsets is torch.int32 .* torch.int64"),
        ("shape", torch.tensor([5, 17]), r"bitmask is .* \(5, 2\), but a weight of shape \(5, 17\) needs .* \(5, 3\)"),
        ("shape", torch.tensor([1 << 40, 1 << 40]), r"bitmask is .* \(5, 2\), but a weight of shape"),
        ("shape", torch.tensor([-5, 10]), r"shape holds a negative size: \(-5, 10\)"),
        ("shape", torch.tensor([], dtype=torch.int64), "shape holds no sizes"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "",
)
def test_part_that_does_not_belong_is_named_with_both_sizes(part, value, message):
    with pytest.raises(PackedTensorError, match=message):
        COMPRESSOR.decompress_weight({**parts_of(), part: value})


def test_shape_may_be_a_column():
    parts = parts_of()
    expected = COMPRESSOR.decompress_weight(parts)
    assert torch.equal(COMPRESSOR.decompress_weight({**parts, "shape": torch.tensor([[5], [10]])}), expected)


def test_missing_and_superfluous_parts_are_named():
    parts = parts_of()
    parts["bias"] = parts.pop("row_offsets")
    with pytest.raises(PackedTensorError, match=r"missing \['row_offsets'\], superfluous \['bias'\]"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_cuda_gives_the_bytes_of_the_cpu(dtype):
    weight = random_weight(dtype, (96, 131))
    parts = COMPRESSOR.compress_weight(weight)
    on_cuda = COMPRESSOR.compress_weight(weight.cuda())
    assert (on_cuda["compressed"].device.type, on_cuda["shape"].device.type) == ("cuda", "cpu")
    assert_same_parts({part: value.cpu() for part, value in on_cuda.items()}, parts)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(on_cuda).cpu()), bits(COMPRESSOR.decompress_weight(parts)))
    on_cuda["row_offsets"][7] += 1
    with pytest.raises(PackedTensorError, match=r"row_offsets\[7\]"):
        COMPRESSOR.decompress_weight(on_cuda)

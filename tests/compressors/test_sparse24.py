"""Oracle: a group at a time in plain Python, with the ties of golden/units/ties.json; and files of compressed-tensors 0.12.2."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24 import pattern
from hf_sparse24.compressors import PackedTensorError, Sparse24Compressor
from hf_sparse24.compressors.base import unpack_bits
from hf_sparse24.compressors.sparse24 import _pack_anywhere
from tests.conftest import GOLDEN

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, *FLOAT8, torch.int8]
SIGNED_ZEROS = DTYPES[:-1]
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ONE, NEGATIVE_ZERO = 1.0, -0.0
TIES = json.loads((GOLDEN / "units" / "ties.json").read_text())
NIBBLES = [nibble for nibble in itertools.product([0, 1], repeat=4) if sum(nibble) <= 2]
COMPRESSOR = Sparse24Compressor()
# What each non-zero nibble keeps (FORMATS.md 1.4), column 0 first.
KEPT = {"0000": (2, 3), "1000": (0, 2), "0100": (1, 3), "0010": (2, 3), "0001": (2, 3)}
KEPT |= {"".join("01"[column in pair] for column in range(4)): pair for pair in itertools.combinations(range(4), 2)}


def name(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value).replace(" ", "")


def bits(tensor):
    return tensor.view(INTEGER[tensor.dtype.itemsize])


def raw(tensor):
    return (tensor.dtype, tuple(tensor.shape), bits(tensor).numpy().tobytes() if tensor.dtype != torch.int64 else tensor.tolist())


def assert_same_parts(actual, expected):
    assert {part: raw(tensor) for part, tensor in actual.items()} == {part: raw(tensor) for part, tensor in expected.items()}


def packed_with(weight, kept):
    """The parts of a weight of which `kept`, a bool of its shape, says what is stored."""
    return {
        "compressed": bits(weight)[kept].view(weight.dtype).view(len(weight), -1),
        "bitmask": torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little")),
        "shape": torch.tensor(weight.shape).view(2, 1),
    }


def mask_of(pairs, rows):
    """Kept columns of consecutive groups, as (row, group) -> bool."""
    mask = torch.zeros(len(pairs), 4, dtype=torch.bool)
    for group, pair in enumerate(pairs):
        mask[group, list(pair)] = True
    return mask.view(rows, -1)


def random_weight(dtype, shape, full=1.0, seed=0):
    """2:4, of random bits; a share `full` of the kept places holds a non-zero, the zeros have random signs."""
    random = np.random.default_rng(seed)
    word = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    codes = random.integers(np.iinfo(word).min, np.iinfo(word).max, shape, dtype=word, endpoint=True)
    negative_zero = np.iinfo(word).min if word != np.uint8 else 0x80
    codes[(codes == 0) | (codes == negative_zero)] = 1
    order = random.random((shape[0], shape[1] // 4, 4)).argsort(-1) < 2
    kept = (order & (random.random(order.shape) < full)).reshape(shape)
    zeros = np.where(random.random(shape) < 0.5, negative_zero, 0) if dtype != torch.int8 else 0
    return torch.from_numpy(np.where(kept, codes, zeros).astype(word)).view(dtype)


@pytest.fixture(params=[1, 2], ids="{}threads".format)
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(pattern, "CPU_CHUNK", 1 << 16)  # enough chunks for every thread
    yield request.param
    torch.set_num_threads(before)


# ---- which elements are kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("odd", [False, True], ids=["even-groups", "odd-groups"])
def test_every_pair_of_nibbles_keeps_what_the_old_library_kept(dtype, odd):
    nibbles = [nibble for pair in itertools.product(NIBBLES, repeat=2) for nibble in pair] + [NIBBLES[-1]] * 11 * odd
    rows = 11 if odd else 121
    weight = torch.tensor(nibbles).view(rows, -1).mul(torch.arange(1, 5).repeat(len(nibbles) // rows)).to(dtype)
    kept = mask_of([KEPT["".join(map(str, nibble))] for nibble in nibbles], rows)
    assert_same_parts(COMPRESSOR.compress_weight(weight), packed_with(weight, kept))


def test_table_of_the_tests_is_that_of_the_golden_file():
    lines = (GOLDEN / "units" / "units_0122.txt").read_text().splitlines()
    tables = [line for line in lines if re.match(r"torch\.\w+ \['0000>", line)]
    assert len(tables) == 5
    for line in tables:
        masks = dict(entry.split(">") for entry in re.findall(r"[01]{4}>[01]{4}", line))
        assert {nibble: masks[nibble] for nibble in KEPT} == {
            nibble: "".join("01"[column in pair] for column in range(4)) for nibble, pair in KEPT.items()
        }


def ranked_pair(ranks):
    """The two highest ranks; where the second place is tied, what ties.json says."""
    levels = sorted(set(ranks))
    digits = "".join(str(levels.index(rank)) for rank in ranks)
    return tuple(TIES.get(digits) or sorted(sorted(range(4), key=lambda column: -ranks[column])[:2]))


@pytest.mark.parametrize("dtype", SIGNED_ZEROS, ids=name)
def test_every_group_of_both_zeros_and_non_zeros_keeps_what_the_ties_say(dtype):
    ranks = [group for group in itertools.product([0, 1, 2], repeat=4) if group.count(2) <= 2]
    values = torch.tensor([NEGATIVE_ZERO, 0.0, ONE])[torch.tensor(ranks)]
    seen = [group if dtype in FLOAT8 else tuple(max(rank, 1) for rank in group) for group in ranks]
    pairs = list(itertools.product(range(len(ranks)), repeat=2))
    weight = values[torch.tensor(pairs)].view(len(pairs), 8).to(dtype)
    kept = mask_of([ranked_pair(seen[index]) for pair in pairs for index in pair], len(pairs))
    assert {"".join(map(str, group)) for group in ranks} >= set(TIES)
    assert_same_parts(COMPRESSOR.compress_weight(weight), packed_with(weight, kept))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_code_survives_in_every_column(dtype):
    codes = torch.arange(256).repeat(4).to(torch.uint8) if dtype.itemsize == 1 else torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    if dtype.itemsize == 4:
        codes = codes.int() << 16
    for column, other in itertools.permutations(range(4), 2):
        weight = torch.zeros(len(codes), 4, dtype=codes.dtype)
        weight[:, column] = codes
        weight[1::2, other] = 1  # with and without a second value
        weight = weight.view(-1, 64).view(dtype)
        restored = COMPRESSOR.decompress_weight(COMPRESSOR.compress_weight(weight))
        changed = bits(restored) != bits(weight)
        # A zero that is not kept loses its sign, and nothing else changes.
        assert not (bits(restored)[changed].any() or (dtype == torch.int8 and changed.any()))
        assert (weight.float()[changed] == 0).all()
        if dtype == torch.int8:
            assert (restored == -128).sum() == (weight == -128).sum() > 0


def test_stored_zeros_keep_their_sign():
    weight = torch.tensor([[NEGATIVE_ZERO, ONE, 0.0, NEGATIVE_ZERO]])
    parts = COMPRESSOR.compress_weight(weight)
    assert parts["bitmask"].tolist() == [[0b1010]]
    assert raw(parts["compressed"]) == raw(torch.tensor([[ONE, NEGATIVE_ZERO]]))
    parts = COMPRESSOR.compress_weight(weight.to(torch.float8_e4m3fn))  # FORMATS.md 1.4: bytes 80 38 00 80
    assert parts["bitmask"].tolist() == [[0b0110]]


# ---- files of the old library --------------------------------------------------------------------------------------------


def units(section):
    """[(dense, {part: tensor})] of units_0122.txt."""
    text = (GOLDEN / "units" / "units_0122.txt").read_text().split("== sparse-bitmask\n")[section]
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


@pytest.mark.parametrize("unit", range(7))
def test_worked_examples(unit):
    weight, parts = units(0)[unit]
    assert_same_parts({"weight": COMPRESSOR.decompress_weight(parts)}, {"weight": weight})
    if weight.shape[1] % 4 == 0:
        assert_same_parts(COMPRESSOR.compress_weight(weight), parts)


def test_the_worked_example_of_the_specification_is_among_them():
    bfloat16 = next(parts for weight, parts in units(0) if weight.dtype == torch.bfloat16)
    assert bfloat16["bitmask"].numpy().tobytes().hex(" ") == "69 0c 96 03"
    assert bits(bfloat16["compressed"])[0].numpy().tobytes().hex(" ") == "80 3f 00 c0 00 3f 80 3e 40 40 80 40"
    assert len(units(0)) == 7


def golden_parts(folder):
    tensors = load_file(GOLDEN / folder / "model.safetensors")
    names = [key.removesuffix(".bitmask") for key in tensors if key.endswith(".bitmask")]
    assert len(names) == 14
    return {key: {part: tensors[f"{key}.{part}"] for part in COMPRESSOR.parts} for key in names}


def test_golden_weights_pack_to_the_same_bytes():
    dense = load_file(GOLDEN / "sparse-24-bitmask" / "dense_original.safetensors")
    for key, parts in golden_parts("sparse-24-bitmask").items():
        assert_same_parts(COMPRESSOR.compress_weight(dense[f"{key}.weight"]), parts)
        assert torch.equal(COMPRESSOR.decompress_weight(parts), dense[f"{key}.weight"])


@pytest.mark.parametrize("quantized", ["", "float-quantized+", "float-quantized-static+"])
def test_golden_parts_unpack_and_pack_to_the_same_bytes(quantized):
    for parts in golden_parts(f"{quantized}sparse-24-bitmask").values():
        assert_same_parts(COMPRESSOR.compress_weight(COMPRESSOR.decompress_weight(parts)), parts)


def test_golden_int8_unpacks_and_packs_to_the_same_values():
    # Not to the same bytes: where the old library lost a -128, it kept another zero than it keeps beside a zero.
    for parts in golden_parts("int-quantized+sparse-24-bitmask").values():
        weight = COMPRESSOR.decompress_weight(parts)
        assert torch.equal(COMPRESSOR.decompress_weight(COMPRESSOR.compress_weight(weight)), weight)


# ---- any weight that fits, and those that do not -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(1, 4), (1, 12), (0, 8), (8, 0), (0, 0), (3, 8), (5, 20), (64, 36), (2, 4096)], ids=name)
def test_shapes(shape, dtype):
    weight = random_weight(dtype, shape, full=0.7)
    parts = COMPRESSOR.compress_weight(weight)
    specs = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()}
    assert specs == COMPRESSOR.part_specs(shape, dtype)
    assert (unpack_bits(parts["bitmask"], shape[1]).sum() if weight.numel() else 0) == weight.numel() // 2
    restored = COMPRESSOR.decompress_weight(parts)
    assert (restored.shape, restored.dtype) == (weight.shape, dtype)
    assert torch.equal(bits(restored), torch.where(unpack_bits(parts["bitmask"], shape[1]), bits(weight), 0).to(bits(weight).dtype))


@pytest.mark.parametrize("full", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_large_weight_packs_as_on_any_device(dtype, full, threads):
    weight = random_weight(dtype, (700, 4092), full)
    parts = COMPRESSOR.compress_weight(weight)
    compressed, bitmask = _pack_anywhere(weight)
    assert_same_parts(parts, {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[700], [4092]])})
    restored = torch.zeros(700, 4092, dtype=bits(weight).dtype)
    restored[unpack_bits(bitmask, 4092)] = bits(compressed).flatten()
    assert torch.equal(bits(COMPRESSOR.decompress_weight(parts)), restored)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_strided_weights_and_parts(dtype):
    weight = random_weight(dtype, (24, 40), full=0.8)
    expected = COMPRESSOR.compress_weight(weight)
    wide = bits(torch.zeros(26, 48, dtype=dtype))
    wide[1:25, 3:43] = bits(weight)
    for strided in (bits(weight).t().contiguous().t(), wide[1:25, 3:43], bits(weight).flip(0).flip(0)):
        assert_same_parts(COMPRESSOR.compress_weight(strided.view(dtype)), expected)
    one_row = COMPRESSOR.compress_weight(weight[:1].expand(24, 40))
    assert_same_parts(one_row, COMPRESSOR.compress_weight(bits(weight)[:1].repeat(24, 1).view(dtype)))
    unaligned = torch.cat([bits(weight)[0, :1], bits(weight).flatten()])[1:].view(24, 40).view(dtype)
    assert_same_parts(COMPRESSOR.compress_weight(unaligned), expected)
    parts = {part: value if part == "compressed" else value.t().contiguous().t() for part, value in expected.items()}
    parts["compressed"] = bits(expected["compressed"]).t().contiguous().t().view(dtype)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(parts)), bits(COMPRESSOR.decompress_weight(expected)))


def test_input_is_not_changed_and_shares_no_memory():
    weight = random_weight(torch.bfloat16, (8, 64))
    before = weight.clone()
    parts = COMPRESSOR.compress_weight(weight)
    restored = COMPRESSOR.decompress_weight(parts)
    bits(parts["compressed"]).zero_()
    bits(restored).zero_()
    assert torch.equal(bits(weight), bits(before))


def test_parameters_pack_without_a_gradient():
    parts = COMPRESSOR.compress_weight(torch.nn.Parameter(random_weight(torch.float32, (4, 8))))
    parts["compressed"] = torch.nn.Parameter(parts["compressed"])
    assert not COMPRESSOR.decompress_weight(parts).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_meta_tensors_have_the_shapes_of_real_ones(dtype):
    parts = COMPRESSOR.compress_weight(torch.empty(6, 20, dtype=dtype, device="meta"))
    assert {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()} == COMPRESSOR.part_specs((6, 20), dtype)
    assert all(tensor.is_meta for tensor in parts.values())
    restored = COMPRESSOR.decompress_weight({**parts, "shape": torch.tensor([[6], [20]])})
    assert (restored.is_meta, restored.shape, restored.dtype) == (True, (6, 20), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_one_bad_group_among_a_million_is_named(dtype, threads):
    weight = torch.tensor([0, 1, 1, 0]).repeat(1000, 1000).to(dtype)
    assert COMPRESSOR.why_not(weight) is None
    bits(weight)[777, 1236] = 1
    message = "not 2:4: 1 group keeps too many values, the first in row 777, columns 1236..1239 (3 non-zeros)"
    assert COMPRESSOR.why_not(weight) == message
    with pytest.raises(ValueError, match=re.escape(message)):
        COMPRESSOR.compress_weight(weight)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_nibble_of_three_or_four_is_refused(dtype, place):
    for nibble in itertools.product([0, 1], repeat=4):
        weight = torch.zeros(2, 12, dtype=torch.int8)
        weight[1, 4 * place : 4 * place + 4] = torch.tensor(nibble)
        if sum(nibble) > 2:
            with pytest.raises(ValueError, match=rf"row 1, columns {4 * place}\.\.{4 * place + 3} \({sum(nibble)} non-zeros\)"):
                COMPRESSOR.compress_weight(weight.to(dtype))
        else:
            COMPRESSOR.compress_weight(weight.to(dtype))


@pytest.mark.parametrize("dtype", SIGNED_ZEROS, ids=name)
def test_nan_is_a_value_and_negative_zero_is_not(dtype):
    weight = torch.tensor([[NEGATIVE_ZERO, float("nan"), NEGATIVE_ZERO, ONE]]).to(dtype)
    parts = COMPRESSOR.compress_weight(weight)
    assert torch.equal(bits(parts["compressed"]), bits(weight)[:, 1::2])
    with pytest.raises(ValueError, match=r"row 0, columns 0\.\.3 \(3 non-zeros\)"):
        COMPRESSOR.compress_weight(torch.tensor([[ONE, float("nan"), NEGATIVE_ZERO, ONE]]).to(dtype))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 6), "in_features must be a multiple of 4, got 6"),
        ((3, 6), "in_features must be a multiple of 4, got 6"),
        ((1, 3), "in_features must be a multiple of 4, got 3"),
        ((8,), r"only 2-D weights can be 2:4, got shape \(8,\)"),
        ((2, 2, 4), r"only 2-D weights can be 2:4, got shape \(2, 2, 4\)"),
        ((), r"only 2-D weights can be 2:4, got shape \(\)"),
    ],
    ids=name,
)
def test_shapes_that_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        COMPRESSOR.compress_weight(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64], ids=name)
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"{dtype} cannot be stored sparse, expected one of torch.float32"):
        COMPRESSOR.compress_weight(torch.zeros(2, 8, dtype=dtype))


# ---- parts that disagree -------------------------------------------------------------------------------------------------


def parts_of(shape=(6, 20)):
    return COMPRESSOR.compress_weight(random_weight(torch.bfloat16, shape))


LEGAL_BYTES = {low | high << 4 for low, high in itertools.product((3, 5, 6, 9, 10, 12), repeat=2)}


@pytest.mark.parametrize("value", sorted(set(range(256)) - LEGAL_BYTES))
def test_bitmask_byte_that_does_not_keep_two_of_four_is_named(value):
    parts = parts_of()
    parts["bitmask"][4, 1] = value
    with pytest.raises(PackedTensorError, match=f"exactly two of each group of four: row 4, byte 1 is 0x{value:02x}"):
        COMPRESSOR.decompress_weight(parts)


def test_bad_byte_at_the_end_of_a_large_bitmask_is_named(threads):
    parts = COMPRESSOR.compress_weight(torch.zeros(3000, 1024, dtype=torch.int8))
    parts["bitmask"][2999, 127] = 0x7C
    with pytest.raises(PackedTensorError, match="row 2999, byte 127 is 0x7c"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize("value", [0x00, 0x01, 0x07, 0x0F])
def test_half_a_byte_at_the_end_of_a_row_is_checked(value):
    parts = parts_of()
    parts["bitmask"][5, 2] = value
    with pytest.raises(PackedTensorError, match=f"row 5, byte 2 is 0x{value:02x}"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize("bit", range(4, 8))
def test_padding_bit_is_refused(bit):
    parts = parts_of()
    parts["bitmask"][3, 2] |= 1 << bit
    with pytest.raises(PackedTensorError, match="bitmask sets bits beyond column 19"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("compressed", torch.zeros(6, 9, dtype=torch.bfloat16), r"compressed is torch.bfloat16 of shape \(6, 9\), .* of shape \(6, 10\)"),
        ("compressed", torch.zeros(60, dtype=torch.bfloat16), r"compressed is .* shape \(60,\), .* of shape \(6, 10\)"),
        ("compressed", torch.zeros(6, 10, dtype=torch.int16), "compressed has dtype torch.int16, expected one of"),
        ("bitmask", torch.zeros(6, 2, dtype=torch.uint8), r"bitmask is torch.uint8 of shape \(6, 2\), .* of shape \(6, 3\)"),
        ("bitmask", torch.zeros(6, 3, dtype=torch.int8), "bitmask is torch.int8 .* torch.uint8"),
        ("shape", torch.tensor([[6], [24]]), r"\(6, 10\), but a weight of shape \(6, 24\) needs .* \(6, 12\)"),
        ("shape", torch.tensor([[7], [20]]), r"\(6, 10\), but a weight of shape \(7, 20\) needs .* \(7, 10\)"),
        ("shape", torch.tensor([[1 << 40], [1 << 40]]), r"\(6, 10\), but a weight of shape"),
        ("shape", torch.tensor([6, 20, 1]), r"shape holds 3 sizes \(6, 20, 1\), expected 2"),
        ("shape", torch.tensor([-6, 20]), r"shape holds a negative size: \(-6, 20\)"),
        ("shape", torch.tensor([6, 20], dtype=torch.int32), "shape is torch.int32 .* torch.int64"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "",
)
def test_part_that_does_not_belong_is_named_with_both_sizes(part, value, message):
    with pytest.raises(PackedTensorError, match=message):
        COMPRESSOR.decompress_weight({**parts_of(), part: value})


def test_shape_may_be_flat():
    parts = parts_of()
    expected = COMPRESSOR.decompress_weight(parts)
    assert torch.equal(bits(COMPRESSOR.decompress_weight({**parts, "shape": torch.tensor([6, 20])})), bits(expected))


def test_missing_and_superfluous_parts_are_named():
    parts = parts_of()
    parts["row_offsets"] = parts.pop("bitmask")
    with pytest.raises(PackedTensorError, match=r"missing \['bitmask'\], superfluous \['row_offsets'\]"):
        COMPRESSOR.decompress_weight(parts)


def test_groups_that_straddle_rows_are_read_and_counted():
    parts = {
        "compressed": torch.arange(1.0, 7.0).view(2, 3),
        "bitmask": torch.tensor([[0x19], [0x15]], dtype=torch.uint8),
        "shape": torch.tensor([[2], [6]]),
    }
    assert COMPRESSOR.decompress_weight(parts).tolist() == [[1, 0, 0, 2, 3, 0], [4, 0, 5, 0, 6, 0]]
    parts["bitmask"][0] = 0x1D
    with pytest.raises(PackedTensorError, match="bitmask keeps 7 values, but 6 are stored"):
        COMPRESSOR.decompress_weight(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_cuda_gives_the_bytes_of_the_cpu(dtype):
    weight = random_weight(dtype, (96, 132), full=0.7)
    parts = COMPRESSOR.compress_weight(weight)
    on_cuda = COMPRESSOR.compress_weight(weight.cuda())
    assert (on_cuda["compressed"].device.type, on_cuda["shape"].device.type) == ("cuda", "cpu")
    assert_same_parts({part: value.cpu() for part, value in on_cuda.items()}, parts)
    assert torch.equal(bits(COMPRESSOR.decompress_weight(on_cuda).cpu()), bits(COMPRESSOR.decompress_weight(parts)))
    on_cuda["bitmask"][7, 3] = 0x37
    with pytest.raises(PackedTensorError, match="row 7, byte 3 is 0x37"):
        COMPRESSOR.decompress_weight(on_cuda)

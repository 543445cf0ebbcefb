"""Marlin's order of integers, metadata and scales; and what the format cannot hold."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24.compressors import GptqMarlin24Compressor, Marlin24Compressor, PackedTensorError
from hf_sparse24.compressors.base import specs_of
from hf_sparse24.compressors.marlin24 import CODE_OF_NONZERO, SCALE_ORDER, order_scales, pack_integers, scales_in_rows, unpack_integers
from hf_sparse24.quantization import GPTQ_MARLIN, PRESETS, QuantizationScheme, quantize_weight
from tests.conftest import GOLDEN
from tests.models import same_bytes, two_of_four

FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.name.startswith("marlin"))
SIZES = [(64, 32), (64, 64), (128, 96), (192, 128), (448, 256), (576, 1376), (64, 3712)]
W4 = PRESETS["w4a16"]


def random_integers(n, k, num_bits, seed=0):
    """2:4, each value of the range, groups with fewer than two non-zeros included."""
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-half, half, (n, k), generator=generator).to(torch.int8)
    keep = torch.rand(n, k // 4, 4, generator=generator).argsort(-1) < torch.randint(0, 3, (n, k // 4, 1), generator=generator)
    return integers * keep.view(n, k)


def modules_of(folder):
    modules = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        base, _, part = name.rpartition(".")
        modules.setdefault(base, {})[part] = tensor
    return {base: parts for base, parts in modules.items() if set(parts) == set(Marlin24Compressor.parts)}


def scheme_in(folder):
    return Marlin24Compressor().claim(json.loads((folder / "config.json").read_text())["quantization_config"])


def test_unit_file_is_written_and_read():
    unit = load_file(GOLDEN / "units" / "marlin_unit_64x32.safetensors")
    integers = unit["dense_int"].to(torch.int8)
    packed, meta = pack_integers(integers, 4)
    assert same_bytes(packed, unit["weight_packed"]) and same_bytes(meta, unit["meta"])
    assert torch.equal(unpack_integers(unit["weight_packed"], unit["meta"], 4), integers)
    assert integers[0, :8].tolist() == [1, -1, 0, 0, 2, 0, -2, 0]


def test_first_words_are_those_of_the_specification():
    unit = load_file(GOLDEN / "units" / "marlin_unit_64x32.safetensors")
    packed, meta = pack_integers(unit["dense_int"].to(torch.int8), 4)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in packed[0, :4].tolist()] == ["7337add9", "4004beea", "1551cffb", "6226d99c"]
    assert [f"{word & 0xFFFF:04x}" for word in meta[0, :4].tolist()] == ["c984", "84ed", "84ed", "edc9"]


def place_of_word(n, k, num_bits):
    """Row, word and field of integer (k, n), written out as the old library's layout is described: index by index."""
    for kt in range(k // 16):
        for block in range(n // 64):
            for word in range(32 * num_bits):
                for field in range(32 // num_bits):
                    if num_bits == 4:
                        kr = 2 * ((word >> 2) & 3) + (field >> 2) + 8 * (field & 1)
                        nc = 8 * ((word >> 4) & 1) + 4 * ((field >> 1) & 1) + (word & 3) + 16 * (word >> 5)
                    else:
                        kr = 2 * ((word >> 3) & 3) + (field >> 1) + 8 * (field & 1)
                        nc = 8 * ((word >> 5) & 1) + 4 * (word & 1) + ((word >> 1) & 3) + 16 * (word >> 6)
                    yield kt, 32 * num_bits * block + word, field, 16 * kt + kr, 64 * block + nc


@pytest.mark.parametrize("num_bits", [4, 8])
def test_every_field_of_every_word_is_in_its_place(num_bits):
    n, k = 128, 64
    integers = random_integers(n, k, num_bits)
    packed, meta = pack_integers(integers, num_bits)
    codes = torch.tensor(CODE_OF_NONZERO)[((integers != 0).view(n, k // 4, 4) * torch.tensor([1, 2, 4, 8])).sum(-1)]
    kept = integers.view(n, k // 4, 4).gather(-1, torch.stack((codes & 3, codes >> 2), -1)).view(n, k // 2)
    for row, word, field, place_k, place_n in place_of_word(n, k // 2, num_bits):
        found = int(packed[row, word]) >> num_bits * field & (1 << num_bits) - 1
        assert found == int(kept[place_n, place_k]) + (1 << num_bits - 1)
    for row in range(n):
        n_bits = [row >> bit & 1 for bit in range(6)]
        for c in range(k // 16):
            column = (
                128 * (row >> 6)
                + 64 * n_bits[1]
                + 32 * n_bits[5]
                + 16 * n_bits[4]
                + 8 * n_bits[3]
                + 4 * n_bits[0]
                + 2 * (c & 1)
                + n_bits[2]
            )
            word = sum(int(codes[row, 4 * c + j]) << 4 * j for j in range(4))
            assert int(meta[c >> 1, column]) & 0xFFFF == word


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_integers_survive(n, k, num_bits):
    integers = random_integers(n, k, num_bits)
    packed, meta = pack_integers(integers, num_bits)
    assert (packed.dtype, packed.shape) == (torch.int32, (k // 32, n * num_bits // 2))
    assert (meta.dtype, meta.shape) == (torch.int16, (k // 32, 2 * n))
    assert torch.equal(unpack_integers(packed, meta, num_bits), integers)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_integers_and_scales_are_packed_again_byte_by_byte(folder):
    compressor = Marlin24Compressor(scheme_in(folder))
    modules = modules_of(folder)
    assert len(modules) == 7
    for parts in modules.values():
        again = compressor.compress_integers(*compressor.decompress_integers(parts))
        assert all(same_bytes(again[part], value) for part, value in parts.items())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_original_weights_are_quantised_to_the_golden_bytes(folder):
    """Scales, rounding and packing together are those of the old writer."""
    original = load_file(folder / "dense_original.safetensors")
    compressor = Marlin24Compressor(scheme_in(folder))
    for base, parts in modules_of(folder).items():
        written = compressor.compress_weight(original[f"{base}.weight"])
        assert all(same_bytes(written[part], value) for part, value in parts.items()), base


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_values_are_within_their_rounding(folder):
    original = load_file(folder / "dense_original.safetensors")
    compressor = Marlin24Compressor()
    # Half a step, and what scale and quotient lose in float16.
    bound = 0.504 if "w4" in folder.name else 0.556
    for base, parts in modules_of(folder).items():
        integers, scale = compressor.decompress_integers(parts)
        step = scale.float().repeat_interleave(integers.shape[1] // scale.shape[1], 1)
        assert ((integers * step - original[f"{base}.weight"].float()).abs() / step).max() <= bound
        assert same_bytes(compressor.decompress_weight(parts), (integers * step).half())
        assert compressor.scheme_of(specs_of(parts)).num_bits == scheme_in(folder).num_bits


# ---- scales ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressor", "k", "permuted"),
    [
        (Marlin24Compressor, 128, False), (Marlin24Compressor, 256, False), (Marlin24Compressor, 384, True),
        (GptqMarlin24Compressor, 128, False), (GptqMarlin24Compressor, 256, True), (GptqMarlin24Compressor, 384, True),
    ],
)  # fmt: skip
def test_scales_of_groups_are_permuted_by_the_rule_of_the_spelling(compressor, k, permuted):
    scheme = W4 if compressor is Marlin24Compressor else W4.model_copy(update={"format": GPTQ_MARLIN})
    scale = (torch.arange(64 * k // 128).view(64, k // 128) + 1).half()
    integers = random_integers(64, k, 4)
    parts = compressor(scheme).compress_integers(integers, scale)
    stored = parts[compressor.parts[2]]
    in_rows = [row for start in range(0, 64, 8) for row in (start + place for place in SCALE_ORDER)] if permuted else list(range(64))
    assert torch.equal(stored, scale.t()[:, in_rows])
    found_integers, found_scale = compressor().decompress_integers(parts)
    assert torch.equal(found_integers, integers) and torch.equal(found_scale, scale)


@pytest.mark.parametrize("compressor", [Marlin24Compressor, GptqMarlin24Compressor])
def test_scales_of_rows_are_never_permuted(compressor):
    assert not any(compressor().scales_permuted(k, 1) for k in (128, 256, 512, 4096))


def test_k_256_read_by_the_other_rule_is_wrong():
    """Why the spelling must be kept, and conversion between the two reorders."""
    parts = Marlin24Compressor(W4).compress_integers(random_integers(64, 256, 4), (torch.arange(128).view(64, 2) + 1).half())
    renamed = dict(zip(GptqMarlin24Compressor.parts, parts.values(), strict=True))
    ours, theirs = Marlin24Compressor().decompress_weight(parts), GptqMarlin24Compressor().decompress_weight(renamed)
    assert not torch.equal(ours, theirs)


def test_order_of_scales_is_undone():
    scale = torch.arange(256).view(128, 2).half()
    assert torch.equal(scales_in_rows(order_scales(scale, True), True), scale)
    assert order_scales(scale, True)[0, :8].tolist() == [0, 8, 2, 10, 4, 12, 6, 14]


# ---- refused ----------------------------------------------------------------------------------------------------------------------------


def weight_2_4(n=64, k=256, dtype=torch.float16):
    return two_of_four(torch.randn(n, k, generator=torch.Generator().manual_seed(0))).to(dtype)


def filled(value, dtype=torch.float16):
    weight = weight_2_4(dtype=dtype)
    weight[5, 8:12] = torch.tensor([value, 0, 0, 0])
    return weight


REFUSED = {
    "rows": (weight_2_4(n=96), W4, "out_features 96 is not a multiple of 64"),
    "columns": (weight_2_4(k=48), PRESETS["w8a16"], "in_features 48 is not a multiple of 32"),
    "no-rows": (weight_2_4()[:0], W4, "out_features 0"),
    "columns-of-groups": (weight_2_4(k=192), W4, "in_features 192 is not a multiple of the group size 128"),
    "group-of-64": (weight_2_4(), W4.model_copy(update={"group_size": 64}), "group size 64: marlin-24 holds groups of 128"),
    "1-d": (torch.zeros(64).half(), W4, "only 2-D weights"),
    "not-2-4": (torch.ones(64, 256).half(), W4, "not 2:4: .*row 0, columns 0..3"),
    "nan": (filled(torch.nan), W4, "1 weights are NaN or infinite, the first in row 5, column 8"),
    "infinite": (filled(torch.inf), W4, "NaN or infinite"),
    "scale-too-large": (filled(1e6, torch.bfloat16), W4, "the scale .* of row 5 does not fit torch.float16"),
    "scale-too-small": (weight_2_4(dtype=torch.bfloat16) * 1e-7, W4, "of row 0 does not fit torch.float16"),
    "int": (weight_2_4().to(torch.int8), W4, "dtype torch.int8 cannot be quantised"),
}  # fmt: skip


@pytest.mark.parametrize(("weight", "scheme", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_format_cannot_hold_is_refused_with_numbers(weight, scheme, message):
    compressor = Marlin24Compressor(scheme)
    with pytest.raises(ValueError, match=message):
        compressor.compress_weight(weight)
    assert compressor.why_not(weight) is not None


@pytest.mark.parametrize(
    ("integers", "scale", "message"),
    [
        (torch.full((64, 32), 9, dtype=torch.int8), torch.ones(64, 1), "integers run from 9 to 9, marlin-24 holds -8 to 7"),
        (torch.ones(64, 32, dtype=torch.int8), torch.ones(64, 1), "not 2:4"),
        (torch.zeros(64, 32, dtype=torch.int8), torch.full((64, 1), 0.1), "not a float16 number"),
        (torch.zeros(64, 32, dtype=torch.int8), torch.ones(64, 2), r"scale has shape \(64, 2\)"),
        (torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1), "out_features 32"),
    ],
    ids=["range", "dense", "inexact-scale", "groups", "rows"],
)  # fmt: skip
def test_integers_that_the_format_cannot_hold_are_refused(integers, scale, message):
    with pytest.raises(ValueError, match=message):
        Marlin24Compressor(W4).compress_integers(integers, scale)


def test_integers_of_another_method_are_stored_as_they_are():
    """The seam for methods that choose integers better than rounding does."""
    weight = weight_2_4()
    integers, scale = quantize_weight(weight, weight != 0, W4)
    integers[integers > 0] -= 1
    found, _ = Marlin24Compressor().decompress_integers(Marlin24Compressor(W4).compress_integers(integers, scale))
    assert torch.equal(found, integers)


@pytest.mark.parametrize("part", Marlin24Compressor.parts)
def test_a_part_of_another_dtype_is_refused_by_name(part):
    parts = Marlin24Compressor(W4).compress_weight(weight_2_4())
    with pytest.raises(PackedTensorError, match=f"{part} is torch.float64"):
        Marlin24Compressor().decompress_weight({**parts, part: parts[part].double()})


def test_a_scheme_has_what_the_two_names_share():
    parts = Marlin24Compressor(QuantizationScheme(num_bits=8)).compress_weight(weight_2_4())
    renamed = dict(zip(GptqMarlin24Compressor.parts, parts.values(), strict=True))
    assert torch.equal(GptqMarlin24Compressor().decompress_weight(renamed), Marlin24Compressor().decompress_weight(parts))

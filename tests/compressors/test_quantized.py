"""8-bit weights in the sparse formats, and what of the old files is exact, rounded or lost."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24.compressors import (
    PackedTensorError,
    PackQuantizedCompressor,
    QuantizedCompressor,
    Sparse24Compressor,
    SparseBitmaskCompressor,
    compressor_for,
)
from hf_sparse24.quantization import PRESETS, QuantizationScheme
from tests.conftest import GOLDEN
from tests.models import same_bytes, two_of_four

FP8, INT8 = PRESETS["fp8"], PRESETS["int8"]
SPARSE24 = QuantizedCompressor(Sparse24Compressor())
# Folder -> which of the values that we round from the original differ from those of the old writer, which divided in bfloat16.
ROUNDED_DIFFERENTLY = {
    "float-quantized+sparse-24-bitmask": 1041,
    "float-quantized+sparse-bitmask": 790,
    "int-quantized+sparse-24-bitmask": 5804,
    "naive-quantized+sparse-24-bitmask": 5804,
}


def modules_of(folder):
    modules = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        base, _, part = name.rpartition(".")
        modules.setdefault(base, {})[part] = tensor
    return {base: parts for base, parts in modules.items() if "compressed" in parts}


def weight_2_4(dtype=torch.bfloat16):
    return two_of_four(torch.randn(48, 64, generator=torch.Generator().manual_seed(0))).to(dtype)


def compressor_in(folder):
    sparsity = SparseBitmaskCompressor() if folder.name.endswith("+sparse-bitmask") else Sparse24Compressor()
    scheme = QuantizedCompressor(sparsity).claim(json.loads((folder / "config.json").read_text())["quantization_config"])
    return QuantizedCompressor(sparsity, scheme)


@pytest.mark.parametrize(
    "name", [name for name in ROUNDED_DIFFERENTLY if name.startswith("float")] + ["float-quantized-static+sparse-24-bitmask"]
)
def test_golden_float8_values_are_packed_again_byte_by_byte(name):
    compressor = compressor_in(GOLDEN / name)
    modules = modules_of(GOLDEN / name)
    assert len(modules) == 14
    for parts in modules.values():
        again = compressor.compress_integers(*compressor.decompress_integers(parts))
        assert all(same_bytes(value, parts[part]) for part, value in again.items())


@pytest.mark.parametrize("name", ROUNDED_DIFFERENTLY)
def test_the_original_weights_get_the_golden_scales_and_values_at_least_as_close(name):
    original = load_file(GOLDEN / name / "dense_original.safetensors")
    compressor, differing = compressor_in(GOLDEN / name), 0
    for base, parts in modules_of(GOLDEN / name).items():
        weight = original[f"{base}.weight"]
        written = compressor.compress_weight(weight)
        assert same_bytes(written["weight_scale"], parts["weight_scale"])
        ours, theirs = compressor.decompress_integers(written)[0].float(), compressor.decompress_integers(parts)[0].float()
        differing += int((ours != theirs).sum())
        quotient = weight.float() / parts["weight_scale"].float()
        assert ((ours - quotient).abs() <= (theirs - quotient).abs() + 1e-3).all(), base
    assert differing == ROUNDED_DIFFERENTLY[name]


def test_integers_never_reach_the_number_that_the_old_writer_lost():
    weight = torch.zeros(2, 8)
    weight[0, 1], weight[1, 1] = -3.0, 3.0
    integers, scale = SPARSE24.with_scheme(INT8).decompress_integers(SPARSE24.with_scheme(INT8).compress_weight(weight))
    assert (integers[0, 1], integers[1, 1]) == (-127, 127)
    assert torch.allclose(scale, torch.tensor(3 / 127.5))


def test_minus_128_of_other_writers_is_read_and_written():
    integers = torch.zeros(2, 8, dtype=torch.int8)
    integers[0, 2] = -128
    parts = SPARSE24.compress_integers(integers, torch.ones(2, 1))
    assert torch.equal(SPARSE24.decompress_integers(parts)[0], integers)


@pytest.mark.parametrize("scheme", [FP8, INT8, FP8.model_copy(update={"strategy": "tensor"})], ids=["fp8", "int8", "fp8-tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sparsity", ["sparse-24-bitmask", "sparse-bitmask"])
def test_parts_are_those_that_were_announced_and_values_as_close_as_8_bits_are(sparsity, dtype, scheme):
    weight = weight_2_4(dtype)
    compressor = compressor_for(sparsity, scheme)
    parts = compressor.compress_weight(weight)
    num_values = parts["compressed"].numel()
    assert {part: (value.dtype, tuple(value.shape)) for part, value in parts.items()} == compressor.part_specs((48, 64), dtype, num_values)
    dense = compressor.decompress_weight(parts)
    assert dense.dtype == dtype
    assert not dense[weight == 0].any()
    # Half a step of int8, or half of the last of three bits of float8, and the rounding of the product.
    largest = weight.float().abs().amax(1, keepdim=True) if scheme.strategy == "channel" else weight.float().abs().max()
    bound = weight.float().abs() / 16 + largest / 448 / 512 if scheme.type == "float" else 0.51 * largest / 127.5
    assert ((dense.float() - weight.float()).abs() <= bound + weight.float().abs() * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_weight_is_the_largest_float8_number(dtype):
    """Whichever way its scale is rounded: above 464 it would be NaN."""
    weight = torch.zeros(1000, 4, dtype=dtype)
    weight[:, 0] = torch.linspace(-0.01, 65504.0, 1000)
    values = SPARSE24.with_scheme(FP8).compress_weight(weight)["compressed"].float()
    assert (values.abs().amax(1) == 448).all()


def test_a_weight_of_zeros_has_a_scale_that_is_a_number():
    parts = SPARSE24.with_scheme(FP8).compress_weight(torch.zeros(4, 8))
    assert parts["weight_scale"].isfinite().all() and not SPARSE24.decompress_weight(parts).any()


REFUSED = {
    "nan": (torch.tensor([[1.0, torch.nan, 0, 0]]), FP8, "1 weights are NaN or infinite, the first in row 0, column 1"),
    "not-2-4": (torch.ones(1, 4), INT8, "not 2:4"),
    "static": (weight_2_4(), FP8.model_copy(update={"activations": "static"}), "static activations need an input_scale"),
    "columns": (torch.ones(4, 6), INT8, "in_features must be a multiple of 4"),
    "float16-scale": (torch.tensor([[1e-6, 0, 0, 0]]).half(), INT8, "does not fit torch.float16"),
}


@pytest.mark.parametrize(("weight", "scheme", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_is_refused(weight, scheme, message):
    with pytest.raises(ValueError, match=message):
        SPARSE24.with_scheme(scheme).compress_weight(weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"symmetric": False}, "symmetric"),
        ({"num_bits": 3}, "num_bits"),
        ({"num_bits": 4, "type": "float"}, "4 bits are for integers"),
        ({"num_bits": 4, "activations": "dynamic"}, "4 bits are for integers"),
        ({"strategy": "group"}, "groups, and only groups"),
        ({"group_size": 128}, "groups, and only groups"),
        ({"strategy": "group", "group_size": 128, "activations": "dynamic"}, "per channel or tensor"),
        ({"strategy": "tensor"}, "per channel or group"),
        ({"type": "float", "format": "marlin-24"}, "marlin-24 holds integers"),
        ({"bits": 8}, "bits"),
    ],
    ids=str,
)
def test_a_scheme_that_no_format_has_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizationScheme(**fields)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_marlin_is_2_4_only(scheme):
    with pytest.raises(ValueError, match="marlin-24 cannot hold weights in the sparsity format sparse-bitmask"):
        compressor_for("sparse-bitmask", PRESETS[scheme])


def test_weight_scale_of_a_row_and_of_all_are_told_apart_when_rows_are_cut():
    from hf_sparse24.checkpoint import find_packed

    for scheme in (FP8, FP8.model_copy(update={"strategy": "tensor"})):
        parts = SPARSE24.with_scheme(scheme).compress_weight(weight_2_4())
        (packed,) = find_packed({f"layer.{part}": value for part, value in parts.items()}).values()
        assert torch.equal(packed[5:17], SPARSE24.decompress_weight(parts)[5:17])


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 36, 30])
def test_pack_quantised_is_read_field_by_field(num_bits, columns):
    half = 1 << (num_bits - 1)
    integers = torch.randint(-half, half, (5, columns), generator=torch.Generator().manual_seed(0))
    per_word = 32 // num_bits
    words = torch.zeros(5, -(-columns // per_word), dtype=torch.int64)
    for column in range(columns):
        words[:, column // per_word] |= (integers[:, column] + half) << num_bits * (column % per_word)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    parts = {"weight_packed": words, "weight_scale": torch.full((5, 1), 0.5), "weight_shape": torch.tensor([5, columns])}
    assert torch.equal(PackQuantizedCompressor().decompress_weight(parts), integers * 0.5)
    with pytest.raises(PackedTensorError, match="neither 4 nor 8 bits"):
        PackQuantizedCompressor().decompress_weight({**parts, "weight_packed": words[:, :-1]})
    with pytest.raises(PackedTensorError, match="asymmetric"):
        PackQuantizedCompressor().decompress_weight({**parts, "weight_zero_point": torch.ones(1, dtype=torch.int32)})
    with pytest.raises(ValueError, match="read, not written"):
        PackQuantizedCompressor().compress_weight(weight_2_4())

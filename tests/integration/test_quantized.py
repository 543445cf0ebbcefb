"""Quantised 2:4 checkpoints that compressed-tensors wrote, and the GPTQ spelling of one: dense, kept, and written again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config, Sparse24Linear
from hf_sparse24.checkpoint import find_packed, open_checkpoint
from hf_sparse24.compressors import GptqMarlin24Compressor, Marlin24Compressor, PackQuantizedCompressor
from hf_sparse24.compressors.base import specs_of
from hf_sparse24.config import GUARD, parse_config
from hf_sparse24.integration.quantizer import prepare_kernels
from hf_sparse24.kernels import dispatch
from hf_sparse24.linear import PackedLinear
from hf_sparse24.modules import packed_layers
from hf_sparse24.quantized_linear import (
    GptqMarlin24Linear,
    Marlin24Linear,
    PackQuantizedLinear,
    QuantizedSparse24Linear,
    QuantizedSparseBitmaskLinear,
)
from tests.conftest import GOLDEN
from tests.models import DENSE, KEPT, logits, same_bytes, two_of_four

# Folder -> the layer that keeps its weights, how many there are, the largest error against the original (from the writer's own
# dequantised weights), and whether the checkpoint asks for 8-bit activations.
QUANTISED = {
    "float-quantized+sparse-24-bitmask": (QuantizedSparse24Linear, 14, 0.0069, True),
    "float-quantized+sparse-bitmask": (QuantizedSparseBitmaskLinear, 14, 0.0069, True),
    "float-quantized-static+sparse-24-bitmask": (QuantizedSparse24Linear, 14, 0.0081, True),
    "int-quantized+sparse-24-bitmask": (QuantizedSparse24Linear, 14, None, True),
    "naive-quantized+sparse-24-bitmask": (QuantizedSparse24Linear, 14, None, True),
    "pack-quantized+sparse-24-bitmask": (PackQuantizedLinear, 14, 0.0147, False),
    "marlin-24-w4-channel": (Marlin24Linear, 7, 0.0179, False),
    "marlin-24-w4-g128": (Marlin24Linear, 7, 0.0179, False),
    "marlin-24-w8-channel": (Marlin24Linear, 7, 0.0013, False),
    "marlin-24-w8-g128": (Marlin24Linear, 7, 0.0013, False),
    "gptq-w4-g128": (GptqMarlin24Linear, 7, 0.0179, False),
    "gptq-w8-channel": (GptqMarlin24Linear, 7, 0.0013, False),
}
GPTQ_NAMES = dict(zip(Marlin24Compressor.parts, GptqMarlin24Compressor.parts, strict=True))


def gptq_spelling(source, out, bits, group_size):
    """A golden folder as GPTQ writes it: K is 128 or 512 there, for which both rules of the scales agree."""
    shutil.copytree(source, out)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        base, _, suffix = name.rpartition(".")
        tensors[f"{base}.{GPTQ_NAMES.get(suffix, suffix)}"] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "checkpoint_format": "marlin_24", "bits": bits, "group_size": group_size}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def gptq(tmp_path_factory):
    root = tmp_path_factory.mktemp("gptq")
    gptq_spelling(GOLDEN / "marlin-24-w4-g128", root / "gptq-w4-g128", 4, 128)
    gptq_spelling(GOLDEN / "marlin-24-w8-channel", root / "gptq-w8-channel", 8, -1)
    return root


@pytest.fixture(scope="module", params=QUANTISED)
def folder(request, gptq):
    return (gptq if request.param.startswith("gptq") else GOLDEN) / request.param


def test_every_quantised_golden_folder_is_looked_at():
    found = {path.name for path in GOLDEN.iterdir() if "quantized" in path.name or "marlin" in path.name}
    assert {name for name in QUANTISED if not name.startswith("gptq")} == found


@pytest.mark.parametrize("config", [None, DENSE], ids=["default", "dense"])
def test_opens_as_plain_layers_with_the_dequantised_weights(folder, config):
    options = {} if config is None else {"quantization_config": config}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    _, num_packed, error, _ = QUANTISED[folder.name]
    original = load_file(folder / "dense_original.safetensors")
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, original[name])}
    assert len(changed) == num_packed
    for name in changed if error is not None else ():
        difference = (model.state_dict()[name].float() - original[name].float()).abs()
        assert 0 < difference.max() <= error, name


def test_kernels_are_prepared_once_for_all_layers_of_a_kind(monkeypatch):
    calls, bf16, cpu = [], torch.bfloat16, torch.device("cpu")
    for name in ("prepare", "prepare_marlin24"):
        monkeypatch.setattr(dispatch, name, lambda name=name, **options: calls.append((name, options)))

    def packed(layer_class, rows, *scheme):
        linear = nn.Linear(256, rows, dtype=bf16)
        linear.weight = nn.Parameter(two_of_four(linear.weight.detach()))
        return layer_class.from_linear(linear, *scheme)

    layers = [packed(Sparse24Linear, 64), packed(Sparse24Linear, 128)]
    layers += [packed(QuantizedSparse24Linear, rows, "fp8") for rows in (64, 128)] + [packed(QuantizedSparse24Linear, 64, "int8")]
    layers += [packed(Marlin24Linear, rows, "w4a16") for rows in (64, 128)] + [packed(Marlin24Linear, 64, "w8a16")]
    layers += [QuantizedSparse24Linear.from_specs(256, 64, False, specs_of(layers[2].parts()), device="meta")]
    prepare_kernels({str(index): layer for index, layer in enumerate(layers)}, bf16)
    common, both, one = {"dtype": bf16, "device": cpu}, {(64, 256), (128, 256)}, {(64, 256)}
    eight = {**common, "format": "quantized sparse-24-bitmask", "quantize_x": True}
    assert calls == [
        ("prepare", {**common, "format": "sparse-24-bitmask", "shapes": both}),
        ("prepare", {**eight, "values": torch.float8_e4m3fn, "shapes": both}),
        ("prepare", {**eight, "values": torch.int8, "shapes": one}),
        ("prepare_marlin24", {**common, "num_bits": 4, "grouped": True, "scales_permuted": False, "shapes": both}),
        ("prepare_marlin24", {**common, "num_bits": 8, "grouped": False, "scales_permuted": False, "shapes": one}),
    ]


def test_packed_integers_are_checked_on_loading_and_not_in_every_call(monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "pack-quantized+sparse-24-bitmask", quantization_config=KEPT)
    expected = logits(model)

    def check(*_):
        raise AssertionError

    monkeypatch.setattr(PackQuantizedCompressor, "check_values", check)
    monkeypatch.setattr(PackQuantizedCompressor, "check_parts", check)
    assert torch.equal(logits(model), expected)


def test_lost_int8_weights_are_zero_and_all_others_right():
    """Every -128 became 0 when the old library wrote these files."""
    for name in ("int-quantized+sparse-24-bitmask", "naive-quantized+sparse-24-bitmask"):
        model, lost = AutoModelForCausalLM.from_pretrained(GOLDEN / name), 0
        scales = load_file(GOLDEN / name / "model.safetensors")
        for weight, original in load_file(GOLDEN / name / "dense_original.safetensors").items():
            if (scale := scales.get(weight.removesuffix("weight") + "weight_scale")) is None:
                continue
            value, original = model.state_dict()[weight].float(), original.float()
            # Of dequantised weights only those are zero that were less than a step from it, and those that were lost.
            gone = (value == 0) & (original.abs() > 2 * scale.float())
            lost += int(gone.sum())
            assert ((original / scale.float())[gone] < -127).all()
            assert ((value - original).abs()[~gone] <= (1.1 * scale.float()).expand_as(value)[~gone]).all()
        assert lost == 239


def test_kept_layers_give_the_logits_of_the_dense_model(folder):
    layer_class, num_packed, _, quantize_x = QUANTISED[folder.name]
    model, info = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT, output_loading_info=True)
    assert not any(info.values()), info
    layers = packed_layers(model)
    assert [type(layer) for layer in layers.values()] == [layer_class] * num_packed
    assert {layer.quantize_x for layer in layers.values()} == {quantize_x}
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=DENSE)
    assert torch.equal(logits(model), logits(dense))
    assert all(torch.equal(layer.weight + 0, dense.get_submodule(name).weight) for name, layer in layers.items())


def test_kept_model_writes_the_same_file_and_a_config_that_is_read_again(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    before, after = (json.loads((path / "config.json").read_text())["quantization_config"] for path in (folder, tmp_path))
    assert (
        parse_config({"quantization_config": after}).sparsity.quantization
        == parse_config({"quantization_config": before}).sparsity.quantization
    )
    assert after["quant_method"] == before["quant_method"]
    if before["quant_method"] == "compressed-tensors":
        assert after["config_groups"].pop(GUARD) == ["Linear"]
        assert after == before
    else:
        assert before.items() <= after.items()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_kept_model_saved_with_its_config_writes_the_same_file(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT)
    model.save_pretrained(tmp_path, sparsity_config=model.config.quantization_config)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_another_dtype_leaves_the_parts_as_they_are(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    for cast in (model, model.to(torch.float64), model.to(torch.float32)):
        for name, layer in packed_layers(cast).items():
            assert all(same_bytes(value, stored[f"{name}.{part}"].view_as(value)) for part, value in layer.parts().items())
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=DENSE, dtype=torch.float32)
    assert logits(model).dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(dense))
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    torch.testing.assert_close(logits(model), logits(dense))


def test_compressor_fills_a_dense_model(folder):
    dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=DENSE)
    model = AutoModelForCausalLM.from_config(dense.config).to(dense.dtype)
    ModelCompressor.from_pretrained(folder).decompress(model_path=folder, model=model)
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["marlin-24-w8-g128", "float-quantized+sparse-24-bitmask", "gptq-w4-g128"])
def test_without_a_config_the_tensors_decide(name, gptq, tmp_path):
    source = (gptq if name.startswith("gptq") else GOLDEN) / name
    shutil.copytree(source, tmp_path / "copy")
    config = json.loads((source / "config.json").read_text())
    scheme = parse_config(config).sparsity.quantization
    del config["quantization_config"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    dense = AutoModelForCausalLM.from_pretrained(source, quantization_config=DENSE)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "copy")), logits(dense))
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", quantization_config=Sparse24Config(run_compressed=True))
    assert torch.equal(logits(kept), logits(dense))
    assert kept.config.quantization_config.quantization == scheme
    assert ModelCompressor.from_pretrained(tmp_path / "copy").sparsity_config.quantization == scheme


def test_rows_that_tensor_parallelism_asks_for_are_those_of_the_whole(folder):
    with open_checkpoint(folder) as checkpoint:
        for weight in list(find_packed(checkpoint.tensors, checkpoint.file_of, declared=True).values())[:3]:
            assert torch.equal(weight[8:40], weight[...][8:40])


# ---- refused ------------------------------------------------------------------------------------------------------------------------


def damaged(source, target, change):
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


P = "model.layers.0.mlp.down_proj"
PACK = "pack-quantized+sparse-24-bitmask"
FP8, INT8, W4 = "float-quantized+sparse-24-bitmask", "int-quantized+sparse-24-bitmask", "marlin-24-w4-g128"
DAMAGES = {
    "asymmetric": (INT8, lambda t: t.update({f"{P}.weight_zero_point": torch.ones(64, 1, dtype=torch.int8)}), "not zero: asymmetric"),
    "group-scales": (INT8, lambda t: t.update({f"{P}.weight_scale": torch.ones(64, 2).bfloat16()}), r"a scale per row, or one"),
    "integer-scales": (FP8, lambda t: t.update({f"{P}.weight_scale": torch.ones(64, 1).int()}), "weight_scale is torch.int32"),
    "input-scales": (FP8, lambda t: t.update({f"{P}.input_scale": torch.ones(64)}), r"input_scale has shape \(64,\)"),
    "no-scale": (W4, lambda t: t.pop(f"{P}.scale_packed"), "the part scale_packed is missing"),
    "groups-of-64": (W4, lambda t: t.update({f"{P}.scale_packed": torch.ones(8, 128).half()}), "8 rows for in_features 512"),
    "nan-scale": (W4, lambda t: t[f"{P}.scale_packed"].view(-1)[3:4].fill_(torch.nan), "NaN or infinite"),
    "nan-scale-8-bits": (FP8, lambda t: t[f"{P}.weight_scale"][3].fill_(torch.nan), "weight_scale holds values that are NaN or infinite"),
    "infinite-scale-packed": (PACK, lambda t: t[f"{P}.weight_scale"][3].fill_(torch.inf), "weight_scale holds values that are NaN"),
    "nan-shape": (PACK, lambda t: t.update({f"{P}.weight_shape": torch.tensor([64, torch.nan])}), "weight_shape is torch.float32"),
    "meta": (W4, lambda t: t[f"{P}.meta"].view(-1)[0:1].fill_(0), r"keeps no two columns: row 0, columns 0\.\.3 have 0x0"),
    "packed-size": (W4, lambda t: t.update({f"{P}.weight_packed": torch.zeros(16, 300).int()}), r"weight_packed has shape \(16, 300\)"),
    "scale-beside-16-bits": (FP8, lambda t: t.update({"lm_head.weight_scale": torch.ones(128, 1)}), "lm_head.weight is torch.bfloat16"),
}


@pytest.mark.parametrize("config", [DENSE, KEPT], ids=["dense", "kept"])
@pytest.mark.parametrize(("name", "change", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused_by_layer(name, change, message, config, tmp_path):
    source = damaged(GOLDEN / name, tmp_path / "damaged", change)
    with pytest.raises(CheckpointError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    assert P in str(error.value) or "lm_head" in str(error.value)


def test_zero_points_of_symmetric_weights_are_kept_and_written_again(tmp_path):
    zero_points = {f"{P}.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8)}
    source = damaged(GOLDEN / INT8, tmp_path / "zero-points", lambda tensors: tensors.update(zero_points))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=KEPT)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_quantised_layers_that_are_not_sparse_are_dequantised(tmp_path):
    weight = torch.randn(128, 64).to(torch.float8_e4m3fn)
    layer = {"lm_head.weight": weight, "lm_head.weight_scale": torch.full((128, 1), 0.5).bfloat16()}
    source = damaged(GOLDEN / FP8, tmp_path / "mixed", lambda tensors: tensors.update(layer))
    for config in (DENSE, KEPT):
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
        assert torch.equal(model.lm_head.weight, weight.bfloat16() * 0.5)


# ---- config.json --------------------------------------------------------------------------------------------------------------------


def block_of(name):
    return json.loads((GOLDEN / name / "config.json").read_text())["quantization_config"]


def without_group_formats(block):
    return {**block, "config_groups": {"group_0": {k: v for k, v in block["config_groups"]["group_0"].items() if k != "format"}}}


SPELLINGS = {
    "0.9.4": without_group_formats({k: v for k, v in block_of(W4).items() if k not in ("version", "transform_config")}),
    "no-sparsity-block": {k: v for k, v in block_of(W4).items() if k != "sparsity_config"},
    "empty-sparsity-block": {**block_of(W4), "sparsity_config": {}},
    "mixed-precision": {**block_of(W4), "format": "mixed-precision"},
    "gptq-method": {"quant_method": "gptq_marlin_24", "bits": 4, "group_size": 128},
    "gptq-format": {"quant_method": "gptq", "checkpoint_format": "marlin_24", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}


@pytest.mark.parametrize("block", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_marlin_is_read(block):
    parsed = parse_config({"quantization_config": block})
    assert parsed.quantized and isinstance(parsed.sparsity, Sparse24Config)
    scheme = parsed.sparsity.quantization
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.group_size) == (4, "int", "group", 128)
    assert parsed.sparsity.compressor.format == ("gptq-marlin-24" if "bits" in block else "marlin-24")


def test_schemes_of_a_file_are_written_again_as_they_are():
    block = block_of(FP8)
    block["config_groups"]["group_0"]["weights"]["observer"] = "mse"
    block["config_groups"]["group_1"] = {**block["config_groups"]["group_0"], "targets": ["re:.*vision.*"], "mine": 1}
    written = parse_config({"quantization_config": block}).sparsity.to_dict()
    assert written["config_groups"].pop(GUARD) == ["Linear"]
    assert written == block


REFUSED = {
    "asymmetric": (W4, lambda weights: weights.update(symmetric=False), "asymmetric"),
    "3-bits": (W4, lambda weights: weights.update(num_bits=3), "num_bits"),
    "bits-as-text": (FP8, lambda weights: weights.update(num_bits="8"), "num_bits"),
    "block": (FP8, lambda weights: weights.update(strategy="block"), "strategy"),
}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_scheme_that_cannot_be_read_is_refused_by_group(name, change, message):
    block = block_of(name)
    change(block["config_groups"]["group_0"]["weights"])
    with pytest.raises(CheckpointError, match=f"(?s)config_groups.group_0.*{message}"):
        parse_config({"quantization_config": block})


@pytest.mark.parametrize(
    ("change", "message"), [({"bits": 3}, "bits 3"), ({"group_size": 64}, "group_size 64"), ({"sym": False}, "asymmetric")], ids=str
)
def test_a_gptq_block_that_cannot_be_read_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config({"quantization_config": {**SPELLINGS["gptq-format"], **change}})


@pytest.mark.parametrize("block", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "checkpoint_format": "marlin_24"}], ids=str)
def test_other_methods_are_left_to_others(block):
    assert parse_config({"quantization_config": block}).sparsity is None


def test_pack_quantised_without_a_sparse_block_is_left_to_stock_code():
    block = {**block_of("pack-quantized+sparse-24-bitmask"), "sparsity_config": {}}
    assert parse_config({"quantization_config": block}).sparsity is None

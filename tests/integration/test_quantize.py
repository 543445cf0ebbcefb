"""Writing quantised 2:4 checkpoints from pruned models: by saving, by packing while loading, in memory, and folder to folder."""

import json
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config, Sparse24Linear, SparseBitmaskConfig
from hf_sparse24.compressors import compressor_for
from hf_sparse24.config import GUARD, parse_config
from hf_sparse24.conversion import compress_folder, decompress_folder
from hf_sparse24.modules import LAYERS, packed_layers
from hf_sparse24.quantization import GPTQ_MARLIN, PRESETS, QuantizationScheme, quantize_weight
from hf_sparse24.quantized_linear import QuantizedSparse24Linear
from tests.conftest import GOLDEN
from tests.models import DENSE, FAMILIES, KEPT, llama, logits, make_2_4, same_bytes, tensors_of

GPTQ = PRESETS["w4a16"].model_copy(update={"format": GPTQ_MARLIN})
SCHEMES = {**PRESETS, "gptq-w4a16": GPTQ, "fp8-tensor": QuantizationScheme(type="float", strategy="tensor"), "w8-g128": None}
SCHEMES["w8-g128"] = QuantizationScheme(num_bits=8, strategy="group", group_size=128)
# Relative error of the logits of a random model: 8 bits of mantissa, 4 of float8, 4 bits.
WORST = {"int8": 0.02, "w8a16": 0.02, "w8-g128": 0.02, "fp8": 0.1, "fp8-tensor": 0.1, "w4a16": 0.3, "gptq-w4a16": 0.3}


def model_256(dtype=torch.float16):
    """K is 128, 256 and 512 in it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2, head_dim=64, dtype=dtype
    )
    return make_2_4(LlamaForCausalLM._from_config(config, dtype=dtype).eval())


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    model_256().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def saved(scheme, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model_256().save_pretrained(folder, sparsity_config=Sparse24Config(quantization=SCHEMES[scheme]))
    return folder


def test_saved_model_opens_both_ways_with_the_weights_that_were_rounded(scheme, saved):
    model, kept, dense = model_256(), AutoModelForCausalLM.from_pretrained(saved, quantization_config=KEPT), None
    dense = AutoModelForCausalLM.from_pretrained(saved, quantization_config=DENSE)
    assert torch.equal(logits(kept), logits(dense))
    compressor = compressor_for("sparse-24-bitmask", SCHEMES[scheme])
    layers = packed_layers(kept)
    assert len(layers) == 7 and {type(layer) for layer in layers.values()} == {LAYERS[compressor.format]}
    for name, layer in layers.items():
        weight = model.get_submodule(name).weight
        integers, scale = quantize_weight(weight, weight != 0, SCHEMES[scheme])
        found, found_scale = layer.compressor.decompress_integers(layer.parts())
        assert torch.equal(found.float(), integers.float()) and torch.equal(found_scale, scale), name
        assert not dense.get_submodule(name).weight[weight == 0].any(), name
    relative = torch.linalg.vector_norm(logits(dense) - logits(model)) / torch.linalg.vector_norm(logits(model))
    assert 0 < relative < WORST[scheme]


def test_saved_config_says_how_and_stops_who_does_not_know(scheme, saved):
    block = json.loads((saved / "config.json").read_text())["quantization_config"]
    parsed = parse_config({"quantization_config": block})
    assert parsed.sparsity.quantization == SCHEMES[scheme]
    if scheme.startswith("gptq"):
        expected = {"quant_method": "gptq", "checkpoint_format": "marlin_24", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
        assert expected.items() <= block.items()
    else:
        assert block["quant_method"] == "compressed-tensors" and block["config_groups"][GUARD] == ["Linear"]
        assert block["config_groups"]["group_0"]["weights"]["num_bits"] == SCHEMES[scheme].num_bits


def test_every_way_of_writing_gives_the_same_tensors(scheme, saved, dense_folder, tmp_path):
    config = Sparse24Config(quantization=SCHEMES[scheme])
    expected = tensors_of(saved)
    kept = AutoModelForCausalLM.from_pretrained(saved, quantization_config=KEPT)
    kept.save_pretrained(tmp_path / "kept")
    AutoModelForCausalLM.from_pretrained(
        dense_folder, quantization_config=config.model_copy(update={"run_compressed": True})
    ).save_pretrained(tmp_path / "while-loading")
    ModelCompressor(config).compress_model(model_256()).save_pretrained(tmp_path / "in-place")
    compress_folder(dense_folder, tmp_path / "folder", config)
    for way in ("kept", "while-loading", "in-place", "folder"):
        found = tensors_of(tmp_path / way)
        assert set(found) == set(expected)
        assert all(same_bytes(found[name], value) for name, value in expected.items()), way
        block = json.loads((tmp_path / way / "config.json").read_text())["quantization_config"]
        assert block == json.loads((saved / "config.json").read_text())["quantization_config"], way
    state = ModelCompressor(config).compress(model_256())
    assert all(same_bytes(state[name], value) for name, value in expected.items())
    decompress_folder(saved, tmp_path / "dense-again")
    dense = AutoModelForCausalLM.from_pretrained(saved, quantization_config=DENSE)
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in tensors_of(tmp_path / "dense-again").items())


def test_quantised_layers_say_that_activations_are_quantised_too(scheme, saved, dense_folder):
    expected = SCHEMES[scheme].activations is not None
    packing = Sparse24Config(quantization=SCHEMES[scheme], run_compressed=True)
    for model in (
        AutoModelForCausalLM.from_pretrained(saved, quantization_config=KEPT),
        AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=packing),
        ModelCompressor(packing).compress_model(model_256()),
    ):
        assert {layer.quantize_x for layer in packed_layers(model).values()} == {expected}


@pytest.mark.parametrize("name", ["marlin-24-w4-channel", "marlin-24-w4-g128", "marlin-24-w8-channel", "marlin-24-w8-g128"])
def test_original_model_is_saved_as_the_old_writer_did_byte_by_byte(name, tmp_path):
    folder = GOLDEN / name
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    (tmp_path / "original").mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "original" / "config.json").write_text(json.dumps(config))
    (tmp_path / "original" / "model.safetensors").write_bytes((folder / "dense_original.safetensors").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    scheme = parse_config({"quantization_config": block}).sparsity.quantization
    config = Sparse24Config(quantization=scheme, readable_by="compressed-tensors")
    model.save_pretrained(tmp_path / "saved", sparsity_config=config)
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    for side in (written["sparsity_config"], block["sparsity_config"]):
        side.pop("global_sparsity"), side.pop("readable_by", None)
    assert written == block


@pytest.mark.parametrize("name", ["float-quantized+sparse-24-bitmask", "int-quantized+sparse-24-bitmask"])
def test_config_for_old_readers_is_what_the_old_writer_wrote(name):
    block = json.loads((GOLDEN / name / "config.json").read_text())["quantization_config"]
    written = Sparse24Config(
        quantization=name.split("-")[0].replace("float", "fp8").replace("int", "int8"), readable_by="compressed-tensors"
    )
    written = {**written.to_dict(), "sparsity_config": None}
    assert written == {**block, "sparsity_config": None}


def test_unstructured_weights_are_quantised_too(tmp_path):
    model = llama()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                # Rounds to zero, which must not be counted as a value.
                module.weight[:, ::3] *= 1e-6
                module.weight[torch.rand_like(module.weight) < 0.3] = 0
    model.save_pretrained(tmp_path, sparsity_config=SparseBitmaskConfig(quantization="int8"), max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_of(tmp_path).values())
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KEPT)
    assert torch.equal(logits(kept), logits(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=DENSE)))


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "bert", "llava", "t5"])
def test_families_are_written_and_read(family, tmp_path):
    family = FAMILIES[family]
    model = family.build()
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(quantization="fp8"))
    dense, info = type(model).from_pretrained(tmp_path, quantization_config=DENSE, output_loading_info=True)
    assert not any(info.values()), info
    kept = type(model).from_pretrained(tmp_path, quantization_config=KEPT)
    assert sum(isinstance(module, QuantizedSparse24Linear) for module in kept.modules()) == family.num_packed
    torch.testing.assert_close(logits(kept, **family.inputs), logits(dense, **family.inputs))


def test_integers_of_a_better_method_are_taken_over(tmp_path):
    model, name = model_256(), "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(name).weight.detach()
    integers, scale = quantize_weight(weight, weight != 0, PRESETS["w4a16"])
    integers[integers > 0] -= 1
    compressor = ModelCompressor(Sparse24Config(quantization="w4a16"))
    compressor.compress_model(model, {name: (integers, scale)}).save_pretrained(tmp_path)
    layers = packed_layers(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KEPT))
    assert torch.equal(layers[name].compressor.decompress_integers(layers[name].parts())[0], integers)
    other = "model.layers.0.mlp.gate_proj"
    rounded, _ = quantize_weight(model_256().get_submodule(other).weight, None, PRESETS["w4a16"])
    assert torch.equal(layers[other].compressor.decompress_integers(layers[other].parts())[0], rounded)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lm_head", lambda q: q, "lm_head: integers were given for a module that is not packed"),
        ("model.layers.0.mlp.up_proj", lambda q: q + 100, r"up_proj: integers run from"),
        ("model.layers.0.mlp.up_proj", lambda q: q[:, :128], r"up_proj: scale has shape \(512, 2\)"),
    ],
    ids=["not-packed", "range", "shape"],
)
def test_integers_that_do_not_fit_are_refused_by_layer_and_nothing_is_changed(name, change, message):
    model = model_256()
    weight = model.model.layers[0].mlp.up_proj.weight
    integers, scale = quantize_weight(weight, None, PRESETS["w4a16"])
    with pytest.raises(ValueError, match=message):
        ModelCompressor(Sparse24Config(quantization="w4a16")).compress_model(model, {name: (change(integers), scale)})
    assert not packed_layers(model)


# ---- refused ------------------------------------------------------------------------------------------------------------------------


def test_what_the_format_cannot_hold_is_refused_by_layer_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj: .*out_features 32 is not a multiple of 64"):
        llama().save_pretrained(tmp_path / "out", sparsity_config=Sparse24Config(quantization="w8a16"))
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight[3].fill_(torch.nan), "NaN or infinite, the first in row 3"),
        (lambda weight: weight[3].fill_(1.0), "not 2:4"),
        (lambda weight: weight.mul_(1e-5), r"the scale .* does not fit torch.float16"),
    ],
    ids=["nan", "dense", "scale"],
)
def test_values_that_cannot_be_held_are_refused_by_layer(change, message, tmp_path):
    model = model_256(torch.bfloat16)
    change(model.model.layers[0].mlp.up_proj.weight.data)
    for write in (
        lambda config: model.save_pretrained(tmp_path / "out", sparsity_config=config),
        lambda config: ModelCompressor(config).compress_model(model),
    ):
        with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj: .*{message}"):
            write(Sparse24Config(quantization="w4a16"))
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj\.weight: .*{message}"):
        compress_folder(tmp_path / "dense", tmp_path / "out", Sparse24Config(quantization="w4a16"))
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj\.weight: .*{message}"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "dense", quantization_config=Sparse24Config(quantization="w4a16", run_compressed=True)
        )


def test_layers_that_are_left_dense_are_ignored_in_the_config(tmp_path):
    model = model_256()
    model.model.layers[0].mlp.up_proj.weight.data.fill_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(quantization="w4a16", on_dense="skip"))
    assert any("model.layers.0.mlp.up_proj" in str(warning.message) for warning in caught)
    block = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert block["ignore"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KEPT)
    assert len(packed_layers(kept)) == 6 and torch.equal(kept.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(tmp_path / "dense")
    with pytest.warns(UserWarning, match="1 targeted weights are stored dense"):
        compress_folder(tmp_path / "dense", tmp_path / "folder", Sparse24Config(quantization="w4a16", on_dense="skip"))
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["quantization_config"]["ignore"] == block["ignore"]


@pytest.mark.parametrize(
    "fields",
    [{"quantization": "fp4"}, {"quantization": {"num_bits": 4, "symmetric": False}}, {"quantization": {"group_size": 64}}],
    ids=str,
)
def test_a_wrong_scheme_is_refused_where_it_is_written_down(fields):
    with pytest.raises(ValueError, match="quantization"):
        Sparse24Config(**fields)


def test_group_size_64_is_refused_by_layer(tmp_path):
    config = Sparse24Config(quantization={"num_bits": 4, "strategy": "group", "group_size": 64})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj: group size 64"):
        model_256().save_pretrained(tmp_path, sparsity_config=config)


def test_a_model_that_is_kept_in_another_scheme_is_not_mixed(saved, scheme, tmp_path):
    kept = AutoModelForCausalLM.from_pretrained(saved, quantization_config=KEPT)
    for other in set(SCHEMES) - {scheme}:
        with pytest.raises(ValueError, match=r"call model\.dequantize"):
            kept.save_pretrained(tmp_path, sparsity_config=Sparse24Config(quantization=SCHEMES[other]))


def test_compressed_or_quantised_source_is_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match="packed already"):
        compress_folder(saved, tmp_path / "out", Sparse24Config(quantization="fp8"))


def test_auto_does_not_quantise(tmp_path):
    model_256().save_pretrained(tmp_path, sparsity_config="auto")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=KEPT)
    assert {type(layer) for layer in packed_layers(kept).values()} == {Sparse24Linear}

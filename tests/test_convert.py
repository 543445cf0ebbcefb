"""From one packed format to another, without the original: integers stay, values stay, or the user says how to round."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_sparse24 import CheckpointError, Sparse24Config
from hf_sparse24.cli import main
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.config import parse_config
from hf_sparse24.conversion import convert_folder, decompress_folder
from hf_sparse24.quantization import GPTQ_MARLIN, PRESETS, QuantizationScheme, exact_integers
from tests.conftest import GOLDEN
from tests.integration.test_quantize import model_256
from tests.models import KEPT, logits, same_bytes, tensors_of, two_of_four

MARLIN_FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith("marlin"))
W4_GPTQ = PRESETS["w4a16"].model_copy(update={"format": GPTQ_MARLIN})


def scheme_of(folder):
    return parse_config(json.loads((folder / "config.json").read_text())).sparsity.quantization


def same_tensors(found, expected):
    return set(found) == set(expected) and all(same_bytes(found[name], value) for name, value in expected.items())


def golden_tensors(name):
    tensors = tensors_of(GOLDEN / name)  # dense_original.safetensors lies beside
    return {key: value for key, value in tensors.items() if not (key.endswith("_proj.weight"))}


@pytest.mark.parametrize("name", MARLIN_FOLDERS)
def test_marlin_to_gptq_and_back_is_byte_by_byte(name, tmp_path):
    convert_folder(GOLDEN / name, tmp_path / "gptq", "gptq-marlin-24")
    suffixes = {key.rpartition(".")[2] for key in tensors_of(tmp_path / "gptq")}
    assert suffixes == {"B_24", "B_meta", "s", "weight"}
    assert scheme_of(tmp_path / "gptq") == scheme_of(GOLDEN / name).model_copy(update={"format": GPTQ_MARLIN})
    original = AutoModelForCausalLM.from_pretrained(GOLDEN / name)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "gptq")), logits(original))
    convert_folder(tmp_path / "gptq", tmp_path / "back", "marlin-24")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (GOLDEN / name / "model.safetensors").read_bytes()
    assert scheme_of(tmp_path / "back") == scheme_of(GOLDEN / name)


def test_scales_at_k_256_are_put_in_the_other_order(tmp_path):
    for name, scheme in (("marlin", PRESETS["w4a16"]), ("gptq", W4_GPTQ)):
        model_256().save_pretrained(tmp_path / name, sparsity_config=Sparse24Config(quantization=scheme))
    convert_folder(tmp_path / "marlin", tmp_path / "to-gptq", "gptq-marlin-24")
    convert_folder(tmp_path / "gptq", tmp_path / "to-marlin", "marlin-24")
    assert same_tensors(tensors_of(tmp_path / "to-gptq"), tensors_of(tmp_path / "gptq"))
    assert same_tensors(tensors_of(tmp_path / "to-marlin"), tensors_of(tmp_path / "marlin"))
    name = "model.layers.0.self_attn.q_proj"
    scales = tensors_of(tmp_path / "marlin")[f"{name}.scale_packed"], tensors_of(tmp_path / "gptq")[f"{name}.s"]
    assert scales[0].shape == (2, 128) and not torch.equal(*scales)


@pytest.mark.parametrize("to", ["sparse-24-bitmask", "sparse-bitmask", "dense"])
@pytest.mark.parametrize("name", ["marlin-24-w4-g128", "float-quantized+sparse-24-bitmask", "pack-quantized+sparse-24-bitmask"])
def test_dequantised_weights_are_stored_as_they_are(name, to, tmp_path):
    convert_folder(GOLDEN / name, tmp_path / "out", to)
    original = AutoModelForCausalLM.from_pretrained(GOLDEN / name)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(found), logits(original))
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in found.state_dict().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if to == "dense":
        assert "quantization_config" not in config
    else:
        assert config["quantization_config"]["sparsity_config"]["format"] == to and scheme_of(tmp_path / "out") is None


@pytest.mark.parametrize("by_way_of", ["sparse-24-bitmask", "dense"])
@pytest.mark.parametrize("name", MARLIN_FOLDERS)
def test_weights_that_were_dequantised_get_their_integers_back(name, by_way_of, tmp_path):
    """In another order where several integers and scales have the same product: the values are the same."""
    convert_folder(GOLDEN / name, tmp_path / "between", by_way_of)
    convert_folder(tmp_path / "between", tmp_path / "back", "marlin-24", scheme_of(GOLDEN / name))
    original = AutoModelForCausalLM.from_pretrained(GOLDEN / name)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", quantization_config=KEPT)
    assert torch.equal(logits(back), logits(original))
    assert all(
        torch.equal(module.weight + 0, original.get_submodule(key).weight)
        for key, module in back.named_modules()
        if hasattr(module, "quantize_x")
    )


@pytest.mark.parametrize(
    "scheme",
    [PRESETS["w4a16"], PRESETS["w8a16"], QuantizationScheme(num_bits=4), QuantizationScheme(num_bits=8, strategy="group", group_size=128)],
    ids=["w4-g128", "w8-channel", "w4-channel", "w8-g128"],
)
def test_products_of_integers_and_scales_are_taken_apart_exactly(scheme):
    torch.manual_seed(0)
    low, high = scheme.int_range
    integers = two_of_four(torch.randint(low, high + 1, (64, 256)).float())
    integers[:, 0], integers[3] = low, 0
    scale = torch.rand(64, 256 // (scheme.group_size or 256)).half() * 0.01 + 0.001
    weight = (integers.half().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
    found = exact_integers(weight, scheme)
    assert found is not None
    products = (found[0].half().unflatten(1, (scale.shape[1], -1)) * found[1].unsqueeze(-1)).flatten(1)
    assert torch.equal(products, weight) and found[0].min() >= low and found[0].max() <= high
    weight[5, 9] *= 1.01
    assert exact_integers(weight, scheme) is None
    assert exact_integers(weight.bfloat16(), scheme) is None


def test_packed_4_bits_become_marlin_with_the_same_integers(tmp_path):
    """Half of the bytes for a 2:4 model that compressed-tensors did not store sparse."""
    source = tmp_path / "packed"
    model_256(torch.bfloat16).save_pretrained(tmp_path / "dense")
    shutil.copytree(tmp_path / "dense", source)
    write_pack_quantized(tmp_path / "dense", source)
    convert_folder(source, tmp_path / "marlin", "marlin-24")
    before, after = AutoModelForCausalLM.from_pretrained(source), AutoModelForCausalLM.from_pretrained(tmp_path / "marlin")
    assert torch.equal(logits(before), logits(after))


def write_pack_quantized(dense, target):
    tensors = {}
    for name, value in tensors_of(dense).items():
        base = name.removesuffix(".weight")
        if not base.endswith("_proj"):
            tensors[name] = value
            continue
        # Scales that both float16 and bfloat16 hold.
        integers = (value.float() * 64).round().clamp(-8, 7).to(torch.int32) + 8
        words = (integers.view(len(integers), -1, 8) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
        shape, scale = torch.tensor(value.shape), torch.full((len(value), 1), 1 / 64).bfloat16()
        tensors |= {f"{base}.weight_packed": words, f"{base}.weight_scale": scale, f"{base}.weight_shape": shape}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    golden = json.loads((GOLDEN / "pack-quantized+sparse-24-bitmask" / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": golden["quantization_config"]}))


def test_dense_and_packed_folders_are_quantised_alike(tmp_path):
    model_256(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model_256(torch.bfloat16).save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    for source in ("dense", "packed"):
        convert_folder(tmp_path / source, tmp_path / f"{source}-fp8", "sparse-24-bitmask", "fp8")
    assert same_tensors(tensors_of(tmp_path / "dense-fp8"), tensors_of(tmp_path / "packed-fp8"))
    assert scheme_of(tmp_path / "dense-fp8") == scheme_of(tmp_path / "packed-fp8") == PRESETS["fp8"]


def test_shards_are_converted_one_by_one(tmp_path):
    model = model_256()
    model.save_pretrained(tmp_path / "one", sparsity_config=Sparse24Config(quantization="w4a16"))
    model.save_pretrained(tmp_path / "many", sparsity_config=Sparse24Config(quantization="w4a16"), max_shard_size="100KB")
    for source in ("one", "many"):
        convert_folder(tmp_path / source, tmp_path / f"{source}-gptq", "gptq-marlin-24")
    assert len(list((tmp_path / "many-gptq").glob("*.safetensors"))) == len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert same_tensors(tensors_of(tmp_path / "many-gptq"), tensors_of(tmp_path / "one-gptq"))
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "many-gptq")), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "one"))
    )


# ---- refused ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "to", "quantization", "message"),
    [
        ("sparse-24-bitmask", "marlin-24", None, "the source is not quantised: say how"),
        ("sparse-24-bitmask", "fp8", None, "unknown format 'fp8'"),
        ("sparse-24-bitmask", "sparse-24-bitmask", "w4a16", "convert to marlin-24"),
        ("sparse-24-bitmask", "sparse-24-bitmask", "w2", "unknown quantization 'w2'"),
        ("sparse-24-bitmask", "dense", "fp8", "dense weights are not quantised"),
        ("float-quantized+sparse-24-bitmask", "marlin-24", None, "marlin-24 holds integers"),
        ("sparse-bitmask", "sparse-24-bitmask", None, r"model\.layers\.0\..*\.weight: not 2:4"),
        ("int-quantized+sparse-24-bitmask", "marlin-24", None, r"model\.layers\..*k_proj\.weight: out_features 32 is not a multiple of 64"),
        (
            "sparse-24-bitmask",
            "marlin-24",
            "w4a16",
            r"model\.layers\.0\..*\.weight: in_features 64 is not a multiple of the group size 128",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(name, to, quantization, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert_folder(GOLDEN / name, tmp_path / "out", to, quantization)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_weight_that_is_not_quantised_is_not_rounded_unasked(tmp_path):
    model_256().save_pretrained(tmp_path / "mixed", sparsity_config=Sparse24Config(quantization="w4a16"))
    tensors = tensors_of(tmp_path / "mixed")
    up_proj = "model.layers.0.mlp.up_proj"
    tensors = {name: value for name, value in tensors.items() if not name.startswith(up_proj)}
    parts = Sparse24Compressor().compress_weight(model_256().get_parameter(f"{up_proj}.weight"))
    save_file({**tensors, **{f"{up_proj}.{part}": value for part, value in parts.items()}}, tmp_path / "mixed" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{up_proj}\.weight: is not quantised, as others are"):
        convert_folder(tmp_path / "mixed", tmp_path / "out", "gptq-marlin-24")
    convert_folder(tmp_path / "mixed", tmp_path / "asked", "gptq-marlin-24", "w4a16")
    assert f"{up_proj}.B_24" in tensors_of(tmp_path / "asked")


@pytest.mark.parametrize("to", ["dense", "sparse-24-bitmask"])
def test_scales_of_activations_are_not_left_out_in_silence(to, tmp_path):
    with pytest.warns(UserWarning, match="the input_scale of 14 weights"):
        convert_folder(GOLDEN / "float-quantized-static+sparse-24-bitmask", tmp_path / "out", to)


def test_a_damaged_source_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "marlin-24-w4-g128", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        convert_folder(tmp_path / "damaged", tmp_path / "out", "gptq-marlin-24")


# ---- command line -------------------------------------------------------------------------------------------------------------------


def test_command_line_converts(tmp_path, capsys):
    source = GOLDEN / "marlin-24-w4-g128"
    assert main(["convert", str(source), str(tmp_path / "gptq"), "--to", "gptq-marlin-24"]) == 0
    assert "7 of" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "dense"), "--to", "dense", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["num_packed"] == 0
    decompress_folder(source, tmp_path / "expected")
    assert same_tensors(tensors_of(tmp_path / "dense"), tensors_of(tmp_path / "expected"))
    assert main(["compress", str(tmp_path / "dense"), str(tmp_path / "again"), "--quantization", "w4a16"]) == 0
    assert scheme_of(tmp_path / "again") == PRESETS["w4a16"]


def test_command_line_says_in_one_line_what_is_wrong(tmp_path, capsys):
    assert main(["convert", str(GOLDEN / "dense"), str(tmp_path / "out"), "--to", "marlin-24"]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("hf-sparse24 convert: the source is not quantised")

"""Checkpoints that compressed-tensors wrote: opened exactly, written again byte by byte; those that are quantised, in test_quantized.py."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_sparse24 import (
    DenseSparsityConfig,
    ModelCompressor,
    Sparse24Config,
    Sparse24Linear,
    SparseBitmaskConfig,
    SparseBitmaskLinear,
)
from hf_sparse24.linear import PackedLinear
from tests.conftest import GOLDEN
from tests.models import DENSE, KEPT, logits, same_bytes

# Folder -> class of the layers that stay packed, and how many there are.
UNQUANTISED = {
    "dense": (Sparse24Linear, 14),  # packed while it loads
    "sparse-24-bitmask": (Sparse24Linear, 14),
    "sparse-bitmask": (SparseBitmaskLinear, 14),
    "sparse-bitmask-ct0.8.1": (SparseBitmaskLinear, 15),  # every tensor is packed there, lm_head too
}
CONFIGS = {"sparse-24-bitmask": Sparse24Config, "sparse-bitmask": SparseBitmaskConfig}
SUFFIXES = ("compressed", "bitmask", "shape", "row_offsets")


@pytest.fixture(scope="module", params=UNQUANTISED)
def folder(request):
    return GOLDEN / request.param


@pytest.fixture(scope="module")
def original(folder, tmp_path_factory):
    """The dense model before compression, opened by stock Transformers."""
    return stock_model(folder, tmp_path_factory.mktemp("original"))


def stock_model(folder, target):
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "dense_original.safetensors", target / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.parametrize("config", [None, DENSE], ids=["default", "dense"])
def test_opens_as_plain_layers_with_the_original_logits(folder, original, config):
    options = {} if config is None else {"quantization_config": config}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(original))
    values = load_file(folder / "dense_original.safetensors")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_keeps_layers_packed_with_the_original_logits(folder, original):
    layer_class, num_packed = UNQUANTISED[folder.name]
    model, info = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT, output_loading_info=True)
    assert not any(info.values()), info
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert [type(module) for module in packed] == [layer_class] * num_packed
    assert torch.equal(logits(model), logits(original))


def test_compressor_fills_a_dense_model(folder, original):
    model = LlamaForCausalLM(original.config).to(torch.bfloat16)
    buffers = {name: value.clone() for name, value in original.named_buffers()}
    for name, value in buffers.items():
        model.get_buffer(name).data = value
    compressor = ModelCompressor.from_pretrained(folder)
    assert isinstance(compressor.sparsity_config, CONFIGS.get(folder.name.removesuffix("-ct0.8.1"), DenseSparsityConfig))
    assert compressor.decompress(model_path=folder, model=model) is model
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model.eval()), logits(original))


# ---- written again -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_kept_model_writes_the_same_file(name, tmp_path):
    AutoModelForCausalLM.from_pretrained(GOLDEN / name, quantization_config=KEPT).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (GOLDEN / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_model_writes_the_same_file(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, quantization_config=DENSE)
    model.save_pretrained(tmp_path, sparsity_config=CONFIGS[name]())
    assert (tmp_path / "model.safetensors").read_bytes() == (GOLDEN / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_original_with_negative_zeros_writes_the_same_file(name, tmp_path):
    (tmp_path / "original").mkdir()
    stock_model(GOLDEN / name, tmp_path / "original").save_pretrained(tmp_path / "packed", sparsity_config=CONFIGS[name]())
    assert (tmp_path / "packed" / "model.safetensors").read_bytes() == (GOLDEN / name / "model.safetensors").read_bytes()


def test_old_key_spelling_is_written_again_in_todays(tmp_path):
    folder = GOLDEN / "sparse-bitmask-ct0.8.1"
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT).save_pretrained(tmp_path)
    written, old = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    packed = {name for name in written if name.rpartition(".")[2] in SUFFIXES}
    assert len(packed) == 15 * len(SUFFIXES)
    for name in packed:
        module, _, part = name.rpartition(".")
        assert same_bytes(written[name], old[f"{module}.weight.{part}"]), name
    dense = load_file(folder / "dense_original.safetensors")
    plain = set(written) - packed
    assert plain == {name for name in dense if "norm" in name or "embed" in name}
    assert all(torch.equal(written[name], dense[name]) for name in plain)

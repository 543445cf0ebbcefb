"""ModelCompressor: models in memory and checkpoints on disk, by the names that users of compressed-tensors know."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from hf_sparse24 import (
    CheckpointError,
    DenseSparsityConfig,
    ModelCompressor,
    Sparse24Config,
    Sparse24Linear,
    SparseBitmaskConfig,
    SparseBitmaskLinear,
)
from hf_sparse24.compressors import Sparse24Compressor
from tests.models import (
    FAMILIES,
    SIZES,
    files_of,
    llama,
    load_dense,
    load_kept,
    logits,
    packed_names,
    same_bytes,
    state_bytes,
    tensors_of,
    two_of_four,
)

SHARD = "30KB"


@pytest.fixture
def model():
    return llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    llama().save_pretrained(folder, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    return folder


def empty_llama(**overrides):
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **overrides})).eval()


# ---- which config -----------------------------------------------------------------------------------------------------------------


def test_from_pretrained_reads_the_config_of_the_folder(tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head", "model.layers.0"]))
    config = ModelCompressor.from_pretrained(tmp_path).sparsity_config
    assert config.ignore == ["lm_head", "model.layers.0"]
    assert type(ModelCompressor.from_pretrained(str(tmp_path)).sparsity_config) is Sparse24Config


@pytest.mark.parametrize("config", [Sparse24Config(), SparseBitmaskConfig()], ids=lambda config: config.format)
def test_from_pretrained_without_a_config_goes_by_the_tensors(config, tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=config)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert type(ModelCompressor.from_pretrained(tmp_path).sparsity_config) is type(config)
    (tmp_path / "config.json").unlink()
    assert type(ModelCompressor.from_pretrained(tmp_path).sparsity_config) is type(config)


def test_from_pretrained_of_a_dense_folder_is_dense(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert type(ModelCompressor.from_pretrained(tmp_path).sparsity_config) is DenseSparsityConfig


def test_from_pretrained_of_nothing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither"):
        ModelCompressor.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no/such/folder"):
        ModelCompressor.from_pretrained("no/such/folder/at/all")


def test_from_compression_config():
    assert ModelCompressor.from_compression_config(None) is None
    assert ModelCompressor.from_compression_config({"quant_method": "compressed-tensors", "sparsity_config": {}}) is None
    config = Sparse24Config(ignore=[])
    assert ModelCompressor.from_compression_config(config).sparsity_config is config
    assert ModelCompressor.from_compression_config(config.to_dict()).sparsity_config == config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Sparse24Config()),
        ("sparse-bitmask", SparseBitmaskConfig()),
        ({"ignore": []}, Sparse24Config(ignore=[])),
        (SparseBitmaskConfig(ignore=[]), SparseBitmaskConfig(ignore=[])),
    ],
    ids=str,
)
def test_from_pretrained_model(model, given, expected):
    assert ModelCompressor.from_pretrained_model(model, sparsity_config=given).sparsity_config == expected


def test_from_pretrained_model_takes_the_models_own_config(tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=SparseBitmaskConfig(ignore=["lm_head"]))
    assert isinstance(ModelCompressor.from_pretrained_model(load_kept(tmp_path)).sparsity_config, SparseBitmaskConfig)


# ---- models in memory -------------------------------------------------------------------------------------------------------------


def test_compress_gives_the_tensors_of_the_checkpoint_and_leaves_the_model_alone(model, folder):
    before = state_bytes(model)
    state = ModelCompressor.from_pretrained_model(model, sparsity_config=Sparse24Config()).compress(model)
    assert state_bytes(model) == before
    stored = tensors_of(folder)
    assert state.keys() == stored.keys()
    assert all(same_bytes(value.detach(), stored[name]) for name, value in state.items())


def test_compressed_state_dict_and_config_make_a_checkpoint(model, tmp_path):
    """The way in which checkpoints were written with compressed-tensors."""
    wanted = logits(model)
    compressor = ModelCompressor.from_pretrained_model(model, sparsity_config=Sparse24Config())
    model.save_pretrained(tmp_path, state_dict=compressor.compress(model))
    compressor.update_config(tmp_path)
    for load in (load_dense, load_kept):
        assert torch.equal(logits(load(tmp_path)), wanted)


def test_compress_refuses_what_does_not_fit(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(1)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: not 2:4"):
        ModelCompressor(Sparse24Config()).compress(model)


@pytest.mark.parametrize(
    ("config", "layer_class"),
    [(Sparse24Config(), Sparse24Linear), (SparseBitmaskConfig(), SparseBitmaskLinear)],
    ids=["2:4", "bitmask"],
)
def test_compress_model_packs_in_place_and_decompress_model_undoes_it(model, config, layer_class, tmp_path):
    wanted, before = logits(model), state_bytes(model)
    compressor = ModelCompressor(config)
    assert compressor.compress_model(model) is model
    packed = [name for name, module in model.named_modules() if type(module) is layer_class]
    assert len(packed) == 14
    assert torch.equal(logits(model), wanted)
    model.save_pretrained(tmp_path / "from-memory", max_shard_size=SHARD)
    llama().save_pretrained(tmp_path / "saved", sparsity_config=config, max_shard_size=SHARD)
    from_memory, saved = files_of(tmp_path / "from-memory"), files_of(tmp_path / "saved")
    assert {name for name in saved if from_memory.get(name) != saved[name]} <= {"config.json"}
    assert compressor.decompress_model(model) is model
    assert not any(isinstance(module, layer_class) for module in model.modules())
    assert state_bytes(model) == before


def test_compress_model_checks_every_weight_before_it_replaces_one(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(1)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="down_proj"):
        ModelCompressor(Sparse24Config()).compress_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_compressed_model_in_memory_writes_its_sparsity_and_can_be_compressed_no_second_time(model, tmp_path):
    ModelCompressor(Sparse24Config()).compress_model(model)
    model.save_pretrained(tmp_path)
    block = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["sparsity_config"]
    llama().save_pretrained(tmp_path / "saved", sparsity_config=Sparse24Config())
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["sparsity_config"]
    assert block == saved
    with pytest.raises(ValueError, match="Linear"):
        ModelCompressor(Sparse24Config()).compress_model(model)


def test_model_without_a_linear_among_its_targets_is_refused(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(two_of_four(model.model.embed_tokens.weight))
    with pytest.raises(ValueError, match=r"none of the 1 targeted modules is an nn\.Linear"):
        ModelCompressor(Sparse24Config(targets=["model.embed_tokens"])).compress_model(model)


def test_embedding_named_as_a_target_is_stored_packed_and_comes_back(model, tmp_path):
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(two_of_four(model.model.embed_tokens.weight))
    wanted = logits(model)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(targets=["Linear", "model.embed_tokens"]))
    assert "model.embed_tokens.bitmask" in tensors_of(tmp_path)
    for load in (load_dense, load_kept):
        again = load(tmp_path)
        assert type(again.model.embed_tokens) is nn.Embedding
        assert torch.equal(logits(again), wanted)


def test_packed_layers_of_a_plain_module_are_unpacked():
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.copy_(two_of_four(layer.weight))
    module = nn.Sequential(Sparse24Linear.from_linear(layer), nn.ReLU())
    assert ModelCompressor(Sparse24Config()).decompress_model(module) is module
    assert type(module[0]) is nn.Linear
    assert torch.equal(module[0].weight, layer.weight)


def test_update_config_writes_into_an_existing_config_or_makes_one(tmp_path):
    compressor = ModelCompressor(Sparse24Config())
    compressor.update_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"quantization_config": Sparse24Config().to_dict()}
    (tmp_path / "config.json").write_text('{"hidden_size": 4, "quantization_config": {"old": 1}}')
    compressor.update_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 4, "quantization_config": Sparse24Config().to_dict()}


# ---- checkpoints on disk into a model ------------------------------------------------------------------------------------------------


def test_decompress_fills_a_dense_model(model, folder):
    other = empty_llama()
    assert ModelCompressor.from_pretrained(folder).decompress(model_path=folder, model=other) is other
    assert state_bytes(other) == state_bytes(model)
    assert torch.equal(logits(other), logits(model))
    assert not packed_names(other)


def test_decompress_keeps_the_models_dtype(folder):
    other = empty_llama().to(torch.bfloat16)
    ModelCompressor.from_pretrained(folder).decompress(folder, other)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.bfloat16}
    wanted = load_dense(folder, dtype=torch.bfloat16).state_dict()
    assert all(same_bytes(value, wanted[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("family", ["mixtral", "llama-tied", "bert", "llava"])
def test_decompress_renames_merges_and_ties_as_transformers_does(family, tmp_path):
    family = FAMILIES[family]
    model = family.build()
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    reference = load_dense(tmp_path, family.model_class)
    torch.manual_seed(7)
    other = family.model_class(family.config()).eval()
    ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path, other)
    assert torch.equal(logits(other, **family.inputs), logits(reference, **family.inputs))


def test_decompress_fills_a_plain_module(tmp_path):
    module = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    weight = two_of_four(torch.randn(8, 16))
    parts = {f"0.{part}": value for part, value in Sparse24Compressor().compress_weight(weight).items()}
    rest = {"0.bias": torch.ones(8), "2.weight": torch.ones(4, 8), "2.bias": torch.zeros(4)}
    save_file({**parts, **rest}, tmp_path / "model.safetensors")
    ModelCompressor(Sparse24Config()).decompress(tmp_path, module)
    assert torch.equal(module[0].weight, weight)
    assert torch.equal(module[2].weight, torch.ones(4, 8))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..*not in the checkpoint"),
        ({"num_hidden_layers": 1}, r"the model has no model\.layers\.1\."),
        ({"intermediate_size": 128}, r"shape \(64, 32\).* is \(128, 32\)"),
    ],
    ids=str,
)
def test_decompress_refuses_another_architecture_and_leaves_the_model_alone(folder, overrides, reason):
    other = empty_llama(**overrides)
    before = state_bytes(other)
    with pytest.raises(CheckpointError, match=reason):
        ModelCompressor.from_pretrained(folder).decompress(folder, other)
    assert state_bytes(other) == before


def test_decompress_refuses_another_class(folder):
    other = FAMILIES["bert"].build()
    assert isinstance(other, BertForSequenceClassification)
    with pytest.raises(CheckpointError, match="not the checkpoint of this BertForSequenceClassification"):
        ModelCompressor.from_pretrained(folder).decompress(folder, other)


def test_decompress_refuses_a_model_with_packed_layers(folder):
    with pytest.raises(ValueError, match="has packed layers: call decompress_model"):
        ModelCompressor.from_pretrained(folder).decompress(folder, load_kept(folder))


def test_decompress_of_a_damaged_checkpoint_leaves_the_model_alone(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    file = next(file for file in sorted(broken.glob("*.safetensors")) if any(name.endswith(".bitmask") for name in load_file(file)))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".bitmask"))
    tensors[name][0, 0] = 0b0111
    save_file(tensors, file, metadata={"format": "pt"})
    other = empty_llama()
    before = state_bytes(other)
    with pytest.raises(CheckpointError, match=name.removesuffix(".bitmask")):
        ModelCompressor.from_pretrained(folder).decompress(broken, other)
    assert state_bytes(other) == before


def test_expert_that_is_missing_is_an_error(tmp_path):
    family = FAMILIES["mixtral"]
    family.build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    tensors = tensors_of(tmp_path)
    gone = next(name for name in tensors if ".experts.2." in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(7)
    other = MixtralForCausalLM(family.config())
    with pytest.raises((CheckpointError, RuntimeError)):
        ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path, other)

"""`save_pretrained(sparsity_config=...)`: what is written, what is refused before anything is, and what stays untouched."""

import copy
import inspect
import json
import re
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.base import HfQuantizer

import hf_sparse24
from hf_sparse24 import ModelCompressor, Sparse24Config, SparseBitmaskConfig, SparseBitmaskLinear, staging
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.integration import save as save_hook
from tests.models import (
    KEPT,
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
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture
def model():
    return llama()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """What an ordinary save of `model` writes, sharded."""
    folder = tmp_path_factory.mktemp("packed")
    llama().save_pretrained(folder, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    return folder


def block_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["sparsity_config"]


# ---- what is written -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 9 / 16), (torch.float16, 9 / 16), (torch.float32, 17 / 32)], ids=str)
def test_layer_takes_exactly_its_share_of_the_dense_bytes(dtype, share, tmp_path):
    model = llama(dtype, hidden_size=64, intermediate_size=512, head_dim=16)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size="100KB")
    tensors = tensors_of(tmp_path)
    dense = model.state_dict()
    for name in {name.removesuffix(".bitmask") for name in tensors if name.endswith(".bitmask")}:
        stored = sum(tensors[f"{name}.{part}"].nbytes for part in ("compressed", "bitmask"))
        assert stored == share * dense[f"{name}.weight"].nbytes
        assert tensors[f"{name}.shape"].nbytes == 16
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert index["weight_map"].keys() == tensors.keys()
    for file in tmp_path.glob("*.safetensors"):
        assert all(index["weight_map"][name] == file.name for name in load_file(file))


def test_folder_of_linears_falls_below_six_tenths(tmp_path):
    model = llama(torch.bfloat16, hidden_size=128, intermediate_size=1024, head_dim=32)
    model.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    sizes = {name: sum(len(content) for content in files_of(tmp_path / name).values()) for name in ("dense", "packed")}
    assert sizes["packed"] < 0.6 * sizes["dense"]


def test_model_with_mostly_dense_parameters_is_saved_sparse(tmp_path):
    model = llama(torch.bfloat16, vocab_size=4096)
    model.save_pretrained(tmp_path / "dense")
    AutoModelForCausalLM.from_pretrained(tmp_path / "dense").save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    content = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert content["quant_method"] == "compressed-tensors"
    assert content["version"]
    block = content["sparsity_config"]
    assert (block["format"], block["targets"], block["ignore"]) == ("sparse-24-bitmask", ["Linear"], ["lm_head"])
    assert 0 < block["global_sparsity"] < 0.1
    again = load_dense(tmp_path / "packed").state_dict()
    assert all(same_bytes(value, again[name]) for name, value in model.state_dict().items())


def test_embeddings_norms_and_ignored_layers_stay_plain_and_byte_equal(model, tmp_path):
    ignore = ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp"]
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=ignore))
    tensors, dense = tensors_of(tmp_path), model.state_dict()
    packed = {name.removesuffix(".bitmask") for name in tensors if name.endswith(".bitmask")}
    assert packed == {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    plain = {name for name in dense if name.removesuffix(".weight") not in packed}
    assert plain == {name for name in tensors if name in dense}
    assert all(same_bytes(tensors[name], dense[name]) for name in plain)
    assert len(tensors) == len(plain) + 3 * len(packed)


def test_head_of_another_name_is_not_covered_by_the_default_ignore(tmp_path):
    model = llama()
    model.my_lm_head2 = nn.Linear(32, 8, bias=False)
    with torch.no_grad():
        model.my_lm_head2.weight.copy_(two_of_four(model.my_lm_head2.weight))
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert "my_lm_head2.bitmask" in tensors_of(tmp_path)
    assert "lm_head.weight" in tensors_of(tmp_path)


def test_bias_stays_plain(tmp_path):
    model = llama(attention_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert f"{Q_PROJ}.bias" in tensors_of(tmp_path)
    assert torch.equal(logits(load_kept(tmp_path)), logits(model))


@pytest.mark.parametrize("config", [{}, {"format": "sparse-24-bitmask", "ignore": ["lm_head"]}, "sparse-24-bitmask"], ids=str)
def test_dict_or_format_name_is_a_config(model, packed, config, tmp_path):
    model.save_pretrained(tmp_path, sparsity_config=config, max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


def test_function_does_what_the_method_does(model, packed, tmp_path):
    save_hook.save_pretrained(model, tmp_path, Sparse24Config(), max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


def test_positional_arguments_mean_what_they_mean_without_us(model, packed, tmp_path):
    names = list(inspect.signature(PreTrainedModel.save_pretrained).parameters)
    assert names[1:3] == ["save_directory", "is_main_process"]
    model.save_pretrained(tmp_path, True, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


def test_auto_detects_the_format_of_every_layer(model, tmp_path):
    torch.manual_seed(0)
    with torch.no_grad():
        dense, scattered = model.get_submodule(Q_PROJ).weight, model.get_submodule(UP_PROJ).weight
        dense.normal_()
        scattered.copy_(torch.where(torch.rand_like(scattered) < 0.7, 0.0, torch.randn_like(scattered)))
    model.save_pretrained(tmp_path, sparsity_config="auto")
    tensors = tensors_of(tmp_path)
    assert f"{Q_PROJ}.weight" in tensors
    assert f"{UP_PROJ}.row_offsets" in tensors
    assert f"{UP_PROJ}.weight" not in tensors
    assert sum(name.endswith(".bitmask") for name in tensors) == 13
    assert not any(re.match("re:", target) or target == "Linear" for target in block_of(tmp_path)["targets"])
    assert len(block_of(tmp_path)["targets"]) == 13
    wanted = logits(model)
    kept = load_kept(tmp_path)
    assert len(packed_names(kept)) == 12
    assert type(kept.get_submodule(UP_PROJ)) is SparseBitmaskLinear
    assert torch.equal(logits(kept), wanted)
    assert torch.equal(logits(load_dense(tmp_path)), wanted)
    kept.save_pretrained(tmp_path / "again")
    assert files_of(tmp_path / "again")["model.safetensors"] == files_of(tmp_path)["model.safetensors"]


def test_auto_refuses_a_model_without_zeros(tmp_path):
    model = llama()
    nn.init.normal_(model.lm_head.weight)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_()
    with pytest.raises(ValueError, match="no weight can be stored sparse"):
        model.save_pretrained(tmp_path, sparsity_config="auto")
    assert files_of(tmp_path) == {}


def test_unstructured_format(model, tmp_path):
    model.save_pretrained(tmp_path, sparsity_config=SparseBitmaskConfig())
    assert f"{Q_PROJ}.row_offsets" in tensors_of(tmp_path)
    assert torch.equal(logits(load_kept(tmp_path)), logits(model))
    assert torch.equal(logits(load_dense(tmp_path)), logits(model))


def test_given_state_dict_is_what_is_written(model, tmp_path):
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    model.save_pretrained(tmp_path / "given", sparsity_config=Sparse24Config(), state_dict=other.state_dict())
    other.save_pretrained(tmp_path / "other", sparsity_config=Sparse24Config())
    assert files_of(tmp_path / "given") == files_of(tmp_path / "other")


def test_variant_stands_beside_the_ordinary_weights(model, tmp_path):
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    ordinary = files_of(tmp_path)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), variant="fp32", max_shard_size=SHARD)
    both = files_of(tmp_path)
    assert {name: both[name] for name in ordinary} == ordinary
    new = set(both) - set(ordinary)
    stock_names = re.compile(r"model\.fp32-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.fp32\.json")
    assert len(new) > 2
    assert all(stock_names.fullmatch(name) for name in new)
    for load in (load_dense, load_kept):
        assert torch.equal(logits(load(tmp_path, variant="fp32")), logits(model))


def test_variant_has_the_file_names_of_stock_transformers(model, tmp_path):
    for folder, options in (("stock", {}), ("ours", {"sparsity_config": Sparse24Config()})):
        model.save_pretrained(tmp_path / folder, variant="v1", **options)
        model.save_pretrained(tmp_path / folder, variant="v2", max_shard_size="10KB", **options)
    ours, stock = ({re.sub(r"\d{5}", "N", name) for name in files_of(tmp_path / folder)} for folder in ("ours", "stock"))
    assert ours == stock


def test_other_process_writes_nothing(model, tmp_path):
    model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config(), is_main_process=False)
    assert not (tmp_path / "folder").exists()


def test_compiled_model(model, packed, tmp_path):
    torch.compile(model).save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


def test_weights_of_any_strides(model, packed, tmp_path):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
    assert not model.get_submodule(UP_PROJ).weight.is_contiguous()
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


def test_negative_zeros_are_zeros(model, packed, tmp_path):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.where(module.weight == 0, -0.0, module.weight))
        model.lm_head.weight.copy_(torch.where(model.lm_head.weight == 0, 0.0, model.lm_head.weight))
    assert bool(torch.signbit(model.get_submodule(UP_PROJ).weight[model.get_submodule(UP_PROJ).weight == 0]).all())
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert files_of(tmp_path) == files_of(packed)


# ---- tied and shared weights -------------------------------------------------------------------------------------------------


def test_file_with_both_keys_of_a_tied_pair_opens(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    tensors = tensors_of(tmp_path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (load_dense, load_kept):
        again = load(tmp_path)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("where", ["one parameter", "views of one buffer"])
def test_layers_that_share_memory_are_stored_and_come_back(where, tmp_path):
    model = llama()
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    if where == "one parameter":
        second.up_proj.weight = first.up_proj.weight
    else:
        fused = torch.cat([first.gate_proj.weight, first.up_proj.weight]).detach().clone()
        first.gate_proj.weight, first.up_proj.weight = nn.Parameter(fused[:64]), nn.Parameter(fused[64:])
    wanted = logits(model)
    if where == "one parameter":
        # Stock Transformers refuses to write undeclared sharing: so do we, rather than storing a weight that does not come back.
        with pytest.raises(RuntimeError) as stock:
            model.save_pretrained(tmp_path / "stock")
        with pytest.raises(type(stock.value)):
            model.save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
        assert files_of(tmp_path / "packed") == {}
        return
    model.save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    for load in (load_dense, load_kept):
        assert torch.equal(logits(load(tmp_path / "packed")), wanted)
    names = [name for name in tensors_of(tmp_path / "packed") if name.endswith(".compressed")]
    assert len(names) == 14


def test_module_used_by_several_layers_is_stored_once(tmp_path):
    sizes = {"vocab_size": 96, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AlbertForMaskedLM(AlbertConfig(**sizes, num_hidden_layers=4)).eval()
    hf_sparse24.prune(model, ignore=["predictions"])
    config = Sparse24Config(ignore=["predictions"])
    model.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "packed", sparsity_config=config)
    stored = {name.removesuffix(".bitmask") for name in tensors_of(tmp_path / "packed") if name.endswith(".bitmask")}
    weights = {name.removesuffix(".weight") for name in tensors_of(tmp_path / "dense")}
    assert stored < weights
    assert len(stored) == 7
    wanted = logits(AlbertForMaskedLM.from_pretrained(tmp_path / "dense"))
    for load in (load_dense, load_kept):
        again, info = load(tmp_path / "packed", AlbertForMaskedLM, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(logits(again), wanted)


# ---- offloaded models ----------------------------------------------------------------------------------------------------------

ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("config", [None, KEPT], ids=["dense", "kept"])
def test_offloaded_model_writes_the_bytes_of_one_in_memory(packed, config, tmp_path):
    pytest.importorskip("accelerate")
    options = {"quantization_config": config} if config else {}
    model = AutoModelForCausalLM.from_pretrained(packed, device_map=ON_DISK, offload_folder=str(tmp_path / "offload"), **options)
    assert any(value.device.type == "meta" for value in model.state_dict().values())
    model.save_pretrained(tmp_path / "again", sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    written, expected = files_of(tmp_path / "again"), files_of(packed)
    assert [name for name in expected if written.get(name) != expected[name]] == []
    assert written.keys() == expected.keys()


def test_offloaded_kept_model_is_saved_by_stock_transformers(packed, tmp_path):
    pytest.importorskip("accelerate")
    model = load_kept(packed, device_map=ON_DISK, offload_folder=str(tmp_path / "offload"))
    model.save_pretrained(tmp_path / "again", max_shard_size=SHARD)
    assert files_of(tmp_path / "again") == files_of(packed)


def test_model_on_meta_is_refused(tmp_path):
    with torch.device("meta"):
        model = llama()
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert not any(name.endswith(".safetensors") for name in files_of(tmp_path))


# ---- what is refused, before anything is written ------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("group", "non_zeros"),
    [([1, 2, 3, 0], 3), ([1, 2, 3, 4], 4), ([1e-8, 1, 1, 0], 3), ([NAN, 1, 2, 0], 3), ([-1, 0, 1e-45, 1], 3)],
    ids=str,
)
def test_group_of_more_than_two_is_refused_by_layer_and_place(model, group, non_zeros, tmp_path):
    with torch.no_grad():
        model.get_submodule(UP_PROJ).weight[5, 8:12] = torch.tensor(group)
    place = rf"1 group.*row 5, columns 8\.\.11 \({non_zeros} non-zeros\)"
    with pytest.raises(ValueError, match=f"1 targeted weights are not 2:4.*{UP_PROJ}.*{place}"):
        model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config())
    assert not (tmp_path / "folder").exists()
    with pytest.warns(UserWarning, match=f"1 targeted weights are stored dense: {UP_PROJ}"):
        model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config(on_dense="skip"))
    tensors = tensors_of(tmp_path / "folder")
    assert same_bytes(tensors[f"{UP_PROJ}.weight"], model.get_submodule(UP_PROJ).weight.detach())
    assert len([name for name in tensors if name.endswith(".bitmask")]) == 13


@pytest.mark.parametrize("through", ["method", "function"])
def test_warnings_point_at_the_callers_line(model, through, tmp_path):
    nn.init.ones_(model.get_submodule(UP_PROJ).weight)
    config = Sparse24Config(on_dense="skip", ignore=["model.layers.7"], targets=["Linear"])
    with pytest.warns(UserWarning) as caught:
        if through == "method":
            model.save_pretrained(tmp_path, sparsity_config=config)
        else:
            save_hook.save_pretrained(model, tmp_path, config)
    ours = [warning for warning in caught if "stored dense" in str(warning.message) or "match no module" in str(warning.message)]
    assert len(ours) == 2
    assert [warning.filename for warning in ours] == [__file__] * 2


def test_one_bad_group_of_a_million_is_found(tmp_path):
    model = llama(torch.bfloat16, intermediate_size=131072, num_hidden_layers=1)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.numel() // 4 == 1 << 20
    with torch.no_grad():
        weight[131071, 28:32] = torch.tensor([1.0, 0.0, 1.0, 1e-30])
    with pytest.raises(ValueError, match=r"1 group.*row 131071, columns 28\.\.31"):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())


def test_every_bad_layer_is_counted_and_the_first_are_named(tmp_path):
    model = llama()
    with torch.no_grad():
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.weight.fill_(1.0)
    with pytest.raises(ValueError, match=r"14 targeted weights are not 2:4.*model\.layers\.0\.self_attn\.q_proj.*and 6 more"):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())


@pytest.mark.parametrize("target", ["Conv2d", "re:.*qkv_proj", "model.layers.7.mlp.up_proj"])
def test_target_that_matches_nothing_is_refused(model, target, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"target {target!r} matches no module")):
        model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config(targets=["Linear", target]))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("sparse-25", ValueError),
        ({"tagrets": []}, ValueError),
        (7, TypeError),
        ("dense", ValueError),
        (Sparse24Config, TypeError),
        (False, TypeError),
    ],
    ids=str,
)
def test_config_that_is_none_is_refused(model, config, error, tmp_path):
    with pytest.raises(error):
        model.save_pretrained(tmp_path / "folder", sparsity_config=config)
    assert not (tmp_path / "folder").exists()


def test_unknown_keyword_is_refused(model, tmp_path):
    with pytest.raises(TypeError, match="max_shard_sise"):
        model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config(), max_shard_sise="1GB")
    assert not (tmp_path / "folder").exists()


def test_file_in_the_place_of_the_folder_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        model.save_pretrained(tmp_path / "file", sparsity_config=Sparse24Config())
    assert (tmp_path / "file").read_text() == "mine"


def test_model_quantised_by_another_method_is_refused_by_its_name(model, tmp_path):
    class Other(HfQuantizer):
        requires_calibration = False

        def _process_model_before_weight_loading(self, model, **kwargs):
            return model

        _process_model_after_weight_loading = _process_model_before_weight_loading

        def is_serializable(self, **kwargs):
            return True

        is_trainable = False

    class OtherConfig:
        quant_method = "hqq"
        modules_to_not_convert = None

    model.hf_quantizer = Other(OtherConfig())
    with pytest.raises(ValueError, match="quantised with hqq: dequantize it"):
        model.save_pretrained(tmp_path / "folder", sparsity_config=Sparse24Config())
    assert not (tmp_path / "folder").exists()


def test_kept_model_is_not_saved_in_another_format(packed, tmp_path):
    with pytest.raises(ValueError, match=r"packed as sparse-24-bitmask, not sparse-bitmask: call model.dequantize\(\)"):
        load_kept(packed).save_pretrained(tmp_path / "folder", sparsity_config=SparseBitmaskConfig())
    assert not (tmp_path / "folder").exists()


# ---- what stays untouched --------------------------------------------------------------------------------------------------------


def fingerprint(model):
    attributes = {name: repr(value) for name, value in vars(model).items() if not isinstance(value, dict)}
    modules = {name: type(module) for name, module in model.named_modules()}
    return copy.deepcopy(model.config.to_dict()), state_bytes(model), attributes, modules, model.generation_config.to_dict()


@pytest.mark.parametrize("outcome", ["written", "refused"])
def test_users_model_is_not_changed(model, outcome, tmp_path):
    model.requires_grad_(True)
    if outcome == "refused":
        with torch.no_grad():
            model.get_submodule(UP_PROJ).weight.fill_(1)
    before = fingerprint(model)
    parameters = dict(model.named_parameters())
    config = Sparse24Config()
    if outcome == "refused":
        with pytest.raises(ValueError, match=UP_PROJ):
            model.save_pretrained(tmp_path, sparsity_config=config)
    else:
        model.save_pretrained(tmp_path, sparsity_config=config)
    assert fingerprint(model) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    assert config == Sparse24Config()
    assert config.model_fields_set == set()


@pytest.fixture
def recorder(monkeypatch):
    """The methods under our wrapper replaced by one that records how it was called."""
    calls = []
    originals = {name: save_hook._original(name) for name in ("save_pretrained", "push_to_hub")}

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, **kwargs):
        calls.append((self, save_directory, is_main_process, state_dict, push_to_hub, kwargs))
        return "the original's result"

    try:
        PreTrainedModel.save_pretrained = save_pretrained
        PreTrainedModel.push_to_hub = originals["push_to_hub"]
        save_hook.install()
        yield calls
    finally:
        for name, original in originals.items():
            setattr(PreTrainedModel, name, original)
        save_hook.install()


def test_without_the_keyword_the_original_gets_the_same_arguments(model, recorder):
    state = {}
    assert model.save_pretrained("folder", False, state, max_shard_size=7, any_key="x") == "the original's result"
    assert model.save_pretrained("folder", sparsity_config=None) == "the original's result"
    first = (model, "folder", False, state, False, {"max_shard_size": 7, "any_key": "x"})
    assert recorder == [first, (model, "folder", True, None, False, {})]
    assert recorder[0][3] is state


def test_without_the_keyword_the_files_are_those_of_the_original(model, tmp_path):
    model.save_pretrained(tmp_path / "wrapped")
    save_hook._original("save_pretrained")(model, tmp_path / "original")
    assert files_of(tmp_path / "wrapped") == files_of(tmp_path / "original")


def test_wrapper_looks_like_the_original():
    for name in ("save_pretrained", "push_to_hub"):
        method, original = getattr(PreTrainedModel, name), save_hook._original(name)
        assert method is not original
        assert (method.__doc__, method.__name__) == (original.__doc__, original.__name__)
        assert inspect.signature(method) == inspect.signature(original)


def test_installed_twice_is_installed_once():
    before = PreTrainedModel.save_pretrained
    save_hook.install()
    assert PreTrainedModel.save_pretrained is before
    assert not hasattr(save_hook._original("save_pretrained"), "_sparse24_original")


def test_uninstalled_and_opted_out(model, packed, monkeypatch, tmp_path):
    original = save_hook._original("save_pretrained")
    try:
        save_hook.uninstall()
        assert PreTrainedModel.save_pretrained is original
        monkeypatch.setenv("HF_SPARSE24_NO_PATCH", "1")
        save_hook.install()
        assert PreTrainedModel.save_pretrained is original
        save_hook.save_pretrained(model, tmp_path, Sparse24Config(), max_shard_size=SHARD)
        assert files_of(tmp_path) == files_of(packed)
    finally:
        monkeypatch.delenv("HF_SPARSE24_NO_PATCH", raising=False)
        save_hook.install()
    assert PreTrainedModel.save_pretrained is not original


def test_threads_that_save_at_once_write_the_same_bytes(model, packed, tmp_path):
    failures = []

    def work(number):
        try:
            model.save_pretrained(tmp_path / str(number), sparsity_config=Sparse24Config(), max_shard_size=SHARD)
        except BaseException as error:  # a thread's error would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(files_of(tmp_path / str(number)) == files_of(packed) for number in range(6))
    assert not hasattr(model.config, "quantization_config")


# ---- interrupted and repeated saves ----------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize("old", ["nothing", "packed", "dense"])
def test_interrupted_save_leaves_the_old_folder_intact(model, monkeypatch, shard, old, tmp_path):
    options = {"nothing": None, "packed": {"sparsity_config": Sparse24Config()}, "dense": {}}[old]
    tmp_path = tmp_path / "folder"
    if options is not None:
        llama(rms_norm_eps=1e-3).save_pretrained(tmp_path, max_shard_size="50KB", **options)
        (tmp_path / "README.md").write_text("mine")
    before = files_of(tmp_path)
    original, calls = save_hook.save_file, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == shard:
            original(*args, **kwargs)  # the file itself is there
            raise Interrupted
        return original(*args, **kwargs)

    monkeypatch.setattr(save_hook, "save_file", failing)
    with pytest.raises(Interrupted):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert len(calls) == shard
    assert files_of(tmp_path) == before


def test_interrupted_while_moving_files_cannot_be_taken_for_complete(model, monkeypatch, tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size="50KB")
    original, moved = staging.os.replace, []

    def failing(source, target):
        if len(moved) == 2:
            raise Interrupted
        moved.append(target)
        original(source, target)

    monkeypatch.setattr(staging.os, "replace", failing)
    with pytest.raises(Interrupted):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    monkeypatch.undo()
    assert not (tmp_path / "config.json").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    # Saving again repairs the folder.
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    assert torch.equal(logits(load_kept(tmp_path)), logits(model))


def test_shards_of_an_earlier_save_are_gone_and_other_files_stay(model, packed, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors.txt").write_text("notes")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_text("mine")
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    written = files_of(tmp_path)
    others = {"tokenizer.json": b"{}", "model-of-mine.safetensors.txt": b"notes", "sub/model.safetensors": b"mine"}
    assert {name: written.pop(name) for name in others} == others
    assert written == files_of(packed)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert {name for name in files_of(tmp_path) if name.startswith("model") and "mine" not in name} == {"model.safetensors"}
    assert torch.equal(logits(load_kept(tmp_path)), logits(model))


def test_dense_save_over_a_packed_one(model, packed, tmp_path):
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    model.save_pretrained(tmp_path)
    assert b"quantization_config" not in files_of(tmp_path)["config.json"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("load", "config"),
    [(load_kept, None), (load_kept, Sparse24Config()), (load_dense, Sparse24Config())],
    ids=["kept", "kept with a config", "dense with a config"],
)
def test_saved_into_the_folder_it_was_opened_from(packed, config, load, tmp_path):
    for name, content in files_of(packed).items():
        (tmp_path / name).write_bytes(content)
    model = load(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=SHARD, **({"sparsity_config": config} if config else {}))
    assert files_of(tmp_path) == files_of(packed)
    assert torch.equal(logits(model), logits(load_kept(packed)))


# ---- no dense copy stays alive ---------------------------------------------------------------------------------------------------


def test_packing_a_model_in_memory_frees_every_dense_weight(model):
    dense = [weakref.ref(module.weight) for module in model.model.modules() if isinstance(module, nn.Linear)]
    wanted = logits(model)
    ModelCompressor(Sparse24Config()).compress_model(model)
    assert [reference for reference in dense if reference() is not None] == []
    assert torch.equal(logits(model), wanted)


def test_passes_over_a_weight_are_few(model, tmp_path, monkeypatch):
    counts = {"why_not": 0, "compress_weight": 0}
    for name in counts:
        original = getattr(Sparse24Compressor, name)

        def counting(self, weight, name=name, original=original):
            counts[name] += 1
            return original(self, weight)

        monkeypatch.setattr(Sparse24Compressor, name, counting)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert counts == {"why_not": 14, "compress_weight": 14}
    kept = load_kept(tmp_path)
    kept.save_pretrained(tmp_path / "again")
    assert counts == {"why_not": 14, "compress_weight": 14}

"""The configs a user builds, what they select, and what is read from and written to config.json."""

import copy
import json
import pickle
import warnings

import pytest
from pydantic import ValidationError
from torch import nn

from hf_sparse24 import CheckpointError, DenseSparsityConfig, Sparse24Config, SparseBitmaskConfig
from hf_sparse24.config import GUARD, as_config, parse_config
from hf_sparse24.modules import match_modules, unused_ignores
from tests.models import llama


class MyLinear(nn.Linear):
    """A subclass, as tensor-parallel code has them."""


MODULES = {
    "": nn.Module,
    "model": nn.Module,
    "model.embed_tokens": nn.Embedding,
    "model.layers.0.mlp": nn.Module,
    "model.layers.0.mlp.up_proj": nn.Linear,
    "model.layers.0.mlp.down_proj": MyLinear,
    "model.layers.1.mlp": nn.Module,
    "model.layers.1.mlp.up_proj": nn.Linear,
    "model.layers.10.mlp.up_proj": nn.Linear,
    "vision.proj": nn.Linear,
    "lm_head": nn.Linear,
    "my_lm_head2": nn.Linear,
}
METHOD = {"quant_method": "compressed-tensors"}
LINEARS = [name for name, cls in MODULES.items() if issubclass(cls, nn.Linear)]


def selected(**fields):
    return match_modules(MODULES, Sparse24Config(**{"ignore": [], **fields}))


# ---- what targets and ignore select --------------------------------------------------------------------------------------------


def test_default_selects_every_linear_but_the_head():
    assert match_modules(MODULES, Sparse24Config()) == [name for name in LINEARS if name != "lm_head"]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["Linear"], LINEARS),
        (["MyLinear"], ["model.layers.0.mlp.down_proj"]),
        (["Embedding"], ["model.embed_tokens"]),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["lm_head"], ["lm_head"]),
        ([r"re:model\.layers\.1\..*_proj"], ["model.layers.1.mlp.up_proj"]),
        ([r"re:.*up_proj$"], [name for name in LINEARS if name.endswith("up_proj")]),
        (["re:lm_head"], ["lm_head"]),  # anchored at the start
        (["vision.proj", "MyLinear"], ["model.layers.0.mlp.down_proj", "vision.proj"]),
    ],
    ids=str,
)
def test_targets_select(targets, expected):
    assert selected(targets=targets) == expected


@pytest.mark.parametrize("target", ["linear", "Lin", "head", "up_proj", "layers.1.mlp.up_proj", "re:up_proj", "re:Linear"])
def test_target_that_matches_nothing_is_an_error_that_names_it(target):
    with pytest.raises(ValueError, match=f"target '{target}' matches no module"):
        selected(targets=["Linear", target])


@pytest.mark.parametrize(
    ("ignore", "untouched"),
    [
        (["lm_head"], ["lm_head"]),
        (["my_lm_head"], []),
        (["model.layers.1"], ["model.layers.1.mlp.up_proj"]),  # a container covers what it contains, and not layers.10
        (["model.layers.1."], ["model.layers.1.mlp.up_proj"]),
        (["model.layers.0.mlp"], ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]),
        (["re:.*vision.*"], ["vision.proj"]),
        (["MyLinear"], ["model.layers.0.mlp.down_proj"]),
        (["head", "layers.0", "mlp"], []),
    ],
    ids=str,
)
def test_ignore_leaves_alone(ignore, untouched):
    assert selected(targets=["Linear"], ignore=ignore) == [name for name in LINEARS if name not in untouched]


def test_ignore_wins_over_a_target_of_the_same_name():
    assert selected(targets=["lm_head", "vision.proj"], ignore=["lm_head"]) == ["vision.proj"]


def test_name_in_the_checkpoint_counts_as_well():
    aliases = {"vision.proj": "model.visual.proj"}
    assert match_modules(MODULES, Sparse24Config(targets=["model.visual.proj"], ignore=[]), aliases) == ["vision.proj"]
    left = match_modules(MODULES, Sparse24Config(targets=["Linear"], ignore=["model.visual"]), aliases)
    assert left == [name for name in LINEARS if name != "vision.proj"]


def test_unused_ignores_are_listed_without_the_default():
    config = Sparse24Config(ignore=["lm_head", "model.layers.7", "re:.*audio.*", "model.layers.1"])
    assert unused_ignores(MODULES, config) == ["model.layers.7", "re:.*audio.*"]
    assert unused_ignores({"body": nn.Linear}, Sparse24Config()) == []


def test_unused_ignore_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"ignore that match no module: model\.layers\.7$"):
        llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head", "model.layers.7"]))


def test_used_ignore_does_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head", "model.layers.1"]))


# ---- what a user builds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [Sparse24Config, SparseBitmaskConfig, DenseSparsityConfig])
def test_defaults(config_class):
    config = config_class()
    assert (config.targets, config.ignore, config.on_dense, config.run_compressed) == (["Linear"], ["lm_head"], "raise", None)
    assert config.readable_by == "hf-sparse24"
    assert config.dequantize is False


@pytest.mark.parametrize(
    "fields",
    [
        {"target": ["Linear"]},
        {"targets": []},
        {"targets": "Linear"},
        {"targets": ["re:("]},
        {"ignore": ["re:*"]},
        {"on_dense": "prune"},
        {"readable_by": "vllm"},
        {"run_compressed": "perhaps"},
        {"global_sparsity": 1.5},
    ],
    ids=str,
)
def test_wrong_field_is_refused(fields):
    with pytest.raises(ValidationError, match=next(iter(fields))):
        Sparse24Config(**fields)


def test_wrong_assignment_is_refused():
    config = Sparse24Config()
    with pytest.raises(ValidationError):
        config.on_dense = "prune"
    with pytest.raises(ValidationError):
        config.tarets = ["Linear"]
    assert config == Sparse24Config()


def test_equality_is_by_value_and_format():
    assert Sparse24Config() == Sparse24Config(targets=["Linear"])
    assert Sparse24Config() != Sparse24Config(ignore=[])
    assert Sparse24Config() != SparseBitmaskConfig()


def test_defaults_are_not_shared():
    Sparse24Config().ignore.append("changed")
    assert Sparse24Config().ignore == ["lm_head"]


def pickled(config):
    return pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies_are_equal_and_keep_unknown_keys(copied):
    config = parse_config({"quantization_config": {"sparsity_config": {"format": "sparse-24-bitmask", "mine": [1]}, "ours": 2}}).sparsity
    config.run_compressed = True
    twin = copied(config)
    assert twin == config
    assert type(twin) is Sparse24Config
    assert twin.to_dict() == config.to_dict()
    assert (twin.to_dict()["ours"], twin.to_dict()["sparsity_config"]["mine"]) == (2, [1])


@pytest.mark.parametrize(("run_compressed", "expected"), [(True, False), (None, False), (False, True)])
def test_dequantize_says_whether_loading_ends_dense(run_compressed, expected):
    assert Sparse24Config(run_compressed=run_compressed).dequantize is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, Sparse24Config()),
        ({"ignore": []}, Sparse24Config(ignore=[])),
        ({"format": "sparse-bitmask", "on_dense": "skip"}, SparseBitmaskConfig(on_dense="skip")),
        ("sparse-24-bitmask", Sparse24Config()),
        ("sparse-bitmask", SparseBitmaskConfig()),
        ("dense", DenseSparsityConfig()),
    ],
    ids=str,
)
def test_dict_or_name_becomes_a_config(value, expected):
    assert as_config(value) == expected
    assert type(as_config(value)) is type(expected)


def test_config_stays_itself():
    config = Sparse24Config()
    assert as_config(config) is config


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("sparse-25", ValueError, "unknown sparse format 'sparse-25', expected one of dense, sparse-bitmask, sparse-24-bitmask"),
        ({"format": "evil.py:X"}, ValueError, "unknown sparse format 'evil.py:X'"),
        ({"tagrets": []}, ValidationError, "tagrets"),
        (7, TypeError, "got int"),
        (True, TypeError, "got bool"),
        (["Linear"], TypeError, "got list"),
    ],
    ids=str,
)
def test_other_values_are_refused(value, error, text):
    with pytest.raises(error, match=text):
        as_config(value)


# ---- config.json -----------------------------------------------------------------------------------------------------------------


def test_written_block_is_plain_data_without_load_options():
    written = Sparse24Config(run_compressed=True, on_dense="skip").to_dict()
    assert json.loads(json.dumps(written)) == written
    assert "run_compressed" not in json.dumps(written)
    assert "on_dense" not in json.dumps(written)
    assert written["config_groups"] == {GUARD: ["Linear"]}


def test_guard_says_what_to_do():
    assert "import hf_sparse24" in GUARD
    assert "pip install hf-sparse24" in GUARD


@pytest.mark.parametrize(
    "config",
    [
        Sparse24Config(),
        Sparse24Config(targets=["re:.*proj", "Linear"], ignore=[], global_sparsity=0.25),
        SparseBitmaskConfig(readable_by="compressed-tensors"),
        DenseSparsityConfig(ignore=["lm_head", "model.layers.0"]),
    ],
    ids=lambda config: config.format,
)
def test_written_and_read_again_is_equal(config):
    written = json.loads(json.dumps(config.to_dict()))
    again = type(config).from_dict(written)
    assert again == config
    assert again.to_dict() == config.to_dict()


def test_from_dict_gives_the_class_that_the_block_names():
    assert type(Sparse24Config.from_dict(SparseBitmaskConfig().to_dict())) is SparseBitmaskConfig
    config, unused = Sparse24Config.from_dict(Sparse24Config().to_dict(), return_unused_kwargs=True, token="t")
    assert (config, unused) == (Sparse24Config(), {"token": "t"})


@pytest.mark.parametrize("block", [{}, {"quant_method": "compressed-tensors"}, {"quant_method": "gptq", "bits": 4}], ids=str)
def test_from_dict_of_another_method_is_refused(block):
    with pytest.raises(CheckpointError, match="describes no sparse checkpoint"):
        Sparse24Config.from_dict(block)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"sparsity_config": {}},
        {"sparsity_config": "{}"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "bitsandbytes", "sparsity_config": {"format": "sparse-24-bitmask"}}},
        {"quantization_config": {**METHOD, "sparsity_config": {}, "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}},
        {"text_config": {"hidden_size": 4, "sparsity_config": {"format": "sparse-24-bitmask"}}},  # no model's config
    ],
    ids=str,
)
def test_config_of_others_holds_nothing_of_ours(config):
    assert parse_config(config).sparsity is None


@pytest.mark.parametrize(
    ("scheme", "quantized"),
    [({"weights": {"num_bits": 8}}, True), ({"input_activations": {"num_bits": 8}}, True), ({"weights": None}, False)],
    ids=str,
)
def test_second_method_is_seen(scheme, quantized):
    block = {**METHOD, "config_groups": {"group_0": scheme}, "sparsity_config": {"format": "dense"}}
    assert parse_config({"quantization_config": block}).quantized is quantized


def test_guard_is_no_second_method():
    assert parse_config({"quantization_config": Sparse24Config().to_dict()}).quantized is False


def test_nearest_spelling_wins():
    inner = {"quantization_config": Sparse24Config(targets=["inner"]).to_dict(), "model_type": "llama"}
    outer = {"quantization_config": SparseBitmaskConfig(targets=["outer"]).to_dict(), "text_config": inner}
    assert parse_config(outer).sparsity == SparseBitmaskConfig(targets=["outer"])
    assert parse_config({"text_config": inner}).sparsity == Sparse24Config(targets=["inner"])


def test_error_shows_the_start_of_a_long_value():
    with pytest.raises(CheckpointError, match=r"\(10000002 characters\)") as error:
        parse_config({"quantization_config": {"sparsity_config": {"format": "x" * 10_000_000}}})
    assert len(str(error.value)) < 300

"""One set of weights under every config.json in which such weights were published, and under hostile ones."""

import builtins
import importlib
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config
from hf_sparse24.config import GUARD
from tests.conftest import GOLDEN
from tests.models import SIZES, load_dense, load_kept, logits, make_2_4, packed_names, tensors_of

BLOCK = {
    "format": "sparse-24-bitmask",
    "global_sparsity": 0.5,
    "ignore": ["lm_head"],
    "registry_requires_subclass": False,
    "sparsity_structure": "2:4",
    "targets": ["Linear"],
}
METHOD = {"quant_method": "compressed-tensors"}
NEW = {**METHOD, "version": "0.12.2", "transform_config": {}, "sparsity_config": BLOCK}
NO_SCHEME = {"group_0": {"targets": ["Linear"], "weights": None, "input_activations": None, "output_activations": None}}

# What stands beside the model's own keys in config.json.
SPELLINGS = {
    "quantization_config": {"quantization_config": NEW},
    "compression_config of 0.4 to 0.6": {"compression_config": {"sparsity_config": BLOCK}},
    "compression_config with a null quantization_config": {"compression_config": {"sparsity_config": BLOCK, "quantization_config": None}},
    "compression_config with an empty quantization_config": {"compression_config": {"sparsity_config": BLOCK, "quantization_config": {}}},
    "compression_config with a method": {"compression_config": {**METHOD, "sparsity_config": BLOCK}},
    "top-level sparsity_config": {"sparsity_config": BLOCK},
    "empty quantization_config beside it": {"quantization_config": {}, "sparsity_config": BLOCK},
    "quantization_config without quant_method": {"quantization_config": {"sparsity_config": BLOCK}},
    "only format in the block": {"quantization_config": {**METHOD, "sparsity_config": {"format": "sparse-24-bitmask"}}},
    "null targets and ignore": {"quantization_config": {**METHOD, "sparsity_config": {**BLOCK, "targets": None, "ignore": None}}},
    "empty targets and ignore": {"quantization_config": {**METHOD, "sparsity_config": {**BLOCK, "targets": [], "ignore": []}}},
    "config_groups empty": {"quantization_config": {**NEW, "config_groups": {}}},
    "config_groups null": {"quantization_config": {**NEW, "config_groups": None}},
    "config_groups without a scheme": {"quantization_config": {**NEW, "config_groups": NO_SCHEME, "format": "dense"}},
    "unknown keys": {
        "quantization_config": {**NEW, "kv_cache_scheme": None, "global_compression_ratio": 1.5, "quantization_status": "compressed"}
    },
    "version of a nightly build": {"quantization_config": {**NEW, "version": "0.6.0.20240926"}},
    "missing version": {"quantization_config": {key: value for key, value in NEW.items() if key != "version"}},
    "quant_method sparseml": {"quantization_config": {**NEW, "quant_method": "sparseml"}},
    "our own name": {"quantization_config": {**NEW, "quant_method": "sparse24"}},
    "guard": {"quantization_config": {**NEW, "config_groups": {GUARD: ["Linear"]}}},
    "structure in capitals": {"quantization_config": {**NEW, "sparsity_config": {**BLOCK, "sparsity_structure": "UNSTRUCTURED"}}},
    "structure null": {"quantization_config": {**NEW, "sparsity_config": {**BLOCK, "sparsity_structure": None}}},
    "targets that lie": {"quantization_config": {**NEW, "sparsity_config": {**BLOCK, "targets": ["q_proj"], "ignore": ["re:.*mlp.*"]}}},
    "format that lies": {"quantization_config": {**NEW, "sparsity_config": {**BLOCK, "format": "sparse-bitmask"}}},
    "none": {},
}


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory):
    """sparse-24-bitmask, whose config.json a test replaces."""
    return copied(tmp_path_factory.mktemp("packed"), "sparse-24-bitmask")


def copied(target, name):
    shutil.copy(GOLDEN / name / "model.safetensors", target)
    return target


@pytest.fixture(scope="module")
def reference():
    return logits(AutoModelForCausalLM.from_pretrained(GOLDEN / "sparse-24-bitmask"))


def write_config(folder, spelling):
    config = json.loads((GOLDEN / "sparse-24-bitmask" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, **spelling}))
    return folder


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, load_dense, load_kept], ids=["default", "dense", "kept"])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_spelling_opens_with_equal_weights(packed_folder, reference, spelling, load):
    write_config(packed_folder, spelling)
    model, info = load(packed_folder, output_loading_info=True)
    assert not any(info.values()), info
    assert len(packed_names(model)) == (14 if load is load_kept else 0)
    assert torch.equal(logits(model), reference)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_model_opened_dense_keeps_no_trace_of_the_spelling(packed_folder, spelling, tmp_path):
    write_config(packed_folder, spelling)
    model = load_dense(packed_folder)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not written.keys() & {"quantization_config", "compression_config", "sparsity_config"}


OLD_BLOCK = {**BLOCK, "format": "sparse-bitmask", "sparsity_structure": "unstructured", "targets": None, "ignore": None}


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, load_kept], ids=["default", "kept"])
@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"compression_config": {"sparsity_config": OLD_BLOCK}},
        {"sparsity_config": OLD_BLOCK},
        {"quantization_config": {**METHOD, "sparsity_config": OLD_BLOCK}},
    ],
    ids=["none", "compression_config", "top-level sparsity_config", "quantization_config"],
)
def test_old_key_spelling_opens_under_every_config(spelling, load, tmp_path):
    folder = write_config(copied(tmp_path, "sparse-bitmask-ct0.8.1"), spelling)
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(GOLDEN / "sparse-bitmask-ct0.8.1")))


@pytest.mark.parametrize("load", [load_dense, load_kept])
def test_shape_of_either_form_is_read_and_kept(load, reference, tmp_path):
    folder = write_config(copied(tmp_path, "sparse-24-bitmask"), {"quantization_config": NEW})
    tensors = {name: value.flatten() if name.endswith(".shape") else value for name, value in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert torch.equal(logits(model), reference)
    model.save_pretrained(tmp_path / "again", sparsity_config=Sparse24Config())
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (GOLDEN / "sparse-24-bitmask" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "sparsity_config"])
def test_block_in_a_nested_config_is_found(key, tmp_path):
    torch.manual_seed(0)
    vision = CLIPVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**{**SIZES, "vocab_size": 100}), image_token_index=98)
    make_2_4(LlavaForConditionalGeneration(config).eval()).save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    content = json.loads((tmp_path / "config.json").read_text())
    block = content.pop("quantization_config")
    wanted = logits(load_from(tmp_path, {**content, "quantization_config": block}, load_dense))
    content["text_config"][key] = block["sparsity_config"] if key == "sparsity_config" else block
    for load, num_packed in ((load_dense, 0), (load_kept, 22)):
        model = load_from(tmp_path, content, load)
        assert len(packed_names(model)) == num_packed
        assert torch.equal(logits(model), wanted)
    assert ModelCompressor.from_pretrained(tmp_path).sparsity_config.format == "sparse-24-bitmask"


def load_from(folder, content, load):
    (folder / "config.json").write_text(json.dumps(content))
    return load(folder, LlavaForConditionalGeneration)


@pytest.mark.parametrize("targets", [["Linear"], [f"model.layers.{i}.mlp.up_proj" for i in range(2)], None, []], ids=str)
def test_dense_format_with_targets_opens_as_a_plain_model(targets, tmp_path):
    block = {**BLOCK, "format": "dense", "targets": targets, "ignore": ["lm_head", "model.layers.0.self_attn.q_proj"]}
    folder = write_config(copied(tmp_path, "dense"), {"quantization_config": {**METHOD, "sparsity_config": block}})
    wanted = logits(AutoModelForCausalLM.from_pretrained(GOLDEN / "dense"))
    for load in (AutoModelForCausalLM.from_pretrained, load_dense):
        model, info = load(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert getattr(model, "hf_quantizer", None) is None
        assert torch.equal(logits(model), wanted)


def test_unknown_keys_are_written_again(packed_folder, tmp_path):
    future = {"answer": [42, {"deep": None}]}
    top = {**NEW, "kv_cache_scheme": None, "future": future, "sparsity_config": {**BLOCK, "future_block": future}}
    model = load_kept(write_config(packed_folder, {"quantization_config": top}))
    model.save_pretrained(tmp_path / "kept")
    load_dense(packed_folder)  # and a second reader does not lose them
    written = json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]
    assert (written["future"], written["kv_cache_scheme"], written["transform_config"]) == (future, None, {})
    assert written["sparsity_config"]["future_block"] == future


def test_six_old_keys_and_the_guard_are_written(tmp_path):
    model = load_dense(GOLDEN / "sparse-24-bitmask")
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head"]))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    sparsity = written["sparsity_config"].pop("global_sparsity")
    assert written == {
        "quant_method": "compressed-tensors",
        "version": "0.12.2",
        "config_groups": {GUARD: ["Linear"]},
        "sparsity_config": {key: value for key, value in BLOCK.items() if key != "global_sparsity"},
    }
    elements = model.num_parameters()
    left_out = sum(value.numel() for name, value in tensors_of(tmp_path).items() if name.endswith(".compressed"))
    assert sparsity == pytest.approx(left_out / elements, abs=1e-6)


def test_form_for_compressed_tensors_has_no_guard_and_comes_back_as_such(tmp_path):
    model = load_dense(GOLDEN / "sparse-24-bitmask")
    model.save_pretrained(tmp_path / "once", sparsity_config=Sparse24Config(readable_by="compressed-tensors"))
    load_kept(tmp_path / "once").save_pretrained(tmp_path / "twice")
    for folder in ("once", "twice"):
        written = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert "config_groups" not in written
        assert set(BLOCK) <= set(written["sparsity_config"])


# ---- hostile values ------------------------------------------------------------------------------------------------------------

HOSTILE_NAMES = ["evil.py:X", "evil:X", "../x", "x" * 10_000_000, 7, ["sparse-24-bitmask"], None, "__class__", True, {}]


def hostile(**changes):
    return {"quantization_config": {**NEW, "sparsity_config": {**BLOCK, **changes}}}


HOSTILE = {
    **{f"format {str(name)[:12]}": hostile(format=name) for name in HOSTILE_NAMES},
    **{f"structure {str(name)[:12]}": hostile(sparsity_structure=name) for name in HOSTILE_NAMES if name is not None},
    **{f"targets {str(name)[:12]}": hostile(targets=name) for name in ("Linear", 7, [7], [["Linear"]], {"Linear": 1}, "x" * 10_000_000)},
    **{f"ignore {str(name)[:12]}": hostile(ignore=name) for name in ("lm_head", 7, [None])},
    "regular expression that does not compile": hostile(targets=["re:("]),
    "global_sparsity text": hostile(global_sparsity="0.5"),
    "global_sparsity out of range": hostile(global_sparsity=1e300),
    "readable_by a path": hostile(readable_by="evil.py:X"),
    "block a list": {"quantization_config": {**METHOD, "sparsity_config": [BLOCK]}},
    "block a path": {"quantization_config": {**METHOD, "sparsity_config": "evil.py:X"}},
    "groups a list": {"quantization_config": {**NEW, "config_groups": [1]}},
    "quantization_config a list": {"quantization_config": [NEW]},
    **{f"quant_method {str(name)[:12]}": {"quantization_config": {**NEW, "quant_method": name}} for name in (7, ["sparse24"], {}, True)},
}


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """Importing or running evil.py, by whichever name, leaves a marker; every import is recorded."""
    marker = tmp_path / "marker"
    for folder in (tmp_path, tmp_path.parent):
        for name in ("evil.py", "x.py", "__class__.py"):
            (folder / name).write_text(f"open({str(marker)!r}, 'w').close()\nclass X: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    imported = []
    for owner, function in ((importlib, "import_module"), (builtins, "__import__")):
        original = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda name, *a, _original=original, **k: imported.append(name) or _original(name, *a, **k))
    return marker, imported


@pytest.mark.parametrize("spelling", HOSTILE.values(), ids=HOSTILE)
def test_hostile_value_is_refused_and_nothing_imported(packed_folder, spelling, traps):
    marker, imported = traps
    write_config(packed_folder, spelling)
    for read in (AutoModelForCausalLM.from_pretrained, load_kept, load_dense, ModelCompressor.from_pretrained):
        with pytest.raises((CheckpointError, TypeError, AttributeError, ValueError)) as error:
            read(packed_folder)
        assert len(str(error.value)) < 2000
        # A config that is no object at all does not come past Transformers' own reader.
        if not isinstance(spelling["quantization_config"], list):
            assert isinstance(error.value, CheckpointError), error.value
    assert not marker.exists()
    assert not [name for name in imported if name.split(".")[0] in ("evil", "x", "__class__") or "evil" in name]


@pytest.mark.parametrize("name", ["evil.py:X", "evil:X", "../x", "x" * 10_000_000, "__class__"], ids=lambda name: name[:12])
def test_unknown_method_beside_packed_tensors_never_ends_in_random_weights(packed_folder, reference, name, traps):
    marker, imported = traps
    write_config(packed_folder, {"quantization_config": {**NEW, "quant_method": name}})
    try:
        model = AutoModelForCausalLM.from_pretrained(packed_folder)
    except (CheckpointError, ValueError) as error:
        assert len(str(error)) < 2000
    else:
        assert torch.equal(logits(model), reference)
    assert not marker.exists()
    assert not [module for module in imported if "evil" in module]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.ckpt"])
def test_folder_with_only_a_pickle_is_refused_with_a_hint(name, traps, tmp_path):
    marker, _ = traps
    folder = tmp_path / "folder"
    folder.mkdir()
    write_config(folder, {"quantization_config": NEW})
    (folder / name).write_bytes(pickle_that_writes(marker))
    for read in (AutoModelForCausalLM.from_pretrained, load_kept, load_dense, ModelCompressor.from_pretrained):
        with pytest.raises(CheckpointError, match=rf"{name} is a pickle, which may run code.*safetensors"):
            read(folder)
    assert not marker.exists()


def pickle_that_writes(marker):
    class Opens:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    return pickle.dumps({"model.embed_tokens.weight": Opens()})


def test_the_pickle_of_the_test_above_does_run_code(tmp_path):
    pickle.loads(pickle_that_writes(tmp_path / "marker"))
    assert (tmp_path / "marker").exists()


def test_config_alone_is_read_by_autoconfig_in_every_spelling(packed_folder):
    for spelling in SPELLINGS.values():
        config = AutoConfig.from_pretrained(write_config(packed_folder, spelling))
        assert config.hidden_size == 64

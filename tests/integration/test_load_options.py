"""A packed checkpoint under every option of `from_pretrained`, and a kept model under what is done to models."""

import copy
import json
import logging
import pickle
import shutil
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.utils import logging as transformers_logging

from hf_sparse24 import CheckpointError, Sparse24Config, Sparse24Linear, fuse_projections
from hf_sparse24.kernels import dispatch
from hf_sparse24.linear import PackedWeight
from tests.models import (
    IDS,
    KEPT,
    dense_names,
    files_of,
    llama,
    load_dense,
    load_kept,
    logits,
    packed_names,
    same_bytes,
    state_bytes,
    tensors_of,
)

ALL_PACKED = {
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sharded packed Llama in float32."""
    folder = tmp_path_factory.mktemp("packed")
    llama().save_pretrained(folder, sparsity_config=Sparse24Config(), max_shard_size="30KB")
    return folder


@pytest.fixture(scope="module")
def bfloat16_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat16")
    llama(torch.bfloat16).save_pretrained(folder, sparsity_config=Sparse24Config())
    return folder


@pytest.fixture(scope="module")
def dense_folder(folder, tmp_path_factory):
    dense = tmp_path_factory.mktemp("dense")
    load_dense(folder).save_pretrained(dense)
    return dense


@pytest.fixture(scope="module")
def wanted(dense_folder):
    return logits(AutoModelForCausalLM.from_pretrained(dense_folder))


@pytest.fixture
def kept(folder):
    return load_kept(folder)


# ---- how it is opened ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "auto", "bfloat16"], ids=str)
@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_dtype(folder, dense_folder, load, dtype):
    model = load(folder, dtype=dtype)
    reference = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=dtype)
    assert model.dtype == reference.dtype
    assert torch.equal(logits(model), logits(reference))
    for name in packed_names(model):
        layer = model.get_submodule(name)
        assert (layer.compressed.dtype, layer.bitmask.dtype, layer.shape.dtype) == (reference.dtype, torch.uint8, torch.int64)


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_file_of_bfloat16_is_opened_wider(bfloat16_folder, load):
    wide = load(bfloat16_folder, dtype=torch.float32)
    narrow = load(bfloat16_folder, dtype="auto")
    assert narrow.dtype == torch.bfloat16
    assert all(torch.equal(value, wide.state_dict()[name].to(value.dtype)) for name, value in narrow.state_dict().items())


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")], ids=str)
@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_device_map(folder, wanted, load, device_map):
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto is the GPU here")
    model, info = load(folder, device_map=device_map, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model), wanted)


PARTLY_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_layers_on_disk(folder, wanted, load, tmp_path):
    pytest.importorskip("accelerate")
    model = load(folder, device_map=PARTLY_ON_DISK, offload_folder=str(tmp_path / "offload"))
    assert packed_names(model) == (ALL_PACKED if load is load_kept else set())
    on_meta = {name for name, value in model.state_dict().items() if value.device.type == "meta"}
    assert any(name.startswith("model.layers.0.") for name in on_meta)
    assert not any(name.startswith("model.layers.1.") for name in on_meta)
    assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(model), wanted)  # the hooks put everything back


def test_dense_checkpoint_is_not_packed_onto_disk(dense_folder, tmp_path):
    with pytest.raises(ValueError, match=r"offloaded to disk.*hf-sparse24 compress"):
        load_kept(dense_folder, device_map=PARTLY_ON_DISK, offload_folder=str(tmp_path))


def test_run_compressed_from_the_models_config(folder):
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["run_compressed"] = True
    assert packed_names(AutoModelForCausalLM.from_pretrained(folder, config=config)) == ALL_PACKED
    config.quantization_config["run_compressed"] = False
    assert not packed_names(AutoModelForCausalLM.from_pretrained(folder, config=config))


@pytest.mark.parametrize(
    ("available", "capability", "packed"),
    [
        (False, (9, 0), False),
        (True, (7, 0), False),
        (True, (7, 5), False),
        (True, (8, 0), True),
        (True, (8, 6), True),
        (True, (8, 9), True),
        (True, (9, 0), True),
        (True, (10, 0), True),
        (True, (12, 0), True),
    ],
    ids=str,
)
def test_default_keeps_layers_packed_where_a_supported_gpu_is_visible(folder, wanted, monkeypatch, available, capability, packed):
    monkeypatch.setattr(dispatch, "_why_not_built", lambda path, device, dtype, values: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    assert packed_names(model) == (ALL_PACKED if packed else set())
    asked = load_kept(folder, device_map={"": "cpu"})
    assert packed_names(asked) == ALL_PACKED
    monkeypatch.undo()
    assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(asked), wanted)


def test_options_that_a_packed_checkpoint_cannot_follow_are_named(folder):
    with pytest.warns(UserWarning, match="ignore, targets of the quantization_config is ignored"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=Sparse24Config(targets=["Linear"], ignore=[]))


def test_users_config_is_not_changed_and_opens_the_next_checkpoint_silently(folder, dense_folder, recwarn):
    config = Sparse24Config(run_compressed=True)
    packed_while_loading = AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config)
    assert (config, config.model_fields_set) == (Sparse24Config(run_compressed=True), {"run_compressed"})
    opened = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert packed_names(packed_while_loading) == packed_names(opened) == ALL_PACKED
    assert (config, config.model_fields_set) == (Sparse24Config(run_compressed=True), {"run_compressed"})
    assert [str(warning.message) for warning in recwarn] == []


def test_dense_checkpoint_packed_while_it_loads_is_saved_as_any_other(folder, dense_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=Sparse24Config())
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert files_of(tmp_path) == files_of(folder)


def test_loading_is_silent(folder, caplog, recwarn):
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for load in (load_kept, load_dense, AutoModelForCausalLM.from_pretrained):
            load(folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("load", [load_kept, load_dense, AutoModelForCausalLM.from_pretrained], ids=["kept", "dense", "default"])
def test_weight_that_a_checkpoint_lacks_is_an_error_that_names_it(folder, load, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    gone = "model.layers.1.mlp.up_proj"
    for part in ("compressed", "bitmask", "shape"):
        file = broken / index["weight_map"].pop(f"{gone}.{part}")
        rewrite(file, lambda tensors, part=part: tensors.pop(f"{gone}.{part}"))
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=gone):
        load(broken)


@pytest.mark.parametrize("part", ["bitmask", "compressed", "shape"])
@pytest.mark.parametrize("load", [load_kept, load_dense, AutoModelForCausalLM.from_pretrained], ids=["kept", "dense", "default"])
def test_part_that_a_checkpoint_lacks_is_an_error_that_names_it(folder, load, part, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    name = f"model.layers.1.mlp.up_proj.{part}"
    rewrite(broken / index["weight_map"].pop(name), lambda tensors: tensors.pop(name))
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=name):
        load(broken)


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# ---- another model class ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_new_head_is_left_to_transformers(folder, dense_folder, load):
    model, info = load(folder, LlamaForSequenceClassification, num_labels=3, output_loading_info=True)
    stock, stock_info = LlamaForSequenceClassification.from_pretrained(dense_folder, num_labels=3, output_loading_info=True)
    assert info["missing_keys"] == stock_info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == stock_info["unexpected_keys"]
    assert type(model.score) is torch.nn.Linear
    assert 0 < model.score.weight.std() < 0.1
    stock.score.weight.data.copy_(model.score.weight)
    assert torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_body_without_its_head(folder, dense_folder, load):
    body, stock = load(folder, LlamaModel), LlamaModel.from_pretrained(dense_folder)
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, stock(IDS).last_hidden_state)


def test_body_checkpoint_opened_with_a_head(folder, tmp_path):
    load_kept(folder, LlamaModel).save_pretrained(tmp_path)
    model, info = load_kept(tmp_path, LlamaForCausalLM, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert packed_names(model) == ALL_PACKED
    assert torch.equal(model.model.layers[0].mlp.up_proj.unpack(), load_dense(folder).model.layers[0].mlp.up_proj.weight)


class Remote(LlamaForCausalLM):
    """As custom code on the Hub: initialises by touching the weight of whatever is a Linear, missing or not."""

    touched: ClassVar[list[type]] = []

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            self.touched.append(type(module))
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, torch.nn.Embedding):
            module.weight.data.normal_()


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_initialiser_of_custom_code_neither_overwrites_nor_fails(folder, wanted, load):
    model = load(folder, Remote)
    assert torch.equal(logits(model), wanted)


def test_initialiser_of_custom_code_runs_for_a_new_head(folder):
    class RemoteClassifier(LlamaForSequenceClassification):
        _init_weights = Remote._init_weights
        touched: ClassVar[list[type]] = []

    model = load_kept(folder, RemoteClassifier, num_labels=3)
    assert model.touched == [torch.nn.Linear]
    assert packed_names(model) == ALL_PACKED


def test_initialising_a_kept_model_again_is_refused_and_changes_nothing(kept):
    before = state_bytes(kept)
    with pytest.raises(RuntimeError, match=r"normal_.*weight of a packed layer would be lost: call model.dequantize\(\)"):
        Remote._init_weights(kept, kept.model.layers[0].mlp.up_proj)
    assert state_bytes(kept) == before


# ---- what is done to a kept model ------------------------------------------------------------------------------------------------


def test_same_as_the_dense_model_in_what_is_asked_of_models(kept, folder, dense_folder):
    dense = AutoModelForCausalLM.from_pretrained(dense_folder)
    assert kept.num_parameters() == dense.num_parameters()
    assert kept.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
    assert (kept.dtype, kept.device) == (dense.dtype, dense.device)
    stored = sum(value.nbytes for value in tensors_of(folder).values())
    buffers = sum(value.nbytes for name, value in kept.named_buffers() if not name.endswith(".shape"))
    assert kept.get_memory_footprint() == stored + buffers
    assert kept.get_memory_footprint() < 0.75 * dense.get_memory_footprint()


def test_to_a_dtype_and_back(kept, dense_folder, wanted):
    narrow = copy.deepcopy(kept).to(torch.bfloat16)
    layer = narrow.model.layers[0].mlp.up_proj
    assert (layer.compressed.dtype, layer.bitmask.dtype, layer.shape.dtype) == (torch.bfloat16, torch.uint8, torch.int64)
    stock = AutoModelForCausalLM.from_pretrained(dense_folder).to(torch.bfloat16)
    assert torch.equal(logits(narrow), logits(stock))
    assert torch.equal(logits(kept.to("cpu").to(torch.float32)), wanted)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_are_whole_and_apart(kept, folder, wanted, copied, tmp_path):
    twin = copied(kept)
    assert torch.equal(logits(twin), wanted)
    assert twin.num_parameters() == kept.num_parameters()
    twin.save_pretrained(tmp_path, max_shard_size="30KB")
    assert files_of(tmp_path) == files_of(folder)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.compressed.zero_()
        twin.model.embed_tokens.weight.zero_()
    assert torch.equal(logits(kept), wanted)
    assert not torch.equal(logits(twin), wanted)
    # The count is the copy's own.
    twin.lm_head = torch.nn.Identity()
    assert twin.num_parameters() < kept.num_parameters()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_in_one_graph_for_any_batch(kept, backend):
    torch._dynamo.reset()
    layer = kept.model.layers[0].mlp
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counting)
    torch.manual_seed(0)
    with torch.no_grad():
        for rows in (2, 3, 5, 17, 33):
            x = torch.randn(rows, 4, 32)
            torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) <= 2
    assert any("hf_sparse24.linear" in str(node.target) for node in graphs[-1].graph.nodes)


def test_whole_model_compiles_without_a_break(kept, wanted):
    torch._dynamo.reset()
    compiled = torch.compile(kept, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), wanted)


def test_gradients_reach_the_input_through_a_compiled_layer(kept):
    torch._dynamo.reset()
    layer = kept.model.layers[0].mlp.up_proj
    x = torch.randn(3, 32, requires_grad=True)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.unpack().sum(0).expand(3, 32))


def test_exports(kept):
    layer = kept.model.layers[0].mlp
    x = torch.randn(4, 32)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    for rows in (2, 9):
        y = torch.randn(rows, 32)
        torch.testing.assert_close(program.module()(y), layer(y))


def test_dequantize_makes_the_stock_model(kept, dense_folder, wanted, tmp_path):
    plain = kept.dequantize()
    assert plain is kept
    assert not packed_names(plain)
    assert dense_names(plain) == {*ALL_PACKED, "lm_head"}
    assert not getattr(plain, "is_quantized", False)
    assert getattr(plain, "hf_quantizer", None) is None
    assert torch.equal(logits(plain), wanted)
    assert all(parameter.requires_grad for parameter in plain.parameters())
    plain.save_pretrained(tmp_path)
    assert files_of(tmp_path) == files_of(dense_folder)
    assert plain.num_parameters() == sum(parameter.numel() for parameter in plain.parameters())


def test_dequantize_to_a_dtype(kept):
    kept.dequantize(torch.bfloat16)
    assert kept.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_packed_parts_ask_for_no_gradient_and_the_rest_does(kept):
    frozen = {name for name, parameter in kept.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"{name}.{part}" for name in ALL_PACKED for part in ("compressed", "bitmask")}
    kept.train()
    kept(input_ids=IDS, labels=IDS).loss.backward()
    assert all((parameter.grad is None) == (name in frozen) for name, parameter in kept.named_parameters())


@pytest.mark.parametrize("options", [{}, {"assign": True}], ids=str)
def test_state_dict_goes_into_another_kept_model(kept, wanted, options):
    other = copy.deepcopy(kept)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    result = other.load_state_dict(kept.state_dict(), strict=True, **options)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(logits(other), wanted)
    assert state_bytes(other) == state_bytes(kept)


@pytest.mark.parametrize("loaded", ["q_proj", "k_proj"])
def test_metadata_of_other_positions_does_not_outlive_a_state_dict(kept, loaded):
    if loaded == "k_proj":
        fuse_projections(kept)
    first = kept.model.layers[0].self_attn.q_proj  # holds the metadata of a group
    first.metadata = torch.zeros(1, dtype=torch.uint8)
    state = {name: value.clone() for name, value in kept.state_dict().items()}
    kept.load_state_dict(state)
    assert first.metadata is not None
    state[f"model.layers.0.self_attn.{loaded}.bitmask"] ^= 0xFF  # the other two of every four
    kept.load_state_dict(state)
    assert first.metadata is None


def test_dense_state_dict_does_not_go_into_a_kept_model_silently(kept, dense_folder):
    dense = AutoModelForCausalLM.from_pretrained(dense_folder)
    with pytest.raises(RuntimeError, match=r"up_proj\.compressed"):
        kept.load_state_dict(dense.state_dict())


def test_shares_memory(kept, wanted):
    kept.share_memory()
    assert all(parameter.is_shared() for parameter in kept.parameters())
    assert torch.equal(logits(kept), wanted)


def test_generates_what_the_dense_model_generates(kept, dense_folder):
    dense = AutoModelForCausalLM.from_pretrained(dense_folder)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(kept.generate(IDS, **options), dense.generate(IDS, **options))


def test_gradient_checkpointing_gives_the_same_gradients(kept):
    kept.train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            # Its name of today, or the one of older versions.
            getattr(kept, "activation_checkpointing_enable", kept.gradient_checkpointing_enable)()
        kept.zero_grad()
        kept(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in kept.named_parameters() if parameter.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert "model.embed_tokens.weight" in grads[0]
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("config", [None, Sparse24Config(), "auto"], ids=["nothing", "config", "auto"])
def test_saved_again_from_a_kept_model(kept, folder, config, tmp_path):
    kept.save_pretrained(tmp_path, max_shard_size="30KB", **({} if config is None else {"sparsity_config": config}))
    written, original = files_of(tmp_path), files_of(folder)
    assert written.keys() == original.keys()
    # "auto" lists the layers by name in config.json.
    assert [name for name in written if written[name] != original[name]] == (["config.json"] if config == "auto" else [])


def test_kept_model_with_a_changed_dense_part_saves_the_change(kept, tmp_path):
    with torch.no_grad():
        kept.lm_head.weight.fill_(0.5)
    kept.save_pretrained(tmp_path)
    assert torch.equal(load_kept(tmp_path).lm_head.weight, kept.lm_head.weight)
    assert torch.equal(logits(load_dense(tmp_path)), logits(kept))


# ---- the weight of a packed layer ------------------------------------------------------------------------------------------------


@pytest.fixture
def layer(kept):
    return kept.model.layers[0].mlp.down_proj


def test_weight_answers_without_being_unpacked(layer, monkeypatch):
    monkeypatch.setattr(Sparse24Linear, "unpack", lambda self: pytest.fail("unpacked"))
    weight = layer.weight
    assert isinstance(weight, PackedWeight)
    assert isinstance(layer, torch.nn.Linear)
    assert (weight.dtype, weight.shape, weight.device, weight.ndim) == (torch.float32, (32, 64), torch.device("cpu"), 2)
    assert (weight.numel(), weight.element_size(), weight.size(1)) == (2048, 4, 64)
    assert (weight.requires_grad, weight.is_floating_point()) == (False, True)
    assert (weight.data.dtype, weight.data.shape, weight.grad) == (torch.float32, (32, 64), None)
    assert (layer.in_features, layer.out_features, layer.bias) == (64, 32, None)
    assert repr(weight).startswith("PackedWeight(shape=(32, 64), dtype=torch.float32, device=cpu")


def test_weight_gives_its_values(layer, dense_folder):
    dense = AutoModelForCausalLM.from_pretrained(dense_folder).model.layers[0].mlp.down_proj.weight.detach()
    weight = layer.weight
    assert torch.equal(weight + 0, dense)
    assert torch.equal(weight.clone(), dense)
    assert torch.equal(weight.to(torch.bfloat16), dense.to(torch.bfloat16))
    assert torch.equal(weight[3, 4:8], dense[3, 4:8])
    assert torch.equal(weight.T @ weight, dense.T @ dense)
    assert torch.equal(torch.cat([weight, dense]), torch.cat([dense, dense]))
    assert weight.float().norm() == dense.norm()
    x = torch.randn(2, 64)
    assert torch.equal(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, dense))


WRITES = {
    "add_": lambda weight: weight.add_(1),
    "data +=": lambda weight: setattr(weight, "data", weight.data + 1),
    "data.add_": lambda weight: weight.data.add_(1),
    "data.normal_": lambda weight: weight.data.normal_(),
    "init": lambda weight: torch.nn.init.uniform_(weight),
    "zero_": lambda weight: weight.zero_(),
    "copy_": lambda weight: weight.copy_(torch.zeros(32, 64)),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "out=": lambda weight: torch.add(torch.zeros(32, 64), 1, out=weight),
    "fill through a view": lambda weight: weight[0].fill_(1.0),
    "fill through a flat view": lambda weight: weight.view(-1).fill_(1.0),
    "mul_ of the transpose": lambda weight: weight.T.mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_to_the_weight_is_refused(layer, write):
    before = layer.unpack()
    with pytest.raises(RuntimeError, match=r"weight of a packed layer would be lost: call model.dequantize\(\)"), torch.no_grad():
        write(layer.weight)
    assert torch.equal(layer.unpack(), before)


def test_weight_cannot_be_replaced(layer):
    with pytest.raises((AttributeError, RuntimeError, TypeError, KeyError)):
        layer.weight = torch.nn.Parameter(torch.zeros(32, 64))


def test_kept_quantizer_knows_its_layers(kept):
    assert set(kept.hf_quantizer.kept.values()) == ALL_PACKED
    assert kept.hf_quantizer.is_serializable()
    assert kept.hf_quantizer.is_trainable
    assert kept.is_quantized
    assert kept.config.quantization_config == kept.hf_quantizer.quantization_config
    assert KEPT.run_compressed is True


def test_unpacked_layer_is_the_stock_one(layer, dense_folder):
    dense = AutoModelForCausalLM.from_pretrained(dense_folder).model.layers[0].mlp.down_proj
    plain = layer.to_linear()
    assert type(plain) is torch.nn.Linear
    assert same_bytes(plain.weight.detach(), dense.weight.detach())

"""Fused projections: the same model, state and files, fewer products; and every way to call a fused layer out of order."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from hf_sparse24 import Sparse24Config, Sparse24Linear, fuse_projections, projection_group, unfuse_projections
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.fusion import groups_of
from hf_sparse24.kernels import dispatch, ops, reference
from tests.models import FAMILIES, IDS, SIZES, Family, files_of, llama, load_dense, load_kept, logits, same_bytes, state_bytes

SHARD = "7KB"  # less than a group
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# Family -> modules that are fused, by the end of their name.
FUSED = {
    "llama": {"self_attn": QKV, "mlp": GATE_UP},
    "llama-tied": {"self_attn": QKV, "mlp": GATE_UP},
    "qwen2": {"self_attn": QKV, "mlp": GATE_UP},
    "mistral": {"self_attn": QKV, "mlp": GATE_UP},
    "gemma": {"self_attn": QKV, "mlp": GATE_UP},
    "opt": {"self_attn": QKV},
    "bert": {"self": ("query", "key", "value")},
    "t5": {"SelfAttention": ("q", "k", "v"), "EncDecAttention": ("k", "v")},
    "vit": None,
    "mixtral": {"self_attn": QKV},
    "qwen3-moe": {"self_attn": QKV},
    "llava": {"self_attn": QKV, "mlp": GATE_UP},
    "phi3": {},
}
BUILT = {
    **FAMILIES,
    "mistral": Family(MistralForCausalLM, lambda: MistralConfig(**SIZES), 14),
    "gemma": Family(GemmaForCausalLM, lambda: GemmaConfig(**SIZES), 14),
    "phi3": Family(Phi3ForCausalLM, lambda: Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, pad_token_id=0), 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    llama().save_pretrained(folder, sparsity_config=Sparse24Config())
    return folder


@pytest.fixture
def kept(folder):
    return load_kept(folder).eval()


@pytest.fixture
def fused(folder):
    model = load_kept(folder).eval()
    fuse_projections(model)
    return model


@pytest.fixture
def products(monkeypatch):
    """Rows of the weights that were multiplied, in order."""
    rows, multiply = [], reference.linear

    def note(x, compressed, bitmask, bias, in_features):
        rows.append(bitmask.shape[0])
        return multiply(x, compressed, bitmask, bias, in_features)

    monkeypatch.setattr(reference, "linear", note)
    return rows


class Pair(nn.Module):
    """Two fused layers and a forward that the test writes."""

    def __init__(self, calls, bias=True):
        super().__init__()
        torch.manual_seed(0)
        for name, rows in (("gate_proj", 24), ("up_proj", 40)):
            linear = nn.Linear(32, rows, bias=bias)
            linear.weight.data = Sparse24Compressor().decompress_weight(_packed(rows))
            setattr(self, name, Sparse24Linear.from_linear(linear))
        self.calls = calls

    def forward(self, x):
        return self.calls(self, x)


def _packed(rows):
    weight = torch.randn(rows, 8, 4)
    weight[..., 1::2] = 0
    return Sparse24Compressor().compress_weight(weight.view(rows, 32))


def pair(calls, bias=True):
    """The module, fused, and the same apart."""
    apart = Pair(calls, bias)
    module = copy.deepcopy(apart)
    fuse_projections(module)
    assert groups_of(module)
    return module, apart


def check(calls, *, products, expected, times=1):
    """A forward gives what it gives apart, by products of weights of so many rows."""
    module, apart = pair(calls)
    x = torch.randn(3, 32)
    with torch.no_grad():
        wanted = apart(x.clone())
        products.clear()
        for _ in range(times):
            found = module(x.clone())
    torch.testing.assert_close(found, wanted)
    assert products == expected
    return module


# ---- whole models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_family_keeps_its_logits_its_state_and_its_files(name, tmp_path):
    family = BUILT[name]
    family.build().save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    kept = load_kept(tmp_path / "packed", family.model_class).eval()
    wanted, before = logits(kept, **family.inputs), state_bytes(kept)
    kept.save_pretrained(tmp_path / "apart", max_shard_size=SHARD)
    report = fuse_projections(kept)
    if (expected := FUSED[name]) is not None:
        assert {module.rpartition(".")[2]: names for module, names in report.fused.items()} == expected
    torch.testing.assert_close(logits(kept, **family.inputs), wanted)
    assert not any(group.apart for group in groups_of(kept))
    assert list(state_bytes(kept)) == list(before)
    assert state_bytes(kept) == before
    kept.save_pretrained(tmp_path / "native", max_shard_size=SHARD)
    kept.save_pretrained(tmp_path / "ours", sparsity_config=Sparse24Config(), max_shard_size=SHARD)
    for saved in ("native", "ours"):
        found, expected_files = files_of(tmp_path / saved), files_of(tmp_path / "apart")
        assert {file for file in expected_files if file.endswith(".safetensors")} <= set(found)
        assert all(found[file] == content for file, content in expected_files.items() if "safetensors" in file)


def test_a_transformer_layer_has_four_products_instead_of_seven(fused, kept, products):
    logits(kept)
    apart = len(products)
    products.clear()
    logits(fused)
    assert apart == 14
    assert len(products) == 8
    assert products[:4] == [64, 32, 128, 32]


def test_nothing_is_packed_or_unpacked_to_fuse(kept, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise AssertionError("packed or unpacked")

    for owner, name in ((Sparse24Compressor, "compress_weight"), (Sparse24Compressor, "decompress_weight"), (reference, "unpack")):
        monkeypatch.setattr(owner, name, fail)
    fuse_projections(kept)
    kept.save_pretrained(tmp_path)
    unfuse_projections(kept)


def test_memory_of_a_group_is_one_allocation_of_its_bytes(fused, kept):
    def storages(model):
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}

    assert sum(storages(fused).values()) == sum(storages(kept).values())
    assert len(storages(kept)) - len(storages(fused)) == 2 * (2 * 2 + 1 * 2)


def test_metadata_of_the_separate_layers_is_dropped(kept):
    layers = [module for module in kept.modules() if isinstance(module, Sparse24Linear)]
    for layer in layers:
        layer.metadata = torch.zeros(1, dtype=torch.uint8)
    fuse_projections(kept)
    for layer in layers:
        assert layer.group is None or layer.metadata is None  # it would keep the separate values


def test_kernels_for_the_fused_shapes_are_prepared(kept, monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "prepare", lambda format, shapes, dtype, device: asked.append((format, shapes, dtype, device)))
    fuse_projections(kept)
    assert asked == [("sparse-24-bitmask", {(64, 32), (128, 32)}, torch.float32, torch.device("cpu"))]


def test_fusing_twice_changes_nothing(fused):
    groups = groups_of(fused)
    assert len(fuse_projections(fused).fused) == 4
    assert groups_of(fused) == groups


def test_unfused_layers_are_independent_again(fused, kept, products):
    unfuse_projections(fused)
    assert not groups_of(fused)
    assert not fused.model.layers[0].self_attn._forward_hooks
    torch.testing.assert_close(logits(fused), logits(kept), rtol=0, atol=0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in fused.parameters()}
    assert len(storages) == len(list(fused.parameters()))


def test_config_fuses_on_load(folder, kept, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Sparse24Config(run_compressed=True, fuse_projections=True))
    assert len(groups_of(model)) == 4
    torch.testing.assert_close(logits(model.eval()), logits(kept))
    kept.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "fused")
    assert files_of(tmp_path / "fused") == files_of(tmp_path / "apart")
    llama().save_pretrained(tmp_path / "dense")
    options = Sparse24Config(fuse_projections=True)
    assert len(groups_of(AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=options))) == 4


def test_config_says_that_dense_layers_are_not_fused(folder):
    with pytest.warns(UserWarning, match="fuse_projections=True has no effect"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=Sparse24Config(run_compressed=False, fuse_projections=True))


def test_config_says_that_nothing_was_fused(tmp_path):
    BUILT["phi3"].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    with pytest.warns(UserWarning, match="fused nothing: .*qkv_proj: the architecture has merged it already"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Sparse24Config(run_compressed=True, fuse_projections=True))


def test_dequantized_model_is_the_dense_one(fused, folder):
    model = fused.dequantize()
    assert not any(isinstance(module, Sparse24Linear) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model), logits(load_dense(folder).eval()))


def test_single_layer_becomes_linear(fused, kept):
    found, wanted = (model.model.layers[0].self_attn.k_proj for model in (fused, kept))
    assert same_bytes(found.to_linear().weight, wanted.to_linear().weight)
    assert torch.equal(found.weight + 0, wanted.weight + 0)


# ---- what is left alone ---------------------------------------------------------------------------------------------------


def test_merged_projections_are_listed(tmp_path):
    BUILT["phi3"].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    report = fuse_projections(load_kept(tmp_path))
    assert not report.fused
    assert report.left_alone["model.layers.0.self_attn.qkv_proj"] == "the architecture has merged it already"
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=96, n_positions=64))
    assert fuse_projections(gpt2).left_alone["transformer.h.0.attn.c_attn"] == "the architecture has merged it already"


def test_cross_attention_leaves_its_query_alone(tmp_path):
    BUILT["t5"].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    report = fuse_projections(load_kept(tmp_path, BUILT["t5"].model_class))
    assert "cross-attention" in report.left_alone["decoder.block.0.layer.1.EncDecAttention.q"]


def unlike(**changes):
    module = Pair(None)
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def _layer(rows=40, columns=32, dtype=torch.float32, bias=True):
    weight = torch.randn(rows, columns // 4, 4)
    weight[..., 1::2] = 0
    linear = nn.Linear(columns, rows, bias=bias)
    linear.weight.data = weight.view(rows, columns)
    return Sparse24Linear.from_linear(linear.to(dtype))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: nn.Linear(32, 40), "up_proj beside it is a Linear, not packed 2:4"),
        (lambda: _layer(columns=64), "in_features differs: gate_proj 32, up_proj 64"),
        (lambda: _layer(dtype=torch.bfloat16), "dtype differs: gate_proj torch.float32, up_proj torch.bfloat16"),
        (lambda: _layer(bias=False), "bias differs: gate_proj True, up_proj False"),
        (lambda: _layer().to("meta"), "device differs: gate_proj cpu, up_proj meta"),
    ],
)
def test_unequal_layers_are_left_alone_and_listed(other, reason):
    module = unlike(up_proj=other())
    report = fuse_projections(nn.ModuleDict({"mlp": module}))
    assert not report.fused
    assert report.left_alone["mlp.gate_proj"] == reason
    assert not groups_of(module)


def test_names_of_a_single_module_are_those_of_its_children():
    assert set(fuse_projections(unlike(up_proj=nn.Linear(32, 40))).left_alone) == {"gate_proj"}


def test_tensor_parallel_model_is_refused(kept):
    kept._tp_size = 2
    with pytest.raises(ValueError, match="split over 2 devices"):
        fuse_projections(kept)


# ---- order of calls -------------------------------------------------------------------------------------------------------


def test_siblings_share_one_product_in_any_order(products):
    check(lambda m, x: (m.gate_proj(x), m.up_proj(x)), products=products, expected=[64] * 2, times=2)
    check(lambda m, x: (m.up_proj(x), m.gate_proj(x)), products=products, expected=[64] * 2, times=2)


def test_second_call_with_the_same_input_multiplies_alone(products):
    check(lambda m, x: (m.gate_proj(x), m.gate_proj(x), m.up_proj(x), m.up_proj(x)), products=products, expected=[64, 24, 40])


def test_another_input_is_multiplied_alone_and_from_then_on_all_are(products):
    calls = lambda m, x: (m.gate_proj(x), m.up_proj(x + 1))  # noqa: E731
    module = check(calls, products=products, expected=[64, 40, 24, 40], times=2)
    assert groups_of(module)[0].apart


def test_input_that_was_written_to_is_another_one(products):
    check(lambda m, x: (m.gate_proj(x), m.up_proj(x.add_(1))), products=products, expected=[64, 40])


def test_equal_input_of_another_identity_is_multiplied_alone(products):
    check(lambda m, x: (m.gate_proj(x), m.up_proj(x.clone())), products=products, expected=[64, 40])


def test_layer_outside_of_its_parent_multiplies_alone(products):
    module, apart = pair(None)
    x = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(module.up_proj(x), apart.up_proj(x))
    assert products == [40, 40]


def test_nothing_is_kept(products):
    seen = []

    def calls(module, x):
        given = x + 1
        y = module.gate_proj(given), module.up_proj(given)
        seen.append((weakref.ref(given), weakref.ref(y[0])))
        del given
        assert seen[0][0]() is None  # the last sibling took its columns
        return y

    module, _ = pair(calls)
    with torch.no_grad():
        module(torch.randn(3, 32))
    assert seen[0][1]() is None
    assert not groups_of(module)[0]._scopes


def test_an_exception_leaves_nothing_behind(products):
    def calls(module, x):
        module.gate_proj(x)
        raise KeyError("between")

    module, _ = pair(calls)
    with torch.no_grad(), pytest.raises(KeyError):
        module(torch.randn(3, 32))
    group = groups_of(module)[0]
    assert not group._scopes
    assert not group.apart


def test_two_threads_get_their_own(products):
    both = threading.Barrier(2, timeout=20)

    def calls(module, x):
        gate = module.gate_proj(x)
        both.wait()
        return gate, module.up_proj(x)

    module, apart = pair(calls)
    inputs, found = [torch.randn(3, 32) for _ in range(2)], {}

    def run(index):
        with torch.no_grad():
            found[index] = module(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert products == [64, 64]
    for index, x in enumerate(inputs):
        torch.testing.assert_close(found[index], (apart.gate_proj(x), apart.up_proj(x)))


def test_with_gradients_layers_multiply_alone(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    x = torch.randn(3, 32, requires_grad=True)
    for y in module(x):  # one after the other: a shared node would be gone
        y.sum().backward()
    twin = x.detach().clone().requires_grad_(True)
    sum(y.sum() for y in apart(twin)).backward()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(module.up_proj.bias.grad, apart.up_proj.bias.grad)
    assert products == [24, 40] * 2


def test_inference_mode_multiplies_alone(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    with torch.inference_mode():
        x = torch.randn(3, 32)
        torch.testing.assert_close(module(x), apart(x))
    assert products == [24, 40] * 2


def test_autocast_multiplies_alone(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    x = torch.randn(3, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(x), apart(x))
    assert products == [24, 40] * 2


def test_hooks_of_a_layer_run_and_count(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    for m in (module, apart):
        m.up_proj.register_forward_hook(lambda m, args, y: y * 2)
    x = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(module(x), apart(x))
        products.clear()
        for m in (module, apart):
            m.gate_proj.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
        torch.testing.assert_close(module(x), apart(x))
    assert products == [64, 40, 24, 40]


@pytest.mark.parametrize("shape", [(32,), (1, 32), (0, 32), (2, 3, 32), (2, 1, 1, 32)], ids=str)
def test_columns_can_be_viewed_as_heads_and_one_row_is_contiguous(shape):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    x = torch.randn(shape)
    with torch.no_grad():
        for found, wanted in zip(module(x), apart(x), strict=True):
            torch.testing.assert_close(found.view(*shape[:-1], found.shape[-1] // 8, 8), wanted.unflatten(-1, (-1, 8)))
            assert found.is_contiguous() or x.numel() > 32  # of more rows: columns of a larger tensor


# ---- moving and copying ---------------------------------------------------------------------------------------------------


def shares(model):
    groups = groups_of(model)
    return bool(groups) and all(group.is_shared for group in groups)


def test_casting_keeps_the_memory_shared(fused, kept):
    fused.bfloat16 = lambda: nn.Module.to(fused, torch.bfloat16)  # Transformers refuses `.bfloat16()` where a quantizer is
    assert shares(fused.bfloat16())
    nn.Module.to(kept, torch.bfloat16)
    assert state_bytes(fused) == state_bytes(kept)
    torch.testing.assert_close(logits(fused), logits(kept))


def test_moving_keeps_the_memory_shared(fused, kept):
    pointer = fused.model.layers[0].self_attn.q_proj.compressed.data_ptr()
    fused.to("cpu")
    assert shares(fused)
    assert fused.model.layers[0].self_attn.q_proj.compressed.data_ptr() == pointer
    fused._apply(lambda tensor: tensor.clone())
    assert shares(fused)
    assert state_bytes(fused) == state_bytes(kept)
    fused.to("meta")
    assert fused.model.layers[0].self_attn.k_proj.compressed.is_meta
    fused.to_empty(device="cpu")
    fused.load_state_dict(kept.state_dict())
    assert shares(fused)
    assert state_bytes(fused) == state_bytes(kept)


def test_one_layer_moved_apart_is_still_right(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    module.up_proj.compressed.data = module.up_proj.compressed.data.clone()
    assert not groups_of(module)[0].is_shared
    x = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(module(x), apart(x))
    assert products == [24, 40] * 2


def test_offloaded_layers_multiply_alone(fused, kept):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(fused, execution_device=torch.device("cpu"))
    assert fused.model.layers[0].self_attn.q_proj.compressed.is_meta
    torch.testing.assert_close(logits(fused), logits(kept), rtol=0, atol=0)
    assert not any(group.apart for group in groups_of(fused))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_are_independent_and_can_be_fused_again(fused, kept, copied):
    twin = copied(fused)
    assert not groups_of(twin)
    assert shares(fused)
    torch.testing.assert_close(logits(twin), logits(kept), rtol=0, atol=0)
    layer = twin.model.layers[0].self_attn.q_proj
    assert layer.compressed.untyped_storage().nbytes() == layer.compressed.nbytes
    with torch.no_grad():
        layer.compressed.zero_()
    assert state_bytes(fused) == state_bytes(kept)
    fuse_projections(twin)
    assert shares(twin)


def test_a_model_that_is_gone_leaves_no_memory(folder):
    model = load_kept(folder)
    fuse_projections(model)
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.compressed)
    logits(model)
    del model
    gc.collect()
    assert weight() is None


def test_state_dict_has_the_memory_of_the_model(fused):
    value = fused.state_dict()["model.layers.0.mlp.up_proj.compressed"]
    # Of a view, Transformers would save a copy; all of them together are one of the model.
    assert value.untyped_storage().nbytes() == value.nbytes
    value.zero_()
    assert not fused.model.layers[0].mlp.up_proj.compressed.any()
    assert fused.model.layers[0].mlp.gate_proj.compressed.any()


# ---- adapters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse_first", [True, False])
def test_adapters_on_one_projection(folder, kept, products, fuse_first):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        return model.eval()

    model = load_kept(folder)
    if fuse_first:
        fuse_projections(model)
    model = adapted(model)
    if not fuse_first:
        assert len(fuse_projections(model).fused) == 4
    apart = adapted(kept)
    torch.testing.assert_close(logits(model), logits(apart))
    products.clear()
    logits(model)
    assert len(products) == 8
    for m in (model, apart):
        m.train()(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: parameter.grad for name, parameter in apart.named_parameters() if parameter.grad is not None}
    assert grads
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name])


# ---- torch.compile --------------------------------------------------------------------------------------------------------


def counted(backend, graphs):
    def compile(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if "hf_sparse24" in str(node.target)])
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    return compile


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decoding_compiles_once_without_a_break(fused, kept, backend):
    from transformers import StaticCache

    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(fused, fullgraph=True, backend=counted(backend, graphs))
    caches = [StaticCache(config=fused.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            kept(input_ids=IDS, past_key_values=cache)
        counts = []
        for step in range(4):
            tokens = torch.tensor([[step + 3]])
            found = compiled(input_ids=tokens, past_key_values=caches[0]).logits
            wanted = kept(input_ids=tokens, past_key_values=caches[1]).logits
            torch.testing.assert_close(found, wanted)
            counts.append(len(graphs))
    assert counts == [1] * 4
    assert sum("linear_group" in target for target in graphs[0]) == 4
    assert len(graphs[0]) == 8


def test_compiled_parts_of_a_model_stay_right(products):
    torch._dynamo.reset()
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    compiled = copy.copy(module)
    x = torch.randn(3, 32)
    with torch.no_grad():
        alone = torch.compile(module.up_proj, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            torch.testing.assert_close(alone(x), apart.up_proj(x))
        torch.testing.assert_close(module(x), apart(x))
        torch.testing.assert_close(torch.compile(compiled, fullgraph=True, backend="aot_eager")(x), apart(x))


def test_compiled_with_other_inputs_multiplies_alone_and_says_so(monkeypatch):
    torch._dynamo.reset()
    said = []
    monkeypatch.setattr(projection_group.logger, "warning_once", said.append)
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x + 1)))
    graphs = []
    compiled = torch.compile(module, fullgraph=True, backend=counted("aot_eager", graphs))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 32)
            torch.testing.assert_close(compiled(x), apart(x))
    assert len(graphs) <= 2
    assert groups_of(module)[0].apart
    assert "do not all read the same input" in said[0]


def test_compiled_code_refuses_an_input_that_is_written_to_between():
    torch._dynamo.reset()
    module, _ = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x.add_(1))))
    with torch.no_grad(), pytest.raises(Exception, match="written to between them"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(torch.randn(3, 32))


def test_operator_is_what_torch_expects_of_one():
    module, _ = pair(None)
    layers = [module.gate_proj, module.up_proj]
    parts = [[getattr(layer, name).detach() for layer in layers] for name in ("compressed", "bitmask", "bias")]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.linear_group, (torch.randn(3, 32), *parts, None, 32), test_utils=checks)

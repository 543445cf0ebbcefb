"""Fused projections of whole models: the same logits, state and files by fewer products; what is left alone; moving and copying."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
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

from hf_sparse24 import Sparse24Config, Sparse24Linear, fuse_projections, unfuse_projections
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.fusion import groups_of
from hf_sparse24.kernels import dispatch, reference
from tests.models import FAMILIES, IDS, SIZES, Family, files_of, llama, load_dense, load_kept, logits, packed_layer, same_bytes, state_bytes

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


def test_unfused_layers_are_independent_again(fused, kept):
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


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: nn.Linear(32, 40), "up_proj beside it is a Linear, not packed 2:4"),
        (lambda: packed_layer(in_features=64), "in_features differs: gate_proj 32, up_proj 64"),
        (lambda: packed_layer(dtype=torch.bfloat16), "dtype differs: gate_proj torch.float32, up_proj torch.bfloat16"),
        (lambda: packed_layer(bias=False), "bias differs: gate_proj True, up_proj False"),
        (lambda: packed_layer().to("meta"), "device differs: gate_proj cpu, up_proj meta"),
    ],
)
def test_unequal_layers_are_left_alone_and_listed(other, reason):
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_proj": packed_layer(24), "up_proj": other()})})
    report = fuse_projections(model)
    assert not report.fused
    assert report.left_alone["mlp.gate_proj"] == reason
    assert not groups_of(model)


def test_names_of_a_single_module_are_those_of_its_children():
    assert set(fuse_projections(nn.ModuleDict({"gate_proj": packed_layer(24), "up_proj": nn.Linear(32, 40)})).left_alone) == {"gate_proj"}


def test_tensor_parallel_model_is_refused(kept):
    kept._tp_size = 2
    with pytest.raises(ValueError, match="split over 2 devices"):
        fuse_projections(kept)


def test_sharded_layers_are_refused(kept):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = kept.model.layers[1].mlp.up_proj
        local, mesh = layer.compressed.detach(), init_device_mesh("cpu", (2,))
        layer.compressed = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=False)
        with pytest.raises(ValueError, match="gate_proj, up_proj are sharded by tensor parallelism"):
            fuse_projections(kept)
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decoding_compiles_once_without_a_break(fused, kept, backend):
    from transformers import StaticCache

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fused, fullgraph=True, backend=counter)
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
            counts.append(counter.frame_count)
    assert counts == [1] * 4
    targets = [str(node.target) for node in counter.graphs[0].graph.nodes if "hf_sparse24" in str(node.target)]
    assert sum("linear_group" in target for target in targets) == 4
    assert len(targets) == 8

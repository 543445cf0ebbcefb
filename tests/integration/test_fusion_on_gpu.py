"""Fused projections on a GPU: which path multiplies, memory, moving, CUDA graphs, generation."""

import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from hf_sparse24 import Sparse24Config, fuse_projections, unfuse_projections
from hf_sparse24.fusion import groups_of
from hf_sparse24.kernels import cusparselt, dispatch, plans
from tests.models import SIZES, load_kept, make_2_4

pytestmark = pytest.mark.gpu
WIDE = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    config = LlamaConfig(**{**WIDE, "max_position_embeddings": 512}, dtype=torch.bfloat16, bos_token_id=None, eos_token_id=None)
    make_2_4(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)).save_pretrained(folder, sparsity_config=Sparse24Config())
    return folder


@pytest.fixture
def kept(folder):
    return load_kept(folder, device_map="cuda").eval()


@pytest.fixture
def fused(folder):
    model = load_kept(folder, device_map="cuda").eval()
    fuse_projections(model)
    return model


@pytest.fixture
def planned(monkeypatch):
    """(rows of the weight, path) of every plan that is made: one for each weight and number of rows."""
    made_plans, plan = [], plans._plan

    def note(x, compressed, bitmask, *args):
        made = plan(x, compressed, bitmask, *args)
        made_plans.append((bitmask.shape[0], made.path))
        return made

    monkeypatch.setattr(plans, "_plan", note)
    monkeypatch.setattr(plans, "_PLANS", {})
    return made_plans


def storages(model):
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_one_kernel_multiplies_the_whole_group(fused, kept, planned, tokens):
    ids = torch.randint(96, (1, tokens), device="cuda")
    with torch.no_grad():
        found = fused(input_ids=ids).logits
        ran = set(planned)
        torch.testing.assert_close(found, kept(input_ids=ids).logits, rtol=0.05, atol=0.02)
    group = groups_of(fused)[0]
    has_metadata = group.layers[0].metadata is not None
    expected = {n: dispatch.explain(n, k, tokens, torch.bfloat16, "cuda", has_metadata).path for n, k in ((1024, 512), (2048, 512))}
    assert {n: path for n, path in ran if n in expected} == expected
    assert "unpack" not in expected.values()


def test_metadata_belongs_to_the_group(fused):
    if reason := cusparselt.why_not_weight(1024, 512, torch.bfloat16) or dispatch.why_not(
        "cusparselt", torch.device("cuda"), torch.bfloat16
    ):
        pytest.skip(reason)
    for group in groups_of(fused):
        first, *others = group.layers
        values = plans.as_one(group.tensors("compressed"))
        assert first.metadata.data_ptr() == values.data_ptr() + values.nbytes
        assert all(layer.metadata is None for layer in others)


def test_memory_is_that_of_the_layers_apart(fused, kept):
    assert storages(fused) == storages(kept)
    before = torch.cuda.memory_allocated()
    unfuse_projections(fused)
    gc.collect()
    # The library pads the metadata of a few rows, and the allocator rounds every allocation to 512 bytes.
    assert abs(torch.cuda.memory_allocated() - before) <= 0.01 * before
    assert storages(fused) == storages(kept)


def test_moving_to_the_device_and_back_keeps_the_memory_shared(folder, kept):
    model = load_kept(folder).eval()
    fuse_projections(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("cuda")
    assert all(group.is_shared for group in groups_of(model))
    assert storages(model) == storages(kept)
    model.to("cpu")
    assert all(group.is_shared for group in groups_of(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_saves_the_same_bytes(fused, kept, tmp_path):
    fused.save_pretrained(tmp_path / "fused")
    kept.save_pretrained(tmp_path / "apart")
    assert (tmp_path / "fused/model.safetensors").read_bytes() == (tmp_path / "apart/model.safetensors").read_bytes()


def test_decode_step_is_captured_in_a_cuda_graph(fused):
    cache = StaticCache(config=fused.config, max_cache_len=64)
    tokens = torch.randint(96, (2, 1), device="cuda")

    def step():
        return fused(input_ids=tokens, past_key_values=cache).logits

    def rewind():
        for layer in cache.layers:
            layer.cumulative_length.fill_(8)

    with torch.no_grad():
        step()
        rewind()
        wanted = step().clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rewind()
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for _ in range(3):
            rewind()
            graph.replay()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not any(group.apart or group._scopes for group in groups_of(fused))


def test_generates_with_a_compiled_static_cache(fused):
    torch._dynamo.reset()
    prompt = torch.randint(96, (1, 8), device="cuda")
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for _ in range(2):
        found = fused.generate(prompt, cache_implementation="static", **options)
        assert found.shape == (1, 20)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(fused.generate(prompt, cache_implementation="static", **options), found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert not any(group.apart for group in groups_of(fused))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_in_one_graph(fused, kept, mode):
    torch._dynamo.reset()
    ids = torch.randint(96, (1, 16), device="cuda")
    compiled = torch.compile(fused, fullgraph=True, mode=mode)
    with torch.no_grad():
        wanted = kept(input_ids=ids).logits
        for _ in range(4):
            torch.testing.assert_close(compiled(input_ids=ids).logits.clone(), wanted, rtol=0.05, atol=0.02)

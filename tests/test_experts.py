"""Packed experts: the operator against plain products, the module against Transformers' own, on any routing; gradients, compile."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_sparse24.compressors import PackedTensorError, Sparse24Compressor
from hf_sparse24.experts import ExpertWeights, Sparse24Experts, why_not_packed
from hf_sparse24.kernels import ops
from tests.models import same_bytes, two_of_four

MEMBERS = {"gate_up_proj": ("*.w1", "*.w3"), "down_proj": ("*.w2",), "up_proj": ("*.up",)}
CONFIG = {"num_local_experts": 6, "num_experts": 6, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24}


@use_experts_implementation(has_gate=False)
class UngatedExperts(nn.Module):
    """As those of Nemotron-H."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.empty(6, 24, 32))
        self.down_proj = nn.Parameter(torch.empty(6, 32, 24))
        self.act_fn = ACT2FN["relu2"]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        every = self.act_fn(torch.einsum("eih,th->tei", self.up_proj, hidden_states))
        results = torch.einsum("ehi,tei->teh", self.down_proj, every)
        chosen = results.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, results.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


def dense_experts(kind=MixtralExperts, dtype=torch.float32):
    torch.manual_seed(0)
    experts = kind(SimpleNamespace(**CONFIG, hidden_act="silu", _experts_implementation="eager"))
    with torch.no_grad():
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(two_of_four(torch.randn(parameter.shape) / 5).to(dtype)))
    return experts


def pack(experts):
    return Sparse24Experts(experts, {name: ExpertWeights.from_dense(weight, MEMBERS[name]) for name, weight in experts.named_parameters()})


def routing(num_tokens, k=2, dtype=torch.float32):
    scores = torch.rand(num_tokens, 6, generator=torch.Generator().manual_seed(num_tokens))
    weights, index = scores.softmax(-1).topk(k, dim=-1)
    return index, weights.to(dtype)


# ---- the operator ------------------------------------------------------------------------------------------------------------


def operands(counts, in_features=32, out_features=24, beyond=0, dtype=torch.float32):
    """x, packed weights, and where each expert's rows end; the dense weights, too."""
    torch.manual_seed(0)
    dense = two_of_four(torch.randn(len(counts), out_features, in_features)).to(dtype)
    packed = ExpertWeights.from_dense(dense, ("*.w",))
    x = torch.randn(sum(counts) + beyond, in_features, dtype=dtype)
    return (x, packed.compressed, packed.bitmask, torch.tensor(counts).cumsum(0, dtype=torch.int32), in_features), dense


@pytest.mark.parametrize("counts", [(3, 1, 4), (0, 5, 0), (0, 0, 0), (0, 0, 2), (7, 0, 1)], ids=str)
@pytest.mark.parametrize("in_features", [32, 12])
def test_each_row_is_multiplied_by_the_weight_of_its_expert(counts, in_features):
    (x, *rest), dense = operands(counts, in_features)
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = torch.stack([dense[expert] @ row for expert, row in zip(experts, x, strict=True)]) if len(x) else torch.empty(0, 24)
    torch.testing.assert_close(ops.experts_linear(x, *rest), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_no_expert_are_zero():
    arguments, _ = operands((2, 3), beyond=4)
    y = ops.experts_linear(*arguments)
    assert y.shape == (9, 24) and y[:5].all(-1).all() and not y[5:].any()


def test_each_expert_is_one_product(products):
    arguments, _ = operands((2, 0, 3))
    ops.experts_linear(*arguments)
    assert products == [24, 24]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_operator_is_what_torch_expects_of_one(requires_grad):
    (x, *rest), _ = operands((3, 0, 2), beyond=1)
    torch.library.opcheck(ops.experts_linear, (x.requires_grad_(requires_grad), *rest))
    torch.library.opcheck(ops.experts_linear_grad_x, (torch.randn(6, 24), *rest))


def test_compilers_keep_the_operator_out_of_cuda_graphs():
    """As long as the host reads offsets."""
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in (ops.experts_linear, ops.experts_linear_grad_x))


def test_operator_names_what_does_not_fit():
    (x, compressed, bitmask, offsets, in_features), _ = operands((3, 2))
    meta = [tensor.to("meta") for tensor in (x, compressed, bitmask, offsets)]
    with pytest.raises(RuntimeError, match="x has 3 dimensions"):
        ops.experts_linear(meta[0].unsqueeze(0), *meta[1:], in_features)
    with pytest.raises(RuntimeError, match="1 offsets for 2 experts"):
        ops.experts_linear(*meta[:3], meta[3][:1], in_features)
    with pytest.raises(RuntimeError, match="x has 16 features, the weight 32"):
        ops.experts_linear(meta[0][:, :16], *meta[1:], in_features)


# ---- the module --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("kind", [MixtralExperts, Qwen3MoeExperts, UngatedExperts])
def test_forward_is_that_of_the_dense_module(kind, k, num_tokens):
    experts = dense_experts(kind)
    x, (index, weights) = torch.randn(num_tokens, 32), routing(num_tokens, k)
    found, expected = pack(experts)(x, index, weights), experts(x, index, weights)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_forward_in_float32_is_that_of_every_dense_implementation(implementation):
    experts = dense_experts()
    packed = pack(experts)
    experts.config._experts_implementation = implementation
    x, (index, weights) = torch.randn(37, 32), routing(37)
    torch.testing.assert_close(packed(x, index, weights), experts(x, index, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, None], ids=["float32 weights", "same"])
def test_forward_in_16_bits_is_as_close_to_float32_as_rounding(dtype, weights_dtype):
    experts = dense_experts(dtype=dtype)
    x, (index, weights) = torch.randn(37, 32, dtype=dtype), routing(37, dtype=weights_dtype or dtype)
    found = pack(experts)(x, index, weights)
    assert found.dtype == dtype
    exact = dense_experts()
    for name, weight in experts.named_parameters():
        setattr(exact, name, nn.Parameter(weight.detach().float()))
    expected = exact(x.float(), index, weights.float())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps * expected.abs().max().item())


def test_an_expert_that_is_chosen_by_all_and_experts_that_are_chosen_by_none():
    experts = dense_experts()
    x, index, weights = torch.randn(9, 32), torch.tensor([[5, 2]]).expand(9, 2), torch.full((9, 2), 0.5)
    torch.testing.assert_close(pack(experts)(x, index, weights), experts(x, index, weights), rtol=1e-5, atol=1e-6)


def test_a_number_that_no_expert_has_adds_nothing():
    experts = dense_experts()
    x, (index, weights) = torch.randn(5, 32), routing(5)
    nowhere = torch.where(torch.arange(5)[:, None] % 2 == 0, torch.tensor([6, 6]), index)
    found = pack(experts)(x, nowhere, weights)
    assert not found[::2].any()
    torch.testing.assert_close(found[1::2], experts(x, index, weights)[1::2], rtol=1e-5, atol=1e-6)


def test_gradients_of_x_and_of_routing_weights_are_those_of_the_dense_module():
    experts = dense_experts()
    packed, grads = pack(experts), []
    for module in (experts, packed):
        x, (index, weights) = torch.linspace(-1, 1, 7 * 32).view(7, 32).requires_grad_(), routing(7)
        weights.requires_grad_()
        (module(x, index, weights) ** 2).sum().backward()
        grads.append((x.grad, weights.grad))
    for found, expected in zip(grads[1], grads[0], strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in packed.parameters())


def test_autocast_is_what_it_is_for_dense_experts():
    experts = dense_experts()
    x, (index, weights) = torch.randn(5, 32), routing(5)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = pack(experts)(x, index, weights), experts(x, index, weights)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_in_one_graph_whatever_the_routing(backend):
    packed = pack(dense_experts())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(packed, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (7, 5, 37, 5):
            x, (index, weights) = torch.randn(num_tokens, 32), routing(num_tokens)
            for chosen in (index, index.flip(0), torch.full_like(index, 3)):
                torch.testing.assert_close(compiled(x, chosen, weights), packed(x, chosen, weights), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# ---- what it holds -----------------------------------------------------------------------------------------------------------


def test_nothing_dense_is_held():
    experts = dense_experts(dtype=torch.bfloat16)
    packed = pack(experts)
    held = sum(parameter.nbytes for parameter in packed.parameters())
    assert held * 16 == 9 * sum(parameter.nbytes for parameter in experts.parameters())
    assert list(packed.form.parameters()) == []
    assert len(list(experts.parameters())) == 2, "the module that was packed is left as it is"


def test_parts_are_those_that_files_hold():
    experts = dense_experts()
    packed = pack(experts)
    found = dict(packed.gate_up_proj.parts_of_each())
    assert list(found) == [f"{expert}.{member}" for expert in range(6) for member in ("w1", "w3")]
    for name, parts in found.items():
        expert, member = name.split(".")
        rows = slice(0, 24) if member == "w1" else slice(24, 48)
        expected = Sparse24Compressor().compress_weight(experts.gate_up_proj[int(expert), rows])
        assert all(same_bytes(parts[part], value) for part, value in expected.items()) and parts.keys() == expected.keys()


@pytest.mark.parametrize("kind", [MixtralExperts, UngatedExperts])
def test_dense_module_comes_back(kind):
    experts = dense_experts(kind)
    again = pack(experts).to_experts()
    assert type(again) is kind and again.config is experts.config
    assert all(same_bytes(weight, experts.get_parameter(name)) for name, weight in again.named_parameters())
    x, (index, weights) = torch.randn(5, 32), routing(5)
    torch.testing.assert_close(again(x, index, weights), experts(x, index, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same(copied):
    packed = pack(dense_experts())
    x, (index, weights) = torch.randn(5, 32), routing(5)
    assert torch.equal(copied(packed)(x, index, weights), packed(x, index, weights))


def test_cast_changes_values_only():
    packed = pack(dense_experts()).to(torch.bfloat16)
    assert packed.down_proj.compressed.dtype == torch.bfloat16
    assert packed.down_proj.bitmask.dtype == torch.uint8 and packed.down_proj.shape.dtype == torch.int64
    packed.down_proj.check()


def test_weight_that_is_not_2_4_is_named():
    weight = dense_experts().gate_up_proj.detach()
    weight[3, 24 + 5, 8:12] = 1
    with pytest.raises(ValueError, match=r"^3\.w3: .*row 5, columns 8\.\.11"):
        ExpertWeights.from_dense(weight, MEMBERS["gate_up_proj"])


def test_damaged_parts_are_named():
    packed = pack(dense_experts())
    packed.down_proj.bitmask.data[2, 7, 1] ^= 1
    with pytest.raises(PackedTensorError, match=r"^2\.w2: .*row 7, byte 1"):
        packed.down_proj.check()
    packed.gate_up_proj.shape[1, 2] = 25
    with pytest.raises(PackedTensorError, match=r"shape holds \[\(24, 32\), \(25, 32\)\], the weights are \(24, 32\)"):
        packed.gate_up_proj.check()


def test_modules_that_cannot_be_packed_say_why():
    assert why_not_packed(dense_experts()) is None
    transposed = GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=2))
    assert why_not_packed(transposed) == "GptOssExperts holds its weights transposed"
    assert why_not_packed(nn.Linear(4, 4)) == "Linear does not go through Transformers' experts interface"
    biased = dense_experts()
    biased.has_bias = True
    assert why_not_packed(biased) == "MixtralExperts has more than two weights for each expert"
    other = dense_experts()
    other.scale = nn.Parameter(torch.ones(6))
    assert "has the parameters ['down_proj', 'gate_up_proj', 'scale']" in why_not_packed(other)

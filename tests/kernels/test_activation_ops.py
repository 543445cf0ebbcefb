"""The operators of squared-ReLU blocks: the selection against sorting in Python, products and gradients against plain autograd."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hf_sparse24.kernels import ops, reference
from hf_sparse24.pattern import find_bad_groups, mask_2_4
from tests.models import same_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
# The check of the schema compares its inputs, which torch cannot do with float8 on a CPU.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def kept_by_sorting(row):
    """The two that a reader of the definition would keep, in Python."""
    result = [0.0] * len(row)
    for start in range(0, len(row), 4):
        columns = range(start, min(start + 4, len(row)))
        rank = {column: math.inf if math.isnan(row[column]) else abs(row[column]) for column in columns}
        order = sorted(columns, key=lambda column: (not math.isnan(row[column]), -rank[column], column))
        for column in order[:2]:
            result[column] = row[column]
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4,), (1, 8), (3, 5, 12), (6, 1), (7, 2), (5, 7), (3, 66), (0, 8)], ids=str)
def test_selection_is_what_sorting_gives(shape, dtype):
    # Few different values: most groups have ties.
    h = torch.randint(-3, 4, shape).to(dtype)
    found = reference.keep_two_of_four(h)
    expected = torch.tensor([kept_by_sorting(row) for row in h.reshape(-1, shape[-1]).tolist()], dtype=dtype).view(shape)
    assert found.shape == h.shape and found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("group", "kept"),
    [
        ([1, 1, 1, 1], [1, 1, 0, 0]),
        ([0, 2, 2, 2], [0, 2, 2, 0]),
        ([-2, 2, -3, 1], [-2, 0, -3, 0]),
        ([0, 0, 0, 5], [0, 0, 0, 5]),
        ([math.inf, 1, -math.inf, 2], [math.inf, 0, -math.inf, 0]),
        ([math.inf, math.inf, math.nan, 2], [math.inf, 0, math.nan, 0]),
        ([1, math.nan, math.nan, math.nan], [0, math.nan, math.nan, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_signs_infinities_and_nan(group, kept, dtype):
    found = reference.keep_two_of_four(torch.tensor(group, dtype=dtype))
    assert torch.equal(found.nan_to_num(nan=-7), torch.tensor(kept, dtype=dtype).nan_to_num(nan=-7))


def test_nans_with_other_bits_are_equal():
    bits = torch.tensor([0x7F81, -1, 0x7FFF, 0x7F80], dtype=torch.int16)  # nan, -nan, nan, inf
    kept = reference.keep_two_of_four(bits.view(torch.bfloat16))
    assert same_bytes(kept[:2], bits[:2].view(torch.bfloat16)) and kept[2:].tolist() == [0, 0]


def test_negative_zero_ties_with_zero():
    kept = reference.keep_two_of_four(torch.tensor([-0.0, 0.0, -0.0, 0.0]))
    assert kept.signbit().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_selection_of_weights_and_of_activations_agree(dtype):
    h = torch.randn(64, 256, dtype=torch.float64).to(dtype)
    h[torch.rand(h.shape) < 0.4] = 0
    h[0, :8] = torch.tensor([math.nan, math.inf, 1, math.nan, -math.inf, math.inf, -math.inf, 0], dtype=dtype)
    assert same_bytes(reference.keep_two_of_four(h), torch.where(mask_2_4(h), h, 0))
    assert find_bad_groups(reference.keep_two_of_four(h)) is None


def operands(dtype, in_features=22, gated=False, bias=True, shape=(3, 5)):
    u, gate = torch.randn(*shape, in_features, dtype=dtype), torch.randn(*shape, in_features, dtype=dtype)
    weight = torch.randn(10, in_features, dtype=dtype) / 4
    return u, gate if gated else None, weight, torch.randn(10, dtype=dtype) if bias else None


def straight_through(u, gate, weight, bias, keep_two):
    """By plain autograd: the values after the selection, the gradient as if there were none."""
    h = F.relu(u) * F.relu(u) if gate is None else F.relu(gate) * F.relu(gate) * u
    if keep_two:
        h = h + (reference.keep_two_of_four(h.detach()) - h).detach()
    return F.linear(h, weight, bias)


@pytest.mark.parametrize("keep_two", [False, True], ids=["all", "two"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)], ids=str)
def test_product_is_linear_on_the_squared_relu(shape, dtype, gated, keep_two):
    u, gate, weight, bias = operands(dtype, gated=gated, shape=shape)
    h = F.relu(u) ** 2 if gate is None else F.relu(gate) ** 2 * u
    expected = F.linear(reference.keep_two_of_four(h) if keep_two else h, weight, bias)
    columns = weight.t().contiguous()
    assert torch.equal(ops.squared_relu(u, gate, keep_two), reference.keep_two_of_four(h) if keep_two else h)
    for found in (
        ops.squared_relu_linear(u, gate, weight, None, None, bias, keep_two),
        ops.squared_relu_linear(u, gate, weight, None, columns, bias, keep_two),
    ):
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("scale", [(10, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_of_float8_is_multiplied_by_its_scale(dtype, scale):
    u, _, weight, bias = operands(dtype)
    weight_scale = torch.rand(scale) + 0.5
    eight_bit = weight.to(FP8)
    wide = (eight_bit.float() * weight_scale).to(dtype)
    assert torch.equal(ops.squared_relu_linear(u, None, eight_bit, weight_scale, None, bias, False), F.linear(F.relu(u) ** 2, wide, bias))
    assert torch.equal(ops.linear_fp8(u, eight_bit, weight_scale, bias), F.linear(u, wide, bias))


@pytest.mark.parametrize("keep_two", [False, True], ids=["all", "two"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", [(), (3, 5), (0,)], ids=str)
def test_gradients_go_straight_through_the_selection(shape, gated, keep_two):
    values = [t for t in operands(torch.float64, gated=gated, shape=shape) if t is not None]
    leaves = [t.requires_grad_() for t in values]
    gate = leaves[1] if gated else None
    u, (weight, bias) = leaves[0], leaves[-2:]
    found = ops.squared_relu_linear(u, gate, weight, None, None, bias, keep_two)
    apart = F.linear(ops.squared_relu(u, gate, keep_two), weight, bias)
    expected = straight_through(u, gate, weight, bias, keep_two)
    grad_y = torch.randn_like(expected)
    grads, grads_apart, wanted = (torch.autograd.grad(y, leaves, grad_y) for y in (found, apart, expected))
    for actual, other, grad in zip(grads, grads_apart, wanted, strict=True):
        torch.testing.assert_close(actual, grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_gradients_without_selection_pass_gradcheck(gated):
    leaves = [t.requires_grad_() for t in operands(torch.float64, in_features=6, gated=gated, shape=(2,)) if t is not None]

    def product(u, *rest):
        gate, weight, bias = rest if gated else (None, *rest)
        return ops.squared_relu_linear(u, gate, weight, None, None, bias, False)

    assert torch.autograd.gradcheck(product, leaves)


def test_only_what_is_asked_for_gets_a_gradient():
    u, gate, weight, bias = operands(torch.float32, gated=True)
    gate.requires_grad_()
    ops.squared_relu_linear(u, gate, weight, None, None, bias, True).sum().backward()
    assert gate.grad is not None and u.grad is None and weight.grad is None and bias.grad is None


@pytest.mark.parametrize("operator", ["squared_relu_linear", "linear_fp8"])
def test_gradients_of_float8_weights_are_those_of_the_wide_ones(operator):
    u, _, weight, bias = operands(torch.float64)
    scale, eight_bit = torch.rand(10, 1) + 0.5, weight.to(FP8)
    wide = (eight_bit.float() * scale).double()
    leaves = [u.requires_grad_(), bias.requires_grad_()]
    if operator == "linear_fp8":
        found, expected = ops.linear_fp8(u, eight_bit, scale, bias), F.linear(u, wide, bias)
    else:
        found = ops.squared_relu_linear(u, None, eight_bit, scale, None, bias, True)
        expected = straight_through(u, None, wide, bias, True)
    for actual, wanted in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("keep_two", [False, True], ids=["all", "two"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_operators_pass_opcheck(gated, keep_two):
    u, gate, weight, bias = operands(torch.float32, gated=gated)
    leaves = [None if t is None else t.requires_grad_() for t in (u, gate, weight)]
    torch.library.opcheck(ops.squared_relu, (*leaves[:2], keep_two))
    torch.library.opcheck(ops.squared_relu, (u.detach().transpose(0, 1), None if gate is None else gate.detach().transpose(0, 1), keep_two))
    torch.library.opcheck(ops.squared_relu_linear, (*leaves, None, weight.detach().t().contiguous(), bias.requires_grad_(), keep_two))


def test_operators_of_float8_pass_opcheck():
    u, _, weight, bias = operands(torch.float32)
    eight_bit, scale = weight.to(FP8), torch.rand(10, 1)
    check = partial(torch.library.opcheck, test_utils=WITHOUT_SCHEMA)
    check(ops.linear_fp8, (u.requires_grad_(), eight_bit, scale, bias.requires_grad_()))
    check(ops.squared_relu_linear, (u, None, eight_bit, scale, None, bias, True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"u": torch.randn(3, 23)}, "23 features, the weight 22"),
        ({"gate": torch.randn(3, 21)}, r"u has shape \(3, 22\), its gate \(3, 21\)"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_while_compiling(changed, message):
    u, gate, weight, bias = operands(torch.float32, gated=True, shape=(3,))
    given = {"u": u, "gate": gate, **changed}
    if "gate" not in changed:
        given["gate"] = given["u"]
    with pytest.raises(RuntimeError, match=message), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        ops.squared_relu_linear(given["u"], given["gate"], weight, None, None, bias, True)

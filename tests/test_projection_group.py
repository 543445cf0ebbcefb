"""Two layers of one parent that share a weight: every order and way to call them gives what they give apart."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparse24 import fuse_projections, projection_group
from hf_sparse24.fusion import groups_of
from hf_sparse24.kernels import ops
from tests.models import packed_layer


class Pair(nn.Module):
    """Two fused layers and a forward that the test writes."""

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(0)
        for name, rows in (("gate_proj", 24), ("up_proj", 40)):
            setattr(self, name, packed_layer(rows))
        self.calls = calls

    def forward(self, x):
        return self.calls(self, x)


def pair(calls):
    """The module, fused, and the same apart."""
    apart = Pair(calls)
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


def test_one_layer_moved_apart_is_still_right(products):
    module, apart = pair(lambda m, x: (m.gate_proj(x), m.up_proj(x)))
    module.up_proj.compressed.data = module.up_proj.compressed.data.clone()
    assert not groups_of(module)[0].is_shared
    x = torch.randn(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(module(x), apart(x))
    assert products == [24, 40] * 2


# ---- torch.compile --------------------------------------------------------------------------------------------------------


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
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 32)
            torch.testing.assert_close(compiled(x), apart(x))
    assert counter.frame_count <= 2
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

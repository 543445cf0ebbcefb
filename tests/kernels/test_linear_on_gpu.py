"""A packed layer on a GPU meets what a Linear meets, and the kernel that was meant to run runs."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_sparse24 import Sparse24Linear
from hf_sparse24.kernels import cusparselt, dispatch, ops, plans
from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp
from tests.kernels import products

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def ran(monkeypatch):
    """The paths that ran, in order."""
    paths, starter, multiply = [], dispatch.starter, cusparselt.linear

    def note(config, *args, **kwargs):
        start = starter(config, *args, **kwargs)
        return lambda *tensors: (paths.append(config.source), start(*tensors))[1]

    def note_library(*args, **kwargs):
        paths.append("cusparselt")
        return multiply(*args, **kwargs)

    monkeypatch.setattr(dispatch, "starter", note)
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(cusparselt, "linear", note_library)
    return paths


def layer_of(n, k, dtype=torch.bfloat16, bias=True, seed=0, prepared=False):
    """A packed layer, and the same dense."""
    linear = nn.Linear(k, n, bias=bias, device="cuda", dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(products.random_weight(n, k, dtype, deficient=True, seed=seed).dense)
    layer = Sparse24Linear.from_linear(linear)
    if prepared:
        assert layer.prepare() is None
    return layer, linear.requires_grad_(False)


def check(layer, linear, x):
    products.check(layer(x).reshape(-1, linear.out_features), x.reshape(-1, linear.in_features), linear.weight, linear.bias)


# Both sides of every threshold, and sizes that are multiples of nothing.
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 300, 1000, 2049])
@pytest.mark.parametrize(("n", "k"), [(512, 1024), (2048, 512), (576, 1536), (1536, 576), (100, 1040), (1000, 2112)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(n, k, m, dtype, ran):
    layer, linear = layer_of(n, k, dtype, bias=m % 2 == 0)
    check(layer, linear, products.random_x(m, k, dtype))
    expected = dispatch.explain(n, k, m, dtype)
    assert ran == ([] if expected.path == "unpack" else [expected.path])
    assert set(expected.reasons) == set(dispatch.PATHS) - {expected.path}
    if k % 64 == 0 and torch.cuda.get_device_capability() == (9, 0):
        assert expected.path in ("mma_sp", "wgmma_sp")


@pytest.mark.parametrize("m", [1, 64, 65, 256, 1000, 1023, 1024, 8192])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (1024, 2048), (2048, 576)], ids=str)
def test_products_of_prepared_layers(n, k, m, ran):
    layer, linear = layer_of(n, k, bias=m % 2 == 0, prepared=True)
    parts = layer.parts()
    check(layer, linear, products.random_x(m, k, torch.bfloat16))
    expected = dispatch.explain(n, k, m, has_metadata=True)
    assert ran == ([] if expected.path == "unpack" else [expected.path])
    if torch.cuda.get_device_capability() == (9, 0) and (n, m) == (14336, 8192):
        assert expected.path == "cusparselt"
    original = Sparse24Linear.from_linear(linear).parts()
    assert all(torch.equal(parts[part].view(torch.uint8), original[part].view(torch.uint8)) for part in parts)


def test_float16_has_no_metadata():
    layer, _ = layer_of(256, 512, torch.float16)
    assert "bfloat16 only" in layer.prepare()
    assert layer.metadata is None


def test_metadata_follows_the_layer_and_is_not_saved(ran):
    layer, linear = layer_of(14336, 4096, prepared=True)
    x = products.random_x(8192, 4096, torch.bfloat16)
    assert set(layer.state_dict()) == {"compressed", "bitmask", "shape", "bias"}
    layer.to("cpu")
    assert layer.metadata is None
    layer.to("cuda")
    check(layer, linear, x)
    copied, halves = copy.deepcopy(layer), copy.deepcopy(layer).half()
    assert copied.metadata is None
    check(copied, linear, x)
    check(halves, copy.deepcopy(linear).half(), x.half())
    layer.compressed.data = layer.compressed.clone()  # as a loader may do: the metadata is no longer behind it
    check(layer, linear, x)
    assert ran == (["cusparselt", "wgmma_sp", "wgmma_sp", "wgmma_sp"] if torch.cuda.get_device_capability() == (9, 0) else ran)


@pytest.mark.parametrize("k", [4096, 14336])
def test_large_products(k):
    for n, m in [(4096, 1), (28672, 16), (4096, 64), (6144, 500)]:
        check(*layer_of(n, k), products.random_x(m, k, torch.bfloat16))


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)], ids=str)
def test_shapes_of_x(shape):
    layer, linear = layer_of(48, 64)
    x = torch.randn(shape, device="cuda").bfloat16()
    assert layer(x).shape == linear(x).shape
    torch.testing.assert_close(layer(x), linear(x), rtol=0.02, atol=0.02)


def test_x_may_have_any_strides():
    layer, linear = layer_of(256, 512)
    wide = torch.randn(40, 1024 + 4, device="cuda").bfloat16()
    for x in (wide[:, :512], wide[:, 1:513], wide[:, 8:520], wide[::3, :512], wide[:, :1024:2], wide[:16, :512].T.contiguous().T):
        check(layer, linear, x)
    check(layer, linear, wide[:40, :512].view(4, 10, 512).transpose(0, 1))


def test_infinities_of_x_meet_only_kept_weights():
    layer, linear = layer_of(256, 512, bias=False)
    for m in (1, 16, 200):
        x = products.random_x(m, 512, torch.bfloat16)
        x[0, 3] = torch.inf
        kept = (linear.weight[:, 3] != 0).nonzero()[:, 0]
        pruned = (
            layer.compressor.decompress_weight({**layer.parts(), "compressed": torch.ones_like(layer.compressed)})[:, 3] == 0
        ).nonzero()[:, 0]
        y = layer(x)
        assert y[0, kept].isinf().all()
        assert y[0, pruned].isfinite().all()
        assert y[1:].isfinite().all()


def test_a_wrong_dtype_or_size_is_what_linear_says():
    layer, linear = layer_of(64, 128)
    for x in (torch.randn(3, 128, device="cuda"), torch.randn(3, 64, device="cuda").bfloat16()):
        with pytest.raises(RuntimeError) as ours:
            layer(x)
        with pytest.raises(RuntimeError) as theirs:
            linear(x)
        assert type(ours.value) is type(theirs.value)


def test_autocast_uses_the_kernel(ran):
    layer, linear = layer_of(256, 512)
    x = torch.randn(5, 512, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, expected = layer(x), linear(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert ran
    products.check(y, x.bfloat16(), linear.weight, linear.bias)


@pytest.mark.parametrize("m", [1, 20, 300])
def test_graph_gives_the_same_and_reads_new_x_and_new_weights(m):
    layer, _ = layer_of(1024, 2048)
    x = products.random_x(m, 2048, torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x * 2
        y = layer(hidden)
        z = layer(hidden + 1)
    for seed in range(3):
        x.copy_(products.random_x(m, 2048, torch.bfloat16, seed=seed))
        layer.compressed.data.mul_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x * 2))
        assert torch.equal(z, layer(x * 2 + 1))


def test_weights_that_a_graph_writes_are_not_read_early():
    layer, _ = layer_of(4096, 4096, bias=False)
    new = torch.randn_like(layer.compressed)
    x = products.random_x(1, 4096, torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer.compressed.copy_(new)
        layer.compressed.mul_(2)
        y = layer(x)
    for _ in range(20):
        layer.compressed.data.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x))


def test_streams_run_side_by_side():
    layers = [layer_of(1024, 1024, seed=seed) for seed in range(4)]
    xs = [products.random_x(m, 1024, torch.bfloat16) for m in (1, 16, 64, 500)]
    expected = [layer(x) for (layer, _), x in zip(layers, xs, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    found = [[] for _ in layers]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(layers[i][0](xs[i]))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i]) for i, ys in enumerate(found) for y in ys)


def test_more_than_two_to_the_31_elements():
    n, k, m = 4096, 128, 2**19 + 1000
    layer, linear = layer_of(n, k)
    x = products.random_x(m, k, torch.bfloat16)
    y = layer(x)
    assert y.numel() > 2**31
    for rows in (slice(0, 300), slice(2**31 // n - 200, 2**31 // n + 200), slice(m - 300, m)):
        products.check(y[rows], x[rows], linear.weight, linear.bias)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process():
    layer, linear = layer_of(512, 1024)
    there = copy.deepcopy(layer).to("cuda:1")
    for m in (1, 16, 300):
        x = products.random_x(m, 1024, torch.bfloat16)
        check(layer, linear, x)
        assert torch.equal(there(x.to("cuda:1")).cpu(), layer(x).cpu())


# ---- gradients and compilers -----------------------------------------------------------------------------------------------


def test_gradients_of_x_and_bias():
    layer, linear = layer_of(96, 128)
    linear.bias.requires_grad_(True)
    layer.bias = nn.Parameter(linear.bias.detach().clone())
    x = torch.randn(4, 3, 128, device="cuda").bfloat16().requires_grad_(True)
    x_dense = x.detach().clone().requires_grad_(True)
    grad_y = torch.randn(4, 3, 96, device="cuda").bfloat16()
    layer(x).backward(grad_y)
    linear(x_dense).backward(grad_y)
    torch.testing.assert_close(x.grad, x_dense.grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer.bias.grad, linear.bias.grad, rtol=0.02, atol=0.02)
    assert layer.compressed.grad is None


@pytest.mark.parametrize("m", [1, 16, 200])
def test_operator_is_what_torch_expects_of_one(m):
    layer, _ = layer_of(96, 128)
    for x in (torch.randn(m, 128, device="cuda").bfloat16(), torch.randn(m, 128, device="cuda").bfloat16().requires_grad_(True)):
        torch.library.opcheck(
            ops.linear, (x, layer.compressed, layer.bitmask, layer.bias.detach(), layer.metadata, 128), atol=0.05, rtol=0.05
        )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_as_one_operator_without_guards_on_the_batch(mode):
    layers = [layer_of(512, 512, seed=seed) for seed in range(2)]
    packed, dense = (nn.Sequential(pair[0][i], nn.GELU(), pair[1][i]) for i, pair in enumerate([layers, layers]))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(packed, mode=mode, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for m in (3, 17, 64, 300, 17):
            x = products.random_x(m, 512, torch.bfloat16)
            for _ in range(3):
                torch.testing.assert_close(compiled(x).clone(), packed(x), rtol=0.02, atol=0.05)
                torch.testing.assert_close(compiled(x).clone(), dense(x), rtol=0.03, atol=0.5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("m", [1, 64, 1024])
def test_nothing_of_x_or_y_is_kept(m):
    layer, _ = layer_of(1024, 1024)
    layer(products.random_x(m, 1024, torch.bfloat16))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        layer(products.random_x(m, 1024, torch.bfloat16))
    assert torch.cuda.memory_allocated() <= before


def test_layer_takes_its_packed_bytes_whatever_has_run():
    layer, linear = layer_of(4096, 4096, bias=False)
    dense_bytes = linear.weight.nbytes
    x = products.random_x(1024, 4096, torch.bfloat16)
    for m in (1, 16, 100, 1024):
        layer(x[:m])
    del linear
    before = torch.cuda.memory_allocated()
    assert layer.prepare() is None
    layer(x)
    assert torch.cuda.memory_allocated() - before <= 0.063 * dense_bytes
    del layer
    assert before - torch.cuda.memory_allocated() <= 0.57 * dense_bytes


def test_an_environment_without_a_compiler_unpacks_and_says_so_once(monkeypatch):
    def fail(*args, **kwargs):
        raise dispatch.KernelCompileError("no compiler")

    monkeypatch.setattr(dispatch, "_kernel", fail)
    monkeypatch.setattr(plans, "_PLANS", {})
    dispatch._why_not_built.cache_clear()
    dispatch.choose.cache_clear()
    try:
        layer, linear = layer_of(128, 256)
        x = products.random_x(4, 256, torch.bfloat16)
        with pytest.warns(UserWarning, match="no compiler"):
            y = layer(x)
        products.check(y, x, linear.weight, linear.bias)
        layer(x)
    finally:
        dispatch._why_not_built.cache_clear()
        dispatch.choose.cache_clear()


def test_both_kernels_are_used():
    kinds = {type(dispatch.explain(4096, 4096, m).config) for m in (1, 16, 64, 512)}
    assert kinds == {MmaSp, WgmmaSp} if torch.cuda.get_device_capability() == (9, 0) else {MmaSp, type(None)}


def test_reference_is_linear():
    layer, linear = layer_of(64, 128)
    x = products.random_x(5, 128, torch.bfloat16)
    y = F.linear(x, layer.unpack(), layer.bias)
    products.check(y, x, linear.weight, linear.bias)

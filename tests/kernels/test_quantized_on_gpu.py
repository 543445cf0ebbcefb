"""Layers of 8 and 4 bits on a GPU: the path that was meant to run runs, and gives the product of what is stored."""

import pytest
import torch

from hf_sparse24.kernels import dispatch, plans, reference
from hf_sparse24.quantization import QuantizationScheme
from hf_sparse24.quantized_linear import Marlin24Linear, QuantizedSparse24Linear
from tests.kernels import products

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def ran(monkeypatch):
    """The configurations that ran, in order, with the dtype of the values."""
    configs, starter = [], dispatch.starter

    def note(config, weight, m, dtype, values=None, x_scale=None):
        start = starter(config, weight, m, dtype, values, x_scale)
        return lambda *arguments: (configs.append((config.source, values)), start(*arguments))[1]

    monkeypatch.setattr(dispatch, "starter", note)
    monkeypatch.setattr(plans, "_PLANS", {})
    return configs


def layer_of(n, k, values, quantize_x, bias=True, dtype=torch.bfloat16, input_scale=None):
    weight = products.random_weight_8bit(n, k, values, torch.float32)
    parts = {"compressed": weight.compressed, "bitmask": weight.bitmask, "weight_scale": weight.scale, "shape": torch.tensor([[n], [k]])}
    if input_scale is not None:
        parts["input_scale"] = input_scale
    layer = QuantizedSparse24Linear.from_parts(parts, torch.randn(n, device="cuda", dtype=dtype) if bias else None)
    layer.quantize_x = quantize_x
    return layer.requires_grad_(False), weight.dense


@pytest.mark.parametrize("values", dispatch.DTYPES_8BIT, ids=str)
@pytest.mark.parametrize("quantize_x", [True, False])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (576, 1536), (1536, 576), (100, 1056)], ids=str)
def test_products(values, quantize_x, n, k, ran):
    layer, dense = layer_of(n, k, values, quantize_x)
    for m in (1, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 300, 1000):
        choice = dispatch.choose(n, k, m, torch.bfloat16, torch.device("cuda", 0), values=values, quantize_x=quantize_x)
        for shape in ((m, k), (1, m, 1, k)):
            x = products.random_x(m, k, torch.bfloat16).view(shape)
            y = layer(x)
            assert y.shape == (*shape[:-1], n)
            rounds = choice.path == "wgmma_sp"
            expected_x = products.rounded(x.view(m, k), values) if rounds else x.view(m, k)
            # A widened value is rounded once more, a row of the reference in float32 is not.
            epsilon = 2**-7 if choice.path in ("widen", "unpack") else 2**-8
            products.check(y.view(m, n), expected_x, dense, layer.bias, epsilon=epsilon)
        if choice.config is not None:
            assert ran[-1] == (choice.path, values)
        elif choice.path == "widen":
            assert ran[-1][1] is None


def test_one_scale_for_all_of_x_clips(ran):
    layer, dense = layer_of(512, 1024, torch.float8_e4m3fn, True, input_scale=torch.tensor([0.002], device="cuda"))
    x = products.random_x(200, 1024, torch.bfloat16)
    y = layer(x)
    if HOPPER:
        assert ran == [("wgmma_sp", torch.float8_e4m3fn)]
        products.check(y, products.rounded(x, torch.float8_e4m3fn, torch.tensor([0.002], device="cuda")), dense, layer.bias, epsilon=2**-8)


@pytest.mark.parametrize("quantize_x", [True, False])
def test_cuda_graphs_replay_new_rows(quantize_x):
    layer, _ = layer_of(1024, 2048, torch.float8_e4m3fn, quantize_x, bias=False)
    for m in (1, 16, 128):
        x = products.random_x(m, 2048, torch.bfloat16)
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for seed in (5, 6):
            x.copy_(products.random_x(m, 2048, torch.bfloat16, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            expected = layer(x)
            assert torch.equal(y, expected)


def test_compiles_without_graph_breaks():
    layer, _ = layer_of(256, 512, torch.float8_e4m3fn, True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 16, 100):
        x = products.random_x(m, 512, torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def test_gradient_of_x():
    layer, dense = layer_of(256, 512, torch.int8, True)
    x = products.random_x(20, 512, torch.bfloat16).requires_grad_()
    layer(x).sum().backward()
    expected = torch.ones(20, 256, device="cuda") @ dense
    torch.testing.assert_close(x.grad.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_memory_is_what_is_stored():
    n = k = 4096
    layer, _ = layer_of(n, k, torch.float8_e4m3fn, True, bias=False)
    torch.cuda.synchronize()
    for m in (1, 64, 500):
        layer(products.random_x(m, k, torch.bfloat16))
    before = torch.cuda.memory_allocated()
    stored = sum(part.nbytes for part in layer.parts().values() if part.is_cuda)
    assert stored <= 0.315 * 2 * n * k
    del layer
    assert before - torch.cuda.memory_allocated() <= stored * 1.001 + 4096


# ---- in Marlin's order -------------------------------------------------------------------------------------------------------


def marlin_layer(n, k, num_bits, grouped, dtype):
    scheme = QuantizationScheme(
        num_bits=num_bits, type="int", strategy="group" if grouped else "channel", group_size=128 if grouped else None
    )
    linear = torch.nn.Linear(k, n, device="cuda", dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(products.random_weight(n, k, dtype, deficient=True).dense)
    layer = Marlin24Linear.from_linear(linear.cpu(), scheme).cuda().requires_grad_(False)
    tensors = layer.tensors[0], layer.tensors[1], layer.tensors[2].float()
    return layer, reference.dequantize_marlin24(*tensors, num_bits, layer.scales_permuted)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("grouped", [True, False], ids=["g128", "channel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (1024, 2048), (192, 256), (17024, 128)], ids=str)
def test_products_in_marlins_order(num_bits, grouped, dtype, n, k):
    layer, dense = marlin_layer(n, k, num_bits, grouped, dtype)
    for m in (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300):
        choice = dispatch.choose_marlin24(n, k, m, dtype, torch.device("cuda", 0), num_bits=num_bits, grouped=grouped)
        path, reasons = choice.path, choice.reasons
        assert set(reasons) == set(dispatch.MARLIN_PATHS) - {path} and all(reasons.values())
        assert path == ("marlin24" if m <= 64 else "widen" if HOPPER else "unpack")
        x = products.random_x(m, k, dtype)
        epsilon = products.EPSILON[dtype] * (1 if path == "marlin24" else 2)  # a widened value is rounded once more
        products.check(layer(x.view(1, m, k)).view(m, n), x, dense, layer.bias, epsilon=epsilon)


def test_a_widened_weight_is_complete_before_it_is_read():
    """In a graph, where kernels start early: each product's weight lies where that of the one before was."""
    layers = [marlin_layer(1024, 2048, 4, True, torch.float16)[0] for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.scale_packed.data.mul_(i + 1)
    x = products.random_x(200, 2048, torch.float16)
    expected = [layer(x) for layer in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer(x) for layer in layers]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""The operators of 8- and 4-bit weights: against plain arithmetic, under opcheck, gradients, compile; and the layers around them."""

import copy
import io

import pytest
import torch
from torch import nn

from hf_sparse24.compressors import (
    GptqMarlin24Compressor,
    Marlin24Compressor,
    QuantizedCompressor,
    Sparse24Compressor,
    SparseBitmaskCompressor,
)
from hf_sparse24.kernels import ops
from hf_sparse24.linear import Sparse24Linear
from hf_sparse24.quantization import GPTQ_MARLIN, PRESETS, QuantizationScheme
from hf_sparse24.quantized_linear import (
    GptqMarlin24Linear,
    Marlin24Linear,
    QuantizedSparse24Linear,
    QuantizedSparseBitmaskLinear,
)
from tests.models import same_bytes, two_of_four

FP8_TENSOR = QuantizationScheme(type="float", strategy="tensor", activations="dynamic")
W8_GROUP = QuantizationScheme(num_bits=8, strategy="group", group_size=128)
# Layer class and scheme; N and K are 64 and 256, for which the two spellings of Marlin order scales differently.
LAYERS = {
    "fp8": (QuantizedSparse24Linear, PRESETS["fp8"]),
    "fp8-tensor": (QuantizedSparse24Linear, FP8_TENSOR),
    "int8": (QuantizedSparse24Linear, PRESETS["int8"]),
    "int8-bitmask": (QuantizedSparseBitmaskLinear, PRESETS["int8"]),
    "w4-g128": (Marlin24Linear, PRESETS["w4a16"]),
    "w4-channel": (Marlin24Linear, QuantizationScheme(num_bits=4)),
    "w8-g128": (Marlin24Linear, W8_GROUP),
    "w8-channel": (Marlin24Linear, PRESETS["w8a16"]),
    "gptq-w4-g128": (GptqMarlin24Linear, PRESETS["w4a16"].model_copy(update={"format": GPTQ_MARLIN})),
}
COMPRESSORS = {
    QuantizedSparse24Linear: QuantizedCompressor(Sparse24Compressor()),
    QuantizedSparseBitmaskLinear: QuantizedCompressor(SparseBitmaskCompressor()),
    Marlin24Linear: Marlin24Compressor(),
    GptqMarlin24Linear: GptqMarlin24Compressor(),
}


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def dense_layer(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=bias, dtype=dtype)
    with torch.no_grad():
        # Every scale differs from its neighbours.
        linear.weight *= torch.linspace(0.5, 8, 64).view(-1, 1) * torch.linspace(1, 2, 256)
    linear.weight = nn.Parameter(two_of_four(linear.weight))
    return linear


@pytest.fixture(params=LAYERS)
def layer(request):
    layer_class, scheme = LAYERS[request.param]
    return layer_class.from_linear(dense_layer(), scheme)


def dequantised(layer):
    """The weight by the compressor, which shares no unpacking of 2:4 with the operators' reference."""
    return COMPRESSORS[type(layer)].decompress_weight(layer.parts())


@pytest.mark.parametrize("shape", [(256,), (1, 256), (3, 5, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_is_linear_on_the_dequantised_weight(layer, dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    layer.bias = nn.Parameter(layer.bias.to(dtype))
    expected = nn.functional.linear(x, dequantised(layer).to(dtype), layer.bias)
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert torch.equal(found, expected)


def test_quantisation_is_all_that_separates_a_layer_from_the_original(layer, request):
    """So that a fault in packing cannot hide behind it: the same layer on its own dequantised copy gives the same numbers."""
    x = torch.randn(7, 256)
    copy_of_it = nn.Linear(256, 64)
    copy_of_it.weight, copy_of_it.bias = nn.Parameter(dequantised(layer).float()), layer.bias
    torch.testing.assert_close(layer(x), copy_of_it(x), rtol=1e-5, atol=1e-5)
    original = dense_layer()
    relative = torch.linalg.vector_norm(layer(x) - original(x)) / torch.linalg.vector_norm(original(x))
    # One scale for rows of very different sizes, float8 and 4 bits are coarse.
    limit = 0.15 if layer.values.dtype == torch.int32 and getattr(layer, "num_bits", 8) == 4 else 0.03
    assert 0 < relative < limit


def test_weight_answers_like_a_dense_one(layer):
    assert layer.weight.shape == (64, 256) and layer.weight.dtype == dequantised(layer).dtype
    assert torch.equal(layer.weight + 0, dequantised(layer))
    assert torch.equal(layer.to_linear().weight, dequantised(layer))
    with pytest.raises(RuntimeError, match="would be lost"):
        layer.weight.data += 1


def test_a_weight_without_values_is_not_multiplied_by(layer):
    """torch would return what memory held."""
    x = torch.randn(3, 256)
    packed = (layer, Sparse24Linear.from_linear(dense_layer()))
    for module in packed:
        with pytest.raises(RuntimeError, match="on meta"):
            module.to("meta")(x)


def arguments(layer, x):
    if isinstance(layer, Marlin24Linear):
        return ops.linear_marlin24, (x, *layer.tensors, layer.bias.detach(), layer.num_bits, layer.scales_permuted)
    scales = layer.weight_scale, None
    return ops.linear_8bit, (x, layer.compressed, layer.bitmask, *scales, layer.bias.detach(), 256, layer.quantize_x)


def test_operators_pass_opcheck(layer):
    operator, values = arguments(layer, torch.randn(3, 256, requires_grad=True))
    # On a CPU torch cannot compare float8, which the check of the schema does to its inputs; int8 takes the same operator.
    utilities = tuple(name for name in UTILITIES if name != "test_schema" or layer.values.dtype != torch.float8_e4m3fn)
    torch.library.opcheck(operator, values, test_utils=utilities)
    if isinstance(layer, Marlin24Linear):
        torch.library.opcheck(ops.dequantize_marlin24, (*layer.tensors, layer.num_bits, layer.scales_permuted))
    else:
        parts = layer.compressed, layer.bitmask, layer.weight_scale
        torch.library.opcheck(ops.dequantize_8bit, (*parts, 256), test_utils=utilities)


def test_gradients_of_x_and_bias_are_those_of_the_dequantised_layer(layer):
    x, twin = torch.randn(2, 3, 256, requires_grad=True), layer.to_linear().float()
    twin.bias = nn.Parameter(layer.bias.detach().clone())
    (layer(x) ** 2).sum().backward()
    found, bias, x.grad = x.grad, layer.bias.grad, None
    (twin(x) ** 2).sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, twin.bias.grad, rtol=1e-4, atol=1e-4)
    assert all(value.grad is None for value in layer.parts().values())


@pytest.mark.parametrize("name", ["fp8", "w4-g128"])
def test_layers_compile_without_a_break(name):
    layer_class, scheme = LAYERS[name]
    layer = layer_class.from_linear(dense_layer(), scheme)
    x = torch.randn(3, 256)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_a_call_looks_up_no_tensor_as_an_attribute(layer, monkeypatch):
    """`nn.Module.__getattr__` costs a microsecond a tensor, where a product takes a few."""
    looked_up = []

    def getattr_of_module(module, name):
        looked_up.append(name)
        return original(module, name)

    original, x = nn.Module.__getattr__, torch.randn(1, 256)
    monkeypatch.setattr(nn.Module, "__getattr__", getattr_of_module)
    layer.forward(x)
    assert looked_up == []
    assert layer.bias is not None and looked_up == ["bias"]


def test_wrong_number_of_features_is_an_error(layer):
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 255))


def test_autocast_multiplies_in_its_dtype(layer):
    x = torch.randn(3, 256)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    expected = nn.functional.linear(x.bfloat16(), dequantised(layer).bfloat16(), layer.bias.bfloat16())
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()], ids=["half", "bfloat16", "double"]
)
def test_a_cast_changes_the_bias_only(layer, cast):
    before = {part: value.clone() for part, value in layer.parts().items()}
    cast(layer)
    assert layer.bias.dtype != torch.float32
    assert all(same_bytes(value, before[part]) for part, value in layer.parts().items())


def save_and_load(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, save_and_load], ids=["deepcopy", "save"])
def test_a_copy_is_the_same_layer(layer, again):
    twin, x = again(layer), torch.randn(2, 256)
    assert type(twin) is type(layer) and twin.quantize_x == layer.quantize_x and torch.equal(twin(x), layer(x))


def test_static_scale_of_activations_is_a_part_and_x_is_not_rounded():
    layer = QuantizedSparse24Linear.from_linear(dense_layer(), "fp8")
    static = QuantizedSparse24Linear.from_parts({**layer.parts(), "input_scale": torch.tensor([10.0])}, layer.bias)
    static.quantize_x = True
    x = torch.randn(2, 256)
    assert "input_scale" in static.state_dict() and torch.equal(static(x), layer(x))


@pytest.mark.parametrize(
    ("layer_class", "scheme", "message"),
    [
        (QuantizedSparse24Linear, "w4a16", "holds quantized sparse-24-bitmask, not marlin-24"),
        (Marlin24Linear, "fp8", "holds marlin-24, not quantized"),
        (QuantizedSparse24Linear, "fp4", "unknown quantization 'fp4', expected one of fp8, int8, w4a16, w8a16"),
    ],
)
def test_a_scheme_of_another_format_is_refused(layer_class, scheme, message):
    with pytest.raises(ValueError, match=message):
        layer_class.from_linear(dense_layer(), scheme)

"""The operators of the package: schema, implementation, fake and gradient.  The only place that touches `torch.library`."""

from typing import Any

import torch
from torch import Tensor

from hf_sparse24.kernels import activation_plans, plans, reference

NAMESPACE = "hf_sparse24"
LIB = torch.library.Library(NAMESPACE, "DEF")

LIB.define("unpack(Tensor compressed, Tensor bitmask, int in_features) -> Tensor")
LIB.define("linear(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
# The same without gradients: the registration of these costs each call some microseconds, also where none are wanted.
LIB.define("linear_inference(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
# One product with weights whose rows follow each other in memory, as if they were one.  Without gradients.
LIB.define("linear_group(Tensor x, Tensor[] compressed, Tensor[] bitmask, Tensor[] bias, Tensor? metadata, int in_features) -> Tensor")
# Rows of x, sorted by expert, times the weight of each row's expert; `plans.experts_linear` has shapes.  Rows and experts are told by
# tensors on the device alone: neither shapes nor code around the operator depend on how many rows an expert has.  What runs today
# asks the device for the offsets, which the compiler is told: it keeps the operator out of its CUDA graphs.
HOST = (torch.Tag.cudagraph_unsafe,)
LIB.define("experts_linear(Tensor x, Tensor compressed, Tensor bitmask, Tensor offsets, int in_features) -> Tensor", tags=HOST)
LIB.define("experts_linear_grad_x(Tensor grad_y, Tensor compressed, Tensor bitmask, Tensor offsets, int in_features) -> Tensor", tags=HOST)
LIB.define("linear_grad_x(Tensor grad_y, Tensor compressed, Tensor bitmask, int in_features) -> Tensor")
LIB.define("dequantize_8bit(Tensor compressed, Tensor bitmask, Tensor weight_scale, int in_features) -> Tensor")
LIB.define("dequantize_marlin24(Tensor weight_packed, Tensor meta, Tensor scale_packed, int num_bits, bool scales_permuted) -> Tensor")
LIB.define(
    "linear_8bit(Tensor x, Tensor compressed, Tensor bitmask, Tensor weight_scale, Tensor? input_scale, Tensor? bias, int in_features, "
    "bool quantize_x) -> Tensor"
)
LIB.define(
    "linear_marlin24(Tensor x, Tensor weight_packed, Tensor meta, Tensor scale_packed, Tensor? bias, int num_bits, bool scales_permuted) "
    "-> Tensor"
)
# The second projection of a squared-ReLU block with its activation before it, that activation alone, and a dense product with a weight
# of float8.
LIB.define("squared_relu(Tensor u, Tensor? gate, bool keep_two) -> Tensor")
LIB.define(
    "squared_relu_linear(Tensor u, Tensor? gate, Tensor weight, Tensor? weight_scale, Tensor? weight_columns, Tensor? bias, bool keep_two) "
    "-> Tensor"
)
LIB.define("linear_fp8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")


def _unpack(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return reference.unpack(compressed, bitmask, in_features)


def _linear_grad_x(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y @ reference.unpack(compressed, bitmask, in_features)


def _experts_linear_grad_x(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, offsets: Tensor, in_features: int) -> Tensor:
    def multiply(rows: Tensor, expert: int) -> Tensor:
        return _linear_grad_x(rows, compressed[expert], bitmask[expert], in_features)

    return reference.for_each_expert(grad_y, offsets, in_features, multiply)


# The rest is for weights of 8 and 4 bits.  `quantize_x` says that the checkpoint asks for activations of 8 bits, and `input_scale` by
# what it divides them; nothing here rounds x, and a kernel may, with a result that is as far from this one as such rounding is.


for _name, _implementation in (
    ("unpack", _unpack),
    ("linear", plans.linear),
    ("linear_inference", plans.linear),
    ("linear_group", plans.linear_group),
    ("linear_grad_x", _linear_grad_x),
    ("experts_linear", plans.experts_linear),
    ("experts_linear_grad_x", _experts_linear_grad_x),
    ("dequantize_8bit", reference.dequantize_8bit),
    ("dequantize_marlin24", reference.dequantize_marlin24),
    ("linear_8bit", plans.linear_8bit),
    ("linear_marlin24", plans.linear_marlin24),
    ("squared_relu", activation_plans.squared_relu),
    ("squared_relu_linear", activation_plans.squared_relu_linear),
    ("linear_fp8", activation_plans.linear_fp8),
):
    LIB.impl(_name, _implementation, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::unpack", lib=LIB)
def _unpack_fake(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return compressed.new_empty(bitmask.shape[0], in_features)


def _empty_result(x: Tensor, weight: Tensor, in_features: int, out_features: int) -> Tensor:
    """Of a product.  Fakes also answer for weights on meta, where a real x would get what memory holds."""
    torch._check(x.device == weight.device, lambda: f"x is on {x.device}, the weight on {weight.device}")
    torch._check(x.shape[-1] == in_features, lambda: f"x has {x.shape[-1]} features, the weight {in_features}")
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake(f"{NAMESPACE}::linear", lib=LIB)
@torch.library.register_fake(f"{NAMESPACE}::linear_inference", lib=LIB)
def _linear_fake(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> Tensor:
    return _empty_result(x, bitmask, in_features, bitmask.shape[0])


@torch.library.register_fake(f"{NAMESPACE}::linear_group", lib=LIB)
def _linear_group_fake(
    x: Tensor, compressed: list[Tensor], bitmask: list[Tensor], bias: list[Tensor], metadata: Tensor | None, in_features: int
) -> Tensor:
    return _empty_result(x, bitmask[0], in_features, sum(rows.shape[0] for rows in bitmask))


@torch.library.register_fake(f"{NAMESPACE}::experts_linear", lib=LIB)
def _experts_linear_fake(x: Tensor, compressed: Tensor, bitmask: Tensor, offsets: Tensor, in_features: int) -> Tensor:
    torch._check(x.ndim == 2, lambda: f"x has {x.ndim} dimensions, expected rows and features")
    torch._check(offsets.shape[0] == bitmask.shape[0], lambda: f"{offsets.shape[0]} offsets for {bitmask.shape[0]} experts")
    return _empty_result(x, bitmask, in_features, bitmask.shape[1])


@torch.library.register_fake(f"{NAMESPACE}::experts_linear_grad_x", lib=LIB)
def _experts_linear_grad_x_fake(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, offsets: Tensor, in_features: int) -> Tensor:
    return grad_y.new_empty(grad_y.shape[0], in_features)


@torch.library.register_fake(f"{NAMESPACE}::linear_grad_x", lib=LIB)
def _linear_grad_x_fake(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-1], in_features)


@torch.library.register_fake(f"{NAMESPACE}::dequantize_8bit", lib=LIB)
def _dequantize_8bit_fake(compressed: Tensor, bitmask: Tensor, weight_scale: Tensor, in_features: int) -> Tensor:
    return weight_scale.new_empty(bitmask.shape[0], in_features)


@torch.library.register_fake(f"{NAMESPACE}::dequantize_marlin24", lib=LIB)
def _dequantize_marlin24_fake(weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, num_bits: int, scales_permuted: bool) -> Tensor:
    return scale_packed.new_empty(scale_packed.shape[1], 32 * meta.shape[0])


@torch.library.register_fake(f"{NAMESPACE}::linear_8bit", lib=LIB)
def _linear_8bit_fake(
    x: Tensor,
    compressed: Tensor,
    bitmask: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    quantize_x: bool,
) -> Tensor:
    return _linear_fake(x, compressed, bitmask, bias, None, in_features)


@torch.library.register_fake(f"{NAMESPACE}::linear_marlin24", lib=LIB)
def _linear_marlin24_fake(
    x: Tensor, weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, bias: Tensor | None, num_bits: int, scales_permuted: bool
) -> Tensor:
    return _empty_result(x, meta, 32 * meta.shape[0], scale_packed.shape[1])


@torch.library.register_fake(f"{NAMESPACE}::squared_relu", lib=LIB)
def _squared_relu_fake(u: Tensor, gate: Tensor | None, keep_two: bool) -> Tensor:
    if gate is not None:
        torch._check(gate.shape == u.shape, lambda: f"u has shape {tuple(u.shape)}, its gate {tuple(gate.shape)}")
    return u.new_empty(u.shape)


@torch.library.register_fake(f"{NAMESPACE}::squared_relu_linear", lib=LIB)
def _squared_relu_linear_fake(
    u: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_columns: Tensor | None,
    bias: Tensor | None,
    keep_two: bool,
) -> Tensor:
    return _empty_result(_squared_relu_fake(u, gate, keep_two), weight, weight.shape[1], weight.shape[0])


@torch.library.register_fake(f"{NAMESPACE}::linear_fp8", lib=LIB)
def _linear_fp8_fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    return _empty_result(x, weight, weight.shape[1], weight.shape[0])


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, compressed, bitmask, _, _, in_features = inputs
    ctx.save_for_backward(compressed, bitmask)
    ctx.in_features = in_features


def _linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None, None]:
    compressed, bitmask = ctx.saved_tensors
    grad_x = linear_grad_x(grad_y, compressed, bitmask, ctx.in_features) if ctx.needs_input_grad[0] else None
    return grad_x, None, None, _grad_bias(grad_y, ctx.needs_input_grad[3]), None, None


torch.library.register_autograd(f"{NAMESPACE}::linear", _linear_backward, setup_context=_save_packed, lib=LIB)


def _save_experts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, compressed, bitmask, offsets, in_features = inputs
    ctx.save_for_backward(compressed, bitmask, offsets)
    ctx.in_features = in_features


def _experts_linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None, None]:
    grad_x = experts_linear_grad_x(grad_y, *ctx.saved_tensors, ctx.in_features) if ctx.needs_input_grad[0] else None
    return grad_x, None, None, None, None


torch.library.register_autograd(f"{NAMESPACE}::experts_linear", _experts_linear_backward, setup_context=_save_experts, lib=LIB)


def _save_8bit(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, compressed, bitmask, weight_scale, _, _, in_features, _ = inputs
    ctx.save_for_backward(compressed, bitmask, weight_scale)
    ctx.in_features = in_features


def _linear_8bit_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight = dequantize_8bit(*ctx.saved_tensors, ctx.in_features) if ctx.needs_input_grad[0] else None
    return _grad_x(grad_y, weight), None, None, None, None, _grad_bias(grad_y, ctx.needs_input_grad[5]), None, None


def _save_marlin24(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight_packed, meta, scale_packed, _, num_bits, scales_permuted = inputs
    ctx.save_for_backward(weight_packed, meta, scale_packed)
    ctx.form = num_bits, scales_permuted


def _linear_marlin24_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight = dequantize_marlin24(*ctx.saved_tensors, *ctx.form) if ctx.needs_input_grad[0] else None
    return _grad_x(grad_y, weight), None, None, None, _grad_bias(grad_y, ctx.needs_input_grad[4]), None, None


def _save_squared_relu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, gate, _ = inputs
    ctx.save_for_backward(u, gate)


def _squared_relu_backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    return *_grads_of_squared_relu(grad_h, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None


def _save_squared_relu_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, gate, weight, weight_scale, _, _, keep_two = inputs
    ctx.save_for_backward(u, gate, weight, weight_scale)
    ctx.keep_two = keep_two


def _squared_relu_linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    u, gate, weight, weight_scale = ctx.saved_tensors
    wants_u, wants_gate, wants_weight, _, _, wants_bias, _ = ctx.needs_input_grad
    grad_u = grad_gate = grad_weight = None
    if wants_u or wants_gate:
        grad_h = grad_y @ reference.widened(weight, weight_scale, grad_y.dtype)
        grad_u, grad_gate = _grads_of_squared_relu(grad_h, u, gate, wants_u, wants_gate)
    if wants_weight:
        # h is computed anew: kept from the forward pass, it would be the largest tensor of the block.
        h = squared_relu(u, gate, ctx.keep_two)
        grad_weight = grad_y.reshape(-1, grad_y.shape[-1]).t() @ h.reshape(-1, h.shape[-1])
    return grad_u, grad_gate, grad_weight, None, None, _grad_bias(grad_y, wants_bias), None


def _grads_of_squared_relu(
    grad_h: Tensor, u: Tensor, gate: Tensor | None, wants_u: bool, wants_gate: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Straight through the selection: what was dropped gets the gradient that it would have had."""
    if gate is None:
        return grad_h * (2 * torch.relu(u)), None
    grad_u = grad_h * torch.square(torch.relu(gate)) if wants_u else None
    return grad_u, grad_h * u * (2 * torch.relu(gate)) if wants_gate else None


def _save_fp8(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _linear_fp8_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight, weight_scale = ctx.saved_tensors
    weight = reference.widened(weight, weight_scale, grad_y.dtype) if ctx.needs_input_grad[0] else None
    return _grad_x(grad_y, weight), None, None, _grad_bias(grad_y, ctx.needs_input_grad[3])


def _grad_x(grad_y: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else grad_y @ weight.to(grad_y.dtype)


def _grad_bias(grad_y: Tensor, wanted: bool) -> Tensor | None:
    return grad_y.reshape(-1, grad_y.shape[-1]).sum(0) if wanted else None


torch.library.register_autograd(f"{NAMESPACE}::linear_8bit", _linear_8bit_backward, setup_context=_save_8bit, lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::linear_marlin24", _linear_marlin24_backward, setup_context=_save_marlin24, lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::squared_relu", _squared_relu_backward, setup_context=_save_squared_relu, lib=LIB)
torch.library.register_autograd(
    f"{NAMESPACE}::squared_relu_linear", _squared_relu_linear_backward, setup_context=_save_squared_relu_linear, lib=LIB
)
torch.library.register_autograd(f"{NAMESPACE}::linear_fp8", _linear_fp8_backward, setup_context=_save_fp8, lib=LIB)

unpack = getattr(torch.ops, NAMESPACE).unpack.default
linear = getattr(torch.ops, NAMESPACE).linear.default
linear_inference = getattr(torch.ops, NAMESPACE).linear_inference.default
linear_group = getattr(torch.ops, NAMESPACE).linear_group.default
linear_grad_x = getattr(torch.ops, NAMESPACE).linear_grad_x.default
experts_linear = getattr(torch.ops, NAMESPACE).experts_linear.default
experts_linear_grad_x = getattr(torch.ops, NAMESPACE).experts_linear_grad_x.default
dequantize_8bit = getattr(torch.ops, NAMESPACE).dequantize_8bit.default
dequantize_marlin24 = getattr(torch.ops, NAMESPACE).dequantize_marlin24.default
linear_8bit = getattr(torch.ops, NAMESPACE).linear_8bit.default
linear_marlin24 = getattr(torch.ops, NAMESPACE).linear_marlin24.default
squared_relu = getattr(torch.ops, NAMESPACE).squared_relu.default
squared_relu_linear = getattr(torch.ops, NAMESPACE).squared_relu_linear.default
linear_fp8 = getattr(torch.ops, NAMESPACE).linear_fp8.default

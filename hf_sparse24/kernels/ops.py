"""The operators of the package: schema, implementation, fake and gradient.  The only place that touches `torch.library`."""

from typing import Any

import torch
from torch import Tensor

from hf_sparse24.kernels import plans, reference

NAMESPACE = "hf_sparse24"
LIB = torch.library.Library(NAMESPACE, "DEF")

LIB.define("unpack(Tensor compressed, Tensor bitmask, int in_features) -> Tensor")
LIB.define("linear(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
# The same without gradients: the registration of these costs each call some microseconds, also where none are wanted.
LIB.define("linear_inference(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
LIB.define("linear_grad_x(Tensor grad_y, Tensor compressed, Tensor bitmask, int in_features) -> Tensor")


def _unpack(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return reference.unpack(compressed, bitmask, in_features)


def _linear_grad_x(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y @ reference.unpack(compressed, bitmask, in_features)


for _name, _implementation in (
    ("unpack", _unpack),
    ("linear", plans.linear),
    ("linear_inference", plans.linear),
    ("linear_grad_x", _linear_grad_x),
):
    LIB.impl(_name, _implementation, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::unpack", lib=LIB)
def _unpack_fake(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return compressed.new_empty(bitmask.shape[0], in_features)


@torch.library.register_fake(f"{NAMESPACE}::linear", lib=LIB)
@torch.library.register_fake(f"{NAMESPACE}::linear_inference", lib=LIB)
def _linear_fake(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> Tensor:
    torch._check(x.shape[-1] == in_features, lambda: f"x has {x.shape[-1]} features, the weight {in_features}")
    return x.new_empty(*x.shape[:-1], bitmask.shape[0])


@torch.library.register_fake(f"{NAMESPACE}::linear_grad_x", lib=LIB)
def _linear_grad_x_fake(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-1], in_features)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, compressed, bitmask, _, _, in_features = inputs
    ctx.save_for_backward(compressed, bitmask)
    ctx.in_features = in_features


def _linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None, None]:
    compressed, bitmask = ctx.saved_tensors
    grad_x = linear_grad_x(grad_y, compressed, bitmask, ctx.in_features) if ctx.needs_input_grad[0] else None
    grad_bias = grad_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return grad_x, None, None, grad_bias, None, None


torch.library.register_autograd(f"{NAMESPACE}::linear", _linear_backward, setup_context=_save_packed, lib=LIB)

unpack = getattr(torch.ops, NAMESPACE).unpack.default
linear = getattr(torch.ops, NAMESPACE).linear.default
linear_inference = getattr(torch.ops, NAMESPACE).linear_inference.default
linear_grad_x = getattr(torch.ops, NAMESPACE).linear_grad_x.default

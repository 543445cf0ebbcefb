"""The operators of the package: schema, implementation, fake and gradient.  The only place that touches `torch.library`."""

from typing import Any

import torch
from torch import Tensor

from hf_sparse24.kernels import cusparselt, dispatch, reference

NAMESPACE = "hf_sparse24"
LIB = torch.library.Library(NAMESPACE, "DEF")
ALIGNMENT = 16  # bytes, of every row that a kernel reads

LIB.define("unpack(Tensor compressed, Tensor bitmask, int in_features) -> Tensor")
LIB.define("linear(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
LIB.define("linear_grad_x(Tensor grad_y, Tensor compressed, Tensor bitmask, int in_features) -> Tensor")


def _unpack(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return reference.unpack(compressed, bitmask, in_features)


def _linear(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> Tensor:
    if x.is_cuda and compressed.ndim == 2 and x.shape[-1] == in_features and _fits(x, compressed, bitmask, bias):
        rows, out_features = x.numel() // max(1, in_features), bitmask.shape[0]
        buffer = _cusparselt_buffer(compressed, metadata)
        choice = dispatch.choose(out_features, in_features, rows, x.dtype, x.device, buffer is not None)
        if choice.path == "cusparselt":
            assert buffer is not None
            return cusparselt.linear(x, buffer, out_features, bias)
        if choice.config is not None:
            y = x.new_empty((*x.shape[:-1], out_features))
            x_rows, y_rows = _rows(x, in_features), y.view(rows, out_features)
            dispatch.run(choice.config, x_rows, compressed, bitmask, bias, y_rows, _may_start_early(compressed, bitmask))
            return y
    return reference.linear(x, compressed, bitmask, bias, in_features)


def _fits(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel can be asked; what is wrong with the others, `F.linear` says."""
    weights = (compressed, bitmask) if bias is None else (compressed, bitmask, bias)
    return (
        x.dtype == compressed.dtype
        and (bias is None or bias.dtype == x.dtype)
        and all(tensor.device == x.device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in weights)
    )


def _cusparselt_buffer(compressed: Tensor, metadata: Tensor | None) -> Tensor | None:
    """The values and what follows them in memory, as bytes, or None if that is not the metadata (after a move, say)."""
    if metadata is None or metadata.device != compressed.device or metadata.data_ptr() != compressed.data_ptr() + compressed.nbytes:
        return None
    start, size = compressed.storage_offset() * compressed.element_size(), compressed.nbytes + metadata.numel()
    return torch.empty(0, dtype=torch.uint8, device=compressed.device).set_(compressed.untyped_storage(), start, (size,), (1,))


def _rows(x: Tensor, in_features: int) -> Tensor:
    """x as a matrix whose rows are contiguous and aligned, copied where they are not."""
    x = x.reshape(-1, in_features)
    aligned = x.stride(1) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


# Packed tensors that an earlier call, outside of a graph, has read: address -> versions.
_READ: dict[int, tuple[int, int]] = {}


def _may_start_early(compressed: Tensor, bitmask: Tensor) -> bool:
    """Whether the kernel may fetch its weight while the kernel before it still runs, which pays in CUDA graphs.

    It must not where that one writes the weight: so only if the weight has been read before, and not been changed since.
    """
    try:
        versions = compressed._version, bitmask._version
    except RuntimeError:  # tensors of inference mode are not counted
        return False
    address = compressed.data_ptr()
    if torch.cuda.is_current_stream_capturing():
        return _READ.get(address) == versions
    _READ[address] = versions
    return False


def _linear_grad_x(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y @ reference.unpack(compressed, bitmask, in_features)


for _name, _implementation in (("unpack", _unpack), ("linear", _linear), ("linear_grad_x", _linear_grad_x)):
    LIB.impl(_name, _implementation, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::unpack", lib=LIB)
def _unpack_fake(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return compressed.new_empty(bitmask.shape[0], in_features)


@torch.library.register_fake(f"{NAMESPACE}::linear", lib=LIB)
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
linear_grad_x = getattr(torch.ops, NAMESPACE).linear_grad_x.default

"""The operators of the package: schema, implementation, fake and gradient.  The only place that touches `torch.library`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.kernels import cusparselt, dispatch, reference
from hf_sparse24.kernels.sparse_mma import Start, WeightAt

NAMESPACE = "hf_sparse24"
LIB = torch.library.Library(NAMESPACE, "DEF")
ALIGNMENT = 16  # bytes, of all that a kernel reads
EARLY_CAPABILITY = (9, 0)

LIB.define("unpack(Tensor compressed, Tensor bitmask, int in_features) -> Tensor")
LIB.define("linear(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
# The same without gradients: the registration of these costs each call some microseconds, also where none are wanted.
LIB.define("linear_inference(Tensor x, Tensor compressed, Tensor bitmask, Tensor? bias, Tensor? metadata, int in_features) -> Tensor")
# One product with weights whose rows follow each other in memory, as if they were one.  Without gradients.
LIB.define("linear_group(Tensor x, Tensor[] compressed, Tensor[] bitmask, Tensor[] bias, Tensor? metadata, int in_features) -> Tensor")
LIB.define("linear_grad_x(Tensor grad_y, Tensor compressed, Tensor bitmask, int in_features) -> Tensor")


def _unpack(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return reference.unpack(compressed, bitmask, in_features)


def _linear(
    x: Tensor,
    compressed: Tensor,
    bitmask: Tensor,
    bias: Tensor | None,
    metadata: Tensor | None,
    in_features: int,
    counted: Sequence[Tensor] = (),
) -> Tensor:
    """`counted` are the tensors whose versions tell of a change to the weight, where these are not `compressed` and `bitmask`."""
    if not x.is_cuda:
        return reference.linear(x, compressed, bitmask, bias, in_features)
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    # All that a plan depends on: what lies where, in which form.
    key = (
        *(x.numel(), x.shape[-1:], x.dtype, x.get_device(), in_features, bitmask.shape[0]),
        *(compressed.data_ptr(), compressed.dtype, compressed.shape, compressed.is_contiguous()),
        *(bitmask.data_ptr(), bitmask.is_contiguous(), 0 if metadata is None else metadata.data_ptr()),
        *((0, None) if bias is None else (bias.data_ptr(), bias.dtype, bias.is_contiguous())),
    )
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _plan(x, compressed, bitmask, bias, metadata, in_features)
    if plan.start is not None:
        y = x.new_empty((*x.shape[:-1], plan.out_features))
        index = x.get_device()
        early = plan.may_start_early(counted or (compressed, bitmask))
        if index == torch._C._cuda_getDevice():
            plan.start(x, y, early)
        else:
            with torch.cuda.device(index):
                plan.start(x, y, early)
        return y
    if plan.path == "cusparselt":
        return cusparselt.linear(x, _cusparselt_buffer(compressed, metadata), plan.out_features, bias)
    return reference.linear(x, compressed, bitmask, bias, in_features)


def _linear_group(
    x: Tensor, compressed: list[Tensor], bitmask: list[Tensor], bias: list[Tensor], metadata: Tensor | None, in_features: int
) -> Tensor:
    """Weights that were moved apart are multiplied one by one."""
    whole = [as_one(rows) for rows in (compressed, bitmask, bias) if rows]
    if any(rows is None for rows in whole):
        biases: Sequence[Tensor | None] = bias or [None] * len(compressed)
        return torch.cat([_linear(x, *weight, None, in_features) for weight in zip(compressed, bitmask, biases, strict=True)], dim=-1)
    counted = (*compressed, *bitmask)
    return _linear(x, whole[0], whole[1], whole[2] if bias else None, metadata, in_features, counted)  # type: ignore[arg-type]


def as_one(rows: Sequence[Tensor]) -> Tensor | None:
    """Tensors whose rows follow each other in one allocation as one tensor, without a copy; None if they do not."""
    first = rows[0]
    storage, end = first.untyped_storage(), first.data_ptr()
    for part in rows:
        if part.data_ptr() != end or part.dtype != first.dtype or part.shape[1:] != first.shape[1:] or not part.is_contiguous():
            return None
        end += part.nbytes
    if end > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((sum(part.shape[0] for part in rows), *first.shape[1:]), (*first.shape[1:], 1))


class _Plan:
    """The path of one weight for one number of rows; holds no tensor."""

    def __init__(self, path: str, out_features: int, start: Start | None = None):
        self.path, self.out_features, self.start = path, out_features, start
        self.versions: tuple[int, ...] | None = None

    def may_start_early(self, weights: Sequence[Tensor]) -> bool:
        """Whether the kernel may fetch its weight while the kernel before it still runs, which pays in CUDA graphs.

        It must not where that one writes the weight: so only if a call outside of a graph has read it, and it has not been changed
        since.
        """
        try:
            versions = tuple(weight._version for weight in weights)
        except RuntimeError:  # tensors of inference mode are not counted
            return False
        if torch._C._cuda_isCurrentStreamCapturing():
            return self.versions == versions and torch.cuda.get_device_capability(weights[0].device) >= EARLY_CAPABILITY
        self.versions = versions
        return False


# By what lies where.  A plan that is never asked for again is dropped with all others, when there are too many.
_PLANS: dict[tuple[Any, ...], _Plan] = {}
MAX_PLANS = 1 << 15


def _plan(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> _Plan:
    """What is wrong with the arguments, if anything is, the reference says: it is `F.linear`."""
    out_features = bitmask.shape[0]
    weights = (compressed, bitmask) if bias is None else (compressed, bitmask, bias)
    fits = (
        x.dtype == compressed.dtype
        and (x.ndim > 0 and x.shape[-1] == in_features)
        and compressed.shape == (out_features, in_features // 2)
        and (bias is None or bias.dtype == x.dtype)
        and all(tensor.device == x.device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in weights)
    )
    if not fits or not x.numel() or not out_features:
        return _Plan("unpack", out_features)
    rows = x.numel() // in_features
    has_metadata = metadata is not None and metadata.data_ptr() == compressed.data_ptr() + compressed.nbytes
    choice = dispatch.choose(out_features, in_features, rows, x.dtype, x.device, has_metadata)
    if choice.config is None:
        return _Plan(choice.path, out_features)
    with torch.cuda.device(x.device):
        weight = WeightAt.of(compressed, bitmask, bias)
        return _Plan(choice.path, out_features, dispatch.starter(choice.config, weight, rows, x.dtype))


def _cusparselt_buffer(compressed: Tensor, metadata: Tensor | None) -> Tensor:
    """The values and the metadata that follows them in memory, as bytes."""
    assert metadata is not None
    start, size = compressed.storage_offset() * compressed.element_size(), compressed.nbytes + metadata.numel()
    return torch.empty(0, dtype=torch.uint8, device=compressed.device).set_(compressed.untyped_storage(), start, (size,), (1,))


def _linear_grad_x(grad_y: Tensor, compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    return grad_y @ reference.unpack(compressed, bitmask, in_features)


for _name, _implementation in (
    ("unpack", _unpack),
    ("linear", _linear),
    ("linear_inference", _linear),
    ("linear_group", _linear_group),
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


@torch.library.register_fake(f"{NAMESPACE}::linear_group", lib=LIB)
def _linear_group_fake(
    x: Tensor, compressed: list[Tensor], bitmask: list[Tensor], bias: list[Tensor], metadata: Tensor | None, in_features: int
) -> Tensor:
    torch._check(x.shape[-1] == in_features, lambda: f"x has {x.shape[-1]} features, the weight {in_features}")
    return x.new_empty(*x.shape[:-1], sum(rows.shape[0] for rows in bitmask))


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
linear_group = getattr(torch.ops, NAMESPACE).linear_group.default
linear_grad_x = getattr(torch.ops, NAMESPACE).linear_grad_x.default

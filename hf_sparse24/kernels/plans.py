"""What runs for a product, found once for each weight and number of rows, and kept by address: a plan holds no tensor."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hf_sparse24.kernels import cusparselt, dispatch, reference
from hf_sparse24.kernels.marlin24 import Marlin24At, expand_starter
from hf_sparse24.kernels.sparse_mma import SCALE_TYPES, Start, WeightAt

ALIGNMENT = 16  # bytes, of all that a kernel reads
EARLY_CAPABILITY = (9, 0)


class Plan:
    """The path of one weight for one number of rows."""

    def __init__(self, path: str, out_features: int, start: Start | None = None):
        self.path, self.out_features, self.start = path, out_features, start
        self.versions: tuple[int, ...] | None = None

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product, by a kernel; the versions of `weights` tell of a change to what it reads, none that it is new."""
        assert self.start is not None
        y = x.new_empty((*x.shape[:-1], self.out_features))
        index = x.get_device()
        early = self.may_start_early(weights)
        if index == torch._C._cuda_getDevice():
            self.start(x, y, early)
        else:
            with torch.cuda.device(index):
                self.start(x, y, early)
        return y

    def may_start_early(self, weights: Sequence[Tensor]) -> bool:
        """Whether the kernel may fetch its weight while the kernel before it still runs, which pays in CUDA graphs.

        It must not where that one writes the weight: so only if a call outside of a graph has read it, and it has not been changed
        since.
        """
        if not weights:
            return False
        try:
            versions = tuple(weight._version for weight in weights)
        except RuntimeError:  # tensors of inference mode are not counted
            return False
        if torch._C._cuda_isCurrentStreamCapturing():
            return self.versions == versions and torch.cuda.get_device_capability(weights[0].device) >= EARLY_CAPABILITY
        self.versions = versions
        return False


# By what lies where.  A plan that is never asked for again is dropped with all others, when there are too many.
_PLANS: dict[Hashable, Plan] = {}
MAX_PLANS = 1 << 15


def kept(key: Hashable) -> Plan | None:
    """The plan that was kept for a key."""
    return _PLANS.get(key)


def keep(key: Hashable, plan: Plan) -> Plan:
    """Keep a plan; gives it back."""
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def aligned(x: Tensor) -> Tensor:
    """As kernels read it: contiguous and aligned, itself if it is so."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def where(tensor: Tensor | None) -> Hashable:
    """A tensor's part of a key: where it lies, in which form."""
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous())


def linear(
    x: Tensor,
    compressed: Tensor,
    bitmask: Tensor,
    bias: Tensor | None,
    metadata: Tensor | None,
    in_features: int,
    counted: Sequence[Tensor] = (),
    fresh: bool = False,
) -> Tensor:
    """x W^T + bias with values as wide as x; see `reference.linear`.  `metadata` is cuSPARSELt's, behind the values, or None.

    `counted` are the tensors whose versions tell of a change to the weight, where these are not `compressed` and `bitmask`.  A
    `fresh` weight was written by the kernel before.
    """
    if not x.is_cuda:
        return reference.linear(x, compressed, bitmask, bias, in_features)
    x = aligned(x)
    # All that a plan depends on: what lies where, in which form.
    key = (
        *(x.numel(), x.shape[-1:], x.dtype, x.get_device(), in_features, bitmask.shape[0]),
        *(compressed.data_ptr(), compressed.dtype, compressed.shape, compressed.is_contiguous()),
        *(bitmask.data_ptr(), bitmask.is_contiguous(), 0 if metadata is None else metadata.data_ptr()),
        *((0, None) if bias is None else (bias.data_ptr(), bias.dtype, bias.is_contiguous())),
    )
    plan = kept(key) or keep(key, _plan(x, compressed, bitmask, bias, metadata, in_features))
    if plan.start is not None:
        return plan.run(x, () if fresh else counted or (compressed, bitmask))
    if plan.path == "cusparselt":
        return cusparselt.linear(x, _cusparselt_buffer(compressed, metadata), plan.out_features, bias)
    return reference.linear(x, compressed, bitmask, bias, in_features)


def _plan(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> Plan:
    """What is wrong with the arguments, if anything is, the reference says: it is `F.linear`."""
    out_features = bitmask.shape[0]
    if x.dtype != compressed.dtype or not _fits(x, compressed, bitmask, bias, in_features):
        return Plan("unpack", out_features)
    rows = x.numel() // in_features
    has_metadata = metadata is not None and metadata.data_ptr() == compressed.data_ptr() + compressed.nbytes
    choice = dispatch.choose(out_features, in_features, rows, x.dtype, x.device, has_metadata)
    if choice.config is None:
        return Plan(choice.path, out_features)
    with torch.cuda.device(x.device):
        weight = WeightAt.of(compressed, bitmask, bias)
        return Plan(choice.path, out_features, dispatch.starter(choice.config, weight, rows, x.dtype))


def _fits(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, in_features: int) -> bool:
    """Whether a kernel can read these."""
    out_features = bitmask.shape[0]
    weights = (compressed, bitmask) if bias is None else (compressed, bitmask, bias)
    return (
        (x.ndim > 0 and x.shape[-1] == in_features)
        and compressed.shape == (out_features, in_features // 2)
        and (bias is None or bias.dtype == x.dtype)
        and all(tensor.device == x.device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in weights)
        and bool(x.numel() and out_features)
    )


def _cusparselt_buffer(compressed: Tensor, metadata: Tensor | None) -> Tensor:
    """The values and the metadata that follows them in memory, as bytes."""
    assert metadata is not None
    start, size = compressed.storage_offset() * compressed.element_size(), compressed.nbytes + metadata.numel()
    return torch.empty(0, dtype=torch.uint8, device=compressed.device).set_(compressed.untyped_storage(), start, (size,), (1,))


def linear_group(
    x: Tensor, compressed: list[Tensor], bitmask: list[Tensor], bias: list[Tensor], metadata: Tensor | None, in_features: int
) -> Tensor:
    """x times the weights of several layers whose rows lie below each other; those that were moved apart are multiplied one by one."""
    whole = [as_one(rows) for rows in (compressed, bitmask, bias) if rows]
    if any(rows is None for rows in whole):
        biases: Sequence[Tensor | None] = bias or [None] * len(compressed)
        return torch.cat([linear(x, *weight, None, in_features) for weight in zip(compressed, bitmask, biases, strict=True)], dim=-1)
    counted = (*compressed, *bitmask)
    return linear(x, whole[0], whole[1], whole[2] if bias else None, metadata, in_features, counted)  # type: ignore[arg-type]


def experts_linear(x: Tensor, compressed: Tensor, bitmask: Tensor, offsets: Tensor, in_features: int) -> Tensor:
    """The rows of each expert times its weight, by `linear`, one expert after the other.

    The host reads the offsets for that, so that no CUDA graph can capture it yet: a grouped kernel, which reads them itself, belongs
    here, before this loop.

    Args:
        x: (rows, in_features), sorted by expert.
        compressed: (num_experts, out_features, in_features / 2), values of the dtype of x.
        bitmask: (num_experts, out_features, ceil(in_features / 8)), uint8.
        offsets: (num_experts,), int32, ascending, where x is: the first row behind those of each expert.
        in_features: Columns of the weights.

    Returns:
        y: (rows, out_features); rows from the last offset on are 0.
    """

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return linear(rows, compressed[expert], bitmask[expert], None, None, in_features)

    return reference.for_each_expert(x, offsets, bitmask.shape[1], multiply)


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


def linear_8bit(
    x: Tensor,
    compressed: Tensor,
    bitmask: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    quantize_x: bool,
) -> Tensor:
    """x W^T + bias with values of 8 bits and their scales; see `reference.linear_8bit`.

    The path `wgmma_sp` rounds x to the dtype of the values, where `quantize_x` allows it: by `input_scale` if there is one, else with
    a scale for each row.  The other paths take x as it is.
    """
    if not x.is_cuda:
        return reference.linear_8bit(x, compressed, bitmask, weight_scale, bias, in_features)
    x = aligned(x)
    key = (
        *(x.numel(), x.shape[-1:], x.dtype, x.get_device(), in_features, quantize_x),
        *(where(tensor) for tensor in (compressed, bitmask, weight_scale, input_scale, bias)),
    )
    plan = kept(key) or keep(key, _plan_8bit(x, compressed, bitmask, weight_scale, input_scale, bias, in_features, quantize_x))
    if plan.start is not None:
        return plan.run(x, (compressed, bitmask))
    if plan.path == "widen":
        wide = (compressed.to(torch.float32) * weight_scale.to(torch.float32).reshape(-1, 1)).to(x.dtype)
        return linear(x, wide, bitmask, bias, None, in_features, fresh=True)
    return reference.linear_8bit(x, compressed, bitmask, weight_scale, bias, in_features)


def _plan_8bit(
    x: Tensor,
    compressed: Tensor,
    bitmask: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    quantize_x: bool,
) -> Plan:
    out_features, values = bitmask.shape[0], compressed.dtype
    scales = [scale for scale in (weight_scale, input_scale) if scale is not None]
    fits = (
        _fits(x, compressed, bitmask, bias, in_features)
        and weight_scale.numel() in (1, out_features)
        and (input_scale is None or input_scale.numel() == 1)
        and all(scale.device == x.device and scale.is_contiguous() and scale.dtype in SCALE_TYPES for scale in scales)
    )
    if not fits:
        return Plan("unpack", out_features)
    rows = x.numel() // in_features
    choice = dispatch.choose(out_features, in_features, rows, x.dtype, x.device, values=values, quantize_x=quantize_x)
    if choice.config is None:
        return Plan(choice.path, out_features)
    with torch.cuda.device(x.device):
        weight = WeightAt.of(compressed, bitmask, bias, weight_scale)
        return Plan(choice.path, out_features, dispatch.starter(choice.config, weight, rows, x.dtype, values, input_scale))


def linear_marlin24(
    x: Tensor, weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, bias: Tensor | None, num_bits: int, scales_permuted: bool
) -> Tensor:
    """x W^T + bias with a weight in Marlin's order; see `reference.linear_marlin24`."""
    if not x.is_cuda:
        return reference.linear_marlin24(x, weight_packed, meta, scale_packed, bias, num_bits, scales_permuted)
    x = aligned(x)
    weights = weight_packed, meta, scale_packed
    key = (x.numel(), x.shape[-1:], x.dtype, x.get_device(), num_bits, scales_permuted, *(where(tensor) for tensor in (*weights, bias)))
    plan = kept(key) or keep(key, _plan_marlin24(x, *weights, bias, num_bits, scales_permuted))
    if plan.start is not None:
        return plan.run(x, weights)
    if plan.path == "widen":
        values, bitmask = _widened_marlin24(x.dtype, *weights, num_bits, scales_permuted)
        return linear(x, values, bitmask, bias, None, x.shape[-1], fresh=True)
    return reference.linear_marlin24(x, *weights, bias, num_bits, scales_permuted)


def _plan_marlin24(
    x: Tensor, weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, bias: Tensor | None, num_bits: int, scales_permuted: bool
) -> Plan:
    n, k, grouped = scale_packed.shape[1], 32 * weight_packed.shape[0], scale_packed.shape[0] > 1
    tensors = [tensor for tensor in (weight_packed, meta, scale_packed, bias) if tensor is not None]
    fits = (
        (x.ndim > 0 and x.shape[-1] == k)
        and (bias is None or bias.dtype == x.dtype)
        and scale_packed.dtype == torch.float16
        and all(tensor.device == x.device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    )
    if not fits:
        return Plan("unpack", n)
    m = x.numel() // k
    choice = dispatch.choose_marlin24(n, k, m, x.dtype, x.device, num_bits=num_bits, grouped=grouped)
    if choice.config is None:
        return Plan(choice.path, n)
    with torch.cuda.device(x.device):
        kernel = dispatch.marlin24_kernel(choice.config, x.dtype, x.get_device(), num_bits, grouped, scales_permuted)
        return Plan(choice.path, n, choice.config.starter(kernel, Marlin24At.of(weight_packed, meta, scale_packed, bias), m))


def _widened_marlin24(
    dtype: torch.dtype, weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, num_bits: int, scales_permuted: bool
) -> tuple[Tensor, Tensor]:
    """Values and bitmask as `linear` takes them."""
    n, k, grouped = scale_packed.shape[1], 32 * weight_packed.shape[0], scale_packed.shape[0] > 1
    values, bitmask = scale_packed.new_empty(n, k // 2, dtype=dtype), scale_packed.new_empty(n, k // 8, dtype=torch.uint8)
    with torch.cuda.device(scale_packed.device):
        kernel = dispatch.marlin24_kernel(None, dtype, scale_packed.get_device(), num_bits, grouped, scales_permuted)
        expand_starter(kernel, Marlin24At.of(weight_packed, meta, scale_packed, None))(values, bitmask)
    return values, bitmask

"""What runs for a product, found once for each weight and number of rows, and kept by address: a plan holds no tensor."""

from collections.abc import Hashable

import torch
from torch import Tensor

from hf_sparse24.kernels import cusparselt, dispatch, reference
from hf_sparse24.kernels.sparse_mma import Start, WeightAt

ALIGNMENT = 16  # bytes, of all that a kernel reads
EARLY_CAPABILITY = (9, 0)


class Plan:
    """The path of one weight for one number of rows."""

    def __init__(self, path: str, out_features: int, start: Start | None = None):
        self.path, self.out_features, self.start = path, out_features, start
        self.versions: tuple[int, int] | None = None

    def run(self, x: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """The product, by a kernel; `values` and `positions` are what it reads of the weight."""
        assert self.start is not None
        y = x.new_empty((*x.shape[:-1], self.out_features))
        index = x.get_device()
        early = self.may_start_early(values, positions)
        if index == torch._C._cuda_getDevice():
            self.start(x, y, early)
        else:
            with torch.cuda.device(index):
                self.start(x, y, early)
        return y

    def may_start_early(self, values: Tensor, positions: Tensor) -> bool:
        """Whether the kernel may fetch its weight while the kernel before it still runs, which pays in CUDA graphs.

        It must not where that one writes the weight: so only if a call outside of a graph has read it, and it has not been changed
        since.
        """
        try:
            versions = values._version, positions._version
        except RuntimeError:  # tensors of inference mode are not counted
            return False
        if torch._C._cuda_isCurrentStreamCapturing():
            return self.versions == versions and torch.cuda.get_device_capability(values.device) >= EARLY_CAPABILITY
        self.versions = versions
        return False


# By what lies where.  A plan that is never asked for again is dropped with all others, when there are too many.
_PLANS: dict[Hashable, Plan] = {}
MAX_PLANS = 1 << 15


def _keep(key: Hashable, plan: Plan) -> Plan:
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def _aligned(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def linear(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, metadata: Tensor | None, in_features: int) -> Tensor:
    """x W^T + bias with values as wide as x; see `reference.linear`.  `metadata` is cuSPARSELt's, behind the values, or None."""
    if not x.is_cuda:
        return reference.linear(x, compressed, bitmask, bias, in_features)
    x = _aligned(x)
    # All that a plan depends on: what lies where, in which form.
    key = (
        *(x.numel(), x.shape[-1:], x.dtype, x.get_device(), in_features, bitmask.shape[0]),
        *(compressed.data_ptr(), compressed.dtype, compressed.shape, compressed.is_contiguous()),
        *(bitmask.data_ptr(), bitmask.is_contiguous(), 0 if metadata is None else metadata.data_ptr()),
        *((0, None) if bias is None else (bias.data_ptr(), bias.dtype, bias.is_contiguous())),
    )
    plan = _PLANS.get(key) or _keep(key, _plan(x, compressed, bitmask, bias, metadata, in_features))
    if plan.start is not None:
        return plan.run(x, compressed, bitmask)
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

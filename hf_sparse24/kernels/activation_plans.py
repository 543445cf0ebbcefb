"""What runs for the second projection of a squared-ReLU block, and for dense weights of float8: found once, kept as in `plans`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.kernels import activation, dispatch, reference
from hf_sparse24.kernels.activation import FP8, SelectColumns, SquaredRelu
from hf_sparse24.kernels.plans import ALIGNMENT, Plan, aligned, keep, kept, where
from hf_sparse24.kernels.sparse_mma import SCALE_TYPES, WeightAt, WgmmaSp

# torch._scaled_mm with a scale for each row.
SCALED_MM_CAPABILITY, SCALED_MM_MULTIPLE = (8, 9), 16


def squared_relu(u: Tensor, gate: Tensor | None, keep_two: bool) -> Tensor:
    """relu(u)^2, or relu(gate)^2 * u; of each four only the two largest if `keep_two`.  Dense, for layers that have no such operator."""
    start = _squared_relu_starter(u, gate, fp8=False, keep_two=keep_two, packed=False)
    if start is None:
        return reference.squared_relu(u, gate, keep_two).contiguous()
    u, gate, h = aligned(u), None if gate is None else aligned(gate), torch.empty_like(u, memory_format=torch.contiguous_format)
    with torch.cuda.device(u.device):
        start(u.data_ptr(), _address(gate), h.data_ptr())
    return h


def squared_relu_linear(
    u: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_columns: Tensor | None,
    bias: Tensor | None,
    keep_two: bool,
) -> Tensor:
    """h W^T + bias for h = relu(u)^2, or relu(gate)^2 * u; see `reference.squared_relu_linear`.

    `weight_columns` holds the weight once more, as (in_features, out_features), for kernels that read only some of its columns.  With
    a weight of float8, `select_columns` takes h as it is, and the other paths round it to float8, with a scale for each row.
    """
    if not u.is_cuda:
        return reference.squared_relu_linear(u, gate, weight, weight_scale, bias, keep_two)
    u, gate = aligned(u), None if gate is None else aligned(gate)
    tensors = gate, weight, weight_scale, weight_columns, bias
    key = ("squared_relu_linear", u.shape, u.dtype, u.get_device(), keep_two, *map(where, tensors[1:]), gate is None or gate.shape)
    plan = kept(key) or keep(key, _plan(u, gate, weight, weight_scale, weight_columns, bias, keep_two))
    if plan.start is not None:
        y = u.new_empty((*u.shape[:-1], plan.out_features))
        with torch.cuda.device(u.device):
            plan.start(u, gate, y)
        return y
    if weight_scale is None or plan.path == "unpack":
        return torch.nn.functional.linear(squared_relu(u, gate, keep_two), reference.widened(weight, weight_scale, u.dtype), bias)
    rows, scales = _rounded_squared_relu(u, gate, keep_two)
    return _scaled_mm(rows, scales, weight, weight_scale, bias, u.dtype).view(*u.shape[:-1], plan.out_features)


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias with a dense weight of float8; see `reference.linear_fp8`.  On a GPU each row of x is rounded to float8."""
    if not _can_scale(x, weight, weight_scale, bias):
        return reference.linear_fp8(x, weight, weight_scale, bias)
    x = aligned(x)
    n, k = weight.shape
    m, index = x.numel() // k, x.get_device()
    rows, scales = x.new_empty(m, k, dtype=FP8), x.new_empty(m, 1, dtype=torch.float32)
    key = "rounding", m, k, x.dtype, index
    plan = kept(key) or keep(key, Plan("rounding", n, dispatch.rounding_starter(m, k, x.dtype, FP8, index, None)))
    assert plan.start is not None
    with torch.cuda.device(x.device):
        plan.start(x.data_ptr(), rows.data_ptr(), scales.data_ptr(), False)
    return _scaled_mm(rows, scales, weight, weight_scale, bias, x.dtype).view(*x.shape[:-1], n)


def _plan(
    u: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_columns: Tensor | None,
    bias: Tensor | None,
    keep_two: bool,
) -> Plan:
    """What is wrong with the arguments, if anything is, the reference says: it is `F.linear`."""
    n, k = weight.shape
    fp8, gated = weight_scale is not None, gate is not None
    tensors = [tensor for tensor in (gate, weight, weight_scale, weight_columns, bias) if tensor is not None]
    fits = (
        bool(u.numel() and n and u.shape[-1] == k)
        and (gate is None or (gate.shape == u.shape and gate.dtype == u.dtype))
        and (bias is None or bias.dtype == u.dtype)
        and weight.dtype == (FP8 if fp8 else u.dtype)
        and (weight_scale is None or (weight_scale.numel() in (1, n) and weight_scale.dtype in SCALE_TYPES))
        and (weight_columns is None or (weight_columns.shape == (k, n) and weight_columns.dtype == weight.dtype))
        and all(tensor.device == u.device and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    )
    if not fits:
        return Plan("unpack", n)
    m, index = u.numel() // k, u.get_device()
    problem: dict[str, Any] = {"fp8": fp8, "gated": gated, "keep_two": keep_two}
    choice = activation.choose(n, k, m, u.dtype, u.device, has_columns=weight_columns is not None, **problem)
    at, scale_at, bias_at = weight.data_ptr(), _address(weight_scale), _address(bias)
    with torch.cuda.device(u.device):
        if isinstance(choice.config, SelectColumns):
            assert weight_columns is not None
            kernel = activation.kernel_of(choice.config, u.dtype, index, *problem.values(), choice.config.shared_bytes(k))
            select, columns = choice.config.starter(kernel, index, m, n, k), weight_columns.data_ptr()
            scale = (scale_at, SCALE_TYPES[weight_scale.dtype], int(weight_scale.numel() > 1)) if weight_scale is not None else (0, 0, 0)

            def start_selecting(u: Tensor, gate: Tensor | None, y: Tensor) -> None:
                select(u.data_ptr(), _address(gate), columns, *scale, bias_at, y.data_ptr())

            return Plan(choice.path, n, start_selecting)
        one_scale_a_row = weight_scale is None or (weight_scale.numel() == n and weight_scale.dtype == torch.float32)
        pack = _squared_relu_starter(u, gate, fp8=fp8, keep_two=True, packed=True)
        if isinstance(choice.config, WgmmaSp) and one_scale_a_row and pack is not None:
            kernel = activation.kernel_of(choice.config, u.dtype, index, *problem.values())
            weight_at = WeightAt(at, 0, bias_at, n, k, index, 1 if fp8 else 2, scale_at)
            return Plan(choice.path, n, _packed_start(pack, choice.config.activations_starter(kernel, weight_at, m), m, k, fp8))
    return Plan("dense" if weight_scale is None or _can_scale(u, weight, weight_scale, bias) else "unpack", n)


def _packed_start(pack: Callable[..., None], multiply: Callable[..., None], m: int, k: int, fp8: bool) -> Callable[..., None]:
    """Pack h of m rows, then multiply."""
    values_bytes, mask_bytes = _align(m * k // 2 * (1 if fp8 else 2)), _align(m * k // 8)

    def start(u: Tensor, gate: Tensor | None, y: Tensor) -> None:
        packed = u.new_empty(values_bytes + mask_bytes + 4 * m, dtype=torch.uint8)
        values = packed.data_ptr()
        bitmask = values + values_bytes
        pack(u.data_ptr(), _address(gate), values, bitmask, bitmask + mask_bytes)
        multiply(values, bitmask, bitmask + mask_bytes, y.data_ptr())

    return start


def _squared_relu_starter(u: Tensor, gate: Tensor | None, *, fp8: bool, keep_two: bool, packed: bool) -> Callable[..., None] | None:
    """What starts `squared_relu.cu`, or None where it does not fit."""
    k = u.shape[-1] if u.ndim else 0
    same = gate is None or (gate.shape == u.shape and gate.dtype == u.dtype and gate.device == u.device)
    if not same or not u.numel() or k % 8 or not u.is_cuda or activation.why_not_squared_relu(u.dtype, u.device, fp8):
        return None
    key = "squared_relu", u.numel(), k, u.dtype, u.get_device(), gate is None, fp8, keep_two, packed
    if (found := kept(key)) is not None:
        return found.start
    config, form = SquaredRelu.of(k), {"fp8": fp8, "gated": gate is not None, "keep_two": keep_two, "packed": packed}
    with torch.cuda.device(u.device):
        kernel = activation.squared_relu_kernel(config, u.dtype, u.get_device(), **form)
        start = config.starter(kernel, u.get_device(), u.numel() // k, k)
    return keep(key, Plan("squared_relu", k, start)).start


def _rounded_squared_relu(u: Tensor, gate: Tensor | None, keep_two: bool) -> tuple[Tensor, Tensor]:
    """h as float8, (m, k), and scales, (m, 1)."""
    k = u.shape[-1]
    m = u.numel() // k
    rows, scales = u.new_empty(m, k, dtype=FP8), u.new_empty(m, 1, dtype=torch.float32)
    start = _squared_relu_starter(u, gate, fp8=True, keep_two=keep_two, packed=False)
    assert start is not None  # `_can_scale` has seen that it fits
    with torch.cuda.device(u.device):
        start(u.data_ptr(), _address(gate), rows.data_ptr(), 0, scales.data_ptr())
    return rows, scales


def _can_scale(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> bool:
    """Whether torch has a product for these, and we a kernel that rounds x."""
    return (
        (x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == FP8 and weight.is_contiguous())
        and bool(x.numel() and x.shape[-1] == weight.shape[1] and weight.shape[0])
        and (weight.shape[0] % SCALED_MM_MULTIPLE, weight.shape[1] % SCALED_MM_MULTIPLE) == (0, 0)
        and weight_scale.numel() in (1, weight.shape[0])
        and all(tensor.device == x.device for tensor in (weight, weight_scale, *(() if bias is None else (bias,))))
        and (bias is None or bias.dtype == x.dtype)
        and torch.cuda.get_device_capability(x.device) >= SCALED_MM_CAPABILITY
        and activation.why_not_squared_relu(x.dtype, x.device, True) is None
    )


def _scaled_mm(rows: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    of_weight = weight_scale.to(torch.float32).reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    return torch._scaled_mm(rows, weight.t(), scale_a=scales, scale_b=of_weight, bias=bias, out_dtype=dtype)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _align(size: int) -> int:
    return -(-size // 128) * 128

"""Every operator in the fewest lines of PyTorch: the oracle of each kernel, and what runs where no kernel fits."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_sparse24.compressors.base import unpack_bits
from hf_sparse24.compressors.marlin24 import scales_in_rows, unpack_integers
from hf_sparse24.pattern import FLOAT_BITS
from hf_sparse24.quantization import dequantize


def unpack(compressed: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    """The dense weight of valid packed tensors.

    Args:
        compressed: Kept values in row-major order, any shape.
        bitmask: (out_features, ceil(in_features / 8)), uint8, as many bits set as there are values.
        in_features: Columns of the weight.

    Returns:
        weight: (out_features, in_features), dtype of compressed.
    """
    mask = unpack_bits(bitmask, in_features)
    weight = torch.zeros(mask.shape, dtype=compressed.dtype, device=compressed.device)
    return weight.masked_scatter_(mask, compressed)


def linear(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """`F.linear` on the unpacked weight.

    Args:
        x: (..., in_features).
        compressed: Kept values in row-major order.
        bitmask: (out_features, ceil(in_features / 8)), uint8.
        bias: (out_features,) or None.
        in_features: Columns of the weight.

    Returns:
        y: (..., out_features).
    """
    return torch.nn.functional.linear(x, unpack(compressed, bitmask, in_features), bias)


def for_each_expert(x: Tensor, offsets: Tensor, out_features: int, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """One product for every expert that has rows; the offsets are read by the host.

    Args:
        x: (rows, in_features), sorted by expert.
        offsets: (num_experts,), int32: rows offsets[e - 1] (0 for the first) to offsets[e] are those of expert e.
        out_features: Columns of the result.
        multiply: (rows of one expert, its number) -> its rows of the result.

    Returns:
        y: (rows, out_features); rows from the last offset on belong to no expert and are 0.
    """
    y, start = x.new_zeros(x.shape[0], out_features), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            y[start:end] = multiply(x[start:end], expert)
        start = end
    return y


def dequantize_8bit(compressed: Tensor, bitmask: Tensor, weight_scale: Tensor, in_features: int) -> Tensor:
    """The dense weight of 8-bit packed tensors.

    Args:
        compressed: Kept values in row-major order, float8_e4m3fn or int8.
        bitmask: (out_features, ceil(in_features / 8)), uint8.
        weight_scale: (out_features, 1), (out_features,) or one element.
        in_features: Columns of the weight.

    Returns:
        weight: (out_features, in_features), dtype of weight_scale.
    """
    # 16-bit floats hold every value of 8 bits.
    return dequantize(unpack(compressed.to(weight_scale.dtype), bitmask, in_features), weight_scale)


def dequantize_marlin24(weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, num_bits: int, scales_permuted: bool) -> Tensor:
    """The dense weight of tensors in Marlin's order (compressors/marlin24.py).

    Args:
        weight_packed: (K / 32, N * num_bits / 2), int32.
        meta: (K / 32, 2 N), int16.
        scale_packed: (groups, N), float16.
        num_bits: 4 or 8.
        scales_permuted: Whether runs of eight scales are stored as 0 4 1 5 2 6 3 7.

    Returns:
        weight: (N, K), dtype of scale_packed.
    """
    return dequantize(unpack_integers(weight_packed, meta, num_bits), scales_in_rows(scale_packed, scales_permuted))


def linear_8bit(x: Tensor, compressed: Tensor, bitmask: Tensor, weight_scale: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
    """`F.linear` on the dequantised weight, in the dtype of x.  x is never rounded: that is more exact than a checkpoint asks for."""
    weight = dequantize_8bit(compressed, bitmask, weight_scale, in_features)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def linear_marlin24(
    x: Tensor, weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, bias: Tensor | None, num_bits: int, scales_permuted: bool
) -> Tensor:
    """`F.linear` on the dequantised weight, in the dtype of x."""
    weight = dequantize_marlin24(weight_packed, meta, scale_packed, num_bits, scales_permuted)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def squared_relu(u: Tensor, gate: Tensor | None, keep_two: bool = False) -> Tensor:
    """relu(u)^2, or relu(gate)^2 * u: each product rounded to the dtype of u, as modules do it.

    Args:
        u: (..., features).
        gate: Shape and dtype of u, or None.
        keep_two: Whether only two of every four values stay, see `keep_two_of_four`.

    Returns:
        h: (..., features), dtype of u.
    """
    h = torch.square(torch.relu(u)) if gate is None else torch.square(torch.relu(gate)) * u
    return keep_two_of_four(h) if keep_two else h


def keep_two_of_four(h: Tensor) -> Tensor:
    """The two largest magnitudes of every four consecutive values of a row, and zeros.

    Args:
        h: (..., features), float; a last group that is short is taken to be filled with zeros.  NaN ranks above every number; of equal
            magnitudes the lower column is kept.

    Returns:
        kept: (..., features), dtype of h.
    """
    padded = torch.nn.functional.pad(h, (0, -h.shape[-1] % 4))
    sign_mask = torch.iinfo(FLOAT_BITS[h.dtype]).max
    infinity = sign_mask + 1 - round(1 / torch.finfo(h.dtype).eps)
    # Integers in the order of the magnitudes, which are equal for all NaNs.
    magnitudes = padded.view(FLOAT_BITS[h.dtype]).bitwise_and(sign_mask).clamp_(max=infinity + 1)
    a, b, c, d = magnitudes.unflatten(-1, (padded.shape[-1] // 4, 4)).unbind(-1)  # (..., features / 4) each
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    kept = torch.stack((_two(ab, ac, ad), _two(~ab, bc, bd), _two(~ac, ~bc, cd), _two(~ad, ~bd, ~cd)), -1).flatten(-2)
    return padded.where(kept, 0)[..., : h.shape[-1]]


def _two(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Where at least two of three hold."""
    return (first & second) | (third & (first | second))


def squared_relu_linear(
    u: Tensor, gate: Tensor | None, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, keep_two: bool
) -> Tensor:
    """`F.linear` on a squared ReLU.

    Args:
        u: (..., in_features).
        gate: Shape and dtype of u, or None.
        weight: (out_features, in_features), dtype of u; or float8_e4m3fn, with scales.
        weight_scale: (out_features, 1) or one element, float; or None.
        bias: (out_features,), dtype of u, or None.
        keep_two: Whether only two of every four values after the squared ReLU are multiplied.

    Returns:
        y: (..., out_features), dtype of u.
    """
    return torch.nn.functional.linear(squared_relu(u, gate, keep_two), widened(weight, weight_scale, u.dtype), bias)


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` on a dense weight of float8, in the dtype of x, which is not rounded.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features), float8_e4m3fn.
        weight_scale: (out_features, 1) or one element, float.
        bias: (out_features,), dtype of x, or None.

    Returns:
        y: (..., out_features), dtype of x.
    """
    return torch.nn.functional.linear(x, widened(weight, weight_scale, x.dtype), bias)


def widened(weight: Tensor, weight_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A dense weight that may be of 8 bits, in a dtype."""
    return weight if weight_scale is None else dequantize(weight, weight_scale).to(dtype)

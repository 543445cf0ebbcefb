"""Every operator in the fewest lines of PyTorch: the oracle of each kernel, and what runs where no kernel fits."""

import torch
from torch import Tensor

from hf_sparse24.compressors.base import unpack_bits


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

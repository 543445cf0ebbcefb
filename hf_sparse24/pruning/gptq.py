"""Integers for a pruned weight: GPTQ (Frantar et al., arXiv 2210.17323) on the weights that are kept.

The second of two passes: the weight is pruned, and its mask is fixed.  What rounding does to a column is made up for by those to
its right; what that moves away from 0 at pruned places is itself an error that goes on to the right.
"""

import torch
from torch import Tensor

from hf_sparse24.pruning.hessian import factor_inverse
from hf_sparse24.pruning.methods import BLOCK


def gptq(
    weight: Tensor, mask: Tensor, hessian: Tensor, *, num_bits: int = 4, group_size: int | None = 128, damp: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Round a weight to integers, symmetrically, keeping its mask.

    Args:
        weight: (out_features, in_features), float32, pruned: 0 outside of mask.
        mask: (out_features, in_features), bool, True = kept.
        hessian: (in_features, in_features), X^T X / tokens of the layer's inputs, float32; `prune` hands it to `after_layer`.
        num_bits: 2 to 8.
        group_size: Consecutive columns with one scale for each row; None for one scale a row.
        damp: As in `prune`.

    Returns:
        integers: (out_features, in_features), int8, from -2^(num_bits - 1) to 2^(num_bits - 1) - 1, 0 outside of mask.
        scales: (out_features, groups), float32.  The weight is integers times the scale of its group.

    Raises:
        ValueError: num_bits or group_size does not fit, or no damping makes H usable.
    """
    rows, in_features = weight.shape
    if not 2 <= num_bits <= 8:
        raise ValueError(f"num_bits must be 2 to 8, got {num_bits}")
    if group_size is not None and (group_size < 1 or in_features % group_size):
        raise ValueError(f"group_size must divide in_features {in_features}, got {group_size}; use None for one scale a row")
    upper, weight = factor_inverse(hessian, damp).upper, weight.clone()
    integers = torch.zeros(rows, in_features, dtype=torch.int8, device=weight.device)
    scales, step = [], group_size or BLOCK
    for start in range(0, in_features, step):
        end = min(start + step, in_features)
        if group_size or not start:
            # Of the weights as the columns before have left them; without groups, of the whole rows.
            scales.append(_scales(weight[:, start : end if group_size else None], mask[:, start : end if group_size else None], num_bits))
        errors = _round_columns(
            weight[:, start:end], mask[:, start:end], upper[start:end, start:end], scales[-1], integers[:, start:end], num_bits
        )
        weight[:, end:] -= errors @ upper[start:end, end:]
    return integers, torch.stack(scales, 1)


def _scales(weight: Tensor, mask: Tensor, num_bits: int) -> Tensor:
    largest = weight.masked_fill(~mask, 0).abs().amax(1)
    # The range is -8..7 for four bits: half a step more than 7, so that both ends are rounded by half a step at most.
    scales = largest / (2 ** (num_bits - 1) - 0.5)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _round_columns(weight: Tensor, mask: Tensor, upper: Tensor, scales: Tensor, integers: Tensor, num_bits: int) -> Tensor:
    """Fill integers; the columns to the right within weight are updated, the errors for those beyond it are returned."""
    errors, limit = torch.zeros_like(weight), 2 ** (num_bits - 1)
    for j in range(weight.shape[1]):
        rounded = (weight[:, j] / scales).round().clamp(-limit, limit - 1) * mask[:, j]
        integers[:, j] = rounded.to(torch.int8)
        errors[:, j] = (weight[:, j] - rounded * scales) / upper[j, j]
        weight[:, j:] -= torch.outer(errors[:, j], upper[j, j:])
    return errors

"""Which weights of one layer go, and what the others become.

Every method is a pure function of the weight W, (out_features, in_features), and H = X^T X / tokens of the layer's inputs, both
float32.  Magnitude, Wanda and RIA choose a mask by a score; SparseGPT and OBS remove weights one by one, or group by group, and
let those to the right make up for them; ALPS (alps.py) optimises mask and weights together.  Sources: Wanda arXiv 2306.11695,
RIA (ICLR 2024, "Plug-and-Play"), SparseGPT arXiv 2301.00774, OBS: Hassibi and Stork, 1992, on a group at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from hf_sparse24.pruning.hessian import Factor, damped, factor_inverse
from hf_sparse24.pruning.sparsity import Sparsity

# Columns that are updated together before the update reaches those to their right.
BLOCK = 128
RIA_POWER = 0.5
# Of conjugate gradient, where it follows a method.
REFINE_STEPS = 10


@dataclass(frozen=True)
class Pruned:
    """A pruned weight, which is 0 outside of mask; `damping` that was added to H's diagonal; `fallback`: what had to be done."""

    weight: Tensor
    mask: Tensor
    damping: float = 0.0
    fallback: str | None = None


def magnitude(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """Keep the largest weights.  Does not look at H."""
    return _by_scores(weight, weight.abs(), sparsity)


def wanda(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """Keep the largest |W_ij| * sqrt(H_jj): weights times the norm of their inputs."""
    return _by_scores(weight, weight.abs() * hessian.diagonal().sqrt(), sparsity)


def ria(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """As wanda, with each weight relative to its row and its column, and a root of the inputs' norm."""
    size = weight.abs()
    relative = size / size.sum(0).clamp(min=1e-30) + size / size.sum(1, keepdim=True).clamp(min=1e-30)
    return _by_scores(weight, relative * hessian.diagonal() ** (RIA_POWER / 2), sparsity)


def _by_scores(weight: Tensor, scores: Tensor, sparsity: Sparsity) -> Pruned:
    mask = sparsity.mask(scores)
    return Pruned(weight.masked_fill(~mask, 0), mask)


def sparsegpt(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """Column by column: a group's mask is chosen from the weights as they are by then; what a removed weight did goes to its right."""
    factor = factor_inverse(hessian, damp)
    weight, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    for start, end in _blocks(weight.shape[1], sparsity):
        columns, upper = weight[:, start:end], factor.upper[start:end, start:end]  # columns is a view
        errors, group = torch.zeros_like(columns), sparsity.group or end - start
        for j in range(end - start):
            if j % group == 0:
                scores = (columns[:, j : j + group] / upper.diagonal()[j : j + group]).square()
                mask[:, start + j : start + j + group] = sparsity.mask(scores)
            errors[:, j] = columns[:, j].masked_fill(mask[:, start + j], 0) / upper[j, j]
            columns[:, j:] -= torch.outer(errors[:, j], upper[j, j:])
        weight[:, end:] -= errors @ factor.upper[start:end, end:]
    return _finish(weight, mask, factor)


def obs(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """Group by group: of all ways to prune a group the one that costs least, with the best answer of the group and all to its right."""
    if sparsity.group is None:
        raise ValueError(f"method 'obs' prunes groups, such as 2:4, not {sparsity}; use 'sparsegpt' or 'alps'")
    factor, group = factor_inverse(hessian, damp), sparsity.group
    weight, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    choices = torch.tensor(list(combinations(range(group), group - int(sparsity.kept))), device=weight.device)  # (choices, pruned)
    rows = torch.arange(len(weight), device=weight.device)
    for start, end in _blocks(weight.shape[1], sparsity):
        errors = torch.zeros_like(weight[:, start:end])
        for j in range(start, end, group):
            here = slice(j, j + group)
            upper = factor.upper[here, here]
            inverses = _inverses(upper.T @ upper, choices)
            scaled = torch.einsum("rg,cgh->crh", weight[:, here], inverses)  # w_P A_PP^-1, 0 at the others
            best = (scaled * weight[:, here]).sum(-1).argmin(0)  # the cost of each choice, by row
            errors[:, j - start : j - start + group] = error = scaled[best, rows] @ upper.T
            mask[:, here].scatter_(1, choices[best], False)
            weight[:, j:end] -= error @ factor.upper[here, j:end]
        weight[:, end:] -= errors @ factor.upper[start:end, end:]
    return _finish(weight, mask, factor)


def _inverses(inverse_hessian: Tensor, choices: Tensor) -> Tensor:
    """(choices, group, group): A_PP^-1 at rows and columns P, 0 elsewhere, for every choice P of weights to prune."""
    rows, columns = choices[:, :, None], choices[:, None, :]
    inverses = torch.linalg.inv_ex(inverse_hessian[rows, columns]).inverse  # unlike inv, it does not wait for a GPU
    full = inverses.new_zeros(len(choices), *inverse_hessian.shape)
    full[torch.arange(len(choices), device=choices.device)[:, None, None], rows, columns] = inverses
    return full


def _blocks(in_features: int, sparsity: Sparsity) -> list[tuple[int, int]]:
    group = sparsity.group or BLOCK
    step = group * max(1, BLOCK // group)
    return [(start, min(start + step, in_features)) for start in range(0, in_features, step)]


def _finish(weight: Tensor, mask: Tensor, factor: Factor) -> Pruned:
    fallback = f"damping raised {factor.retries} times" if factor.retries else None
    return Pruned(weight.masked_fill(~mask, 0), mask, factor.damping, fallback)


def refine(weight: Tensor, pruned: Pruned, hessian: Tensor, damp: float, steps: int) -> Pruned:
    """Move the surviving weights to where the layer's outputs are nearest to the dense ones: conjugate gradient, all rows at once.

    Args:
        weight: (out_features, in_features), the dense one.
        pruned: Where it starts; the mask stays.
        hessian: (in_features, in_features).
        damp: As for the other methods.
        steps: Each is a product of the weight's shape with H.
    """
    damping = damp * float(hessian.diagonal().mean())
    matrix = damped(hessian, damping)
    scale, x = matrix.diagonal().clamp(min=1e-30), pruned.weight.clone()
    residual = ((weight - x) @ matrix) * pruned.mask
    direction = preconditioned = residual / scale
    energy = (residual * preconditioned).sum(1, keepdim=True)
    for _ in range(steps):
        product = (direction @ matrix) * pruned.mask
        step = energy / (direction * product).sum(1, keepdim=True).clamp(min=1e-30)
        x, residual = x + step * direction, residual - step * product
        preconditioned = residual / scale
        before, energy = energy, (residual * preconditioned).sum(1, keepdim=True)
        direction = preconditioned + energy / before.clamp(min=1e-30) * direction
    return Pruned(x, pruned.mask, max(damping, pruned.damping), pruned.fallback)


Method = Callable[[Tensor, Tensor, Sparsity, float], Pruned]

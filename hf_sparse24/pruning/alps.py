"""ALPS (Meng et al., NeurIPS 2024): mask and weights together, by the alternating direction method of multipliers.

With W scaled by s = sqrt(diag H), A = H / (s s^T), the dense weight B0 and a copy D of B that is forced to be sparse:

    B = (B0 A - V + rho D) (A + rho I)^-1        D = keep the largest of B + V / rho        V = V + rho (B - D)

rho starts low, where B is free and D may change its mind, and grows until D stands still.  Conjugate gradient finishes on D's mask.
"""

import torch
from torch import Tensor

from hf_sparse24.pruning.hessian import damped
from hf_sparse24.pruning.methods import REFINE_STEPS, Pruned, refine
from hf_sparse24.pruning.sparsity import Sparsity

MAX_STEPS, CHECK_EVERY = 300, 3
# Share of kept positions that changed since the last look -> growth of rho.
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
START_RHO, SETTLED_AFTER, SETTLED = 0.1, 30, 3e-4


def alps(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damp: float) -> Pruned:
    """Mask and weights by ADMM, then ten steps of conjugate gradient."""
    damping = damp * float(hessian.diagonal().mean())
    matrix = damped(hessian, damping)
    scale = matrix.diagonal().sqrt()
    if not bool((scale > 0).all()):
        raise ValueError("all its inputs are 0; calibrate with other texts, or ignore the layer")
    mask, sparse = _search(weight * scale, matrix / torch.outer(scale, scale), sparsity)
    return refine(weight, Pruned(sparse / scale, mask, damping), hessian, damp, REFINE_STEPS)


def _search(dense: Tensor, matrix: Tensor, sparsity: Sparsity) -> tuple[Tensor, Tensor]:
    """The mask that ADMM settles on, and B on it."""
    # In float64: float32 leaves eigenvalues as low as the damping wrong by their own size.
    values, vectors = (t.float() for t in torch.linalg.eigh(matrix.double()))
    target, rho = dense @ matrix, START_RHO
    mask = sparsity.mask(dense.abs())
    seen, sparse, dual, has_changed = mask, dense * mask, torch.zeros_like(dense), False
    free = dense
    for step in range(1, MAX_STEPS + 1):
        free = ((target - dual + rho * sparse) @ vectors / (values + rho)) @ vectors.T
        shifted = free + dual / rho
        mask = sparsity.mask(shifted.abs())
        sparse = shifted * mask
        dual += rho * (free - sparse)
        if step % CHECK_EVERY == 0:
            changed, seen = float((mask & ~seen).sum() / mask.sum()), mask
            if has_changed and (changed == 0 or (step > SETTLED_AFTER and changed < SETTLED)):
                break
            # Until the mask moves at all, rho was too high to let it.
            rho *= next((growth for least, growth in GROWTH if changed > least), 0.2 if not has_changed else 1.0)
            has_changed |= changed > 0
    return mask, free * mask

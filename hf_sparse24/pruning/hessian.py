"""What calibration leaves behind of a layer's inputs X, (tokens, in_features): H = X^T X / tokens, and the factor of its inverse."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

RETRIES = 6


class InputSum:
    """Adds up x^T x over batches, in float32; every token counts the same."""

    def __init__(self, in_features: int, device: torch.device | str):
        self.tokens = 0
        self.total = torch.zeros(in_features, in_features, device=device)

    def add(self, x: Tensor) -> None:
        """Add the rows of x, (tokens, in_features)."""
        x = x.to(self.total.device, torch.float32)
        self.tokens += len(x)
        self.total.addmm_(x.T, x)

    def hessian(self) -> Tensor:
        """The mean over tokens, (in_features, in_features)."""
        return self.total / max(1, self.tokens)


@dataclass(frozen=True)
class Factor:
    """`upper` is U with (H + damping I)^-1 = U^T U.  `retries` says how often the damping was raised."""

    upper: Tensor
    damping: float
    retries: int


def factor_inverse(hessian: Tensor, damp: float) -> Factor:
    """Factor the inverse of a damped H.  Where that fails, the damping is raised tenfold, six times at most.

    Args:
        hessian: (in_features, in_features), float32.
        damp: Damping as a share of the mean of H's diagonal.

    Raises:
        ValueError: It fails with the largest damping as well.
    """
    mean = float(hessian.diagonal().mean())
    for retry in range(RETRIES + 1):
        damping = damp * mean * 10**retry
        lower, failed = torch.linalg.cholesky_ex(damped(hessian, damping))
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return Factor(upper, damping, retry)
    raise ValueError(
        f"its inputs give no positive definite matrix, even with a damping of {damping:.3g} (mean of the diagonal {mean:.3g}); "
        "calibrate with more tokens, or ignore the layer"
    )


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H + damping I."""
    matrix = hessian.clone()
    matrix.diagonal().add_(damping)
    return matrix


def squared_error(weight: Tensor, pruned: Tensor, hessian: Tensor | None) -> float:
    """|(W - W') X|^2 / |W X|^2, or |W - W'|^2 / |W|^2 without H; 0 where the layer's outputs are all 0.

    Args:
        weight: (out_features, in_features), float32.
        pruned: The same shape.
        hessian: (in_features, in_features), of the inputs X; None if there are none.
    """
    difference = weight - pruned
    lost, whole = (float(((w if hessian is None else w @ hessian) * w).sum()) for w in (difference, weight))
    # In this order NaN stays NaN: a weight or an input that holds one has no error to report.
    return 0.0 if whole <= 0 else max(lost, 0.0) / whole


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products without TF32, whose 10 bits no factorisation survives."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

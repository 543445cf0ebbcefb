"""How sparse a weight becomes: N:M, or a ratio of zeros anywhere in a row."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparse24.pattern import mask_n_m


@dataclass(frozen=True)
class Sparsity:
    """`kept` of every `group` consecutive weights stay; without a group, a share `kept` of every row."""

    kept: float
    group: int | None

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}" if self.group else f"{1 - self.kept:.0%} unstructured"

    def why_not(self, in_features: int) -> str | None:
        """Why a weight of this width cannot be pruned."""
        if self.group and in_features % self.group:
            return f"in_features {in_features} is not a multiple of {self.group}"
        return None

    def mask(self, scores: Tensor) -> Tensor:
        """Mark the highest scores, exactly as many as the pattern keeps.

        Args:
            scores: (rows, in_features), float32, none below 0.  Of equal scores in a group the lower column is kept.

        Returns:
            mask: shape of scores, bool, True = kept.
        """
        if self.group:
            return mask_n_m(scores, int(self.kept), self.group)
        best = scores.topk(round(scores.shape[1] * self.kept), dim=1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def as_sparsity(pattern: str | float) -> Sparsity:
    """Read a pattern.

    Args:
        pattern: "2:4", "4:8" and the like: how many are kept of how many; or the ratio of zeros, as 0.5.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(pattern, str) and (found := re.fullmatch(r"(\d+):(\d+)", pattern)) and 0 < int(found[1]) < int(found[2]):
        return Sparsity(int(found[1]), int(found[2]))
    try:
        ratio = float(pattern)
    except ValueError:
        ratio = -1
    if not 0 < ratio < 1:
        raise ValueError(f"pattern must be N:M with 0 < N < M, such as '2:4', or a ratio of zeros between 0 and 1, got {pattern!r}")
    return Sparsity(1 - ratio, None)

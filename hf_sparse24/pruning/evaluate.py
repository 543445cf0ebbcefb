"""What pruning cost: perplexity of a causal model, agreement of an encoder's embeddings with the dense model's."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparse24.pruning.blocks import evaluating, run_model
from hf_sparse24.pruning.calibration import Batch


@torch.no_grad()
def perplexity(model: Any, windows: Tensor, batch_size: int = 8) -> float:
    """exp of the mean loss over every token of every window but the first.

    Args:
        model: Causal.
        windows: (windows, tokens), int64, of `pack_windows`.
        batch_size: Windows at a time.

    Raises:
        ValueError: The windows have no second token.
    """
    if windows.ndim != 2 or windows.shape[1] < 2 or not len(windows):
        raise ValueError(f"perplexity needs windows of two tokens or more, got shape {tuple(windows.shape)}")
    total = 0.0
    with evaluating(model):
        for ids in windows.split(batch_size):
            logits = run_model(model, {"input_ids": ids}).logits
            targets = ids[:, 1:].to(logits.device)
            for row, target in zip(logits[:, :-1], targets, strict=True):  # in float32, one window at a time
                total += float(F.cross_entropy(row.float(), target, reduction="sum"))
    return math.exp(total / (len(windows) * (windows.shape[1] - 1)))


@torch.no_grad()
def embed(model: Any, batches: Sequence[Batch]) -> Tensor:
    """The mean of the last hidden states over the tokens of each text.

    Args:
        model: An encoder.
        batches: Of `make_batches`.

    Returns:
        (texts, hidden), float32, each of length 1.
    """
    found = []
    with evaluating(model):
        for batch in batches:
            hidden = run_model(model.base_model, batch).last_hidden_state.float()
            mask = batch.get("attention_mask", torch.ones(hidden.shape[:2])).to(hidden)[..., None]
            found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu())
    return torch.cat(found)


@dataclass(frozen=True)
class Agreement:
    """How alike two models see the same texts: rank correlation of all pairs' cosines (Spearman), mean cosine of a text's two
    embeddings, share of texts with the same nearest neighbour."""

    spearman: float
    cosine: float
    nearest: float

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


def agreement(dense: Tensor, pruned: Tensor) -> Agreement:
    """Compare the embeddings of two models.

    Args:
        dense: (texts, hidden), of `embed`; three texts or more.
        pruned: The same shape, of the other model.

    Raises:
        ValueError: There are fewer than three texts, or not the same number.
    """
    if len(dense) < 3 or len(dense) != len(pruned):
        raise ValueError(f"agreement needs the same three texts or more, got {len(dense)} and {len(pruned)}")
    pairs = torch.triu_indices(len(dense), len(dense), 1).unbind()
    similar = dense @ dense.T, pruned @ pruned.T
    ranks = torch.stack([_ranks(matrix[pairs]) for matrix in similar])
    nearest = [matrix.fill_diagonal_(-math.inf).argmax(1) for matrix in similar]
    return Agreement(
        spearman=float(torch.corrcoef(ranks)[0, 1]),
        cosine=float((dense * pruned).sum(1).mean()),
        nearest=float((nearest[0] == nearest[1]).float().mean()),
    )


def _ranks(values: Tensor) -> Tensor:
    """Equal values share the mean of their ranks."""
    _, groups, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[groups]

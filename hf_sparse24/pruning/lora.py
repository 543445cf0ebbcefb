"""LoRA that knows the mask: the layer computes with W + (B A) * mask, so that merging keeps the pattern.

An ordinary LoRA adds B A everywhere.  Merged, such a weight is dense, and `save_pretrained(..., sparsity_config=...)` refuses it;
`apply_masks` makes it sparse again, and loses what was learnt elsewhere.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_sparse24.config import Sparse24Config
from hf_sparse24.modules import match_modules
from hf_sparse24.pruning.masks import SUFFIX


class MaskedDelta(nn.Module):
    """weight -> weight + scale * (B A) * mask; B is 0 at first."""

    def __init__(self, weight: Tensor, mask: Tensor, rank: int, alpha: float):
        super().__init__()
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight to compute with."""
        return weight + self.scale * (self.b @ self.a) * self.get_buffer("mask")


def add_masked_lora(
    model: nn.Module, *, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = ("lm_head",)
) -> list[str]:
    """Freeze a pruned model, and give its layers low-rank deltas to train, in place.

    Args:
        model: With masks, by `prune`.
        rank: Of the deltas.
        alpha: Their scale is alpha / rank.
        targets: Layers that get one, as in `Sparse24Config`; those without a mask are left out.
        ignore: Layers that get none.

    Returns:
        The names of the layers.

    Raises:
        ValueError: No targeted layer has a mask.
    """
    modules = dict(model.named_modules())
    selected = match_modules(
        {name: type(module) for name, module in modules.items()}, Sparse24Config(targets=list(targets), ignore=list(ignore))
    )
    names = [name for name in selected if getattr(modules[name], f"weight{SUFFIX}", None) is not None]
    if not names:
        raise ValueError("no targeted layer has a mask: prune the model first")
    model.requires_grad_(False)
    for name in names:
        weight, mask = modules[name].weight, modules[name].get_buffer(f"weight{SUFFIX}")
        assert isinstance(weight, Tensor)
        parametrize.register_parametrization(modules[name], "weight", MaskedDelta(weight, mask, rank, alpha))
    return names


@torch.no_grad()
def merge_masked_lora(model: nn.Module) -> None:
    """Add every delta to its weight, and make plain layers of them again; pruned weights stay 0.

    Raises:
        ValueError: The model has no deltas.
    """
    layers = [module for module in model.modules() if parametrize.is_parametrized(module, "weight")]
    layers = [module for module in layers if isinstance(module.parametrizations.weight[0], MaskedDelta)]  # type: ignore[index, union-attr]
    if not layers:
        raise ValueError("the model has no masked LoRA deltas to merge")
    for module in layers:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)

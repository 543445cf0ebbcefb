"""Magnitude pruning: of every group of four, keep the two largest weights.  No data, seconds, and by far the worst quality."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from hf_sparse24.config import Sparse24Config
from hf_sparse24.modules import match_modules, tied_names
from hf_sparse24.pattern import is_nonzero, mask_2_4


@dataclass(frozen=True)
class LayerReport:
    """What pruning did to one layer: `relative_error` is |W - W'| / |W| in the Frobenius norm."""

    name: str
    dropped: int
    elements: int
    relative_error: float


@dataclass
class PruneReport:
    """Every pruned layer, and why others were left alone."""

    method: str
    layers: list[LayerReport] = field(default_factory=list)
    left_dense: dict[str, str] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Non-zero weights that were set to zero."""
        return sum(layer.dropped for layer in self.layers)


@torch.no_grad()
def prune(
    model: nn.Module,
    method: Literal["magnitude"] = "magnitude",
    *,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = ("lm_head",),
) -> PruneReport:
    """Make a model's linear layers 2:4, in place.

    Args:
        model: Dense.
        method: "magnitude" is the only one of this version.
        targets: Modules to prune, as in `Sparse24Config`.
        ignore: Modules that are never touched.

    Returns:
        How many values every layer lost, and which targeted layers were not pruned.

    Raises:
        ValueError: Another method, a target that matches nothing, or a tied weight that is targeted by its name: pruning it
            would prune the embedding as well.
    """
    if method != "magnitude":
        raise ValueError(f"method must be 'magnitude', got {method!r}; other methods are not in this version")
    modules = dict(model.named_modules())
    config = Sparse24Config(targets=list(targets), ignore=list(ignore))
    selected = match_modules({name: type(module) for name, module in modules.items()}, config)
    tied = tied_names(model)
    if named := [name for name in selected if name in targets and f"{name}.weight" in tied]:
        raise ValueError(f"{named[0]}.weight is tied to another parameter, which would be pruned with it: untie it, or do not target it")
    report = PruneReport(method)
    for name in selected:
        module = modules[name]
        reason = _why_not(module, f"{name}.weight" in tied)
        if reason:
            report.left_dense[name] = reason
        else:
            report.layers.append(_prune_layer(name, module.weight))
    if not report.layers:
        raise ValueError(f"no targeted layer can be pruned: {report.left_dense or 'none has a weight'}")
    return report


def _why_not(module: nn.Module, tied: bool) -> str | None:
    if tied:
        return "tied to another parameter"
    if not isinstance(module, nn.Linear):
        return f"a {type(module).__name__}, not a Linear"
    if module.in_features % 4:
        return f"in_features {module.in_features} is not a multiple of 4"
    return None


def _prune_layer(name: str, weight: torch.Tensor) -> LayerReport:
    mask = mask_2_4(weight)
    dropped = int((is_nonzero(weight) & ~mask).sum())
    norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
    kept = torch.linalg.vector_norm(weight * mask, dtype=torch.float32)
    # masked_fill and not a product, which would leave -0.0 behind.
    weight.masked_fill_(~mask, 0)
    error = torch.sqrt(torch.clamp(norm**2 - kept**2, min=0)) / norm if norm else torch.zeros(())
    return LayerReport(name, dropped, weight.numel(), float(error))

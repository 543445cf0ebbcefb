"""Making a dense model 2:4, and keeping it so through training.  Nothing else in the package prunes one."""

from typing import TYPE_CHECKING, Any

from hf_sparse24.pruning.calibration import make_batches, pack_windows
from hf_sparse24.pruning.distill import DistillReport, distill, sample_windows
from hf_sparse24.pruning.evaluate import Agreement, agreement, embed, perplexity
from hf_sparse24.pruning.gptq import gptq
from hf_sparse24.pruning.lora import add_masked_lora, merge_masked_lora
from hf_sparse24.pruning.masks import MaskKeeper, apply_masks, keep_masks, load_masks, save_masks, stored_masks
from hf_sparse24.pruning.one_shot import METHODS, prune
from hf_sparse24.pruning.report import LayerReport, PruneReport

if TYPE_CHECKING:
    from hf_sparse24.pruning.callback import KeepMasks

__all__ = [
    "METHODS",
    "Agreement",
    "DistillReport",
    "KeepMasks",
    "LayerReport",
    "MaskKeeper",
    "PruneReport",
    "add_masked_lora",
    "agreement",
    "apply_masks",
    "distill",
    "embed",
    "gptq",
    "keep_masks",
    "load_masks",
    "make_batches",
    "merge_masked_lora",
    "pack_windows",
    "perplexity",
    "prune",
    "sample_windows",
    "save_masks",
    "stored_masks",
]


def __getattr__(name: str) -> Any:
    if name != "KeepMasks":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from hf_sparse24.pruning.callback import KeepMasks

    return KeepMasks

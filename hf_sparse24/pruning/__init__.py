"""Making a dense model 2:4, and keeping it so through training.  Nothing else in the package changes a weight."""

from hf_sparse24.pruning.calibration import make_batches, pack_windows
from hf_sparse24.pruning.masks import KeepMasks, MaskKeeper, keep_masks, load_masks, save_masks, stored_masks
from hf_sparse24.pruning.one_shot import METHODS, prune
from hf_sparse24.pruning.report import LayerReport, PruneReport

__all__ = [
    "METHODS",
    "KeepMasks",
    "LayerReport",
    "MaskKeeper",
    "PruneReport",
    "keep_masks",
    "load_masks",
    "make_batches",
    "pack_windows",
    "prune",
    "save_masks",
    "stored_masks",
]

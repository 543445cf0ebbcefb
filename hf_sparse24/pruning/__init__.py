"""Making a dense model 2:4.  Nothing else in the package changes a weight."""

from hf_sparse24.pruning.magnitude import LayerReport, PruneReport, prune

__all__ = ["LayerReport", "PruneReport", "prune"]

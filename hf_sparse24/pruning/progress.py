"""Blocks that were pruned already, by a run that was interrupted: their weights and masks in files, their reports in the journal."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_sparse24.journal import Journal
from hf_sparse24.pruning.masks import SUFFIX, store_mask
from hf_sparse24.pruning.report import LayerReport


def prune_once(
    journal: Journal, block: str, layers: Mapping[str, nn.Module], prune: Callable[[], Iterable[LayerReport]], never_run: list[str]
) -> list[LayerReport]:
    """Prune the layers of a block, or put back what an interrupted run made of them.

    Args:
        journal: Of the task.
        block: Its name.
        layers: Those of the block, by name.
        prune: Prunes them.
        never_run: `prune` adds the names of layers that no input reached.

    Returns:
        The report of each layer that was pruned.
    """
    file = f"blocks/{block}.safetensors"
    if found := journal.finished.get(file):
        reports = [LayerReport(**report) for report in found["reports"]]
        _restore({report.name: layers[report.name] for report in reports}, load_file(journal.work / file))
        never_run += found["never_run"]
        return reports
    num_before = len(never_run)
    reports = list(prune())
    tensors = {}
    for name in (report.name for report in reports):
        for part in ("weight", f"weight{SUFFIX}"):
            tensors[f"{name}.{part}"] = getattr(layers[name], part).detach().cpu().contiguous()
    noted = {"reports": [asdict(report) for report in reports], "never_run": never_run[num_before:]}
    journal.finish(file, partial(save_file, tensors), **noted)
    return reports


@torch.no_grad()
def _restore(layers: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, layer in layers.items():
        weight = layer.get_parameter("weight")
        weight.copy_(tensors[f"{name}.weight"])
        store_mask(layer, tensors[f"{name}.weight{SUFFIX}"].to(weight.device))

"""Packed checkpoints of experts: their parts are merged as their weights would be.

Parts have the rows of the weight.  The loader is shown merged parts, whose pieces are read when it asks for them, each into its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sparse24.checkpoint import DTYPES, PackedSlice, Slice, name_of_part
from hf_sparse24.experts import ExpertWeights, Sparse24Experts
from hf_sparse24.merged import Merged, by_module, find_merged, members_in_checkpoint


@dataclass(frozen=True)
class PlacedExperts:
    """What became of packed weights that the loader merges.

    Attributes:
        kept: Name in the checkpoint -> parameter that it is part of.
        pieces: Parameter -> names in the checkpoint, for each expert in the order of its members.
        left_dense: Name in the checkpoint -> why it is not kept.
    """

    kept: dict[str, str]
    pieces: dict[str, list[list[str]]]
    left_dense: dict[str, str]


def place_packed_experts(
    model: PreTrainedModel, packed: Mapping[str, PackedSlice], targets: Mapping[str, str], conversions: list[Any]
) -> PlacedExperts:
    """Replace the experts of an empty model whose weights are all packed in the checkpoint.

    Args:
        model: On the meta device.
        packed: Name in the checkpoint -> packed weight; those that the loader merges.
        targets: Name in the checkpoint -> parameter of the model.
        conversions: The renamings and merges that the loader will apply.
    """
    merged, reasons = find_merged(model, conversions) if targets else ({}, {})
    modules = members_in_checkpoint(targets, merged, conversions)
    placed = PlacedExperts({}, {}, {})
    found: dict[str, dict[str, str]] = {parameter.experts: {} for parameter in merged.values()}
    for name, target in targets.items():
        if name in modules:
            found[merged[target].experts][modules[name]] = name
        else:
            placed.left_dense[name] = reasons.get(target.rpartition(".")[0], "the loader merges or changes this tensor")
    for experts, parameters in by_module(merged).items():
        if not (names := found[experts]):
            continue
        if reason := _why_dense(parameters, names, packed):
            placed.left_dense.update(dict.fromkeys(names.values(), reason))
        else:
            _place(model, parameters, names, placed)
    return placed


def _place(model: PreTrainedModel, parameters: list[Merged], names: Mapping[str, str], placed: PlacedExperts) -> None:
    experts = model.get_submodule(parameters[0].experts)
    weights = {}
    for parameter in parameters:
        dtype = getattr(experts, parameter.projection).dtype
        weights[parameter.projection] = ExpertWeights(parameter.shape, parameter.members, dtype=dtype, device="meta")
        in_order = [names[module] for module, _ in parameter.places()]
        step = len(parameter.members)
        placed.kept.update(dict.fromkeys(in_order, parameter.name))
        placed.pieces[parameter.name] = [in_order[start : start + step] for start in range(0, len(in_order), step)]
    model.set_submodule(parameters[0].experts, Sparse24Experts(experts, weights))


def _why_dense(parameters: list[Merged], names: Mapping[str, str], packed: Mapping[str, PackedSlice]) -> str | None:
    """Why experts of which `names` (what module -> name in the checkpoint) are packed cannot stay so, or None."""
    sizes = {
        module: (parameter.shape[1] // len(parameter.members), parameter.shape[2])
        for parameter in parameters
        for module, _ in parameter.places()
    }
    if absent := sizes.keys() - names:
        return f"{len(absent)} of the {len(sizes)} weights of these experts are not packed, {min(absent)} for example"
    if extra := names.keys() - sizes:
        return f"the model has no place for {min(extra)}"
    for module, name in names.items():
        if packed[name].compressor.format != ExpertWeights.compressor.format:
            return f"experts are not kept in the format {packed[name].compressor.format}"
        if packed[name].shape != sizes[module]:
            return f"the model expects shape {sizes[module]}"
    return None


class MergedSlice:
    """The parts of all experts as one tensor, with the interface of `Slice`: each is read into its place when that tensor is asked for.

    Args:
        pieces: For each expert, its members' parts.
    """

    def __init__(self, pieces: list[list[Slice]]):
        self.pieces = pieces

    def get_shape(self) -> list[int]:
        """Sizes of the axes."""
        rows, *rest = self.pieces[0][0].get_shape()
        return [len(self.pieces), len(self.pieces[0]) * rows, *rest]

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return self.pieces[0][0].get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        merged = torch.empty(self.get_shape(), dtype=DTYPES[self.get_dtype()])
        for of_expert, pieces in zip(merged, self.pieces, strict=True):
            for rows, piece in zip(of_expert.chunk(len(pieces)), pieces, strict=True):
                rows.copy_(piece[...])
        return merged if index in (..., (...,)) else merged[index]


def merge_parts(dense: dict[str, Any], pieces: Mapping[str, list[list[str]]]) -> dict[str, Any]:
    """A checkpoint's tensors with the parts of kept experts merged.

    Args:
        dense: `as_dense(..., keep=...)`, in which they are apart.
        pieces: Of `PlacedExperts`.
    """
    merged = dict(dense)
    for parameter, names in pieces.items():
        for part in ExpertWeights.compressor.parts:
            parts = [[merged.pop(name_of_part(name, part)) for name in of_expert] for of_expert in names]
            merged[f"{parameter}.{part}"] = MergedSlice(parts)
    return merged

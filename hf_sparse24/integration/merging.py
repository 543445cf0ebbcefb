"""Between the merged parameters of experts and the weights of which checkpoints hold them apart.

Which weights become which parameter is what Transformers' conversions say: `.experts.*.w1.weight` and `.experts.*.w3.weight`, stacked
and concatenated, are `.experts.gate_up_proj`.  Parts of a packed weight have its rows, so that they are merged in the same way; the
loader is shown merged parts, whose pieces are read when it asks for them, each into its place.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from hf_sparse24.checkpoint import DTYPES, PackedSlice, Slice, name_of_part
from hf_sparse24.experts import ExpertWeights, Sparse24Experts, packed_experts, places, projections_of, why_not_packed


@dataclass(frozen=True)
class Merged:
    """A merged parameter of a model.

    Attributes:
        experts: Its module.
        projection: Its name in there.
        shape: (num_experts, out_features, in_features).
        members: Names of the weights of one expert in the module, "*" for its number.
        sources: Patterns that tell these weights in a checkpoint, after renaming.
    """

    experts: str
    projection: str
    shape: tuple[int, ...]
    members: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the parameter."""
        return f"{self.experts}.{self.projection}"

    def places(self) -> Iterator[tuple[str, tuple[int, slice]]]:
        """What modules the experts' weights would be, were they not merged, and where they lie."""
        for member, place in places(self.shape, self.members):
            yield f"{self.experts}.{member}", place

    def module_of(self, renamed: str) -> str | None:
        """What module a weight in a checkpoint, after renaming, would be."""
        for member, source in zip(self.members, self.sources, strict=True):
            if found := re.search(re.escape(source).replace(r"\*", r"(\d+)") + "$", renamed):
                return f"{self.experts}.{member.replace('*', found[1])}"
        return None


def find_merged(model: nn.Module, conversions: Iterable[Any] | None = None) -> tuple[dict[str, Merged], dict[str, str]]:
    """The merged parameters of experts that can be held packed.

    Args:
        model: Dense, or on the meta device.
        conversions: Transformers' for this model, if they are at hand.

    Returns:
        By name; and module -> why not for other modules of experts.
    """
    modules = {
        name: module for name, module in model.named_modules() if hasattr(module, "is_transposed") and list(module.parameters(False))
    }
    if not modules or not isinstance(model, PreTrainedModel):
        return {}, {}
    # Conversions remember what they matched; those of the loader must not be touched.
    conversions = get_model_conversion_mapping(model) if conversions is None else conversions
    converters = [copy.deepcopy(c) for c in conversions if isinstance(c, WeightConverter)]
    merged: dict[str, Merged] = {}
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if reason := why_not_packed(module):
            reasons[name] = reason
            continue
        found = {projection: _find_sources(name, projection, converters) for projection in projections_of(module)}
        for projection, sources in found.items():
            if sources is None:
                reasons[name] = f"Transformers does not say of which weights {projection} is merged"
        if name not in reasons:
            merged |= {
                f"{name}.{projection}": Merged(name, projection, tuple(getattr(module, projection).shape), *sources)
                for projection, sources in found.items()
                if sources is not None
            }
    return merged, reasons


def _find_sources(experts: str, projection: str, converters: list[WeightConverter]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Members and patterns of a merged parameter, if a conversion does nothing but put weights behind and below each other."""
    parameter, prefix = f"{experts}.{projection}", f"{experts}.0."
    for converter in converters:
        target, sources = converter.target_patterns[0], tuple(converter.source_patterns)
        operations = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
        expected = [(MergeModulelist, 0), (Concatenate, 1)][: 1 if len(sources) == 1 else 2]
        if len(converter.target_patterns) > 1 or not parameter.endswith(target) or operations != expected:
            continue
        names = [parameter.removesuffix(target) + source.replace("*", "0") for source in sources]
        leads_here = all(converter.rename_source_key(name) == (parameter, source) for name, source in zip(names, sources, strict=True))
        if leads_here and all(name.startswith(prefix) and name.endswith(".weight") for name in names):
            return tuple(f"*.{name.removeprefix(prefix).removesuffix('.weight')}" for name in names), sources
    return None


# ---- what a config selects -----------------------------------------------------------------------------------------------------


def expert_classes(model: nn.Module, merged: Mapping[str, Merged], reasons: Mapping[str, str]) -> dict[str, type]:
    """The weights of experts as modules that a config can name: each counts as a Linear, and by the class of its experts.

    Args:
        model: Dense or packed.
        merged: Of `find_merged(model)`.
        reasons: Of it, too: such modules are named as a whole.
    """
    names = {name: [name] for name in reasons}
    for parameter in merged.values():
        names.setdefault(parameter.experts, []).extend(name for name, _ in parameter.places())
    classes: dict[str, type] = {}
    for experts, members in names.items():
        classes |= dict.fromkeys(members, _expert_class(type(model.get_submodule(experts))))
    for name, packed in packed_experts(model).items():
        for projection, weights in packed.weights.items():
            classes |= dict.fromkeys(weights.member_names(f"{name}.{projection}"), _expert_class(type(packed.form)))
    return classes


def _expert_class(experts: type) -> type:
    return type(f"{experts.__name__}Linear", (nn.Linear, experts), {})


def whole_experts(selected: set[str], merged: Mapping[str, Merged]) -> tuple[dict[str, Merged], dict[str, str]]:
    """The merged parameters of modules of which a config selects every weight; and why not, for those of which it selects some."""
    members: dict[str, list[str]] = {}
    for parameter in merged.values():
        members.setdefault(parameter.experts, []).extend(name for name, _ in parameter.places())
    whole = {experts for experts, names in members.items() if selected.issuperset(names)}
    reasons = {
        experts: f"{len(selected.intersection(names))} of its {len(names)} weights are selected: all are held packed, or none"
        for experts, names in members.items()
        if experts not in whole and selected.intersection(names)
    }
    return {name: parameter for name, parameter in merged.items() if parameter.experts in whole}, reasons


def members_in_checkpoint(targets: Mapping[str, str], merged: Mapping[str, Merged], conversions: Iterable[Any]) -> dict[str, str]:
    """Name in a checkpoint -> what module it would be, of weights that are merged into some parameters.

    Args:
        targets: Name in the checkpoint -> parameter that it becomes or is merged into.
        merged: By name; others are passed over.
        conversions: Those that the loader applies.
    """
    renamings = [copy.deepcopy(c) for c in conversions if isinstance(c, WeightRenaming)]
    modules = {}
    for name, target in targets.items():
        renamed = name
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        if target in merged and (module := merged[target].module_of(renamed)) is not None:
            modules[name] = module
    return modules


# ---- packed checkpoints ------------------------------------------------------------------------------------------------------


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
    for experts, names in found.items():
        parameters = [parameter for parameter in merged.values() if parameter.experts == experts]
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

"""Parameters into which Transformers merges the weights of experts, and what a config calls these weights.

Which weights become which parameter is what Transformers' conversions say: `.experts.*.w1.weight` and `.experts.*.w3.weight`, stacked
and concatenated, are `.experts.gate_up_proj`.  A conversion that does more than to put weights behind and below each other is passed
over, and such experts stay what they are.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from hf_sparse24.experts import packed_experts, places, projections_of, why_not_packed


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
        members = tuple(name.removeprefix(prefix).removesuffix(".weight") for name in names)
        as_expected = all(name == f"{prefix}{member}.weight" for name, member in zip(names, members, strict=True))
        if leads_here and as_expected and not any("." in member for member in members):
            return tuple(f"*.{member}" for member in members), sources
    return None


def by_module(merged: Mapping[str, Merged]) -> dict[str, list[Merged]]:
    """Merged parameters by the module of experts that owns them."""
    modules: dict[str, list[Merged]] = {}
    for parameter in merged.values():
        modules.setdefault(parameter.experts, []).append(parameter)
    return modules


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
        classes |= dict.fromkeys(members, expert_class(type(model.get_submodule(experts))))
    for name, packed in packed_experts(model).items():
        for projection, weights in packed.weights.items():
            classes |= dict.fromkeys(weights.member_names(f"{name}.{projection}"), expert_class(type(packed.form)))
    return classes


def expert_class(experts: type) -> type:
    """The class by which a config finds the weights of one expert of a module of this class."""
    return type(f"{experts.__name__}Linear", (nn.Linear, experts), {})


def whole_experts(selected: set[str], merged: Mapping[str, Merged]) -> tuple[dict[str, Merged], dict[str, str]]:
    """The merged parameters of modules of which a config selects every weight; and why not, for those of which it selects some."""
    members = {experts: [name for parameter in of_it for name, _ in parameter.places()] for experts, of_it in by_module(merged).items()}
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

"""The modules of a model: which ones a config selects, which weights are tied, which layers are packed."""

import re
from collections.abc import Mapping
from typing import Protocol

from torch import nn

from hf_sparse24.config import SparsityConfig
from hf_sparse24.experts import ExpertWeights, packed_projections
from hf_sparse24.linear import PackedLinear, Sparse24Linear, SparseBitmaskLinear
from hf_sparse24.quantized_linear import (
    GptqMarlin24Linear,
    Marlin24Linear,
    PackQuantizedLinear,
    QuantizedSparse24Linear,
    QuantizedSparseBitmaskLinear,
)

# Format -> the layer that keeps weights in it.
LAYERS: dict[str, type[PackedLinear]] = {
    layer.compressor.format: layer
    for layer in (
        *(Sparse24Linear, SparseBitmaskLinear, QuantizedSparse24Linear, QuantizedSparseBitmaskLinear),
        *(Marlin24Linear, GptqMarlin24Linear, PackQuantizedLinear),
    )
}
# Names in a message before it says how many more there are.
LISTED = 8


class Selection(Protocol):
    """What of a config selects modules."""

    @property
    def targets(self) -> list[str]:
        """Class names, module names, patterns."""

    @property
    def ignore(self) -> list[str]:
        """The same; it wins."""


def match_modules(names_and_classes: Mapping[str, type], config: Selection, aliases: Mapping[str, str] | None = None) -> list[str]:
    """The modules that a config selects, in the order given.

    Args:
        names_and_classes: Module name -> class, of every module of the model.
        config: Whose targets and ignore are applied; ignore wins.
        aliases: Second names of modules (those in the checkpoint, where Transformers renames), matched like the first.

    Raises:
        ValueError: A target that selects no module.
    """
    aliases = aliases or {}
    for target in config.targets:
        if not any(_matches(target, name, cls, aliases.get(name)) for name, cls in names_and_classes.items()):
            raise ValueError(f"target {target!r} matches no module of the model; use a class name, a full module name, or 're:PATTERN'")
    return [
        name
        for name, cls in names_and_classes.items()
        if any(_matches(target, name, cls, aliases.get(name)) for target in config.targets)
        and not any(_ignores(entry, name, cls, aliases.get(name)) for entry in config.ignore)
    ]


def unused_ignores(names_and_classes: Mapping[str, type], config: SparsityConfig, aliases: Mapping[str, str] | None = None) -> list[str]:
    """Entries of `ignore` that match no module; the default entry is not counted."""
    aliases = aliases or {}
    default = SparsityConfig.model_fields["ignore"].get_default(call_default_factory=True)
    return [
        entry
        for entry in config.ignore
        if entry not in default and not any(_ignores(entry, name, cls, aliases.get(name)) for name, cls in names_and_classes.items())
    ]


def _matches(entry: str, name: str, cls: type, alias: str | None) -> bool:
    names = (name,) if alias is None else (name, alias)
    if entry.startswith("re:"):
        return any(re.match(entry.removeprefix("re:"), n) for n in names)
    return entry in names or any(base.__name__ == entry for base in cls.__mro__)


def _ignores(entry: str, name: str, cls: type, alias: str | None) -> bool:
    names = (name,) if alias is None else (name, alias)
    return _matches(entry, name, cls, alias) or any(n.startswith(f"{entry.rstrip('.')}.") for n in names)


def tied_names(model: nn.Module) -> set[str]:
    """Parameters that share their values with another one: by declaration, or because they are the same object."""
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    tied = set(declared) | set(declared.values())
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied |= {name, seen[id(parameter)]}
        seen[id(parameter)] = name
    return tied


def packable_modules(model: nn.Module, config: SparsityConfig, others: Mapping[str, type] | None = None) -> list[str]:
    """Modules that a config selects and that own an untied 2-D weight.

    Args:
        model: Whose modules.
        config: Whose targets and ignore are applied.
        others: Names and classes of what a config selects like modules: weights of experts that are merged into one parameter.

    Raises:
        ValueError: A target matches no module.
    """
    modules = dict(model.named_modules())
    tied = tied_names(model)
    others = others or {}
    selected = match_modules({name: type(module) for name, module in modules.items()} | {**others}, config)
    return [
        name
        for name in selected
        if name in others or (f"{name}.weight" not in tied and getattr(getattr(modules[name], "weight", None), "ndim", 0) == 2)
    ]


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Every packed layer by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def packed_weights(model: nn.Module) -> dict[str, PackedLinear | ExpertWeights]:
    """Every packed layer, and every packed projection of experts, by its name."""
    return {**packed_layers(model), **packed_projections(model)}


def left_out(model: nn.Module) -> int:
    """How many weights the packed layers and experts of a model leave out."""
    return sum(weight.num_weights - weight.num_values for weight in packed_weights(model).values())


def refusal(refused: Mapping[str, str], config: SparsityConfig) -> ValueError:
    """The error for targeted weights that do not fit the format."""
    return ValueError(
        f"{len(refused)} targeted weights are not {config.structure}, nothing was changed or written: {listed(refused)}; "
        "prune them, add them to ignore, or use on_dense='skip'"
    )


def listed(reasons: Mapping[str, str]) -> str:
    """`name: reason; ...`, cut after LISTED."""
    shown = [f"{name}: {reason}" for name, reason in list(reasons.items())[:LISTED]]
    return "; ".join(shown) + (f"; and {len(reasons) - LISTED} more" if len(reasons) > LISTED else "")

"""2:4 sparsity of activations, for models whose MLP has a squared ReLU: most of what their second projection multiplies is zero.

sparsify_activations(model, ActivationSparsityConfig())      in place; the weights and their names stay
densify_activations(model)                                   undoes it
measure_activation_sparsity(model, batches)                  what it drops, block by block
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_sparse24.errors import warn
from hf_sparse24.kernels import reference
from hf_sparse24.modules import listed, match_modules
from hf_sparse24.squared_relu import (
    Options,
    Projections,
    SquaredReluBlock,
    find_projections,
    has_squared_relu,
    make_dense,
    make_sparse,
    why_apart,
    why_no_copy,
)

# The key in config.json.
CONFIG_KEY = "activation_sparsity"
NOT_SELECTED = "targets or ignore leave it out"


class ActivationSparsityConfig(BaseModel):
    """Which MLP blocks multiply sparse activations, and how.

    Args:
        pattern: "2:4": of every four consecutive activations the two largest are multiplied.  "exact": all that are not zero.
        quantization: "fp8" multiplies weights that are rounded to float8 with a scale for each row, and on GPUs activations that are
            rounded to float8 with a scale for each token; weights are copied for that.
        decode: Keep the second projection by columns as well, so that for few rows only the columns of non-zero activations are read.
        targets: Blocks: a class name, a full module name, or "re:PATTERN" matched at the start of the module name; None takes every
            block that has Transformers' squared ReLU.  A target that selects nothing, or what cannot be served, is an error.
        ignore: Blocks that are never touched, in the same notation; a module's name also covers what it contains.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: Literal["2:4", "exact"] = "2:4"
    quantization: Literal["fp8"] | None = None
    decode: bool = False
    targets: list[str] | None = Field(default=None, min_length=1)
    ignore: list[str] = Field(default_factory=list)

    @property
    def options(self) -> Options:
        """What of it matters for one block."""
        return Options(keep_two=self.pattern == "2:4", float8=self.quantization == "fp8", columns=self.decode)


@dataclass(frozen=True)
class ReplacedBlock:
    """One block that multiplies sparse activations.

    Attributes:
        projections: Layer -> (out_features, in_features), in the order in which they are multiplied.
        size_bytes: Copy of the weights -> its bytes: "weights" are those of the model itself, "float8" and "columns" exist beside
            them, in evaluation mode.
        apart: Layer -> why it is called as it is, without copies and without the kernels that need its weight.
    """

    projections: dict[str, tuple[int, int]]
    size_bytes: dict[str, int]
    apart: dict[str, str]


@dataclass
class ActivationReport:
    """What `sparsify_activations` did.

    Attributes:
        replaced: Module -> its shapes and the bytes of its copies.
        left_alone: Module -> why it multiplies as before.
    """

    replaced: dict[str, ReplacedBlock] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> dict[str, int]:
        """Of all blocks together, by copy."""
        copies = [copy for block in self.replaced.values() for copy in block.size_bytes]
        return {copy: sum(block.size_bytes.get(copy, 0) for block in self.replaced.values()) for copy in dict.fromkeys(copies)}

    def __str__(self) -> str:
        sizes = ", ".join(f"{copy} {size / 2**20:.1f} MiB" for copy, size in self.size_bytes.items())
        lines = [f"{len(self.replaced)} blocks multiply sparse activations ({sizes})"]
        for name, block in self.replaced.items():
            shapes = ", ".join(f"{layer} {rows} x {columns}" for layer, (rows, columns) in block.projections.items())
            lines.append(f"  {name}: {shapes}" + "".join(f"; {layer} apart: {reason}" for layer, reason in block.apart.items()))
        lines += [f"  {name} is left alone: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)


def sparsify_activations(model: nn.Module, config: ActivationSparsityConfig | None = None) -> ActivationReport:
    """Let the squared-ReLU blocks of a model multiply sparse activations, in place.

    The state dict keeps its names and values.  Adapters and packed layers stay what they are: a block calls them, with the activations
    that it selected.  The config is put into `model.config`, so that a saved model has it again; an earlier one is replaced.

    Args:
        model: Transformers' or any other.
        config: Which blocks, and how; the default is 2:4 for every block that has Transformers' squared ReLU.

    Returns:
        report: What was replaced, which copies of weights that takes, and what was left alone.

    Raises:
        ValueError: There is no such block; a target selects nothing, or a block that cannot be served.  The model is unchanged.
    """
    config = config or ActivationSparsityConfig()
    found = find_blocks(model, config)
    report = ActivationReport(left_alone={name: roles for name, roles in found.items() if isinstance(roles, str)})
    if config.targets is not None and report.left_alone:
        raise ValueError(f"targets select what cannot multiply sparse activations: {listed(report.left_alone)}; name other targets")
    if len(report.left_alone) == len(found):
        reasons = f": {listed(report.left_alone)}" if found else "; name blocks that compute one by targets"
        raise ValueError(f"no block of {type(model).__name__} with a squared ReLU can be served{reasons}")
    densify_activations(model)
    others = (name for name, module in model.named_modules() if has_squared_relu(module) and name not in found)
    report.left_alone |= dict.fromkeys(others, NOT_SELECTED)
    for name, roles in found.items():
        if isinstance(roles, Projections):
            block = model.get_submodule(name)
            make_sparse(block, roles, config.options)
            report.replaced[name] = _describe(block, roles, config)
    if isinstance(getattr(model, "config", None), PreTrainedConfig):
        setattr(model.config, CONFIG_KEY, config)
    _warn_of_missing_copies(report, config)
    return report


def densify_activations(model: nn.Module) -> None:
    """Let every block of a model multiply all of its activations again, in place.

    Args:
        model: On which `sparsify_activations` was called; any other is left as it is.
    """
    for block in sparse_blocks(model).values():
        make_dense(block)
    if isinstance(getattr(model, "config", None), PreTrainedConfig):
        setattr(model.config, CONFIG_KEY, None)


def sparse_blocks(model: nn.Module) -> dict[str, SquaredReluBlock]:
    """Every block that multiplies sparse activations, by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SquaredReluBlock)}


def find_blocks(model: nn.Module, config: ActivationSparsityConfig) -> dict[str, Projections | str]:
    """The blocks that a config selects, and the roles of their layers, or why they cannot be served.

    Args:
        model: Blocks that multiply sparse activations already are found, too.
        config: Its targets and ignore are looked at.

    Raises:
        ValueError: A target that selects no module.
    """
    modules = dict(model.named_modules())
    selection = _Selection([name for name, m in modules.items() if has_squared_relu(m)], config.ignore)
    if config.targets is not None:
        selection = _Selection(config.targets, config.ignore)
    names = match_modules({name: type(module) for name, module in modules.items()}, selection, _second_names(model, modules))
    return {name: m.projections if isinstance(m := modules[name], SquaredReluBlock) else find_projections(m) for name in names}


@dataclass(frozen=True)
class _Selection:
    targets: list[str]
    ignore: list[str]


def _second_names(model: nn.Module, modules: Iterable[str]) -> dict[str, str]:
    """Names with and without the prefix that a model with a head has and its base model has not: a config is for both."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix == ".":
        return {}
    whole = hasattr(model, prefix[:-1])
    return {name: name.removeprefix(prefix) if whole else prefix + name for name in modules if name}


def _describe(block: nn.Module, roles: Projections, config: ActivationSparsityConfig) -> ReplacedBlock:
    layers: dict[str, Any] = {name: block.get_submodule(name) for name in roles.names}
    size_bytes = {"weights": sum(p.nbytes for layer in layers.values() for p in layer.parameters())}
    copied = {name: layer for name, layer in layers.items() if why_no_copy(layer) is None}
    if config.quantization:
        size_bytes["float8"] = sum(layer.weight.numel() + 4 * layer.out_features for layer in copied.values())
    if config.decode:
        down = copied.get(roles.down)
        size_bytes["columns"] = 0 if down is None else down.weight.numel() * (1 if config.quantization else down.weight.element_size())
    return ReplacedBlock(
        projections={name: (layer.out_features, layer.in_features) for name, layer in layers.items()},
        size_bytes=size_bytes,
        apart={name: reason for name, layer in layers.items() if (reason := why_apart(layer))},
    )


def _warn_of_missing_copies(report: ActivationReport, config: ActivationSparsityConfig) -> None:
    """What was asked for by name, and cannot be had, is said."""
    if config.quantization or config.decode:
        reasons = {f"{name}.{layer}": reason for name, block in report.replaced.items() for layer, reason in block.apart.items()}
        if reasons:
            warn(f"{len(reasons)} projections are multiplied as they are, neither in float8 nor by columns: {listed(reasons)}")


# ---- what is dropped -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationStatistics:
    """Of one block's activations after the squared ReLU, and the gate if there is one, before any selection.

    Attributes:
        zeros: Share of zeros.
        dropped_energy: Share of the sum of squares that 2:4 drops.
    """

    zeros: float
    dropped_energy: float


def measure_activation_sparsity(
    model: nn.Module, batches: Iterable[Mapping[str, Any] | Tensor], config: ActivationSparsityConfig | None = None
) -> dict[str, ActivationStatistics]:
    """Count zeros, and what 2:4 drops, in the squared-ReLU blocks of a model, whether they multiply sparse activations or not.

    Args:
        model: It runs as it is: with sparse activations, later blocks see what earlier ones made of theirs.
        batches: What the model is called with: mappings of arguments, or input ids.  Padding counts like everything else.
        config: Which blocks; the default is every block that has Transformers' squared ReLU, or multiplies sparse activations.

    Raises:
        ValueError: There is no such block, or no batch.
    """
    blocks = {name: roles for name, roles in find_blocks(model, config or ActivationSparsityConfig()).items() if not isinstance(roles, str)}
    blocks |= {name: block.projections for name, block in sparse_blocks(model).items()} if config is None else {}
    if not blocks:
        raise ValueError(f"no block of {type(model).__name__} with a squared ReLU can be served; name blocks that compute one by targets")
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in blocks}
    with torch.no_grad(), _watched(model, blocks, sums):
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if not all(total[0] for total in sums.values()):
        raise ValueError(
            f"nothing to measure: {next(n for n, total in sums.items() if not total[0])} was not called; give at least one batch"
        )
    return {
        name: ActivationStatistics(zeros=float(zeros / count), dropped_energy=float(dropped / energy) if energy else 0.0)
        for name, (count, zeros, energy, dropped) in sums.items()
    }


@contextmanager
def _watched(model: nn.Module, blocks: Mapping[str, Projections], sums: Mapping[str, Tensor]) -> Iterator[None]:
    """Add to `sums` what each block multiplies: values, zeros, sum of squares, and the part of it that 2:4 drops."""
    handles = []
    for name, roles in blocks.items():
        results: dict[str, Tensor] = {}
        block = model.get_submodule(name)
        for layer in roles.names:
            # Defaults, since the loop goes on before they are called.
            def note(_m: Any, _x: Any, y: Tensor, layer: str = layer, results: dict[str, Tensor] = results) -> None:
                results[layer] = y

            handles.append(block.get_submodule(layer).register_forward_hook(note))

        def add(_m: Any, _x: Any, _y: Any, roles: Projections = roles, results: dict[str, Tensor] = results, name: str = name) -> None:
            h = reference.squared_relu(results[roles.up], None if roles.gate is None else results[roles.gate])
            energy, dropped = (part.float().square().sum(dtype=torch.float64) for part in (h, h - reference.keep_two_of_four(h)))
            counted = torch.stack([energy.new_tensor(h.numel()), (h == 0).sum().to(energy.dtype), energy, dropped])
            sums[name].add_(counted.to(sums[name].device))

        handles.append(block.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

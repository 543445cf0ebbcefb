"""How each tensor of a model is stored: which weights are packed, in which format, and in which order files are filled.

Nothing is packed here.  A plan holds headers, and functions that read or pack a tensor when its turn comes.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_sparse24.checkpoint import name_of_part
from hf_sparse24.compressors import SPARSITY_COMPRESSORS, BaseCompressor, BaseQuantizedCompressor
from hf_sparse24.compressors.base import STORABLE_DTYPES, specs_of
from hf_sparse24.config import DenseSparsityConfig, Sparse24Config, SparseBitmaskConfig, SparsityConfig, as_config
from hf_sparse24.errors import warn
from hf_sparse24.experts import ExpertWeights, piece, split_parts
from hf_sparse24.integration.quantizer import warn_left_dense
from hf_sparse24.linear import PackedLinear
from hf_sparse24.merged import Merged, expert_classes, find_merged
from hf_sparse24.modules import LISTED, left_out, listed, match_modules, packed_weights, refusal, tied_names, unused_ignores
from hf_sparse24.pattern import is_nonzero, structure
from hf_sparse24.quantization import common_scheme

AUTO = "auto"
# "auto" packs a weight without a pattern only where that saves at least this share of its bytes.
MIN_SAVING = 0.1


@dataclass
class Weight:
    """One tensor of the checkpoint to be: its header, and how to read it when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    in_memory: Tensor | None = None

    def header(self) -> Tensor:
        """A tensor of the same dtype and shape: itself if it is in memory, else an empty one."""
        return self.in_memory if self.in_memory is not None else torch.empty(self.shape, dtype=self.dtype, device="meta")


class Packing:
    """A weight that is packed when its first part is asked for, and forgotten when its last part was."""

    def __init__(self, compressor: BaseCompressor, read: Callable[[], Tensor]):
        self.compressor, self.read = compressor, read
        self.parts: dict[str, Tensor] = {}

    def part(self, name: str) -> Tensor:
        """The part with this suffix."""
        if not self.parts:
            self.parts = self.compressor.compress_weight(self.read())
        return self.parts.pop(name)


def plan_weights(
    model: PreTrainedModel, sparsity_config: Any, state_dict: Mapping[str, Tensor] | None = None, original_names: bool = True
) -> tuple[SparsityConfig | None, dict[str, Weight]]:
    """Decide how every tensor of a model is stored, and check that the targeted ones fit.

    Args:
        model: Dense, or with packed layers.
        sparsity_config: A config, a dict of its fields, a format name, or "auto".
        state_dict: Instead of `model.state_dict()`.
        original_names: Undo Transformers' renamings and merges, as `save_pretrained` does by default.

    Returns:
        The config to store (None if on_dense="skip" left every weight dense), and every tensor by its name in the
        checkpoint, in the order in which shards are filled.

    Raises:
        ValueError: A targeted weight does not fit (the message says which, how many groups, and where the first is), or
            targets match nothing.
    """
    plan = _plan(model, sparsity_config, state_dict, original_names)
    planned, num_left_out = _replace_by_parts(plan.weights, plan.compressors)
    planned = {name: planned[name] for name in _order(model, plan, planned, original_names)}
    if not plan.compressors and not plan.kept:
        return None, planned
    return _config_to_store(plan, (num_left_out + left_out(model)) / max(1, model.num_parameters())), planned


def choose_weights(model: PreTrainedModel, sparsity_config: Any) -> dict[str, BaseCompressor]:
    """The modules whose weights are packed, and what packs them; every one of them was checked.

    Args:
        model: Dense, or with packed layers, which are not among the result.
        sparsity_config: As for `plan_weights`.

    Raises:
        ValueError: As for `plan_weights`.
    """
    plan = _plan(model, sparsity_config, None, original_names=False)
    return {name.removesuffix(".weight"): compressor for name, compressor in plan.compressors.items()}


@dataclass(frozen=True)
class _Plan:
    """Tensors by stored name, what packs those that are packed, and layers and projections that are packed already by module name.

    `headers` holds every tensor in the model's naming, empty; `stored_name` the new name of those that are only renamed;
    `left_dense` the targeted modules that are not packed.
    """

    config: SparsityConfig
    weights: dict[str, Weight]
    compressors: dict[str, BaseCompressor]
    kept: dict[str, PackedLinear | ExpertWeights]
    detected: bool
    headers: dict[str, Tensor]
    stored_name: dict[str, str]
    left_dense: list[str]


def _plan(model: PreTrainedModel, sparsity_config: Any, state_dict: Mapping[str, Tensor] | None, original_names: bool) -> _Plan:
    detect = sparsity_config == AUTO
    config = Sparse24Config(on_dense="skip") if detect else as_config(sparsity_config)
    if isinstance(config, DenseSparsityConfig):
        raise ValueError("the format dense packs nothing: call save_pretrained without sparsity_config")
    kept = packed_weights(model)
    other = sorted({layer.compressor.format for layer in kept.values()} - {config.compressor.format})
    if other and not detect:
        raise ValueError(f"this model has layers packed as {other[0]}, not {config.compressor.format}: call model.dequantize() first")
    _require_scheme(kept.values(), config)
    source = _source(model, state_dict)
    merged, reasons = find_merged(model)
    experts = expert_classes(model, merged, reasons)
    modules = {name: type(module) for name, module in model.named_modules()} | experts
    # The weights of experts apart from the rest, which is merged into the same names.
    names_of_experts = {f"{name}.weight": torch.empty(0, device="meta") for name in experts}
    own_names = _renamed(model, _empty(source), original_names)[1] | _renamed(model, names_of_experts, original_names)[1]
    aliases = {name: own_names[f"{name}.weight"].removesuffix(".weight") for name in modules if f"{name}.weight" in own_names}
    selected = [name for name in match_modules(modules, config, aliases) if name not in kept]
    chosen = set(selected)
    apart = {name: parameter for name, parameter in merged.items() if not chosen.isdisjoint(member for member, _ in parameter.places())}
    weights, headers, stored_name = _stored_tensors(model, _split(source, apart), original_names)
    compressors, left_dense, refused = _choose_compressors(model, selected, weights, stored_name, config, detect)
    if refused:
        raise refusal(refused, config)
    left_dense |= _transposed(model, config) | {name: reason for name, reason in reasons.items() if name in chosen}
    if not compressors and not kept and (detect or config.on_dense == "raise"):
        raise ValueError(f"no weight can be stored sparse: {listed(left_dense) or 'no targeted module has a 2-D weight of its own'}")
    if not detect:
        warn_left_dense(left_dense)
    if unused := unused_ignores(modules, config, aliases):
        warn(f"entries of ignore that match no module: {', '.join(unused)}")
    names_left = [stored_name.get(f"{name}.weight", name).removesuffix(".weight") for name in left_dense]
    return _Plan(config, weights, compressors, kept, detect, headers, stored_name, names_left)


def _require_scheme(kept: Iterable[PackedLinear | ExpertWeights], config: SparsityConfig) -> None:
    """Raise ValueError if packed layers are quantised otherwise than the config says, as far as they tell it."""
    found, asked = common_scheme(layer.compressor.scheme_of(specs_of(layer.parts())) for layer in kept), config.quantization
    if found is None or asked is None:
        return
    for name in ("type", "num_bits", "strategy", "group_size"):
        if getattr(found, name) != getattr(asked, name):
            difference = f"{name} {getattr(found, name)}, not {getattr(asked, name)}"
            raise ValueError(f"this model has layers that are quantised with {difference}: call model.dequantize() first")


@dataclass(frozen=True)
class _Held:
    """A tensor of a model, or a piece of a merged one: `whole`, the model's parameter `owner`, indexed with `place`."""

    owner: str
    whole: Tensor
    place: tuple[int, slice] | None = None

    @functools.cached_property
    def tensor(self) -> Tensor:
        return piece(self.whole, self.place)


def _source(model: PreTrainedModel, state_dict: Mapping[str, Tensor] | None) -> dict[str, _Held]:
    """What Transformers would save of a model, by names in the model; packed experts apart."""
    source = dict(state_dict if state_dict is not None else model.state_dict())
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        source.pop(name, None)
    # Transformers finds tied tensors by their memory, which offloaded ones do not have.
    for name, same in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in source and same in source and source[name].device.type == source[same].device.type == "meta":
            del source[name]
    source = remove_tied_weights_from_state_dict(source, model)
    return {name: _Held(owner, source[owner], place) for name, owner, place in split_parts(model, source)}


def _split(source: Mapping[str, _Held], merged: Mapping[str, Merged]) -> dict[str, _Held]:
    """The same with some merged parameters apart."""
    split = {name: held for name, held in source.items() if name not in merged}
    for name, parameter in merged.items():
        if name in source:
            split |= {f"{member}.weight": _Held(name, source[name].whole, place) for member, place in parameter.places()}
    return split


def _empty(source: Mapping[str, _Held]) -> dict[str, Tensor]:
    return {name: torch.empty(held.tensor.shape, dtype=held.tensor.dtype, device="meta") for name, held in source.items()}


def _renamed(model: PreTrainedModel, empty: Mapping[str, Tensor], original_names: bool) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """Empty tensors by names in the file, and name in the model -> name in the file of those that are only renamed."""
    renamed = revert_weight_conversion(model, dict(empty)) if original_names else empty
    origin = {id(tensor): name for name, tensor in empty.items()}
    return renamed, {origin[id(tensor)]: name for name, tensor in renamed.items() if id(tensor) in origin}


def _stored_tensors(
    model: PreTrainedModel, source: Mapping[str, _Held], original_names: bool
) -> tuple[dict[str, Weight], dict[str, Tensor], dict[str, str]]:
    """Every tensor of the dense checkpoint by its name there; empty tensors by their names in the model; names there of the renamed."""
    source = {name: source[name] for name in sorted(source, key=dot_natural_key)}
    # The names first, with empty tensors: what an operation merges or splits is then known, and read once, below.
    empty = _empty(source)
    renamed, stored_name = _renamed(model, empty, original_names)
    changed = [name for name in source if name not in stored_name]
    operated = revert_weight_conversion(model, {name: _read(model, source[name]) for name in changed}) if changed else {}
    source_of = {stored: name for name, stored in stored_name.items()}
    weights = {}
    for stored, tensor in renamed.items():
        name = source_of.get(stored)
        held = source[name] if name is not None else _Held(stored, operated[stored])
        weights[stored] = Weight(tensor.dtype, tuple(tensor.shape), functools.partial(_read, model, held), held.tensor)
    return weights, empty, stored_name


def _read(model: PreTrainedModel, held: _Held) -> Tensor:
    """The values of a tensor, those of an offloaded one included."""
    if held.whole.device.type != "meta":
        return held.tensor
    # Transformers < 5.14 reads every offloaded tensor in the model's dtype, bitmasks too (their values are exact in it).
    return piece(load_offloaded_parameter(model, held.owner).to(held.whole.dtype), held.place)


def _choose_compressors(
    model: PreTrainedModel,
    selected: list[str],
    weights: Mapping[str, Weight],
    stored_name: Mapping[str, str],
    config: SparsityConfig,
    detect: bool,
) -> tuple[dict[str, BaseCompressor], dict[str, str], dict[str, str]]:
    """Stored name -> what packs it, and -> reason for the weights that stay dense, and for those that are refused."""
    compressors: dict[str, BaseCompressor] = {}
    left_dense, refused = {}, {}
    tied = tied_names(model)
    for module in selected:
        name = f"{module}.weight"
        weight = weights.get(stored_name.get(name, ""))
        reason = _why_unfit(name, weight, name in tied, config)
        if reason is None and weight is not None:
            values = weight.read()
            format, reason = _detect(values) if detect else (config.format, config.compressor.why_not(values))
            if reason is None:
                compressors[stored_name[name]] = SPARSITY_COMPRESSORS[format] if detect else config.compressor
                continue
            if config.on_dense == "raise":
                refused[module] = reason
                continue
        if reason and reason != NO_WEIGHT:
            left_dense[module] = reason
    return compressors, left_dense, refused


NO_WEIGHT = "no weight of its own"


def _transposed(model: PreTrainedModel, config: SparsityConfig) -> dict[str, str]:
    """GPT-2's Conv1D layers, which a user who targets Linear may expect to be packed."""
    if "Linear" not in config.targets:
        return {}
    reason = "a Conv1D, which holds its weight transposed"
    return {name: reason for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}


def _why_unfit(name: str, weight: Weight | None, tied: bool, config: SparsityConfig) -> str | None:
    if tied:
        return "tied to another parameter"
    if weight is None:
        return NO_WEIGHT
    if len(weight.shape) != 2 or not torch.Size(weight.shape).numel():
        return f"shape {weight.shape} is not that of a 2-D weight with elements"
    if isinstance(config, Sparse24Config) and weight.shape[1] % 4:
        return f"in_features {weight.shape[1]} is not a multiple of 4"
    if weight.dtype not in STORABLE_DTYPES:
        return f"dtype {weight.dtype} cannot be stored sparse"
    return None


def _detect(values: Tensor) -> tuple[str, str | None]:
    """The format that fits a weight, and why none does."""
    found = structure(values)
    if found.kind in ("2:4", "1:4"):
        return Sparse24Config.format, None
    stored = (found.elements - found.zeros) * values.element_size() + found.elements / 8
    saving = 1 - stored / (found.elements * values.element_size())
    if saving >= MIN_SAVING:
        return SparseBitmaskConfig.format, None
    return "", f"{found.kind}, {found.reason}"


def _replace_by_parts(weights: Mapping[str, Weight], compressors: Mapping[str, BaseCompressor]) -> tuple[dict[str, Weight], int]:
    """The tensors with parts in the place of packed weights, and how many values are left out."""
    planned, num_left_out = {}, 0
    for name, weight in weights.items():
        if name not in compressors:
            planned[name] = weight
            continue
        compressor = compressors[name]
        elements = torch.Size(weight.shape).numel()
        num_values = elements // 2 if compressor.config_format == Sparse24Config.format else _count_values(weight.read(), compressor)
        num_left_out += elements - num_values
        packing = Packing(compressor, weight.read)
        for part, (dtype, shape) in compressor.part_specs(weight.shape, weight.dtype, num_values).items():
            planned[name_of_part(name, part)] = Weight(dtype, shape, functools.partial(packing.part, part))
    return planned, num_left_out


def _count_values(weight: Tensor, compressor: BaseCompressor) -> int:
    """Non-zeros of a weight, after rounding if it is quantised."""
    return int(is_nonzero(compressor.quantize(weight)[0] if isinstance(compressor, BaseQuantizedCompressor) else weight).sum())


def _order(model: PreTrainedModel, plan: _Plan, planned: Mapping[str, Weight], original_names: bool) -> list[str]:
    """Stored names in the order in which Transformers writes a model with packed layers: shards are then the same.

    Raises:
        ValueError: Transformers renames a weight and its parts differently, so that they could not be loaded again.
    """
    headers: dict[str, Tensor] = {}
    for name, header in plan.headers.items():
        compressor = plan.compressors.get(plan.stored_name.get(name, ""))
        headers |= dict.fromkeys((name_of_part(name, part) for part in compressor.parts), header) if compressor else {name: header}
    headers = {name: headers[name] for name in sorted(headers, key=dot_natural_key)}
    order = list(revert_weight_conversion(model, headers) if original_names else headers)
    if lost := set(planned) ^ set(order):
        raise ValueError(f"Transformers stores weights and their parts under different names: {sorted(lost)[:LISTED]}; add them to ignore")
    return order


def _config_to_store(plan: _Plan, sparsity: float) -> SparsityConfig:
    config = plan.config
    if plan.detected:
        used = {compressor.format for compressor in (*plan.compressors.values(), *(layer.compressor for layer in plan.kept.values()))}
        names = [name.removesuffix(".weight") for name in plan.compressors]
        for name, layer in plan.kept.items():
            names += layer.member_names(name) if isinstance(layer, ExpertWeights) else [name]
        config_class = Sparse24Config if Sparse24Config.format in used else SparseBitmaskConfig
        config = config_class(targets=sorted(names, key=dot_natural_key), ignore=[])
    stored = config.model_copy(deep=True)
    stored.global_sparsity, stored.run_compressed = round(sparsity, 6), None
    stored.ignore_dense(plan.left_dense)
    return stored

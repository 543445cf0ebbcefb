"""Packing, unpacking and converting checkpoint folders without the model: shard by shard, every other file carried over."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from hf_sparse24.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    PackedSlice,
    as_dense,
    find_packed,
    name_of_part,
    open_checkpoint,
)
from hf_sparse24.compressors import QUANTIZED_COMPRESSORS, BaseCompressor, BaseQuantizedCompressor
from hf_sparse24.compressors.base import specs_of
from hf_sparse24.config import (
    CONFIGS,
    DenseSparsityConfig,
    Sparse24Config,
    SparseBitmaskConfig,
    SparsityConfig,
    parse_config,
    without_sparsity,
)
from hf_sparse24.converted_folder import converted_folder, new_folder
from hf_sparse24.errors import CheckpointError, warn
from hf_sparse24.integration.quantizer import checkpoint_names, warn_left_dense
from hf_sparse24.merged import expert_classes, find_merged, members_in_checkpoint
from hf_sparse24.modules import listed, match_modules, refusal, tied_names
from hf_sparse24.quantization import EIGHT_BIT, GPTQ_MARLIN, MARLIN, QuantizationScheme, common_scheme

# What a folder can be converted to.
CONVERTIBLE = (DenseSparsityConfig.format, Sparse24Config.format, SparseBitmaskConfig.format, MARLIN, GPTQ_MARLIN)


def compress_folder(source: str | Path, out: str | Path, config: SparsityConfig | None = None) -> None:
    """Pack a dense checkpoint folder.

    Args:
        source: Folder with safetensors weights; it is not changed.
        out: New or empty folder.
        config: Which weights; `Sparse24Config()` by default.

    Raises:
        ValueError: A targeted weight does not fit (named), targets match nothing, or they are classes of a model that
            Transformers does not know; `out` is not empty, or inside the source.
        CheckpointError: The source is damaged, quantised, or packed already.
    """
    config = config or Sparse24Config()
    if isinstance(config, DenseSparsityConfig):
        raise ValueError("the format dense packs nothing: copy the folder instead")
    out = new_folder(out, source)
    with open_checkpoint(source) as checkpoint:
        if find_packed(checkpoint.tensors, checkpoint.file_of):
            raise CheckpointError(f"{source}: is packed already; decompress it first")
        parsed = parse_config(checkpoint.config)
        if parsed.quantized or (parsed.sparsity is None and "quantization_config" in checkpoint.config):
            raise CheckpointError(f"{source}: is quantised ({CONFIG_NAME} says so); only dense checkpoints can be packed")
        with converted_folder(checkpoint, out, to="packed", config=config.model_dump(mode="json")) as result:
            choice = result.journal.fact("choice", lambda: _choose(checkpoint, config))
            chosen, left_dense = set(choice["packed"]), choice["left dense"]
            warn_left_dense(left_dense)
            result.write_shards(lambda file: _pack_shard(checkpoint, file, chosen, config.compressor), "Packing shards")
            stored = config.model_copy(deep=True)
            stored.global_sparsity = round(result.total("left_out") / max(1, result.total("elements")), 6)
            stored.ignore_dense(name.removesuffix(".weight") for name in left_dense)
            content = {**without_sparsity(checkpoint.config), "quantization_config": stored.to_dict()}
            result.write_rest(content, checkpoint.tensors, chosen)


def _pack_shard(
    checkpoint: Checkpoint, file: str, chosen: Collection[str], compressor: BaseCompressor
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors of a shard with parts in the place of chosen weights, and how many values there were and are left out."""
    shard: dict[str, Tensor] = {}
    left_out, elements = 0, 0
    for name in checkpoint.shards[file]:
        tensor = checkpoint.tensors[name][...]
        elements += tensor.numel()
        if name in chosen:
            parts = compressor.compress_weight(tensor)
            left_out += tensor.numel() - compressor.num_values(specs_of(parts), tuple(tensor.shape))
            shard |= {name_of_part(name, part): value for part, value in parts.items()}
        else:
            shard[name] = tensor
    return shard, {"left_out": left_out, "elements": elements}


def decompress_folder(source: str | Path, out: str | Path) -> None:
    """Unpack a compressed checkpoint folder into an ordinary dense one.

    Args:
        source: Folder with packed weights of any format that is read; it is not changed.
        out: New or empty folder.

    Raises:
        CheckpointError: The source is damaged, in a form that cannot be read, or holds nothing packed.
        ValueError: `out` is not empty, or inside the source.
    """
    out = new_folder(out, source)
    with open_checkpoint(source) as checkpoint:
        parse_config(checkpoint.config)
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        if not packed:
            raise CheckpointError(f"{source}: holds no packed weights")
        dense = as_dense(checkpoint.tensors, packed)
        home = _homes(checkpoint, packed)
        _warn_of_lost_scales(packed)
        with converted_folder(checkpoint, out, to="dense") as result:
            result.write_shards(
                lambda file: ({name: dense[name][...] for name in _names_in(checkpoint, file, dense, home)}, {}), "Unpacking shards"
            )
            result.write_rest(without_sparsity(checkpoint.config), dense, ())


def convert_folder(source: str | Path, out: str | Path, to: str, quantization: QuantizationScheme | str | None = None) -> None:
    """Store a checkpoint's packed weights in another format.

    From one quantised format to another, integers and scales stay as they are.  Otherwise values do: a weight that was dequantised
    and is quantised again gets back its integers, if it is float16, and others are rounded as `quantization` says.

    Args:
        source: Folder, packed in any format that is read, or dense; it is not changed.
        out: New or empty folder.
        to: "dense", "sparse-24-bitmask", "sparse-bitmask", "marlin-24" or "gptq-marlin-24".
        quantization: Round values to this scheme.  Without it, bitmasks hold values of 16 bits, and a source that is not quantised
            cannot become Marlin.

    Raises:
        CheckpointError: The source is damaged, or in a form that cannot be read.
        ValueError: A weight does not fit the format (named), `to` and `quantization` do not go together, or `out` is not empty.
    """
    if to not in CONVERTIBLE:
        raise ValueError(f"unknown format {to[:60]!r}, expected one of {', '.join(CONVERTIBLE)}")
    if to == DenseSparsityConfig.format:
        if quantization is not None:
            raise ValueError("dense weights are not quantised: name another format")
        return decompress_folder(source, out)
    target = new_folder(out, source)
    with open_checkpoint(source) as checkpoint:
        parsed = parse_config(checkpoint.config)
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        config = _target_config(to, quantization, parsed.sparsity, packed)
        if packed:
            _convert(checkpoint, target, packed, config, keep_integers=quantization is None)
    if not packed:
        compress_folder(source, out, config)


def _target_config(
    to: str, quantization: QuantizationScheme | str | None, own: SparsityConfig | None, packed: Mapping[str, PackedSlice]
) -> SparsityConfig:
    """What the converted checkpoint says: the source's targets, the new format and scheme."""
    scheme = None if quantization is None else QuantizationScheme.of(quantization)
    if to in QUANTIZED_COMPRESSORS:
        found = common_scheme(weight.compressor.scheme_of(weight.specs) for weight in packed.values()) or (own and own.quantization)
        scheme = scheme or found
        if scheme is None:
            raise ValueError(f"the source is not quantised: say how to round it to {to}, with quantization='w4a16' for example")
        # Integers that were made for quantised activations serve without them.
        fields = {**scheme.model_dump(), "format": to, "activations": None}
        scheme = QuantizationScheme(**(fields if fields["strategy"] != "tensor" else {**fields, "strategy": "channel"}))
    elif scheme is not None and scheme.format not in EIGHT_BIT:
        raise ValueError(f"{scheme.format} is a format of its own: convert to {scheme.format}, not to {to}")
    kept: dict[str, Any] = {} if own is None else {"targets": own.targets, "ignore": own.ignore, "readable_by": own.readable_by}
    sparsity_format = Sparse24Config.format if to in QUANTIZED_COMPRESSORS else to
    return CONFIGS[sparsity_format](**kept, quantization=scheme, global_sparsity=0.0 if own is None else own.global_sparsity)


def _convert(checkpoint: Checkpoint, out: Path, packed: Mapping[str, PackedSlice], config: SparsityConfig, keep_integers: bool) -> None:
    dense = as_dense(checkpoint.tensors, packed)
    home = _homes(checkpoint, packed)
    compressor, left_dense = config.compressor, [name for name, weight in packed.items() if "weight" in weight.compressor.parts]
    _warn_of_lost_scales(packed)

    def make(file: str) -> tuple[dict[str, Tensor], dict[str, int]]:
        shard: dict[str, Tensor] = {}
        for name in _names_in(checkpoint, file, dense, home):
            if name in packed and name not in left_dense:
                parts = _repack(packed[name], compressor, keep_integers)
                shard |= {name_of_part(name, part): value for part, value in parts.items()}
            else:
                shard[name] = dense[name][...]
        return shard, {}

    with converted_folder(checkpoint, out, to="other", config=config.model_dump(mode="json"), keep_integers=keep_integers) as result:
        result.write_shards(make, "Converting shards")
        config.ignore_dense(name.removesuffix(".weight") for name in left_dense)
        content = {**without_sparsity(checkpoint.config), "quantization_config": config.to_dict()}
        result.write_rest(content, dense, set(packed) - set(left_dense))


def _repack(weight: PackedSlice, compressor: BaseCompressor, keep_integers: bool) -> dict[str, Tensor]:
    """The parts of a packed weight in another format."""
    own = weight.compressor
    try:
        if keep_integers and isinstance(own, BaseQuantizedCompressor) and isinstance(compressor, BaseQuantizedCompressor):
            integers, scale = own.decompress_integers({part: value[...] for part, value in weight.parts.items()})
            per_row = scale if scale.numel() > 1 or scale.shape == (len(integers), 1) else scale.expand(len(integers))
            return compressor.compress_integers(integers, per_row if per_row.ndim == 2 else per_row.view(-1, 1))
        if keep_integers and compressor.scheme is not None:
            raise ValueError("is not quantised, as others are: rounding it must be asked for, by quantization")
        return compressor.compress_weight(weight[...])
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{weight.where}: {weight.name}: {error}") from None


def skeleton(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's model without weights, on the meta device.

    Raises:
        ValueError: Transformers has no class of the name in `architectures` (custom code is not run), or config.json does not
            describe a model of that class.
    """
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ValueError(
            f"{checkpoint.path}: Transformers has no model class {name!r}, so its layers' classes are unknown; give targets as tensor "
            "names without '.weight', or as 're:PATTERN'"
        )
    fields = {key: value for key, value in without_sparsity(checkpoint.config).items() if key != "transformers_version"}
    try:
        config = AutoConfig.for_model(**fields)
        with torch.device("meta"):
            return model_class(config)
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(f"{checkpoint.path / CONFIG_NAME}: does not describe a {name}: {reason}") from error


def _choose(checkpoint: Checkpoint, config: SparsityConfig) -> dict[str, Any]:
    """Names of the weights to pack, every one of which fits, and -> reason for those that stay dense; as plain data."""
    candidates = _select(checkpoint, config)
    refused, left_dense = {}, {}
    for name in logging.tqdm(sorted(candidates), desc="Checking weights"):
        weight = checkpoint.tensors[name][...]
        reason = config.compressor.why_not(weight)
        has_groups = not isinstance(config, Sparse24Config) or weight.shape[1] % 4 == 0
        if reason and (config.on_dense == "skip" or not has_groups):
            left_dense[name] = reason
        elif reason:
            refused[name] = reason
    if refused:
        raise refusal(refused, config)
    chosen = candidates - set(left_dense)
    if not chosen:
        raise ValueError(
            f"{checkpoint.path}: no weight can be stored sparse: {listed(left_dense) or 'no targeted weight of two dimensions'}"
        )
    return {"packed": sorted(chosen), "left dense": left_dense}


def _select(checkpoint: Checkpoint, config: SparsityConfig) -> set[str]:
    weights = [name for name, value in checkpoint.tensors.items() if name.endswith(".weight") and len(value.get_shape()) == 2]
    try:
        model = skeleton(checkpoint)
    except ValueError:
        if any(not target.startswith("re:") and f"{target}.weight" not in checkpoint.tensors for target in config.targets):
            raise
        by_name: Mapping[str, type] = {name.removesuffix(".weight"): nn.Module for name in weights}
        return {f"{name}.weight" for name in match_modules(by_name, config)}
    stored = checkpoint_names(model, weights)
    owner = {target.removesuffix(".weight"): name for name, (target, is_merged) in stored.items() if not is_merged}
    merged, reasons = find_merged(model)
    targets = {name: target for name, (target, is_merged) in stored.items() if is_merged}
    owner |= {module: name for name, module in members_in_checkpoint(targets, merged, get_model_conversion_mapping(model)).items()}
    modules = {name: type(module) for name, module in model.named_modules()} | expert_classes(model, merged, reasons)
    aliases = {module: name.removesuffix(".weight") for module, name in owner.items()}
    tied = tied_names(model)
    return {owner[module] for module in match_modules(modules, config, aliases) if module in owner and f"{module}.weight" not in tied}


def _warn_of_lost_scales(packed: Mapping[str, PackedSlice]) -> None:
    lost = [name for name, weight in packed.items() if "input_scale" in weight.parts]
    if lost:
        warn(f"the input_scale of {len(lost)} weights, of {lost[0]} for example, is left out: it is for activations of 8 bits")


def _homes(checkpoint: Checkpoint, packed: Mapping[str, PackedSlice]) -> dict[str, str | None]:
    """The shard of each packed weight: where its values were; its other parts may be in another one."""
    return {name: checkpoint.shard_of(f"{weight.base}.{weight.compressor.value_part}") for name, weight in packed.items()}


def _names_in(checkpoint: Checkpoint, file: str, dense: Iterable[str], home: Mapping[str, str | None]) -> list[str]:
    """The tensors of the dense checkpoint whose shard this is."""
    own = set(checkpoint.shards[file])
    return [name for name in dense if home.get(name) == file or (name not in home and name in own)]

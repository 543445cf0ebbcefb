"""Packing and unpacking checkpoint folders without the model: shard by shard, every other file carried over."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from hf_sparse24.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    PICKLE_NAMES,
    Checkpoint,
    as_dense,
    find_packed,
    name_of_part,
    open_checkpoint,
    read_json,
    write_json,
)
from hf_sparse24.compressors.base import specs_of
from hf_sparse24.config import DenseSparsityConfig, Sparse24Config, SparsityConfig, parse_config, without_sparsity
from hf_sparse24.errors import CheckpointError
from hf_sparse24.integration.quantizer import checkpoint_names, warn_left_dense
from hf_sparse24.modules import listed, match_modules, refusal, tied_names
from hf_sparse24.staging import STAGE_PREFIX, WEIGHT_FILES, staged


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
    out = _new_folder(out, source)
    with open_checkpoint(source) as checkpoint:
        if find_packed(checkpoint.tensors, checkpoint.file_of):
            raise CheckpointError(f"{source}: is packed already; decompress it first")
        parsed = parse_config(checkpoint.config)
        if parsed.quantized or (parsed.sparsity is None and "quantization_config" in checkpoint.config):
            raise CheckpointError(f"{source}: is quantised ({CONFIG_NAME} says so); only dense checkpoints can be packed")
        chosen, left_dense = _choose(checkpoint, config)
        compressor = config.compressor
        left_out, elements = 0, 0
        with staged(out) as stage:
            weight_map: dict[str, str] = {}
            for file, names in logging.tqdm(checkpoint.shards.items(), desc="Packing shards"):
                shard: dict[str, Tensor] = {}
                for name in names:
                    tensor = checkpoint.tensors[name][...]
                    elements += tensor.numel()
                    if name in chosen:
                        parts = compressor.compress_weight(tensor)
                        left_out += tensor.numel() - compressor.num_values(specs_of(parts), tuple(tensor.shape))
                        shard |= {name_of_part(name, part): value for part, value in parts.items()}
                    else:
                        shard[name] = tensor
                _write_shard(shard, stage, file, weight_map)
            stored = config.model_copy(deep=True)
            stored.global_sparsity = round(left_out / max(1, elements), 6)
            if stored.quantization is not None:
                stored.ignore = [*stored.ignore, *(name.removesuffix(".weight") for name in left_dense)]
            _write_rest(checkpoint, stage, weight_map, {**without_sparsity(checkpoint.config), "quantization_config": stored.to_dict()})


def decompress_folder(source: str | Path, out: str | Path) -> None:
    """Unpack a compressed checkpoint folder into an ordinary dense one.

    Args:
        source: Folder with packed weights of any format that is read; it is not changed.
        out: New or empty folder.

    Raises:
        CheckpointError: The source is damaged, in a form that cannot be read, or holds nothing packed.
        ValueError: `out` is not empty, or inside the source.
    """
    out = _new_folder(out, source)
    with open_checkpoint(source) as checkpoint:
        parse_config(checkpoint.config)
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        if not packed:
            raise CheckpointError(f"{source}: holds no packed weights")
        dense = as_dense(checkpoint.tensors, packed)
        # A weight goes where its values were; its other parts may be in another shard.
        home = {name: checkpoint.shard_of(f"{weight.base}.{weight.compressor.value_part}") for name, weight in packed.items()}
        with staged(out) as stage:
            weight_map: dict[str, str] = {}
            for file in logging.tqdm(checkpoint.shards, desc="Unpacking shards"):
                names = [name for name in dense if home.get(name) == file or (name not in home and name in checkpoint.shards[file])]
                shard = {name: dense[name][...] for name in names}
                _write_shard(shard, stage, file, weight_map)
            _write_rest(checkpoint, stage, weight_map, without_sparsity(checkpoint.config))


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


def _choose(checkpoint: Checkpoint, config: SparsityConfig) -> tuple[set[str], dict[str, str]]:
    """Names of the weights to pack, every one of which fits, and -> reason for those that stay dense."""
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
    warn_left_dense(left_dense)
    return chosen, left_dense


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
    owner = {target.removesuffix(".weight"): name for name, (target, merged) in stored.items() if not merged}
    modules = {name: type(module) for name, module in model.named_modules()}
    aliases = {module: name.removesuffix(".weight") for module, name in owner.items()}
    tied = tied_names(model)
    return {owner[module] for module in match_modules(modules, config, aliases) if module in owner and f"{module}.weight" not in tied}


def _new_folder(out: str | Path, source: str | Path) -> Path:
    out = Path(out)
    if Path(source).resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out}: the result needs a folder of its own, outside {source}")
    if out.is_file() or (out.exists() and any(not path.name.startswith(STAGE_PREFIX) for path in out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; name a new one")
    return out


def _write_shard(shard: dict[str, Tensor], stage: Path, file: str, weight_map: dict[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in shard.items()}, stage / file, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(shard, file)


def _write_rest(checkpoint: Checkpoint, stage: Path, weight_map: dict[str, str], config: dict[str, Any]) -> None:
    if checkpoint.is_sharded:
        metadata = read_json(checkpoint.path / INDEX_NAME).get("metadata", {})
        sizes = [path.stat().st_size for path in stage.glob("*.safetensors")]
        tensors_bytes = sum(sizes) - sum(_header_bytes(path) for path in stage.glob("*.safetensors"))
        write_json(stage / INDEX_NAME, {"metadata": {**metadata, "total_size": tensors_bytes}, "weight_map": weight_map})
    write_json(stage / CONFIG_NAME, config)
    for path in sorted(checkpoint.path.iterdir()):
        weights = WEIGHT_FILES.fullmatch(path.name) or any(path.match(pattern) for pattern in PICKLE_NAMES)
        if path.name == CONFIG_NAME or weights or path.name in (".git", ".cache") or path.name.startswith(STAGE_PREFIX):
            continue
        if path.is_dir():
            shutil.copytree(path, stage / path.name)
        else:
            shutil.copy2(path, stage / path.name)


def _header_bytes(path: Path) -> int:
    with path.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")

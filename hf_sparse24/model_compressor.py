"""Whole models and checkpoint folders: the class that users of compressed-tensors know, on our formats.

ModelCompressor.from_pretrained(path).decompress(model_path=path, model=dense_model)
ModelCompressor.from_pretrained_model(model, sparsity_config=config).compress(model)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from hf_sparse24.checkpoint import CONFIG_NAME, PackedSlice, as_dense, find_packed, open_checkpoint, read_json, write_json
from hf_sparse24.compressors import BaseCompressor, BaseQuantizedCompressor
from hf_sparse24.config import CONFIGS, DenseSparsityConfig, Sparse24Config, SparsityConfig, as_config, parse_config
from hf_sparse24.conversion import compress_folder, decompress_folder
from hf_sparse24.errors import CheckpointError, warn
from hf_sparse24.experts import ExpertWeights, Sparse24Experts, packed_experts
from hf_sparse24.integration.plan import choose_weights, plan_weights
from hf_sparse24.integration.quantizer import (
    Sparse24HfQuantizer,
    checkpoint_names,
    complete_scheme,
    mark_as_packed,
    named_twice,
    sparsity_of,
)
from hf_sparse24.integration.sharding import require_whole_weights
from hf_sparse24.merged import Merged, by_module, find_merged, whole_experts
from hf_sparse24.modules import LAYERS, listed, packed_layers, packed_weights, tied_names
from hf_sparse24.quantization import common_scheme

# What a repository is fetched for; the rest of it is not needed to read weights.
CHECKPOINT_PATTERNS = ["*.safetensors", "*.json"]


class ModelCompressor:
    """Packs and unpacks models and checkpoint folders.

    Args:
        sparsity_config: Which weights are packed, and in which format.
    """

    def __init__(self, sparsity_config: SparsityConfig):
        self.sparsity_config = sparsity_config

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, **hub_kwargs: Any) -> "ModelCompressor":
        """The compressor of a checkpoint.

        Args:
            path_or_repo_id: Folder, or repository on the Hub.
            hub_kwargs: Those of `huggingface_hub.snapshot_download`, `revision` and `token` for example.

        Returns:
            Its config is the checkpoint's own; without one, the format of the packed tensors; `DenseSparsityConfig` if there are none.

        Raises:
            CheckpointError: The folder is damaged or in a form that cannot be read.
        """
        with open_checkpoint(local_folder(path_or_repo_id, **hub_kwargs)) as checkpoint:
            parsed = parse_config(checkpoint.config)
            packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=parsed.sparsity is not None)
        if parsed.sparsity is not None:
            return cls(parsed.sparsity)
        if not packed:
            return cls(DenseSparsityConfig())
        first = max(packed.values(), key=lambda weight: weight.compressor.format).compressor
        scheme = common_scheme(first.scheme_of(weight.specs) for weight in packed.values() if weight.compressor is first)
        return cls(CONFIGS[first.config_format](quantization=scheme))

    @classmethod
    def from_compression_config(cls, config: SparsityConfig | Mapping[str, Any] | None) -> "ModelCompressor | None":
        """The compressor of a `quantization_config` block or of a config; None if it describes nothing sparse."""
        if config is None or isinstance(config, SparsityConfig):
            return None if config is None else cls(config)
        sparsity = parse_config({"quantization_config": config}).sparsity
        return None if sparsity is None else cls(sparsity)

    @classmethod
    def from_pretrained_model(
        cls, model: nn.Module, sparsity_config: SparsityConfig | Mapping[str, Any] | str | None = None
    ) -> "ModelCompressor":
        """A compressor for a model in memory.

        Args:
            model: Its own sparse config is taken if `sparsity_config` is None.
            sparsity_config: A config, a dict of its fields or a format name; `Sparse24Config()` if neither says otherwise.
        """
        own = getattr(getattr(model, "config", None), "quantization_config", None)
        if sparsity_config is None:
            return cls(own if isinstance(own, SparsityConfig) else Sparse24Config())
        return cls(as_config(sparsity_config))

    # ---- models in memory ------------------------------------------------------------------------------------------------

    def compress(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's state dict with targeted weights as parts; the model is not changed.

        Args:
            model: Dense, or with packed layers.

        Returns:
            Name in the model -> tensor; `model.save_pretrained(folder, state_dict=...)` and `update_config(folder)` store it.

        Raises:
            ValueError: A targeted weight does not fit the format, targets match nothing, or the model is sharded over several processes.
        """
        require_whole_weights(model)
        _, weights = plan_weights(model, self.sparsity_config, original_names=False)
        return {name: weight.read() for name, weight in weights.items()}

    def compress_model(self, model: PreTrainedModel, quantized: Mapping[str, tuple[Tensor, Tensor]] | None = None) -> PreTrainedModel:
        """Replace targeted layers by packed ones, in place; every weight is checked before the first is replaced.

        Args:
            model: Its targeted `nn.Linear` layers, and modules of experts all of whose weights are targeted; other modules stay dense.
            quantized: Integers and scales of a method that chooses them better than rounding does, by module name, as from
                `quantization.quantize_weight`.  Other layers are rounded.

        Returns:
            The same model; it saves packed, and `model.dequantize()` undoes this.

        Raises:
            ValueError: A targeted weight or its integers do not fit the format, targets match nothing, no target can be kept packed,
                a name in `quantized` is none of a layer that is packed, or the model is sharded over several processes.
        """
        require_whole_weights(model)
        quantized = quantized or {}
        chosen = choose_weights(model, self.sparsity_config)
        modules = dict(model.named_modules())
        names = [name for name in chosen if type(modules.get(name)) is nn.Linear]
        experts = self._keepable_experts(model, set(chosen))
        if not names and not experts:
            raise ValueError(f"none of the {len(chosen)} targeted modules is an nn.Linear, only those and experts can be kept packed")
        integers = {name: _compress_integers(name, chosen[name] if name in names else None, *given) for name, given in quantized.items()}
        for name, projections in experts.items():
            dense = modules[name]
            packed = {p.projection: ExpertWeights.from_dense(getattr(dense, p.projection), p.members) for p in projections}
            model.set_submodule(name, Sparse24Experts(dense, packed))
        for name in names:
            linear, compressor = model.get_submodule(name), chosen[name]
            parts = integers[name] if name in integers else compressor.compress_weight(linear.weight)
            model.set_submodule(name, LAYERS[compressor.format].from_parts(parts, linear.bias))
        config = self.sparsity_config.model_copy(deep=True)
        complete_scheme(packed_layers(model), config)
        config.global_sparsity = sparsity_of(model)
        mark_as_packed(model, Sparse24HfQuantizer(config, pre_quantized=True))
        model.hf_quantizer.kept = {f"{name}.weight": name for name in names}
        return model

    def _keepable_experts(self, model: PreTrainedModel, chosen: set[str]) -> dict[str, list[Merged]]:
        """Modules of experts that are packed as a whole, and their projections."""
        if self.sparsity_config.compressor.format != ExpertWeights.compressor.format:
            return {}
        whole, partly = whole_experts(chosen, find_merged(model)[0])
        if partly:
            warn(f"experts that stay dense: {listed(partly)}")
        return by_module(whole)

    def decompress_model(self, model: nn.Module) -> nn.Module:
        """Replace packed layers by plain `nn.Linear`, packed experts by plain ones, in place.

        Raises:
            PackedTensorError: The tensors of a packed layer disagree with each other.
        """
        quantizer = getattr(model, "hf_quantizer", None)
        if isinstance(quantizer, Sparse24HfQuantizer):
            return quantizer.dequantize(model)
        for name, layer in packed_layers(model).items():
            model.set_submodule(name, layer.to_linear())
        for name, experts in packed_experts(model).items():
            model.set_submodule(name, experts.to_experts())
        return model

    def decompress(self, model_path: str | Path, model: nn.Module, **hub_kwargs: Any) -> nn.Module:
        """Fill a dense model from a compressed checkpoint, tensor by tensor.

        Args:
            model_path: Folder or repository.
            model: A dense model of the checkpoint's architecture, on any device; keeps its dtype.  Its parameters are replaced.
            hub_kwargs: Those of `huggingface_hub.snapshot_download`.

        Returns:
            The same model.

        Raises:
            CheckpointError: The checkpoint is damaged, or its tensors are not those of the model; the model is unchanged.
            ValueError: The model has packed layers.
        """
        if packed_weights(model):
            raise ValueError("decompress fills a dense model, this one has packed layers: call decompress_model")
        with open_checkpoint(local_folder(model_path, **hub_kwargs)) as checkpoint:
            parse_config(checkpoint.config)
            packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
            tensors = as_dense(checkpoint.tensors, packed)
            require_same_tensors(model, tensors, str(checkpoint.path))
            for weight in packed.values():
                weight.check_values()
            _fill(model, tensors)
        return model

    def update_config(self, save_directory: str | Path) -> None:
        """Write the sparsity config into a folder's config.json, which is made if it is missing."""
        file = Path(save_directory) / CONFIG_NAME
        content = read_json(file) if file.exists() else {}
        write_json(file, {**content, "quantization_config": self.sparsity_config.to_dict()})

    # ---- folders -----------------------------------------------------------------------------------------------------------

    def compress_folder(self, source: str | Path, out: str | Path) -> None:
        """Pack a dense checkpoint folder into another, shard by shard: `conversion.compress_folder`."""
        compress_folder(source, out, self.sparsity_config)

    def decompress_folder(self, source: str | Path, out: str | Path) -> None:
        """Unpack a compressed checkpoint folder into another, shard by shard: `conversion.decompress_folder`."""
        decompress_folder(source, out)


def _compress_integers(name: str, compressor: BaseCompressor | None, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
    if not isinstance(compressor, BaseQuantizedCompressor):
        raise ValueError(f"{name}: integers were given for a module that is not packed as such")
    try:
        return compressor.compress_integers(integers, scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def local_folder(path_or_repo_id: str | Path, **hub_kwargs: Any) -> Path:
    """The folder itself, or the repository's files after downloading them.

    Raises:
        CheckpointError: It is neither, as far as can be seen from here.
    """
    if Path(path_or_repo_id).is_dir():
        return Path(path_or_repo_id)
    try:
        return Path(snapshot_download(str(path_or_repo_id), allow_patterns=CHECKPOINT_PATTERNS, **hub_kwargs))
    except HFValidationError:
        raise CheckpointError(f"{path_or_repo_id}: no such folder") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise CheckpointError(f"{path_or_repo_id} is neither a folder nor a repository that can be reached ({reason})") from error


def require_same_tensors(model: nn.Module, tensors: Mapping[str, Any], where: str) -> None:
    """Check, from headers, that a checkpoint holds the tensors of a model.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape; names it and both shapes.
    """
    unknown, wrong = differing_tensors(model, tensors)
    if wrong := {**unknown, **wrong}:
        raise CheckpointError(f"{where}: not the checkpoint of this {type(model).__name__}: {listed(wrong)}")


def differing_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> reason: tensors of a checkpoint that a model does not have, and those that are missing or of another shape."""
    expected = model.state_dict()
    targets = checkpoint_names(model, list(tensors)) if isinstance(model, PreTrainedModel) else {name: (name, False) for name in tensors}
    shape_of = {
        name: tuple(value.shape if isinstance(value, (Tensor, PackedSlice)) else value.get_shape()) for name, value in tensors.items()
    }
    unknown = {name: f"the model has no {target}" for name, (target, _) in targets.items() if target not in expected}
    wrong = {
        name: f"shape {shape_of[name]}, the model's {target} is {tuple(expected[target].shape)}"
        for name, (target, merged) in targets.items()
        if target in expected and not merged and tuple(expected[target].shape) != shape_of[name]
    }
    wrong |= named_twice(targets)
    merged = any(merged for _, merged in targets.values())
    found = {target for target, _ in targets.values()}
    if not merged:
        wrong |= {name: "not in the checkpoint" for name in expected if name not in found | tied_names(model)}
    return unknown, wrong


def _fill(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    if not isinstance(model, PreTrainedModel):
        own = model.state_dict()
        for name, value in tensors.items():
            own[name].copy_(value[...])
        return
    # Renamings, merges and casts are the loader's.
    load_config = LoadStateDictConfig(
        device_map={"": model.device} if model.device.type != "cpu" else None,
        dtype=model.dtype,
        weight_mapping=get_model_conversion_mapping(model),
    )
    with torch.no_grad():
        loading_info, _ = model._load_pretrained_model(model, dict(tensors), None, load_config)
    model.tie_weights()
    missing = sorted(set(loading_info.missing_keys) - tied_names(model))
    if missing or loading_info.conversion_errors:
        raise CheckpointError(f"the checkpoint left {missing or sorted(loading_info.conversion_errors)} of {type(model).__name__} unfilled")

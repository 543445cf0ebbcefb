"""Around `from_pretrained`: three functions of `transformers.modeling_utils` are wrapped, each looked up there at call time.

    get_hf_quantizer                        reads the config in every spelling and decides: dense, kept packed, or not ours
    convert_and_load_state_dict_in_model    shows the loader the dense checkpoint that the packed tensors stand for; obeys
                                            `config.activation_sparsity`
    log_state_dict_report                   raises where stock Transformers only logs that weights were made up

Without packed tensors and without a config of ours, each calls the original with the same arguments.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import modeling_utils
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from hf_sparse24.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    as_dense,
    find_packed,
    name_of_part,
    open_checkpoint,
)
from hf_sparse24.compressors import PART_SUFFIXES
from hf_sparse24.config import CONFIG_KEYS, DenseSparsityConfig, SparsityConfig, parse_config
from hf_sparse24.errors import CheckpointError, get_logger, warn
from hf_sparse24.integration import activation
from hf_sparse24.integration.merging import merge_parts
from hf_sparse24.integration.quantizer import METHOD, Sparse24HfQuantizer, checkpoint_names, named_twice
from hf_sparse24.integration.sharding import require_fitting_pieces, require_whole_weights
from hf_sparse24.kernels.dispatch import why_not_kept
from hf_sparse24.modules import listed, tied_names

logger = get_logger(__name__)


def install() -> None:
    """Register the method and wrap the three functions; a second call changes nothing."""
    activation.install()
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(SparsityConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(Sparse24HfQuantizer)
    for wrap in (_get_hf_quantizer, _convert_and_load, _log_state_dict_report):
        name = wrap.__name__.removeprefix("_") if wrap is not _convert_and_load else "convert_and_load_state_dict_in_model"
        original = getattr(modeling_utils, name, None)
        if original is None:
            raise ImportError(
                f"transformers {transformers.__version__} has no modeling_utils.{name}, which hf-sparse24 needs: "
                "install the newest hf-sparse24, or an older transformers"
            )
        if not hasattr(original, "_sparse24_original"):
            wrapped: Any = functools.wraps(original)(functools.partial(wrap, original))
            wrapped._sparse24_original = original
            setattr(modeling_utils, name, wrapped)


# ---- which way a checkpoint is opened ------------------------------------------------------------------------------------


def _get_hf_quantizer(
    original: Callable[..., Any], config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any
) -> Any:
    parsed = parse_config(config.to_dict())
    stored_dense = parsed.sparsity is None or isinstance(parsed.sparsity, DenseSparsityConfig)
    if stored_dense and isinstance(quantization_config, SparsityConfig) and quantization_config.run_compressed is False:
        quantization_config = None  # dense stays dense
    if parsed.sparsity is None or (parsed.quantized and isinstance(parsed.sparsity, DenseSparsityConfig)):
        return original(config, quantization_config, device_map, *args, **kwargs)
    _check_folder(config)
    if stored_dense:
        # Old files carry the block beside a dense model: it means nothing, and our own config may still ask to pack.
        return original(_without_our_config(config), quantization_config, device_map, *args, **kwargs)
    if quantization_config is not None and not hasattr(quantization_config, "run_compressed"):
        # Another method: it quantises the dense checkpoint that this one stands for.
        return original(_without_our_config(config, declared=True), quantization_config, device_map, *args, **kwargs)
    _warn_of_ignored_options(quantization_config)
    sparsity = parsed.sparsity
    own = getattr(config, "quantization_config", None)  # of a model that was loaded before, or a dict that says how to load
    stored = own.run_compressed if isinstance(own, SparsityConfig) else sparsity.run_compressed
    asked = getattr(quantization_config, "run_compressed", None)
    fused = getattr(quantization_config, "fuse_projections", False)
    if reason := why_unpacked(asked, stored, sparsity.compressor.format):
        if fused:
            warn(f"fuse_projections=True has no effect on dense layers: {reason}")
        logger.info(f"loading dense layers: {reason}")
        return original(_without_our_config(config, declared=True), None, device_map, *args, **kwargs)
    config = copy.copy(config)
    sparsity.run_compressed = True
    config.quantization_config = sparsity
    quantizer = Sparse24HfQuantizer(sparsity, pre_quantized=True)
    quantizer.fuse_projections = fused
    quantizer.validate_environment(device_map=device_map)
    return quantizer, config, device_map


def why_unpacked(asked: bool | None, stored: bool | None, format: str) -> str | None:
    """Why a packed checkpoint is loaded into dense layers, or None if its layers stay packed.

    Args:
        asked: `run_compressed` of the `quantization_config` that is passed to `from_pretrained`.
        stored: The same in the checkpoint's config.json.
        format: Of the checkpoint.
    """
    if asked is not None:
        return None if asked else "run_compressed=False was passed"
    if stored is not None:
        return None if stored else "config.json says run_compressed: false"
    return why_not_kept(format)


def _warn_of_ignored_options(quantization_config: Any) -> None:
    if isinstance(quantization_config, SparsityConfig):
        ignored = quantization_config.model_fields_set - {"run_compressed", "fuse_projections"}
        if ignored:
            warn(f"this checkpoint is packed already: {', '.join(sorted(ignored))} of the quantization_config is ignored")


def _without_our_config(config: Any, declared: bool = False) -> Any:
    """A copy of a model config without any trace of sparsity, in nested configs too; `declared` tells _convert_and_load of it."""
    config = copy.deepcopy(config)
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *nested):
        for key in CONFIG_KEYS:
            if part is not None and key in vars(part):
                delattr(part, key)
    if declared:
        config._sparse24_declared = True
    return config


def _check_folder(config: Any) -> None:
    """Look at a local folder's headers before Transformers does: its errors name no file."""
    folder = Path(str(getattr(config, "_name_or_path", "") or ""))
    if str(folder) == "." or not (folder / CONFIG_NAME).is_file():
        return
    # Weights under another name (a variant, a subfolder) are left to Transformers.
    if (folder / WEIGHTS_NAME).exists() or (folder / INDEX_NAME).exists() or not any(folder.glob("*.safetensors")):
        with open_checkpoint(folder):
            pass


# ---- the dense checkpoint that packed tensors stand for -----------------------------------------------------------------


def _convert_and_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    result = _load_as_dense(original, call)
    # Before Transformers puts the model into evaluation mode, and before accelerate hooks anything to it.
    activation.apply_config(call.arguments["model"])
    return result


def _load_as_dense(original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    model, tensors, load_config = (call.arguments[name] for name in ("model", "state_dict", "load_config"))
    quantizer = load_config.hf_quantizer
    ours = isinstance(quantizer, Sparse24HfQuantizer)
    declared = vars(model.config).pop("_sparse24_declared", False) or (ours and quantizer.pre_quantized)
    packed = find_packed(tensors, where=_describe_files(load_config), declared=declared)
    if ours and not quantizer.pre_quantized:
        require_whole_weights(model)
    if not packed and not declared:
        return original(*call.args, **call.kwargs)
    kept = quantizer.kept if ours else {}
    if ours and not (set(kept) | set(quantizer.left_dense)) >= set(packed):
        raise ValueError("a state dict cannot be kept packed: pass a folder or a repository, or run_compressed=False")
    devices = set((load_config.device_map or {"": "cpu"}).values())
    for weight in packed.values():
        weight.device = torch.device(next(iter(devices))) if len(devices) == 1 and "disk" not in devices else None
    pieces = quantizer.pieces if ours else {}
    if pieces and (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError("packed experts cannot be split over several devices: load without tp_plan, or with run_compressed=False")
    dense = merge_parts(as_dense(tensors, packed, keep=kept), pieces)
    names = checkpoint_names(model, list(dense))
    if twice := named_twice(names):
        raise CheckpointError(f"{load_config.pretrained_model_name_or_path}: weights are stored twice: {listed(twice)}")
    if ours:
        require_fitting_pieces(model)
    call.arguments["state_dict"] = dense
    loading_info, offload_index = original(*call.args, **call.kwargs)
    _require_every_weight(model, loading_info)
    of_packed = {name_of_part(name, part) for name in (*kept, *pieces) for part in PART_SUFFIXES} | set(packed)
    _require_every_packed_weight_used(model, loading_info, {name: target for name, (target, _) in names.items() if name in of_packed})
    return loading_info, offload_index


def _describe_files(load_config: Any) -> Callable[[str], str]:
    folder = str(load_config.pretrained_model_name_or_path or "state dict")
    weight_map = (load_config.sharded_metadata or {}).get("weight_map", {})
    return lambda name: f"{folder}/{weight_map[name]}" if name in weight_map else folder


def _require_every_weight(model: Any, loading_info: Any) -> None:
    """Raise if the loader would make up weights.

    A model of another class than the saved one may have a new head: modules of which the checkpoint holds nothing are
    then left to Transformers, which initialises and reports them.
    """
    optional = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or []]
    parameters = {name for name, _ in model.named_parameters()}
    missing = [
        name
        for name in sorted(loading_info.missing_keys & parameters - tied_names(model))
        if not any(pattern.search(name) for pattern in optional)
    ]
    if type(model).__name__ not in (getattr(model.config, "architectures", None) or []):
        prefix = f"{model.base_model_prefix}."
        missing = [name for name in missing if name.startswith(prefix)]
    if missing:
        raise CheckpointError(
            f"the checkpoint holds no values for {len(missing)} parameters of {type(model).__name__}: "
            f"{listed(dict.fromkeys(missing, 'neither dense nor packed'))}"
        )


def _require_every_packed_weight_used(model: Any, loading_info: Any, packed: Mapping[str, str]) -> None:
    """Raise if the model has no place for a packed weight.

    Args:
        model: Of another class than the saved one it may lack modules on purpose.
        loading_info: Of the loader.
        packed: Name in the checkpoint, of a weight or of its parts -> name in the model.
    """
    if type(model).__name__ not in (getattr(model.config, "architectures", None) or []):
        return
    optional = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
    unused = [
        name
        for name, target in packed.items()
        if {name, target} & set(loading_info.unexpected_keys) and not any(pattern.search(name) for pattern in optional)
    ]
    if unused:
        reasons = dict.fromkeys(unused, f"no module of {type(model).__name__} takes it")
        raise CheckpointError(f"{len(unused)} packed tensors were not used: {listed(reasons)}")


def _log_state_dict_report(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    loading_info = call.arguments["loading_info"]
    lost = {}
    for name in sorted(loading_info.unexpected_keys):
        base, _, suffix = name.rpartition(".")
        if suffix in PART_SUFFIXES and {base, f"{base}.weight"} & set(loading_info.missing_keys):
            lost[name] = "not read"
    if lost:
        raise CheckpointError(f"packed tensors were not read while the weights they hold are missing: {listed(lost)}")
    return original(*call.args, **call.kwargs)

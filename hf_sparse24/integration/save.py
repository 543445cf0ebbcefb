"""Around `save_pretrained` and `push_to_hub`: with `sparsity_config=`, targeted weights are written as parts.

What is written is the checkpoint that Transformers would write (original names, tied weights once, experts apart), in which
some weights are packed.  Transformers itself writes config, generation config and custom code, from a shallow view of the
model with its own config: the user's model is never changed.  Weights are read, packed and written one shard at a time.

A model that is sharded over several processes is put together by all of them, tensor by tensor, and written by the first.

Without the keyword the untouched original runs.  HF_SPARSE24_NO_PATCH=1 leaves both methods alone; `save_pretrained` below
does the same as a function.
"""

import copy
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_sparse24 import hub
from hf_sparse24.checkpoint import INDEX_NAME, WEIGHTS_NAME, write_json
from hf_sparse24.config import SparsityConfig
from hf_sparse24.errors import get_logger
from hf_sparse24.experts import packed_projections
from hf_sparse24.integration import adapters
from hf_sparse24.integration.plan import Weight, plan_weights
from hf_sparse24.integration.quantizer import Sparse24HfQuantizer
from hf_sparse24.integration.sharding import gather, is_sharded, on_first_process
from hf_sparse24.staging import staged

logger = get_logger(__name__)
OPT_OUT = "HF_SPARSE24_NO_PATCH"


def install() -> None:
    """Wrap the two methods of `PreTrainedModel`; a second call changes nothing."""
    if os.environ.get(OPT_OUT, "").lower() in ("1", "true", "yes"):
        return
    for name, wrapper in (("save_pretrained", _save_pretrained), ("push_to_hub", _push_to_hub)):
        original = getattr(PreTrainedModel, name)
        if not hasattr(original, "_sparse24_original"):
            wrapped = _as_method(wrapper, original)
            wrapped._sparse24_original = original
            setattr(PreTrainedModel, name, wrapped)
    adapters.install()


def uninstall() -> None:
    """Put the original methods back."""
    for name in ("save_pretrained", "push_to_hub"):
        setattr(PreTrainedModel, name, _original(name))


def save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike, sparsity_config: Any, **kwargs: Any) -> None:
    """Save a model with packed weights: `model.save_pretrained(save_directory, sparsity_config=...)` as a function.

    Args:
        model: Dense, or with packed layers.  If it is sharded over several processes, all of them have to call this.
        save_directory: Folder, made if missing.
        sparsity_config: A config, a dict of its fields, or "auto": pack each weight that is 2:4 or has enough zeros.
        kwargs: Those of `PreTrainedModel.save_pretrained`.

    Raises:
        ValueError: A targeted weight does not fit the format, a target matches nothing, or the model cannot be packed (quantised
            by another method, a PEFT adapter); nothing was written.
    """
    call = inspect.signature(_original("save_pretrained")).bind(model, save_directory, **kwargs)
    call.apply_defaults()
    arguments = dict(call.arguments)
    extra = arguments.pop("kwargs", {})
    _refuse(model, arguments)
    push = {"commit_message", "commit_description", "repo_id", "create_pr", "private", "revision", "tags", "token"}
    if unknown := set(extra) - push:
        raise TypeError(f"save_pretrained() got unexpected keyword arguments {sorted(unknown)}")
    sharded = is_sharded(model)
    with on_first_process(sharded) as is_first:
        if sharded:
            arguments["state_dict"] = gather(model, arguments["state_dict"], keep=is_first)
        if is_first:
            _save(model, sparsity_config, arguments, extra)


def _save(model: PreTrainedModel, sparsity_config: Any, arguments: dict[str, Any], extra: dict[str, Any]) -> None:
    """Write the files, and push them if that was asked for."""
    state_dict, save_directory = arguments.pop("state_dict"), arguments.pop("save_directory")
    config, weights = plan_weights(model, sparsity_config, state_dict, arguments.get("save_original_format", True))
    arguments.pop("self")
    push_to_hub, is_main_process = arguments.pop("push_to_hub"), arguments["is_main_process"]
    max_shard_size, variant = arguments.pop("max_shard_size"), arguments["variant"]
    if not is_main_process:
        return
    with staged(Path(save_directory), variant) as stage:
        _original("save_pretrained")(_view(model, config), stage, state_dict={}, push_to_hub=False, **arguments)
        _write_shards(weights, stage, max_shard_size, variant, model.num_parameters())
        written = [path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()]
    if push_to_hub:
        repo_id = extra.pop("repo_id", Path(save_directory).name)
        _push(model, save_directory, repo_id, files=written, token=arguments["token"], **extra)


def _push(model: PreTrainedModel, folder: str | os.PathLike, repo_id: str, tags: list[str] | str | None = None, **kwargs: Any) -> Any:
    """Upload a saved model, with what only the model knows: its tags, and what it was loaded from."""
    tags = [*(model.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]
    # What a packed model was loaded from is a packed checkpoint already, not the model that it was made of.
    kept = isinstance(getattr(model, "hf_quantizer", None), Sparse24HfQuantizer)
    base_model = None if kept else model.config._name_or_path
    return hub.push_folder(Path(folder), repo_id, tags=tags, base_model=base_model, **kwargs)


def _as_method(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    return method


def _original(name: str) -> Callable[..., Any]:
    method = getattr(PreTrainedModel, name)
    return getattr(method, "_sparse24_original", method)


def _save_pretrained(original: Callable[..., Any], model: PreTrainedModel, *args: Any, sparsity_config: Any = None, **kwargs: Any) -> Any:
    kept = isinstance(getattr(model, "hf_quantizer", None), Sparse24HfQuantizer)
    pushed = kwargs.get("push_to_hub") or inspect.signature(original).bind(model, *args, **kwargs).arguments.get("push_to_hub")
    # Transformers puts sharded tensors together in their dtype, which not every backend can send, and then stores tied ones twice;
    # and it looks offloaded tensors up in the model, where those of experts are merged.
    offloaded = any(weights.values.is_meta for weights in packed_projections(model).values())
    if sparsity_config is None and not (kept and (pushed or offloaded or is_sharded(model))):
        return original(model, *args, **kwargs)
    if sparsity_config is None:
        sparsity_config = model.hf_quantizer.quantization_config
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    arguments.pop("self")
    kwargs = arguments.pop("kwargs", {})
    return save_pretrained(model, arguments.pop("save_directory"), sparsity_config, **arguments, **kwargs)


def _push_to_hub(original: Callable[..., Any], model: PreTrainedModel, *args: Any, sparsity_config: Any = None, **kwargs: Any) -> Any:
    if sparsity_config is None and not isinstance(getattr(model, "hf_quantizer", None), Sparse24HfQuantizer):
        return original(model, *args, **kwargs)
    if sparsity_config is None:
        sparsity_config = model.hf_quantizer.quantization_config
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    arguments.pop("self")
    saving = {"max_shard_size": arguments.pop("max_shard_size")} if "max_shard_size" in arguments else {}
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, sparsity_config, **saving)
        with on_first_process(is_sharded(model)) as is_first:
            return _push(model, folder, **arguments) if is_first else None


def _refuse(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, Sparse24HfQuantizer):
        method = quantizer.quantization_config.quant_method
        raise ValueError(f"this model is quantised with {getattr(method, 'value', method)}: dequantize it before it can be stored sparse")
    adapters = any(type(module).__module__.startswith("peft.") for module in model.modules())
    if adapters or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("this model carries a PEFT adapter, of which save_pretrained stores nothing else: merge or delete it first")
    if arguments.get("distributed_checkpoint"):
        raise ValueError("distributed_checkpoint=True cannot be combined with sparsity_config: save dense, then compress the folder")
    if arguments["push_to_hub"] and arguments["variant"]:
        raise ValueError(f"a variant cannot be pushed, got variant={arguments['variant']!r}: save it, then upload it with `hf upload`")
    if os.path.isfile(arguments["save_directory"]):
        raise ValueError(f"{arguments['save_directory']} is a file, expected a folder")


def _view(model: PreTrainedModel, config: SparsityConfig | None) -> PreTrainedModel:
    """The model with a config of its own, as Transformers saves it: without weights."""
    view = object.__new__(type(model))
    view.__dict__.update(model.__dict__)
    own_config = copy.deepcopy(model.config)
    if config is not None:
        own_config.quantization_config = config
    # Only the first process saves a sharded model: Transformers must not wait for the others.
    own_config.__dict__.pop("distributed_config", None)
    view.__dict__.update(config=own_config, hf_quantizer=None, _weight_conversions=[])
    return view


def _write_shards(weights: Mapping[str, Weight], folder: Path, max_shard_size: int | str, variant: str | None, num_parameters: int) -> None:
    """Write every tensor; one shard is in memory at a time."""
    suffix = f".{variant}" if variant else ""
    pattern = WEIGHTS_NAME.replace(".safetensors", f"{suffix}{{suffix}}.safetensors")
    # Tensors that share storage (the experts of a layer, split) go into one file, as they do without us.
    headers = {name: weight.header() for name, weight in weights.items()}
    split = split_torch_state_dict_into_shards(headers, filename_pattern=pattern, max_shard_size=max_shard_size)
    for file, names in logging.tqdm(split.filename_to_tensors.items(), desc="Writing model shards"):
        shard = {name: weights[name].read().detach().cpu().contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        del shard
    if split.is_sharded:
        index = {"metadata": {"total_parameters": num_parameters, **split.metadata}, "weight_map": split.tensor_to_filename}
        write_json(folder / (f"{INDEX_NAME.removesuffix('.json')}{suffix}.json"), index)

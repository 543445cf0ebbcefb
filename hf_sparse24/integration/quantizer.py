"""The Transformers quantizer of models whose layers stay packed.

Dense loading needs none of this: there, Transformers sees the dense checkpoint (load.py).  Two ways lead here:

    packed checkpoint   `update_weight_conversions` puts packed layers where the files hold packed weights; the loader then
                        fills parts as it fills any parameter
    dense checkpoint    `PackOnLoad` runs on each finished weight, after renaming and merging, and swaps the layer; the dense
                        form is freed at once
"""

import copy
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers.base import HfQuantizer

from hf_sparse24.checkpoint import PackedSlice, find_packed, name_of_part, open_file
from hf_sparse24.compressors import PackedTensorError
from hf_sparse24.compressors.base import specs_of
from hf_sparse24.config import SparsityConfig
from hf_sparse24.errors import CheckpointError, get_logger, warn
from hf_sparse24.experts import ExpertWeights, Sparse24Experts, packed_experts, piece, split_parts
from hf_sparse24.fusion import fuse_projections, groups_of
from hf_sparse24.integration.merging import place_packed_experts
from hf_sparse24.integration.sharding import plan_parts
from hf_sparse24.kernels import dispatch
from hf_sparse24.linear import SHAPE_PARTS, PackedLinear, Sparse24Linear
from hf_sparse24.merged import Merged, expert_classes, find_merged, whole_experts
from hf_sparse24.modules import LAYERS, left_out, listed, packable_modules, packed_layers, packed_weights, refusal, tied_names
from hf_sparse24.quantization import common_scheme
from hf_sparse24.quantized_linear import Marlin24Linear, QuantizedLinear

logger = get_logger(__name__)
METHOD = SparsityConfig.quant_method


class Sparse24HfQuantizer(HfQuantizer):
    """Keeps layers packed.

    `kept` maps each packed weight's name in the checkpoint to its module, `pieces` merged parameters of experts to such names;
    `left_dense` says why others are not kept.
    """

    requires_calibration = False

    def __init__(self, quantization_config: SparsityConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized: bool
        self.quantization_config: SparsityConfig
        self.kept: dict[str, str] = {}
        self.left_dense: dict[str, str] = {}
        self.pieces: dict[str, list[list[str]]] = {}
        self.refused: dict[str, str] = {}
        self.fuse_projections: bool = getattr(quantization_config, "fuse_projections", False)
        self._packed: dict[str, PackedSlice] = {}
        self._packed_projections: dict[str, dict[str, ExpertWeights]] = {}
        self._targets: set[str] = set()
        self._merged: dict[str, Merged] = {}
        # Set while a model loads; a reference kept longer would make the model unpicklable.
        self._model: PreTrainedModel | None = None

    # ---- load ------------------------------------------------------------------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to pack while layers are offloaded to disk."""
        if not self.pre_quantized and isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError("a dense checkpoint cannot be packed and offloaded to disk at once: run hf-sparse24 compress DIR OUT first")

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        self._model = model
        if checkpoint_files and all(str(file).endswith(".safetensors") for file in checkpoint_files):
            self._packed = packed_in_files(checkpoint_files, declared=self.pre_quantized)
            # A packed checkpoint without a config, and a user who asks for packed layers.
            self.pre_quantized = self.pre_quantized or bool(self._packed)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel | None = None) -> list[Any]:
        """Put packed layers into the model: here its final list of renamings and merges is known."""
        model, self._model = model or self._model, None
        if model is not None and self._packed:
            self.kept, self.pieces, self.left_dense = place_packed_layers(model, self._packed, weight_conversions)
            plan_parts(model)
            self._packed = {}
            mark_as_used(weight_conversions, [name for names in self.pieces.values() for of_expert in names for name in of_expert])
        elif model is not None and not self.pre_quantized:
            self._choose_targets(model, weight_conversions)
        return weight_conversions

    def _choose_targets(self, model: PreTrainedModel, conversions: list[Any]) -> None:
        """What of a dense checkpoint is packed."""
        config = self.quantization_config
        merged, reasons = find_merged(model, conversions)
        classes = expert_classes(model, merged, reasons)
        selected = set(packable_modules(model, config, classes))
        self._targets = selected.difference(classes)
        if config.compressor.format == ExpertWeights.compressor.format:
            self._merged, partly = whole_experts(selected, merged)
        else:
            reason = f"experts are not kept in the format {config.compressor.format}"
            partly = {parameter.experts: reason for parameter in merged.values() if selected & {name for name, _ in parameter.places()}}
        self.left_dense |= {name: reason for name, reason in reasons.items() if name in selected} | partly

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight of a dense checkpoint is to be packed."""
        if param_name in self._merged:
            return not isinstance(model.get_submodule(self._merged[param_name].experts), Sparse24Experts)
        module = param_name.removesuffix(".weight")
        return module in self._targets and module != param_name and type(model.get_submodule(module)) is nn.Linear

    def get_quantize_ops(self) -> "PackOnLoad":
        """The operation that packs one weight."""
        return PackOnLoad(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._model, self._targets, self._merged = None, set(), {}
        if self._packed_projections and not self.refused:
            found = {name: f"only {', '.join(packed)} is in the checkpoint" for name, packed in self._packed_projections.items()}
            raise CheckpointError(f"experts without all of their weights: {listed(found)}")
        if self.refused:
            raise refusal(self.refused, self.quantization_config)
        check_packed_layers(model)
        kept, experts = packed_layers(model), packed_experts(model)
        if not kept and not experts and not self.pre_quantized and self.quantization_config.on_dense == "raise":
            raise ValueError(f"no weight was packed: {listed(self.left_dense) or 'no targeted Linear has a weight of its own'}")
        if not kept and not experts:
            warn(f"no layer is kept packed: {listed(self.left_dense)}")
        if not self.pre_quantized:
            self.quantization_config.global_sparsity = sparsity_of(model)
        complete_scheme(kept, self.quantization_config)
        mark_as_packed(model, self)
        if self.fuse_projections:
            report = fuse_projections(model)
            if not report.fused:
                reasons = listed(report.left_alone) or "no projections with known names are packed 2:4 without quantisation"
                warn(f"fuse_projections=True fused nothing: {reasons}")
            logger.info(f"projections of {len(report.fused)} modules are fused; left alone: {listed(report.left_alone)}")
        prepare_kernels(kept, model.dtype)
        if self.left_dense:
            logger.info(f"{len(self.left_dense)} packed or targeted weights were left dense: {listed(self.left_dense)}")
        return model

    # ---- afterwards --------------------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The packed tensors in the order in which the save hook writes them: the same shards, the same bytes."""
        merged = model.state_dict()
        state_dict = {name: piece(merged[owner], place) for name, owner, place in split_parts(model, merged)}
        return {name: state_dict[name] for name in sorted(state_dict, key=dot_natural_key)}, {}

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Make every packed layer a plain `nn.Linear`, in place; the model then saves dense.  `dtype` casts those layers only."""
        conversions, own_dtype = getattr(model, "_weight_conversions", None), model.dtype
        for group in groups_of(model):
            group.dissolve(copy=False)
        for name, layer in packed_layers(model).items():
            linear = layer.to_linear()
            # Scales, which give a dequantised weight its dtype, keep their own in a model of any.
            new_dtype = own_dtype if dtype is None and isinstance(layer, QuantizedLinear) else dtype
            model.set_submodule(name, linear.to(new_dtype) if new_dtype is not None else linear)
        for name, experts in packed_experts(model).items():
            model.set_submodule(name, experts.to_experts() if dtype is None else experts.to_experts().to(dtype))
        self.remove_quantization_config(model)
        # Newer versions delete the renamings of the load, which a later save has to undo.
        model._weight_conversions = conversions
        model.__dict__.pop("num_parameters", None)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Packed layers are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained on packed layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        """A packed layer is one operator."""
        return True


class PackOnLoad(ConversionOps):
    """Packs one dense weight and puts the packed layer in its place.

    An exception in here would end in Transformers' report, which names no layer: reasons are collected, and raised after loading.
    """

    def __init__(self, quantizer: Sparse24HfQuantizer):
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: PreTrainedModel,
        full_layer_name: str,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """{name: weight} -> {}, with the layer replaced; or unchanged where the weight stays dense."""
        (weight,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        if full_layer_name in self.quantizer._merged:
            return self._convert_merged(weight, self.quantizer._merged[full_layer_name], model, missing_keys)
        config, name = self.quantizer.quantization_config, full_layer_name.removesuffix(".weight")
        linear = model.get_submodule(name)
        try:
            packed = LAYERS[config.compressor.format].from_parts(config.compressor.compress_weight(weight), linear.bias)
        except ValueError as error:
            if config.on_dense == "skip" or weight.shape[-1] % 4:
                self.quantizer.left_dense[full_layer_name] = str(error)
                return {full_layer_name: weight}
            self.quantizer.refused[full_layer_name] = str(error)
        else:
            self.quantizer.kept[full_layer_name] = name
            model.set_submodule(name, packed)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}

    def _convert_merged(self, weight: Tensor, merged: Merged, model: PreTrainedModel, missing_keys: set[str] | None) -> dict[str, Any]:
        """The same for a projection of experts; their module is replaced when its last projection is packed."""
        quantizer, experts = self.quantizer, model.get_submodule(merged.experts)
        if missing_keys is not None:
            missing_keys.discard(merged.name)
        packed = quantizer._packed_projections.setdefault(merged.experts, {})
        siblings = [other for other in quantizer._merged.values() if other.experts == merged.experts]
        try:
            if dense := next((other.name for other in siblings if other.name in quantizer.left_dense), None):
                raise ValueError(f"{dense} is left dense")
            packed[merged.projection] = ExpertWeights.from_dense(weight, merged.members)
        except ValueError as error:
            if quantizer.quantization_config.on_dense == "raise" and weight.shape[-1] % 4 == 0:
                quantizer.refused[merged.name] = str(error)
                return {}
            quantizer.left_dense[merged.name] = str(error)
            dense_again = quantizer._packed_projections.pop(merged.experts)
            return {merged.name: weight, **{f"{merged.experts}.{name}": weights.unpack() for name, weights in dense_again.items()}}
        if len(packed) == len(siblings):
            model.set_submodule(merged.experts, Sparse24Experts(experts, quantizer._packed_projections.pop(merged.experts)))
        return {}


def packed_in_files(files: list[str], declared: bool) -> dict[str, PackedSlice]:
    """The packed weights in some safetensors files; only headers and shapes are read.

    Args:
        files: Paths.
        declared: See `find_packed`.
    """
    tensors, file_of, handles = {}, {}, []
    for file in files:
        handle = open_file(file)
        handles.append(handle)
        for name in list(handle.keys()):
            tensors[name], file_of[name] = handle.get_slice(name), str(file)
    # Transformers builds models under `torch.device("meta")`, which would make `shape` unreadable.
    with torch.device("cpu"):
        packed = find_packed(tensors, where=lambda name: file_of.get(name, "checkpoint"), declared=declared)
    for handle in handles:
        handle.__exit__(None, None, None)
    return packed


def place_packed_layers(
    model: PreTrainedModel, packed: Mapping[str, PackedSlice], conversions: list[Any]
) -> tuple[dict[str, str], dict[str, list[list[str]]], dict[str, str]]:
    """Replace the layers of an empty model whose weights are packed in the checkpoint.

    Args:
        model: On the meta device.
        packed: Parameter name in the checkpoint -> packed weight.
        conversions: The renamings and merges that the loader will apply.

    Returns:
        Parameter name in the checkpoint -> module name for those that stay packed; the same names for each expert of a merged
        parameter (`PlacedExperts.pieces`); and parameter name -> reason for those that do not stay packed.

    Raises:
        CheckpointError: A renaming treats a weight and its parts differently.
    """
    rename = _renamer(model, conversions)
    tied = tied_names(model)
    kept: dict[str, str] = {}
    left_dense: dict[str, str] = {}
    merged_into: dict[str, str] = {}
    for parameter, weight in packed.items():
        target, merged = rename(parameter)
        if merged:
            merged_into[parameter] = target
            continue
        name = target.removesuffix(".weight")
        reason = _why_dense(model, parameter, name, target, weight, target in tied)
        if reason:
            left_dense[parameter] = reason
            continue
        if name in kept.values():
            raise CheckpointError(f"{weight.where}: {parameter}: the model's {target} is packed under another name, too")
        kept[parameter] = name
        _replace(model, name, weight)
    experts = place_packed_experts(model, packed, merged_into, conversions)
    # Renaming looks at what the model expects: by now, parts.
    rename = _renamer(model, conversions)
    # Parts of experts are shown to the loader merged, under the model's own names.
    for parameter, name in {**kept, **{name: name for name in experts.pieces}}.items():
        value_part = packed.get(parameter, ExpertWeights).compressor.value_part
        part, part_merged = rename(name_of_part(parameter, value_part))
        if part != f"{name}.{value_part}" or part_merged:
            raise CheckpointError(
                f"Transformers loads {parameter} as {name}.weight, but its part as {part}: open this checkpoint with run_compressed=False"
            )
    return kept | experts.kept, experts.pieces, left_dense | experts.left_dense


def _why_dense(model: PreTrainedModel, parameter: str, name: str, target: str, weight: PackedSlice, tied: bool) -> str | None:
    if weight.compressor.format not in LAYERS:
        return f"no layer keeps the format {weight.compressor.format}"
    if name == target or not parameter.endswith(".weight"):
        return "not the weight of a module"
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return f"the model has no module {name}"
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, not a Linear"
    if tied:
        return "tied to another parameter"
    if tuple(module.weight.shape) != weight.shape:
        return f"the model expects shape {tuple(module.weight.shape)}"
    return None


def _replace(model: PreTrainedModel, name: str, weight: PackedSlice) -> None:
    linear = model.get_submodule(name)
    dtype, compressor = linear.weight.dtype, weight.compressor
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    specs = compressor.kept_specs(weight.specs, dtype)
    model.set_submodule(name, LAYERS[compressor.format].from_specs(*sizes, specs, dtype=dtype, device="meta"))


def _renamer(model: PreTrainedModel, conversions: list[Any]) -> Any:
    """Checkpoint name -> (name in the model, whether an operation merges or changes the tensor), as the loader will do it."""
    # Renamings remember what they matched; the loader's own must not be touched.
    conversions = copy.deepcopy(conversions)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    expected = model.state_dict()

    def rename(name: str) -> tuple[str, bool]:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        return target, pattern is not None

    return rename


def mark_as_used(conversions: list[Any], names: list[str]) -> None:
    """Let conversions know of names that they would rename: those that were used are undone on saving."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    for name in names:
        rename_source_key(name, renamings, converters)


def named_twice(names: Mapping[str, tuple[str, bool]]) -> dict[str, str]:
    """Names in a checkpoint that the loader reads into a parameter which an earlier name fills already -> that name."""
    first: dict[str, str] = {}
    return {
        name: f"the model's {target} is stored as {first[target]}, too"
        for name, (target, merged) in names.items()
        if not merged and first.setdefault(target, name) != name
    }


def checkpoint_names(model: PreTrainedModel, parameters: list[str]) -> dict[str, tuple[str, bool]]:
    """Name in a checkpoint -> (parameter of the model, whether it is merged or changed on the way)."""
    rename = _renamer(model, get_model_conversion_mapping(model))
    return {name: rename(name) for name in parameters}


def check_packed_layers(model: nn.Module) -> None:
    """Check the values that were loaded into packed layers.

    Raises:
        CheckpointError: A bitmask or a shape is damaged; names the layer.
    """
    layers = list(packed_weights(model).items())
    on_cpu = all(layer.values.device.type in ("cpu", "meta") and not isinstance(layer.values, DTensor) for _, layer in layers)
    with ThreadPoolExecutor(torch.get_num_threads() if on_cpu else 1) as pool:
        for _ in pool.map(lambda named: _check_layer(*named), layers):
            pass


def _check_layer(name: str, layer: PackedLinear | ExpertWeights) -> None:
    if layer.values.device.type == "meta":  # offloaded to disk
        return
    try:
        layer.check()
    except PackedTensorError as error:
        raise CheckpointError(f"packed layer {name}: {error}") from None


def prepare_kernels(layers: Mapping[str, PackedLinear], dtype: torch.dtype) -> None:
    """Do what the layers' first calls, with x of a dtype, would wait for; warn once about layers for which there is no kernel."""
    shapes_of: dict[tuple[Any, ...], set[tuple[int, int]]] = {}
    for layer in layers.values():
        if isinstance(layer, Sparse24Linear):
            layer.prepare()
        whole = (isinstance(layer, Sparse24Linear) and layer.group) or layer
        if layer.values.device.type != "meta":  # offloaded to disk
            shape = layer.local_shape if whole is layer else (whole.out_features, whole.in_features)
            shapes_of.setdefault(_preparation(layer, dtype), set()).add(shape)
    for (prepare, options), shapes in shapes_of.items():
        if reason := prepare(shapes=shapes, **dict(options)):
            logger.warning_once(f"packed layers unpack their weight for every call, because {reason}")


def _preparation(layer: PackedLinear, dtype: torch.dtype) -> tuple[Callable[..., str | None], tuple[tuple[str, Any], ...]]:
    """What prepares the kernels of a layer, and its arguments beside shapes."""
    options: dict[str, Any] = {"dtype": dtype, "device": dispatch.with_index(layer.values.device)}
    if isinstance(layer, Marlin24Linear):
        grouped = layer.tensors[2].shape[0] > 1
        options |= {"num_bits": layer.num_bits, "grouped": grouped, "scales_permuted": layer.scales_permuted}
        return dispatch.prepare_marlin24, tuple(options.items())
    options["format"] = layer.compressor.format
    if isinstance(layer, QuantizedLinear):
        options |= {"values": layer.values.dtype, "quantize_x": layer.quantize_x}
    else:
        options["dtype"] = layer.values.dtype
    return dispatch.prepare, tuple(options.items())


def complete_scheme(layers: Mapping[str, PackedLinear], config: SparsityConfig) -> None:
    """Tell quantised layers whether activations are quantised, too, and the config how weights are, if no file said it."""
    quantized = [layer for layer in layers.values() if isinstance(layer, QuantizedLinear)]
    if quantized and config.quantization is None:
        config.quantization = common_scheme(layer.compressor.scheme_of(specs_of(layer.parts())) for layer in quantized)
    asked = config.quantization is not None and config.quantization.activations is not None
    for layer in quantized:
        layer.quantize_x = asked or "input_scale" in layer.part_names


def mark_as_packed(model: PreTrainedModel, quantizer: Sparse24HfQuantizer) -> None:
    """Make a model with packed layers one that Transformers treats as quantised by us."""
    for layer in packed_weights(model).values():
        for part in layer.part_names:
            if part not in SHAPE_PARTS:
                getattr(layer, part).requires_grad_(False)
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantizer.quantization_config
    model.is_quantized = True
    model.quantization_method = METHOD
    # Counts of what the checkpoint stands for, in its index file, too.  A partial survives deepcopy and pickle.
    model.num_parameters = functools.partial(_num_parameters, model)


def sparsity_of(model: PreTrainedModel) -> float:
    """Weights that packed layers leave out, over all parameters, as it is stored in the config."""
    return round(left_out(model) / max(1, _num_parameters(model)), 6)


def _num_parameters(model: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """`PreTrainedModel.num_parameters`, with packed layers counted as the dense ones they stand for."""
    count = type(model).num_parameters(model, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    if only_trainable:
        return count
    for layer in packed_weights(model).values():
        stored = sum(getattr(layer, part).numel() for part in layer.part_names if part not in SHAPE_PARTS)
        count += layer.num_weights - stored
    return count


def warn_left_dense(left_dense: Mapping[str, str]) -> None:
    """One warning with the targeted weights that are stored dense."""
    if left_dense:
        warn(f"{len(left_dense)} targeted weights are stored dense: {listed(left_dense)}")

"""What `config.json` says of sparsity: the configs a user builds, and every spelling of them found in published files.

On disk (docs/formats.md), `quantization_config` of a checkpoint of ours is

    quant_method       "compressed-tensors"          the name under which readers of the format look
    version            FORMAT_VERSION                the last compressed-tensors whose files look like ours
    config_groups      {GUARD: ["Linear"]}           makes stock Transformers stop, with GUARD in its error, before any weight is
                                                     read; left out if readable_by="compressed-tensors"
    sparsity_config    format, targets, ignore, ...  the six keys of old, ours behind them
    config_groups, format, ...                       of quantised weights: what the compressor of their format says of them

What is packed is never read from here: the tensors in the file say it (checkpoint.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_sparse24.compressors import QUANTIZED_COMPRESSORS, BaseCompressor, BaseQuantizedCompressor, compressor_for
from hf_sparse24.errors import CheckpointError
from hf_sparse24.quantization import QuantizationScheme

GUARD = "hf-sparse24 (pip install hf-sparse24, then import hf_sparse24)"
FORMAT_VERSION = "0.12.2"
LEGACY_METHOD = "compressed-tensors"
# `quant_method` of checkpoints whose `sparsity_config` is ours to read.  "sparse24" is our name inside Transformers.
OUR_METHODS = (LEGACY_METHOD, "sparse24", "sparseml", "sparsity", None)
# Where `config.json` may say that a checkpoint is sparse.
CONFIG_KEYS = ("quantization_config", "compression_config", "sparsity_config")
LEGACY_KEYS = ("format", "sparsity_structure", "global_sparsity", "registry_requires_subclass", "targets", "ignore")
# Longest text of a hostile value that an error repeats.
SHOWN = 60


class SparsityConfig(BaseModel, QuantizationConfigMixin):
    """Which layers are stored sparse, and how they come back.  Use one of its subclasses.

    Args:
        targets: Modules to pack: a class name ("Linear"; base classes count), a full module name, or "re:PATTERN" matched
            at the start of the module name.  A target that selects nothing is an error.
        ignore: Modules that are never touched, in the same notation; a module's name also covers what it contains.
        on_dense: A targeted weight that does not fit the format: "raise" names it and writes nothing, "skip" stores it
            dense and lists it.
        quantization: Round the weights to 8 or 4 bits as well: "fp8", "int8", "w4a16", "w8a16", or a `QuantizationScheme`.
        readable_by: "compressed-tensors" omits the guard, for readers of compressed-tensors 0.9 to 0.14.
        run_compressed: On load: True keeps the layers packed, False makes plain `nn.Linear`, None keeps them packed if a
            supported GPU is visible.  Not stored.
        global_sparsity: Written on save: left-out weights over all parameters of the checkpoint.
    """

    # Transformers assigns attributes freely (`setattr(config, name, value)`): that is checked, too.
    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    format: ClassVar[str]
    structure: ClassVar[str | None]
    # The registry key of Transformers.  On disk the name is LEGACY_METHOD.
    quant_method: ClassVar[str] = "sparse24"

    targets: list[str] = Field(default_factory=lambda: ["Linear"], min_length=1)
    ignore: list[str] = Field(default_factory=lambda: ["lm_head"])
    on_dense: Literal["raise", "skip"] = "raise"
    quantization: QuantizationScheme | None = None
    readable_by: Literal["hf-sparse24", "compressed-tensors"] = "hf-sparse24"
    run_compressed: bool | None = None
    global_sparsity: float = Field(default=0.0, ge=0.0, le=1.0)

    # Keys of a file that we do not know: kept, and written again.
    _unknown_block_keys: dict[str, Any] = PrivateAttr(default_factory=dict)
    _unknown_keys: dict[str, Any] = PrivateAttr(default_factory=dict)
    # Of a file whose weights are quantised: its schemes of groups, written again as they are.
    _config_groups: dict[str, Any] | None = PrivateAttr(default=None)

    @field_validator("targets", "ignore")
    @classmethod
    def _regular_expressions_compile(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            if entry.startswith("re:"):
                try:
                    re.compile(entry.removeprefix("re:"))
                except (re.error, OverflowError, RecursionError) as error:
                    raise ValueError(f"{_shown(entry)} is not a regular expression: {error}") from None
        return entries

    @field_validator("quantization", mode="before")
    @classmethod
    def _scheme_by_name(cls, value: Any) -> Any:
        return value if value is None else QuantizationScheme.of(value)

    @field_validator("quantization")
    @classmethod
    def _scheme_fits_format(cls, scheme: QuantizationScheme | None) -> QuantizationScheme | None:
        if scheme is not None:
            compressor_for(cls.format, scheme)
        return scheme

    @property
    def compressor(self) -> BaseCompressor:
        """What stores the weights that this config selects."""
        return compressor_for(self.format, self.quantization)

    def ignore_dense(self, modules: Iterable[str]) -> None:
        """Name modules that stay dense: readers of quantised checkpoints take what is not ignored to be quantised."""
        if self.quantization is not None:
            self.ignore = [*self.ignore, *(name for name in modules if name not in self.ignore)]

    @property
    def dequantize(self) -> bool:
        """Whether loading ends in plain dense layers; Transformers reads this name."""
        return self.run_compressed is False

    def to_dict(self) -> dict[str, Any]:
        """The block for `config.json`.  Load options are left out."""
        block = {
            "format": self.compressor.stored_sparsity_format or self.format,
            "sparsity_structure": self.structure,
            "global_sparsity": self.global_sparsity,
            "registry_requires_subclass": False,
            "targets": list(self.targets),
            "ignore": list(self.ignore),
            **self._unknown_block_keys,
        }
        if self.readable_by != "hf-sparse24":
            block["readable_by"] = self.readable_by
        top: dict[str, Any] = {"quant_method": LEGACY_METHOD, "version": FORMAT_VERSION}
        if isinstance(self.compressor, BaseQuantizedCompressor):
            top |= self.compressor.to_block(list(self.targets), list(self.ignore))
        top |= {**self._unknown_keys, "sparsity_config": block}
        if self._config_groups is not None:
            top["config_groups"] = self._config_groups
        if self.readable_by == "hf-sparse24" and top["quant_method"] == LEGACY_METHOD:
            top["config_groups"] = {**top.get("config_groups", {}), GUARD: ["Linear"]}
        return top

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict`: every key is written."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a `quantization_config` block, for Transformers.

        Raises:
            CheckpointError: The block is none of ours, or is refused (see `parse_config`).
        """
        parsed = parse_config({"quantization_config": config_dict})
        if parsed.sparsity is None:
            raise CheckpointError(f"quantization_config describes no sparse checkpoint: {_shown(config_dict)}")
        return (parsed.sparsity, kwargs) if return_unused_kwargs else parsed.sparsity

    def get_loading_attributes(self) -> dict[str, Any]:
        """The options that matter on load."""
        return {"run_compressed": self.run_compressed}


class Sparse24Config(SparsityConfig):
    """Weights with at most two non-zeros in every group of four, stored as `sparse-24-bitmask`; the fields are `SparsityConfig`'s.

    Args:
        fuse_projections: On load: q/k/v and gate/up of layers that stay packed share one weight and one product.  Not stored.
    """

    format: ClassVar[str] = "sparse-24-bitmask"
    structure: ClassVar[str | None] = "2:4"

    fuse_projections: bool = False


class SparseBitmaskConfig(SparsityConfig):
    """Weights with zeros anywhere, stored as `sparse-bitmask`; the fields are `SparsityConfig`'s."""

    format: ClassVar[str] = "sparse-bitmask"
    structure: ClassVar[str | None] = "unstructured"


class DenseSparsityConfig(SparsityConfig):
    """A checkpoint that is stored dense.  Old files carry it beside a dense model; it means nothing."""

    format: ClassVar[str] = "dense"
    structure: ClassVar[str | None] = None


CONFIGS: dict[str, type[SparsityConfig]] = {c.format: c for c in (DenseSparsityConfig, SparseBitmaskConfig, Sparse24Config)}


def as_config(value: "SparsityConfig | Mapping[str, Any] | str") -> SparsityConfig:
    """What a user passed as `sparsity_config`, as a config.

    Args:
        value: A config, a dict of its fields with an optional "format" (default "sparse-24-bitmask"), or a format name.

    Raises:
        ValueError: An unknown format; a dict with unknown fields (pydantic's ValidationError).
        TypeError: Another type.
    """
    if isinstance(value, SparsityConfig):
        return value
    if isinstance(value, str):
        value = {"format": value}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"sparsity_config must be a Sparse24Config, another sparsity config, a dict or a format name, got {type(value).__name__}"
        )
    fields = dict(value)
    name = fields.pop("format", Sparse24Config.format)
    if name not in CONFIGS:
        raise ValueError(f"unknown sparse format {_shown(name)}, expected one of {', '.join(CONFIGS)}")
    return CONFIGS[name](**fields)


@dataclass(frozen=True)
class ParsedConfig:
    """What `config.json` says: `sparsity` is None where nothing of ours is in it; `quantized` tells of a second, other method."""

    sparsity: SparsityConfig | None
    quantized: bool


def parse_config(config: Mapping[str, Any]) -> ParsedConfig:
    """Read every spelling of a sparse checkpoint's config.

    Args:
        config: `config.json` as a dict.  Looked at in this order: `quantization_config`, `compression_config`, a top-level
            `sparsity_config`, then the same in nested configs (`text_config` and the like).

    Returns:
        The sparsity config, and whether the checkpoint is quantised as well.

    Raises:
        CheckpointError: A form that this version cannot read (by name), or a value that is not plain data of the right type.
    """
    top = _find_block(config)
    if top is None:
        return ParsedConfig(None, False)
    block = top.get("sparsity_config")
    if block not in (None, {}, "{}") and not isinstance(block, Mapping):
        raise CheckpointError(f"sparsity_config must be an object, got {_shown(block)}")
    quantized = _is_quantized(top)
    for compressor in QUANTIZED_COMPRESSORS.values():
        if (scheme := compressor.claim(top)) is not None:
            return ParsedConfig(_parse_quantized(scheme, top, compressor.config_format), True)
    method = top.get("quant_method")
    if block in (None, {}, "{}") or not (method is None or isinstance(method, str)) or method not in OUR_METHODS:
        if not (method is None or isinstance(method, str)):
            raise CheckpointError(f"quant_method must be a string, got {_shown(method)}")
        return ParsedConfig(None, quantized)
    sparsity = _parse_block(block, top)
    if quantized and not isinstance(sparsity, DenseSparsityConfig):
        raise CheckpointError(
            f"this checkpoint is quantised ({_shown(top.get('format'))}) and stored as {sparsity.format}, which no format does that "
            "this version of hf-sparse24 reads"
        )
    return ParsedConfig(sparsity, quantized)


def _parse_quantized(scheme: QuantizationScheme, top: Mapping[str, Any], format: str) -> SparsityConfig:
    """The config of weights that are quantised as well, in whichever way a file says so."""
    block = top.get("sparsity_config") or {}
    block = dict(block) if isinstance(block, Mapping) else {}
    block["format"] = format
    if "ignore" not in block and top.get("ignore"):
        block["ignore"] = top["ignore"]
    sparsity = _parse_block(block, top)
    sparsity.quantization = scheme
    groups = top.get("config_groups")
    if isinstance(groups, Mapping):
        sparsity._config_groups = {name: group for name, group in groups.items() if name != GUARD}
    if "quant_method" in top and top["quant_method"] not in OUR_METHODS:
        sparsity._unknown_keys["quant_method"] = top["quant_method"]
    return sparsity


def _find_block(config: Mapping[str, Any]) -> dict[str, Any] | None:
    for key in ("quantization_config", "compression_config"):
        block = config.get(key)
        if isinstance(block, Mapping) and block:
            # 0.4 to 0.6 nested a second `quantization_config` beside `sparsity_config`.
            return (
                {**block, **(block.get("quantization_config") or {})}
                if isinstance(block.get("quantization_config"), Mapping)
                else dict(block)
            )
        if block is not None and not isinstance(block, Mapping):
            if hasattr(block, "to_dict"):
                return block.to_dict()
            raise CheckpointError(f"{key} must be an object, got {_shown(block)}")
    if config.get("sparsity_config") not in (None, {}, "{}"):
        return {"sparsity_config": config["sparsity_config"]}
    for value in config.values():
        nested = _find_block(value) if isinstance(value, Mapping) and "model_type" in value else None
        if nested is not None:
            return nested
    return None


def without_sparsity(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` without any spelling of our block, in nested configs too."""
    kept = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    return {key: without_sparsity(value) if isinstance(value, Mapping) and "model_type" in value else value for key, value in kept.items()}


def _is_quantized(top: Mapping[str, Any]) -> bool:
    """Whether a block says that weights are quantised.  The guard, and groups without weights and activations, say nothing."""
    groups = top.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"config_groups must be an object, got {_shown(groups)}")
    schemes = [group for name, group in groups.items() if name != GUARD]
    empty = all(isinstance(s, Mapping) and not s.get("weights") and not s.get("input_activations") for s in schemes)
    return bool(schemes) and not empty


def _parse_block(block: Any, top: Mapping[str, Any]) -> SparsityConfig:
    if not isinstance(block, Mapping):
        raise CheckpointError(f"sparsity_config must be an object, got {_shown(block)}")
    name = block.get("format")
    if not isinstance(name, str) or name not in CONFIGS:
        raise CheckpointError(f"sparsity_config.format: unknown sparse format {_shown(name)}, expected one of {', '.join(CONFIGS)}")
    _check_structure(block.get("sparsity_structure"))
    fields: dict[str, Any] = {"global_sparsity": block.get("global_sparsity") or 0.0}
    if block.get("readable_by") is not None:
        fields["readable_by"] = block["readable_by"]
    for key in ("targets", "ignore"):
        if block.get(key):
            fields[key] = block[key]
        elif key in block:
            fields[key] = [] if key == "ignore" else ["Linear"]
    try:
        # strict: a file's "1" is no number and its {} no list.
        sparsity = CONFIGS[name].model_validate(fields, strict=True)
    except ValueError as error:
        raise CheckpointError(f"sparsity_config is not valid: {_shown(str(error), 400)}") from None
    sparsity._unknown_block_keys = {k: v for k, v in block.items() if k not in (*LEGACY_KEYS, "readable_by")}
    handled = ("sparsity_config", "quant_method", "version", "config_groups", "run_compressed")
    sparsity._unknown_keys = {k: v for k, v in top.items() if k not in handled}
    if isinstance(top.get("run_compressed"), bool):
        sparsity.run_compressed = top["run_compressed"]
    return sparsity


def _check_structure(structure: Any) -> None:
    if structure is None:
        return
    if not isinstance(structure, str) or not re.fullmatch(r"unstructured|\d{1,3}:\d{1,3}", structure.lower()):
        raise CheckpointError(f'sparsity_structure must be "2:4", another "N:M" or "unstructured", got {_shown(structure)}')


def _shown(value: Any, length: int = SHOWN) -> str:
    text = value if isinstance(value, str) and length != SHOWN else repr(value)
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"

"""Weights of 4 and 8 bits: what a scheme says, as users write it and as files do, and both directions between weights and integers.

    integers = round(weight / scale)        weight ~ integers * scale

A scale belongs to a row ("channel"), to a run of columns of a row ("group"), or to the whole weight ("tensor").  All is symmetric:
there is no zero point, and a zero stays a zero, so that a 2:4 weight stays 2:4.  For float8 an "integer" is a float8 number.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from hf_sparse24.errors import CheckpointError

Format = Literal["float-quantized", "int-quantized", "naive-quantized", "marlin-24", "gptq-marlin-24", "pack-quantized"]
MARLIN: Final = "marlin-24"
GPTQ_MARLIN: Final = "gptq-marlin-24"
PACK: Final = "pack-quantized"
EIGHT_BIT = ("float-quantized", "int-quantized", "naive-quantized")
FLOAT8 = torch.float8_e4m3fn
# A scale that loses more than bfloat16 would does not fit the float16 of the Marlin formats.
MAX_SCALE_ERROR = 2**-8
# The largest integer of a row or group is looked for among so many: all of 4 bits, and of 8 bits what scaling by the largest weight
# gives.  So many rows, and columns, are looked at first.
TRIED, SAMPLED, PROBED = 16, 8, 32
# Elements of a weight that are worked on at a time, in float32.
CHUNK = 1 << 22


class QuantizationScheme(BaseModel):
    """How weights become integers.  `QuantizationScheme.of("w4a16")` and the like are the usual ones, see PRESETS.

    Args:
        num_bits: 8, or 4 for integers without quantised activations.
        type: "int", or "float" for float8_e4m3fn.
        strategy: What shares a scale: "channel" is a row, "group" are `group_size` columns of a row, "tensor" is all.
        group_size: Columns in a group; only for "group".
        symmetric: Always true.
        activations: Whether activations are rounded to 8 bits as well: "dynamic" per token, "static" by a stored scale, or None.
        format: How files store it: "float-quantized", "int-quantized" or "naive-quantized" (8 bits, packed as the sparsity config
            says), "marlin-24" or "gptq-marlin-24" (integers, 2:4, no activations), "pack-quantized" (read only).  None picks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_bits: Literal[4, 8] = 8
    type: Literal["int", "float"] = "int"
    strategy: Literal["channel", "group", "tensor"] = "channel"
    group_size: int | None = Field(default=None, gt=0)
    symmetric: Literal[True] = True
    activations: Literal["dynamic", "static"] | None = None
    format: Format | None = None

    @model_validator(mode="before")
    @classmethod
    def _pick_format(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping) or fields.get("format") is not None:
            return fields
        weight_only, is_float = fields.get("activations") is None, fields.get("type") == "float"
        name = ("naive-quantized" if is_float else MARLIN) if weight_only else ("float-quantized" if is_float else "int-quantized")
        return {**fields, "format": name}

    @model_validator(mode="after")
    def _fits_together(self) -> "QuantizationScheme":
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError(f"strategy {self.strategy!r} and group_size {self.group_size}: groups, and only groups, have a size")
        if self.num_bits == 4 and (self.type == "float" or self.activations or self.format in EIGHT_BIT):
            raise ValueError("4 bits are for integers without quantised activations, in marlin-24 or gptq-marlin-24")
        if self.format in (MARLIN, GPTQ_MARLIN) and (self.type == "float" or self.activations or self.strategy == "tensor"):
            raise ValueError(f"{self.format} holds integers with a scale per channel or group, and no quantised activations")
        if self.format in EIGHT_BIT and self.strategy == "group":
            raise ValueError(f"{self.format} holds a scale per channel or tensor: scales per group are for marlin-24")
        return self

    @classmethod
    def of(cls, value: "QuantizationScheme | Mapping[str, Any] | str") -> "QuantizationScheme":
        """A scheme from its name in PRESETS, or from a dict of its fields.

        Raises:
            ValueError: Another name; a field that is wrong (pydantic's ValidationError).
        """
        if isinstance(value, str):
            if value not in PRESETS:
                raise ValueError(f"unknown quantization {value[:60]!r}, expected one of {', '.join(PRESETS)}, or a QuantizationScheme")
            return PRESETS[value]
        return cls(**value) if isinstance(value, Mapping) else value

    @property
    def int_range(self) -> tuple[int, int]:
        """The smallest and the largest integer.  -128 is for Marlin only: compressed-tensors loses it in the bitmask formats."""
        half = 1 << (self.num_bits - 1)
        return (-half, half - 1) if self.format in (MARLIN, GPTQ_MARLIN, PACK) else (1 - half, half - 1)

    @property
    def largest(self) -> float:
        """The integer to which the largest weight is scaled, as compressed-tensors does it: half of the range for integers."""
        return torch.finfo(FLOAT8).max if self.type == "float" else ((1 << self.num_bits) - 1) / 2


PRESETS = {
    "fp8": QuantizationScheme(type="float", activations="dynamic"),
    "int8": QuantizationScheme(type="int", activations="dynamic"),
    "w4a16": QuantizationScheme(num_bits=4, strategy="group", group_size=128),
    "w8a16": QuantizationScheme(num_bits=8),
}


def common_scheme(schemes: Iterable[QuantizationScheme | None]) -> QuantizationScheme | None:
    """The scheme of layers that each tell what they can of it: one that is a single group wide looks like one per channel."""
    return max((scheme for scheme in schemes if scheme is not None), key=lambda scheme: scheme.group_size or 0, default=None)


# ---- weights and integers -------------------------------------------------------------------------------------------------


def quantize_weight(weight: Tensor, mask: Tensor | None, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """Round a weight to integers, with scales from the largest of the weights that are kept.

    A method that chooses integers better (GPTQ) hands over the same two tensors: `compressor.compress_integers` stores them.

    Args:
        weight: (out_features, in_features), float32, float16 or bfloat16.
        mask: (out_features, in_features), bool, True = kept, or None where the weight's own zeros say it.
        scheme: The scheme.

    Returns:
        integers: (out_features, in_features), int8 or float8_e4m3fn; 0 where nothing is kept.
        scale: (out_features, 1) per channel, (out_features, in_features // group_size) per group, (1,) per tensor; float16 for
            the Marlin formats, else of the weight's dtype.

    Raises:
        ValueError: A weight is NaN or infinite, in_features is no multiple of the group size, or a scale does not fit its dtype.
    """
    if mask is not None:
        weight = weight.masked_fill(~mask, 0)
    if reason := why_not_quantized(weight, scheme):
        raise ValueError(reason)
    return round_weight(weight, scheme)


def round_weight(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """`quantize_weight` without a look at whether the weight can be quantised: a row with NaN or infinite weights becomes NaN."""
    scale = _scale_of(weight, scheme)[0]
    rows = max(1, CHUNK // max(1, weight.shape[1]))
    scales = scale.split(rows) if len(scale) == len(weight) > 1 else [scale] * -(-len(weight) // rows)
    parts = [_round(part, part_scale, scheme) for part, part_scale in zip(weight.split(rows), scales, strict=True)]
    return torch.cat(parts), scale


def why_not_quantized(weight: Tensor, scheme: QuantizationScheme) -> str | None:
    """Why a weight cannot be rounded to integers under a scheme, or None if it can."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"dtype {weight.dtype} cannot be quantised"
    if scheme.strategy == "group" and weight.shape[-1] % (scheme.group_size or 1):
        return f"in_features {weight.shape[-1]} is not a multiple of the group size {scheme.group_size}"
    bad = (~weight.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        return f"{len(bad)} weights are NaN or infinite, the first in row {row}, column {column}"
    scale, exact = _scale_of(weight, scheme)
    unfit = ~scale.isfinite() | ((scale.float() - exact).abs() > MAX_SCALE_ERROR * exact)
    if unfit.any():
        row = int(unfit.nonzero()[0][0])
        return f"the scale {float(exact.flatten()[unfit.flatten().nonzero()[0]]):.3g} of row {row} does not fit {scale.dtype}"
    return None


def _scale_of(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """The scales in the dtype that is stored, and in float32."""
    dtype = torch.float16 if scheme.format in (MARLIN, GPTQ_MARLIN) else weight.dtype
    if scheme.strategy == "tensor":
        largest = weight.abs().amax().view(1) if weight.numel() else weight.new_zeros(1)
    else:
        largest = weight.unflatten(-1, (-1, scheme.group_size or weight.shape[-1])).abs().amax(-1)  # (out, groups)
    exact = largest.float() / scheme.largest
    # Of weights that are all zero: any scale will do, and this is the one of compressed-tensors.
    exact = torch.where(exact == 0, torch.finfo(dtype).eps, exact)
    return exact.to(dtype), exact


def _round(weight: Tensor, scale: Tensor, scheme: QuantizationScheme) -> Tensor:
    # In float16 for Marlin, which is how its files came to be: byte for byte the same.  The bfloat16 in which compressed-tensors
    # divided for the other formats has steps of 1/2 near 127, which costs up to a quarter of an integer more.
    dtype = torch.float16 if scheme.format in (MARLIN, GPTQ_MARLIN) else torch.float32
    quotient = (_by_group(weight.to(dtype), scale) / scale.to(dtype).view(-1, scale.shape[-1], 1)).flatten(1)
    if scheme.type == "float":
        # Scales are exact to MAX_SCALE_ERROR, so that nothing is above 464, from where on a cast gives NaN.
        return quotient.to(FLOAT8)
    return quotient.round_().clamp_(*scheme.int_range).to(torch.int8)


def dequantize(integers: Tensor, scale: Tensor) -> Tensor:
    """The weight that integers stand for.

    Args:
        integers: (out_features, in_features), int8 or float8_e4m3fn: numbers that 16-bit floats hold exactly.
        scale: (out_features, groups), (out_features,), or one element.

    Returns:
        weight: (out_features, in_features), dtype of scale: each product rounded once.
    """
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    return (_by_group(integers.to(scale.dtype), scale) * scale.unsqueeze(-1)).flatten(1)


def exact_integers(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor] | None:
    """The integers and scales of which a weight is the product, so that a weight that was dequantised loses nothing.

    Args:
        weight: (out_features, in_features), float16: integers times float16 scales, each product rounded.
        scheme: Of integers, with a scale per row or group.

    Returns:
        integers and scale as from `quantize_weight`, or None if the weight is no such product (a bfloat16 one is not, as a rule).
    """
    size = scheme.group_size or weight.shape[1]
    if weight.dtype != torch.float16 or scheme.type == "float" or scheme.strategy == "tensor" or weight.shape[1] % size:
        return None
    if len(weight) > SAMPLED and exact_integers(weight[:SAMPLED], scheme) is None:
        return None
    rows = weight.reshape(-1, size)  # (out * groups, size)
    largest = rows.abs().amax(1)
    integers = torch.zeros(rows.shape, dtype=torch.int8, device=weight.device)
    scale = torch.full_like(largest, torch.finfo(torch.float16).eps)
    left = largest.nonzero().flatten()
    low, high = scheme.int_range
    for number in range(-low, max(0, -low - TRIED), -1):
        for step in (0, 1, -1):  # the largest product was rounded, too
            if not len(left):
                return integers.view(weight.shape), scale.view(len(weight), -1)
            tried = ((largest[left] / number).view(torch.int16) + step).view(torch.float16)
            near = _is_product(rows[left, :PROBED], tried, low, high)[0].nonzero().flatten()
            fits, found = _is_product(rows[left[near]], tried[near], low, high)
            fitting = near[fits]
            integers[left[fitting]], scale[left[fitting]] = found[fits].to(torch.int8), tried[fitting]
            left = left[torch.isin(torch.arange(len(left), device=left.device), fitting, invert=True)]
    return None if len(left) else (integers.view(weight.shape), scale.view(len(weight), -1))


def _is_product(rows: Tensor, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Which rows are integers times their scale, and the integers."""
    integers = (rows.float() / scale.float().unsqueeze(1)).round()
    products = integers.to(torch.float16) * scale.unsqueeze(1)
    return ((products == rows) & (integers >= low) & (integers <= high)).all(1), integers


def _by_group(weight: Tensor, scale: Tensor) -> Tensor:
    """(out, in) -> (out, groups, in / groups)."""
    return weight.unflatten(-1, (scale.shape[-1], weight.shape[-1] // scale.shape[-1]))


# ---- config.json ------------------------------------------------------------------------------------------------------------


def group_formats(block: Mapping[str, Any]) -> set[Any]:
    """Every format that a `quantization_config` of compressed-tensors names, for all layers or for a group of them."""
    named = [block.get("format"), *(group.get("format") for group in _groups(block).values())]
    return {name for name in named if isinstance(name, str)}


def _groups(block: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name -> scheme; entries that are no schemes are names of schemes, and left out."""
    groups = block.get("config_groups")
    return {str(name)[:60]: group for name, group in groups.items() if isinstance(group, Mapping)} if isinstance(groups, Mapping) else {}


def scheme_of_groups(block: Mapping[str, Any], format: str) -> QuantizationScheme:
    """The scheme of the first group of layers whose weights are quantised.

    Args:
        block: `quantization_config` of compressed-tensors.
        format: Of the file.

    Raises:
        CheckpointError: There is none, or it is one that this version cannot read: asymmetric for example.
    """
    schemes = {name: group for name, group in _groups(block).items() if group.get("weights")}
    if not schemes:
        raise CheckpointError(f"config_groups of this {format} checkpoint name no scheme of weights")
    name, group = next(iter(schemes.items()))
    weights, inputs = group["weights"], group.get("input_activations")
    if not isinstance(weights, Mapping) or not (inputs is None or isinstance(inputs, Mapping)):
        raise CheckpointError(f"config_groups.{name}: weights and input_activations must be objects")
    if weights.get("symmetric") is False:
        raise CheckpointError(f"config_groups.{name}: asymmetric weights (with zero points) are not read, symmetric ones only")
    fields = {key: weights[key] for key in ("num_bits", "type", "strategy", "group_size") if key in weights}
    if fields.get("strategy") != "group":
        fields.pop("group_size", None)  # -1, or null
    activations = None if not inputs else "dynamic" if inputs.get("dynamic") else "static"
    try:
        return QuantizationScheme.model_validate({**fields, "activations": activations, "format": format}, strict=True)
    except ValueError as error:
        raise CheckpointError(f"config_groups.{name}: not a scheme that is read: {str(error)[:400]}") from None


def block_of_scheme(scheme: QuantizationScheme, targets: list[str], ignore: list[str]) -> dict[str, Any]:
    """What compressed-tensors writes beside `sparsity_config` for a quantised model."""
    return {
        "config_groups": {"group_0": _group_of_scheme(scheme, targets)},
        "format": scheme.format,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "transform_config": {},
    }


def _group_of_scheme(scheme: QuantizationScheme, targets: list[str]) -> dict[str, Any]:
    """A scheme as an entry of `config_groups`, with every key that compressed-tensors writes."""
    common: dict[str, Any] = {"actorder": None, "block_structure": None, "symmetric": True, "observer_kwargs": {}, "type": scheme.type}
    weights = {
        **common,
        "dynamic": False,
        "group_size": scheme.group_size,
        "num_bits": scheme.num_bits,
        "observer": "minmax",
        "strategy": scheme.strategy,
    }
    inputs = {
        **common,
        "dynamic": scheme.activations == "dynamic",
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax" if scheme.activations == "static" else None,
        "strategy": "tensor" if scheme.activations == "static" else "token",
    }
    return {
        "format": scheme.format,
        "input_activations": inputs if scheme.activations else None,
        "output_activations": None,
        "targets": list(targets),
        "weights": weights,
    }

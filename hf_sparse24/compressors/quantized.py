"""`float-quantized`, `int-quantized` and `naive-quantized`: a weight of 8 bits in one of the sparse formats, and its scales.

    compressed, bitmask, ...   as in the sparse format                  float8_e4m3fn or int8
    weight_scale               (R, 1), (R,), or one element             a float dtype, the one of the dense weight
    input_scale                one element, optional                    what static activations are divided by
    weight_zero_point, ...     of symmetric schemes all zero, optional

The dense weight is `compressed * weight_scale`.  A weight that is 8 bits and not sparse (`weight`, `weight_scale`) may lie in the
same checkpoint; it is read the same way.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.compressors.base import BaseCompressor, BaseQuantizedCompressor, Cuts, PackedTensorError, Spec, require_finite, specs_of
from hf_sparse24.quantization import (
    EIGHT_BIT,
    FLOAT8,
    QuantizationScheme,
    group_formats,
    scheme_of_groups,
    why_not_quantized,
)

INTEGERS = (FLOAT8, torch.int8)
ZERO_POINTS = ("weight_zero_point", "input_zero_point")


class QuantizedCompressor(BaseQuantizedCompressor):
    """8-bit values in another format, and scales.

    Args:
        sparsity: The format of the values.
        scheme: To write; a reader needs none.
    """

    optional_parts = ("input_scale", *ZERO_POINTS)

    def __init__(self, sparsity: BaseCompressor, scheme: QuantizationScheme | None = None):
        self.sparsity, self.scheme = sparsity, scheme
        self.format = f"quantized {sparsity.format}"
        self.config_format = sparsity.config_format
        self.parts = (*sparsity.parts, "weight_scale")
        self.key_parts = sparsity.key_parts | {"weight_scale"}
        self.value_part = sparsity.value_part
        # 8-bit weights that are not sparse are stock compressed-tensors' own.
        self.needs_config = sparsity.format == "dense"

    def with_scheme(self, scheme: QuantizationScheme) -> "QuantizedCompressor":
        """The same format, to write under a scheme."""
        return type(self)(self.sparsity, scheme)

    def finds(self, specs: Mapping[str, Spec]) -> bool:
        """Whether the parts are there; beside a dense weight of 16 bits, a scale means nothing."""
        return super().finds(specs) and (self.sparsity.format != "dense" or specs["weight"][0] in INTEGERS)

    def claim(self, block: Mapping[str, Any]) -> QuantizationScheme | None:
        """A block of compressed-tensors with both a sparse format and one of the quantised ones."""
        sparsity = block.get("sparsity_config")
        if self.sparsity.format == "dense" or not isinstance(sparsity, Mapping) or sparsity.get("format") != self.sparsity.format:
            return None
        format = next((name for name in EIGHT_BIT if name in group_formats(block)), None)
        return None if format is None or not block.get("config_groups") else scheme_of_groups(block, format)

    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """As the format of the values has it."""
        return self.sparsity.read_shape(parts)

    def scheme_of(self, specs: Mapping[str, Spec]) -> QuantizationScheme:
        """The scheme, as far as the parts tell it."""
        is_float = specs[self.value_part][0] == FLOAT8
        return QuantizationScheme(
            type="float" if is_float else "int",
            strategy="tensor" if torch.Size(specs["weight_scale"][1]).numel() == 1 else "channel",
            activations="static" if "input_scale" in specs else "dynamic",
        )

    def why_not(self, weight: Tensor) -> str | None:
        """Why this format cannot hold a weight, or None if it can."""
        assert self.scheme is not None
        if self.scheme.activations == "static":
            return "static activations need an input_scale, which only data can give: use dynamic ones"
        return self.sparsity.why_not(weight) or why_not_quantized(weight, self.scheme)

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
        """dtype and shape of each part of a weight of dtype `dtype`."""
        assert self.scheme is not None
        integers = FLOAT8 if self.scheme.type == "float" else torch.int8
        scale = (1,) if self.scheme.strategy == "tensor" else (shape[0], 1)
        return {**self.sparsity.part_specs(shape, integers, num_values), "weight_scale": (dtype, scale)}

    def compress_integers(self, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Store integers and scales as they are.

        Args:
            integers: (out_features, in_features), int8 or float8_e4m3fn, with the zeros that the sparse format needs.
            scale: (out_features, 1), (out_features,) or one element.

        Raises:
            ValueError: The sparse format cannot hold the integers, or a dtype or shape is wrong.
        """
        if integers.dtype not in INTEGERS or scale.numel() not in (1, len(integers)) or scale.shape[1:] not in ((), (1,)):
            found = f"{integers.dtype} {tuple(integers.shape)} with scales {tuple(scale.shape)}"
            raise ValueError(f"expected int8 or float8_e4m3fn integers and a scale per row or one, got {found}")
        return {**self.sparsity.compress_weight(integers), "weight_scale": scale}

    def decompress_integers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The integers, (out_features, in_features), and the scales as they are stored.

        Raises:
            PackedTensorError: The parts disagree with each other, the weight is asymmetric, or a scale is no number.
        """
        values = {part: parts[part] for part in self.sparsity.parts if part in parts}
        integers = self.sparsity.decompress_weight(values)
        self.check_parts(specs_of(parts), tuple(integers.shape))
        self._check_scales(parts)
        return integers, parts["weight_scale"].detach()

    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Check dtypes and shapes of values and scales against each other.

        Raises:
            PackedTensorError: Names the part and both numbers.
        """
        self.require_names(specs)
        self.sparsity.check_parts({part: specs[part] for part in self.sparsity.parts}, shape)
        values, (dtype, scale) = specs[self.value_part][0], specs["weight_scale"]
        if values not in INTEGERS:
            raise PackedTensorError(f"{self.value_part} is {values} beside a weight_scale, expected torch.float8_e4m3fn or torch.int8")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise PackedTensorError(f"weight_scale is {dtype}, expected a float dtype of 16 bits or more")
        if len(shape) != 2 or scale not in ((shape[0], 1), (shape[0],), (1, 1), (1,), ()):
            raise PackedTensorError(f"weight_scale has shape {scale} for a weight of shape {shape}: a scale per row, or one, is read")
        if "input_scale" in specs and torch.Size(specs["input_scale"][1]).numel() != 1:
            raise PackedTensorError(f"input_scale has shape {specs['input_scale'][1]}, expected one element")

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check what is stored beside the values.

        Raises:
            PackedTensorError: As the sparse format has it; the weight is asymmetric, or a scale is no number.
        """
        self.sparsity.check_values(parts, shape, num_values)
        self._check_scales(parts)

    def _check_scales(self, parts: Mapping[str, Tensor]) -> None:
        require_finite(parts, "weight_scale")
        for name in ZERO_POINTS:
            # Not every dtype of a zero point can be compared.
            if name in parts and parts[name].float().any():
                raise PackedTensorError(f"{name} is not zero: asymmetric weights and activations are not read")

    def dense_dtype(self, specs: Mapping[str, Spec]) -> torch.dtype:
        """That of the scales."""
        return specs["weight_scale"][0]

    def num_values(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> int:
        """As the format of the values has it."""
        return self.sparsity.num_values(specs, shape)

    def cuts(self, specs: Mapping[str, Spec]) -> Cuts | None:
        """As the format of the values can be; scales of rows go with them."""
        cuts = self.sparsity.cuts(specs)
        if cuts is None:
            return None
        rows_axis = 0 if torch.Size(specs["weight_scale"][1]).numel() > 1 else None
        whole = {part: (None, None) for part in self.optional_parts if part in specs}
        return replace(cuts, axes={**cuts.axes, "weight_scale": (rows_axis, None), **whole})

    def cut_rows(self, parts: Mapping[str, Any], rows: slice, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The parts of some rows, where the sparse format can do it."""
        cut = self.sparsity.cut_rows(parts, rows, shape)
        if cut is None:
            return None
        scale = parts["weight_scale"]
        per_row = torch.Size(scale.get_shape()).numel() == shape[0] and shape[0] > 1
        rest = {part: parts[part][...] for part in self.optional_parts if part in parts}
        return {**cut, **rest, "weight_scale": scale[rows] if per_row else scale[...]}

"""`pack-quantized`: 4- or 8-bit integers without their 2:4 pattern made use of, as compressed-tensors stores weight-only quantisation.

    weight_packed   (R, ceil(C b / 32))   int32     8 or 4 integers a word, the first in the lowest bits, 2^(b-1) added
    weight_scale    (R, G)                float     G groups of columns, or 1
    weight_shape    (2,)                  int64     [R, C]

Its config may say `sparse-24-bitmask`; nothing in the files is.  Such checkpoints are read here, others by stock Transformers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.compressors.base import BaseQuantizedCompressor, PackedTensorError, Spec, require_finite, shape_of, specs_of
from hf_sparse24.quantization import PACK, QuantizationScheme, group_formats, scheme_of_groups


class PackQuantizedCompressor(BaseQuantizedCompressor):
    """Reads such weights.  Writing them is left to others: a 2:4 weight takes half the bytes as marlin-24."""

    format = PACK
    config_format = "sparse-24-bitmask"
    parts = ("weight_packed", "weight_scale", "weight_shape")
    optional_parts = ("weight_zero_point",)
    key_parts = frozenset({"weight_packed", "weight_scale"})
    value_part = "weight_packed"
    needs_config = True

    def claim(self, block: Mapping[str, Any]) -> QuantizationScheme | None:
        """A block of compressed-tensors that says that the packed weights are sparse as well."""
        sparsity = block.get("sparsity_config")
        is_sparse = isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense")
        return scheme_of_groups(block, PACK) if is_sparse and PACK in group_formats(block) else None

    def why_not(self, weight: Tensor) -> str | None:
        """Always a reason."""
        return f"{PACK} is read, not written: use marlin-24"

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
        """Never asked for.

        Raises:
            ValueError: Always.
        """
        raise ValueError(self.why_not(torch.empty(0)))

    def compress_integers(self, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Not written.

        Raises:
            ValueError: Always.
        """
        raise ValueError(self.why_not(integers))

    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """What weight_shape holds."""
        if "weight_shape" not in parts:
            raise PackedTensorError("the part weight_shape is missing")
        if torch.Size(parts["weight_shape"].get_shape()).numel() != 2:
            raise PackedTensorError(f"weight_shape has shape {tuple(parts['weight_shape'].get_shape())}, expected two sizes")
        shape = parts["weight_shape"][...]
        if shape.is_floating_point():
            raise PackedTensorError(f"weight_shape is {shape.dtype}, expected integers")
        return shape_of(shape)

    def scheme_of(self, specs: Mapping[str, Spec]) -> QuantizationScheme | None:
        """Unknown: 4 and 8 bits look alike without the shape."""
        return None

    def decompress_integers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The integers, (out_features, in_features) int8, and the scales.

        Raises:
            PackedTensorError: The parts disagree with each other, or the weight is asymmetric.
        """
        shape = shape_of(parts["weight_shape"])
        self.check_parts(specs_of(parts), shape)
        self.check_values(parts, shape, 0)
        return unpack_words(parts["weight_packed"].detach(), shape[1]), parts["weight_scale"].detach()

    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Check dtypes and shapes against each other.

        Raises:
            PackedTensorError: Names the part and both numbers.
        """
        self.require_names(specs)
        rows, columns = shape
        (dtype, packed), (scale_dtype, scale) = specs["weight_packed"], specs["weight_scale"]
        if dtype != torch.int32 or len(packed) != 2 or packed[0] != rows or not _num_bits(packed[1], columns):
            raise PackedTensorError(
                f"weight_packed is {dtype} of shape {packed}, which is neither 4 nor 8 bits for a weight of shape {shape}"
            )
        if not scale_dtype.is_floating_point or len(scale) != 2 or scale[0] != rows or not scale[1] or columns % scale[1]:
            raise PackedTensorError(f"weight_scale is {scale_dtype} of shape {scale}, which fits no weight of shape {shape}")

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check that there are no zero points, and that scales are numbers.

        Raises:
            PackedTensorError: There are, or a scale is none.
        """
        require_finite(parts, "weight_scale")
        if "weight_zero_point" in parts and parts["weight_zero_point"].any():
            raise PackedTensorError("weight_zero_point is not zero: asymmetric weights are not read")

    def dense_dtype(self, specs: Mapping[str, Spec]) -> torch.dtype:
        """That of the scales."""
        return specs["weight_scale"][0]

    def num_values(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> int:
        """Every weight."""
        return shape[0] * shape[1]


def unpack_words(weight_packed: Tensor, columns: int) -> Tensor:
    """The integers of a weight_packed that was checked: (out_features, columns), int8."""
    num_bits = _num_bits(weight_packed.shape[1], columns)
    packed = weight_packed.contiguous().view(torch.uint8)
    if num_bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return (packed[:, :columns].to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)


def _num_bits(words: int, columns: int) -> int:
    """4 or 8, or 0 if so many words a row hold neither."""
    return next((bits for bits in (4, 8) if columns and words == -(-columns * bits // 32)), 0)

"""Linear layers that hold 2:4 weights of 8 or 4 bits, as their files do.

    y = x (integers * scales)^T + b

The integers stay as they are stored, on every device; `weight` answers with the dequantised weight.  Moving a layer to another dtype
changes its bias only: scales keep the dtype in which they were stored, and integers are no numbers to be cast.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_sparse24.compressors import (
    BaseCompressor,
    GptqMarlin24Compressor,
    Marlin24Compressor,
    PackQuantizedCompressor,
    QuantizedCompressor,
    Sparse24Compressor,
    SparseBitmaskCompressor,
    compressor_for,
)
from hf_sparse24.compressors.base import Spec
from hf_sparse24.compressors.pack_quantized import unpack_words
from hf_sparse24.kernels import dispatch, ops
from hf_sparse24.linear import PackedLinear
from hf_sparse24.quantization import QuantizationScheme, dequantize


class QuantizedLinear(PackedLinear):
    """A layer whose weight is stored as integers and scales; use a subclass."""

    quantize_x: bool = False
    """Whether the checkpoint asks for activations of 8 bits: kernels may then round x, where that is faster."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: QuantizationScheme | str) -> PackedLinear:
        """Quantise and pack a layer.

        Args:
            linear: Its weight must fit the format; it is not changed, the bias is shared.
            scheme: A scheme of this layer's format, or its name.

        Raises:
            ValueError: The weight or the scheme does not fit.
        """
        scheme = QuantizationScheme.of(scheme)
        compressor = compressor_for(cls.compressor.config_format, scheme)
        if compressor.format != cls.compressor.format:
            raise ValueError(f"a {cls.__name__} holds {cls.compressor.format}, not {compressor.format}")
        layer = cls.from_parts(compressor.compress_weight(linear.weight), linear.bias)
        assert isinstance(layer, QuantizedLinear)
        layer.quantize_x = scheme.activations is not None
        return layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        parts = [getattr(self, part) for part in self.part_names]

        def keep_dtype(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            is_cast = changed.dtype != tensor.dtype and any(tensor is part for part in parts)
            return tensor.to(changed.device) if is_cast else changed

        return super()._apply(keep_dtype, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), of the dtype of x."""
        bias: Tensor | None = self._parameters["bias"]  # not as an attribute, as in linear.py
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
        return self._multiply(x, bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self.unpack().to(x.dtype), bias)


class QuantizedSparse24Linear(QuantizedLinear):
    """A layer with a 2:4 weight of 8 bits; 5/16 of the bytes of bfloat16, and scales."""

    compressor: ClassVar[BaseCompressor] = QuantizedCompressor(Sparse24Compressor())
    compressed: nn.Parameter
    bitmask: nn.Parameter
    weight_scale: nn.Parameter

    def unpack(self) -> Tensor:
        """The dequantised weight (out_features, in_features), dtype of weight_scale."""
        return ops.dequantize_8bit(self.compressed, self.bitmask, self.weight_scale, self.local_shape[1])

    def _choose(self, rows: int, dtype: torch.dtype, device: torch.device, moved: bool) -> dispatch.Choice[Any]:
        options: dict[str, Any] = {"values": self.values.dtype, "quantize_x": self.quantize_x}
        return dispatch.choose(self.out_features, self.in_features, rows, dtype, device, **options)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parameters: dict[str, Any] = self._parameters
        packed = parameters["compressed"], parameters["bitmask"], parameters["weight_scale"]
        return ops.linear_8bit(x, *packed, parameters.get("input_scale"), bias, self.local_shape[1], self.quantize_x)


class QuantizedSparseBitmaskLinear(QuantizedSparse24Linear):
    """A layer with a weight of 8 bits that has zeros anywhere."""

    compressor: ClassVar[BaseCompressor] = QuantizedCompressor(SparseBitmaskCompressor())

    def _choose(self, *problem: Any, **moved: Any) -> dispatch.Choice[Any]:
        return QuantizedLinear._choose(self, *problem, **moved)


class Marlin24Linear(QuantizedLinear):
    """A layer with a 2:4 weight of 4 or 8 bits in Marlin's order, and scales per row or for groups of 128 columns."""

    compressor: ClassVar[BaseCompressor] = Marlin24Compressor()
    num_bits: int
    """4 or 8."""
    scales_permuted: bool
    """Whether each run of eight scales is stored as 0 4 1 5 2 6 3 7; the GPTQ spelling has another rule for that."""

    def _register(self, in_features: int, out_features: int, bias: bool, specs: Mapping[str, Spec], *args: Any) -> None:
        super()._register(in_features, out_features, bias, specs, *args)
        assert isinstance(self.compressor, Marlin24Compressor)
        self.num_bits = self.compressor.num_bits(specs)
        self.scales_permuted = self.compressor.scales_permuted(in_features, specs[self.compressor.parts[2]][1][0])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Integers, metadata and scales, whatever their names are."""
        parameters: dict[str, Any] = self._parameters
        packed, meta, scale = self.compressor.parts
        return parameters[packed], parameters[meta], parameters[scale]

    def unpack(self) -> Tensor:
        """The dequantised weight (out_features, in_features), float16."""
        return ops.dequantize_marlin24(*self.tensors, self.num_bits, self.scales_permuted)

    def _choose(self, rows: int, dtype: torch.dtype, device: torch.device, moved: bool) -> dispatch.Choice[Any]:
        options: dict[str, Any] = {"num_bits": self.num_bits, "grouped": self.tensors[2].shape[0] > 1}
        return dispatch.choose_marlin24(self.out_features, self.in_features, rows, dtype, device, **options)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear_marlin24(x, *self.tensors, bias, self.num_bits, self.scales_permuted)


class GptqMarlin24Linear(Marlin24Linear):
    """The same under the names of GPTQ's checkpoints."""

    compressor: ClassVar[BaseCompressor] = GptqMarlin24Compressor()


class PackQuantizedLinear(QuantizedLinear):
    """A layer with a weight of 4 or 8 bits that is not stored sparse; it is unpacked for every call."""

    compressor: ClassVar[BaseCompressor] = PackQuantizedCompressor()
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def unpack(self) -> Tensor:
        """The dequantised weight (out_features, in_features), dtype of weight_scale.  Parts are checked on loading, not here."""
        return dequantize(unpack_words(self.weight_packed.detach(), self.in_features), self.weight_scale.detach())

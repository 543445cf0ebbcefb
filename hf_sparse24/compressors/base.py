"""What every on-disk format answers, and the bit order that the bitmask formats share.

A weight of shape (out_features, in_features) is stored as named parts.  Bit k of byte j in row r of `bitmask` is 1 if and
only if element (r, 8 j + k) is stored; each row fills whole bytes, unused high bits are 0.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_sparse24.quantization import QuantizationScheme, block_of_scheme, dequantize, exact_integers, quantize_weight

# dtype and shape of a tensor.
Spec = tuple[torch.dtype, tuple[int, ...]]
STORABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# numpy knows no bfloat16 and no fp8: weights are moved as words of the same width.
WORDS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


class PackedTensorError(ValueError):
    """The parts of one packed weight disagree with each other."""


class BaseCompressor(ABC):
    """Turns one weight into named parts and back; knows the format's parts, and the configs that announce them.

    A format of its own is a subclass in a file of its own, and a line in `compressors/__init__.py`.
    """

    format: str
    """Name of the format; that of a sparsity format is also in `sparsity_config.format`."""
    parts: tuple[str, ...]
    """Suffixes of the stored tensors, in the order in which a module registers them."""
    optional_parts: tuple[str, ...] = ()
    """Suffixes of tensors that may lie beside them."""
    key_parts: frozenset[str]
    """Suffixes by which the format is known; of the formats that are found, the one with the most."""
    value_part: str = "compressed"
    """The largest part, which is not read to check a weight."""
    config_format: str
    """Format of the sparsity config that stands for it."""
    stored_sparsity_format: str | None = None
    """What files say in `sparsity_config.format` instead."""
    needs_config: bool = False
    """Whether a config must say that the checkpoint is ours, because others read such tensors, too."""
    scheme: QuantizationScheme | None = None

    @abstractmethod
    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Store a weight as its parts; raises ValueError where the format cannot hold it."""

    @abstractmethod
    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The dense weight of `compress_weight`'s parts; raises PackedTensorError if they disagree."""

    @abstractmethod
    def why_not(self, weight: Tensor) -> str | None:
        """Why this format cannot hold the weight, or None if it can."""

    @abstractmethod
    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
        """dtype and shape of each part of a weight of this shape and dtype with `num_values` stored values, without making them."""

    @abstractmethod
    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """Sizes of the dense weight, from open slices of its parts; raises PackedTensorError if they do not say."""

    @abstractmethod
    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Compare dtypes and shapes of parts, as a header states them, with what a weight of `shape` needs; raises PackedTensorError."""

    @abstractmethod
    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check what is stored beside the values against their number; raises PackedTensorError."""

    def finds(self, specs: Mapping[str, Spec]) -> bool:
        """Whether tensors with these suffixes beside each other are a weight of this format (if no other format knows more of them)."""
        return self.key_parts <= specs.keys()

    def dense_dtype(self, specs: Mapping[str, Spec]) -> torch.dtype:
        """Of the dense weight."""
        return specs[self.value_part][0]

    def kept_specs(self, specs: Mapping[str, Spec], dtype: torch.dtype) -> dict[str, Spec]:
        """Parts as a layer holds them in a model that is loaded with a dtype."""
        return dict(specs)

    def num_values(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> int:
        """How many values are stored."""
        return math.prod(specs[self.value_part][1])

    def scheme_of(self, specs: Mapping[str, Spec]) -> QuantizationScheme | None:
        """What the parts tell of the scheme."""
        return None

    def cut_rows(self, parts: Mapping[str, Any], rows: slice, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The parts of some rows, from open slices, or None where rows cannot be unpacked on their own."""
        return None

    def cuts(self, specs: Mapping[str, Spec]) -> "Cuts | None":
        """How a weight with these parts is divided over processes, or None where it cannot be."""
        return None

    def require_names(self, specs: Mapping[str, Spec]) -> None:
        """Raise PackedTensorError if parts are missing or superfluous."""
        missing, extra = sorted(set(self.parts) - set(specs)), sorted(set(specs) - {*self.parts, *self.optional_parts})
        if missing or extra:
            wrong = f"missing {missing or 'none'}, superfluous {extra or 'none'}"
            raise PackedTensorError(f"expected the parts {', '.join(self.parts)}; {wrong}")


@dataclass(frozen=True)
class Cuts:
    """How a packed weight is divided over processes.

    `axes` tells along which axis of each part the weight's rows, and its columns, lie; None: every piece needs all of the part.
    A cut between rows may stand at multiples of `rows`, one between columns at multiples of `columns`.
    """

    axes: Mapping[str, tuple[int | None, int | None]]
    rows: int
    columns: int


class BaseQuantizedCompressor(BaseCompressor):
    """A format of integers and scales.

    Args:
        scheme: To write; a reader needs none.
    """

    def __init__(self, scheme: QuantizationScheme | None = None):
        self.scheme = scheme

    def with_scheme(self, scheme: QuantizationScheme) -> "BaseQuantizedCompressor":
        """The same format, to write under a scheme."""
        return type(self)(scheme)

    @abstractmethod
    def claim(self, block: Mapping[str, Any]) -> QuantizationScheme | None:
        """The scheme, if a `quantization_config` announces weights of this format, whichever method it names."""

    def to_block(self, targets: list[str], ignore: list[str]) -> dict[str, Any]:
        """What `quantization_config` says of this format, beside the sparsity config: as compressed-tensors has it."""
        assert self.scheme is not None
        return block_of_scheme(self.scheme, targets, ignore)

    @abstractmethod
    def compress_integers(self, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Store integers and scales as they are; raises ValueError where the format cannot hold them."""

    @abstractmethod
    def decompress_integers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The integers, (out_features, in_features), and the scales; raises PackedTensorError if the parts disagree."""

    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The dense weight, integers times scales; raises PackedTensorError if the parts disagree."""
        return dequantize(*self.decompress_integers(parts))

    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise and store a weight; one that is float16 and was dequantised gets its integers back.

        Args:
            weight: (out_features, in_features), float32, float16 or bfloat16, with the zeros that the format needs.

        Returns:
            The parts, on the weight's device.

        Raises:
            ValueError: `why_not`.
        """
        weight = weight.detach()
        if reason := self.why_not(weight):
            raise ValueError(reason)
        return self.compress_integers(*self.quantize(weight))

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The integers and scales that `compress_weight` stores."""
        assert self.scheme is not None
        return exact_integers(weight, self.scheme) or quantize_weight(weight, None, self.scheme)


class BaseSparsityCompressor(BaseCompressor):
    """A format that leaves out zeros."""

    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """What the `shape` part holds."""
        if "shape" not in parts:
            raise PackedTensorError("the part shape is missing")
        return shape_of(parts["shape"][...])

    def kept_specs(self, specs: Mapping[str, Spec], dtype: torch.dtype) -> dict[str, Spec]:
        """Values in the model's dtype, as those of any layer."""
        return {**specs, "compressed": (dtype, specs["compressed"][1])}

    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Compare dtypes and shapes of stored parts with what a weight of `shape` needs.

        Args:
            specs: dtype and shape of each part, as a file's header states them.
            shape: What the `shape` part holds.

        Raises:
            PackedTensorError: A part is missing or superfluous, or its dtype or shape is wrong; names the part and both numbers.
        """
        self.require_names(specs)
        if any(size < 0 for size in shape):
            raise PackedTensorError(f"shape holds a negative size: {shape}")
        dtype, values_shape = specs["compressed"]
        if dtype not in STORABLE_DTYPES:
            raise PackedTensorError(f"compressed has dtype {dtype}, expected one of {', '.join(str(d) for d in STORABLE_DTYPES)}")
        expected = self.part_specs(shape, dtype, math.prod(values_shape))
        for part, (expected_dtype, expected_shape) in expected.items():
            found_dtype, found_shape = specs[part]
            # The two formats write `shape` as (2, 1) or (2,): any shape with as many elements is read.
            same_shape = math.prod(found_shape) == math.prod(expected_shape) if part == "shape" else found_shape == expected_shape
            if found_dtype != expected_dtype or not same_shape:
                raise PackedTensorError(
                    f"{part} is {found_dtype} of shape {found_shape}, but a weight of shape {shape} needs "
                    f"{expected_dtype} of shape {expected_shape}"
                )


def specs_of(parts: Mapping[str, Tensor]) -> dict[str, Spec]:
    """dtype and shape of each part."""
    return {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}


def shape_of(shape_part: Tensor) -> tuple[int, ...]:
    """The sizes that a `shape` part holds."""
    return tuple(int(size) for size in shape_part.flatten().tolist())


def require_storable(weight: Tensor) -> None:
    """Raise ValueError for a dtype that no format stores."""
    if weight.dtype not in STORABLE_DTYPES:
        raise ValueError(f"dtype {weight.dtype} cannot be stored sparse, expected one of {', '.join(str(d) for d in STORABLE_DTYPES)}")


def require_finite(parts: Mapping[str, Tensor], part: str) -> None:
    """Raise PackedTensorError if a part holds NaN or infinity."""
    if not parts[part].float().isfinite().all():
        raise PackedTensorError(f"{part} holds values that are NaN or infinite")


def as_words(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array of unsigned words, one per element; no copy."""
    torch_word, numpy_word = WORDS[tensor.element_size()]
    return tensor.detach().view(torch_word).numpy().view(numpy_word)


def empty_words(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    """An uninitialised CPU tensor and its words.  numpy asks for huge pages, which halves the cost of touching the memory first."""
    words = np.empty(shape, WORDS[dtype.itemsize][1])
    # numpy gives an empty array strides of 0, which torch's views refuse.
    return torch.from_numpy(words).view(dtype) if words.size else torch.empty(shape, dtype=dtype), words


class Scratch(threading.local):
    """Memory that each thread of a loop uses again and again: malloc may hand out fresh memory, at a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """An array in the thread's memory of this name: first asked for at its largest, and always with the same dtype."""
        size = math.prod(shape)
        if name not in self._arrays:
            self._arrays[name] = np.empty(size, dtype)
        return self._arrays[name][:size].reshape(shape)

    def cast(self, name: str, array: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
        """`array.astype(dtype)`."""
        cast = self.empty(name, array.shape, dtype)
        cast[...] = array
        return cast

    def look_up(self, name: str, table: np.ndarray, index: np.ndarray) -> np.ndarray:
        """`table[index]` of (n, k) and (rows, columns), as (rows, columns * k).  The indices must be valid."""
        found = self.empty(name, (*index.shape, table.shape[1]), table.dtype)
        np.take(table, index, axis=0, out=found, mode="clip")  # numpy is fastest in this mode
        return found.reshape(len(index), -1)


def pack_bits(mask: Tensor) -> Tensor:
    """(..., C) bool -> (..., ceil(C / 8)) uint8, lowest column in the lowest bit."""
    columns = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -columns % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (padded.shape[-1] // 8, 8)) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bitmask: Tensor, columns: int) -> Tensor:
    """(..., ceil(columns / 8)) uint8 -> (..., columns) bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    bits = (bitmask.unsqueeze(-1) >> shifts) & 1  # (..., bytes, 8)
    return bits.flatten(-2)[..., :columns].bool()


def bits_per_nibble(bitmask: Any) -> Any:
    """How many bits each nibble of each byte has, as a byte of two nibbles; bitmask and result are uint8 arrays of numpy or torch."""
    pairs = bitmask - ((bitmask >> 1) & 0x55)
    return (pairs & 0x33) + ((pairs >> 2) & 0x33)


def pad_bits_are_zero(bitmask: Tensor, columns: int) -> bool:
    """Whether the unused high bits of each row's last byte are 0."""
    used = columns % 8
    return not used or not bitmask.numel() or not bool((bitmask[..., -1] >> used).any())

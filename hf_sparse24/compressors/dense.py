"""`dense`: the weight as it is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.compressors.base import BaseCompressor, PackedTensorError, Spec


class DenseCompressor(BaseCompressor):
    """The format of a weight that is stored under its own name; a `sparsity_config` may name it, and means nothing by it."""

    format = config_format = "dense"
    parts = ("weight",)
    key_parts = frozenset({"weight"})
    value_part = "weight"

    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """`{"weight": weight}`, any shape and dtype."""
        return {"weight": weight}

    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """`parts["weight"]`."""
        return parts["weight"]

    def why_not(self, weight: Tensor) -> str | None:
        """None."""
        return None

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
        """The weight's own."""
        return {"weight": (dtype, shape)}

    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """The weight's own."""
        return tuple(parts["weight"].get_shape())

    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Check that there are two axes.

        Raises:
            PackedTensorError: There are others.
        """
        if len(shape) != 2:
            raise PackedTensorError(f"weight has shape {shape}, expected two axes")

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Nothing stands beside the values."""

    def cut_rows(self, parts: Mapping[str, Any], rows: slice, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The rows."""
        return {"weight": parts["weight"][rows]}

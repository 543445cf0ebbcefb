"""`dense`: the weight as it is."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from hf_sparse24.compressors.base import BaseCompressor


class DenseCompressor(BaseCompressor):
    """The format of a weight that is stored under its own name; a `sparsity_config` may name it, and means nothing by it."""

    format: ClassVar[str] = "dense"
    parts: ClassVar[tuple[str, ...]] = ("weight",)

    def compress_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """`{"weight": weight}`, any shape and dtype."""
        return {"weight": weight}

    def decompress_weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """`parts["weight"]`."""
        return parts["weight"]

"""One file per on-disk format; tensors in, tensors out.  A compressor knows nothing of models or files."""

from collections.abc import Mapping

from hf_sparse24.compressors.base import BaseCompressor, BaseQuantizedCompressor, BaseSparsityCompressor, PackedTensorError, Spec
from hf_sparse24.compressors.dense import DenseCompressor
from hf_sparse24.compressors.marlin24 import GptqMarlin24Compressor, Marlin24Compressor
from hf_sparse24.compressors.pack_quantized import PackQuantizedCompressor
from hf_sparse24.compressors.quantized import QuantizedCompressor
from hf_sparse24.compressors.semi_structured import (
    from_semi_structured,
    semi_structured_from_dense,
    semi_structured_to_dense,
    to_semi_structured,
)
from hf_sparse24.compressors.sparse24 import Sparse24Compressor
from hf_sparse24.compressors.sparse_bitmask import SparseBitmaskCompressor
from hf_sparse24.quantization import EIGHT_BIT, QuantizationScheme

SPARSITY_COMPRESSORS: dict[str, BaseSparsityCompressor] = {
    compressor.format: compressor for compressor in (SparseBitmaskCompressor(), Sparse24Compressor())
}
DENSE = DenseCompressor()
_QUANTIZED: tuple[BaseQuantizedCompressor, ...] = (
    *(QuantizedCompressor(sparsity) for sparsity in (DENSE, *SPARSITY_COMPRESSORS.values())),
    PackQuantizedCompressor(),
    Marlin24Compressor(),
    GptqMarlin24Compressor(),
)
QUANTIZED_COMPRESSORS = {compressor.format: compressor for compressor in _QUANTIZED}
COMPRESSORS: dict[str, BaseCompressor] = {DENSE.format: DENSE, **SPARSITY_COMPRESSORS, **QUANTIZED_COMPRESSORS}
# Suffixes of all parts, those under which a dense weight is stored excepted.
PART_SUFFIXES = tuple(dict.fromkeys(part for c in COMPRESSORS.values() for part in (*c.parts, *c.optional_parts) if part != "weight"))


def compressor_for(sparsity_format: str, scheme: QuantizationScheme | None = None) -> BaseCompressor:
    """What stores weights in a sparsity format, quantised under a scheme if there is one.

    Raises:
        ValueError: The two do not go together.
    """
    if scheme is None:
        return DENSE if sparsity_format == DENSE.format else SPARSITY_COMPRESSORS[sparsity_format]
    name = f"quantized {sparsity_format}" if scheme.format in EIGHT_BIT else str(scheme.format)
    compressor = QUANTIZED_COMPRESSORS[name]
    if compressor.config_format != sparsity_format or sparsity_format == DENSE.format:
        raise ValueError(f"{scheme.format} cannot hold weights in the sparsity format {sparsity_format}")
    return compressor.with_scheme(scheme)


def find_compressor(specs: Mapping[str, Spec], declared: bool) -> BaseCompressor | None:
    """The format of the tensors beside each other, by their suffixes; None if they are no packed weight.

    Args:
        specs: Suffix -> dtype and shape.
        declared: Whether the config says that the checkpoint is ours.
    """
    found = [c for c in COMPRESSORS.values() if c.format != DENSE.format and (declared or not c.needs_config) and c.finds(specs)]
    return max(found, key=lambda compressor: len(compressor.key_parts), default=None)


__all__ = [
    "COMPRESSORS",
    "PART_SUFFIXES",
    "QUANTIZED_COMPRESSORS",
    "SPARSITY_COMPRESSORS",
    "BaseCompressor",
    "BaseQuantizedCompressor",
    "BaseSparsityCompressor",
    "DenseCompressor",
    "GptqMarlin24Compressor",
    "Marlin24Compressor",
    "PackQuantizedCompressor",
    "PackedTensorError",
    "QuantizedCompressor",
    "Sparse24Compressor",
    "SparseBitmaskCompressor",
    "compressor_for",
    "find_compressor",
    "from_semi_structured",
    "semi_structured_from_dense",
    "semi_structured_to_dense",
    "to_semi_structured",
]

"""One file per on-disk format; tensors in, tensors out.  A compressor knows nothing of models or files."""

from hf_sparse24.compressors.base import BaseCompressor, BaseSparsityCompressor, PackedTensorError
from hf_sparse24.compressors.dense import DenseCompressor
from hf_sparse24.compressors.semi_structured import (
    from_semi_structured,
    semi_structured_from_dense,
    semi_structured_to_dense,
    to_semi_structured,
)
from hf_sparse24.compressors.sparse24 import Sparse24Compressor
from hf_sparse24.compressors.sparse_bitmask import SparseBitmaskCompressor

COMPRESSORS: dict[str, BaseCompressor] = {
    compressor.format: compressor for compressor in (DenseCompressor(), SparseBitmaskCompressor(), Sparse24Compressor())
}

SPARSITY_COMPRESSORS: dict[str, BaseSparsityCompressor] = {
    compressor.format: compressor for compressor in COMPRESSORS.values() if isinstance(compressor, BaseSparsityCompressor)
}


__all__ = [
    "COMPRESSORS",
    "SPARSITY_COMPRESSORS",
    "BaseCompressor",
    "BaseSparsityCompressor",
    "DenseCompressor",
    "PackedTensorError",
    "Sparse24Compressor",
    "SparseBitmaskCompressor",
    "from_semi_structured",
    "semi_structured_from_dense",
    "semi_structured_to_dense",
    "to_semi_structured",
]

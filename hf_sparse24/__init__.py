"""2:4 (semi-structured) sparsity for Hugging Face Transformers.

Importing registers with Transformers: `from_pretrained` opens sparse checkpoints, `save_pretrained` takes `sparsity_config=`.
"""

from typing import TYPE_CHECKING, Any

from hf_sparse24 import pruning as _pruning
from hf_sparse24.activation import (
    ActivationReport,
    ActivationSparsityConfig,
    ActivationStatistics,
    densify_activations,
    measure_activation_sparsity,
    sparsify_activations,
)
from hf_sparse24.config import DenseSparsityConfig, Sparse24Config, SparseBitmaskConfig, SparsityConfig
from hf_sparse24.errors import CheckpointError
from hf_sparse24.experts import Sparse24Experts
from hf_sparse24.fusion import FusionReport, fuse_projections, unfuse_projections
from hf_sparse24.integration import load as _load
from hf_sparse24.integration import save as _save
from hf_sparse24.linear import Sparse24Linear, SparseBitmaskLinear
from hf_sparse24.model_compressor import ModelCompressor
from hf_sparse24.pruning import PruneReport, distill, keep_masks, prune
from hf_sparse24.quantization import QuantizationScheme

if TYPE_CHECKING:
    from hf_sparse24.pruning import KeepMasks

_load.install()
_save.install()

__version__ = "0.1.0.dev0"
__all__ = [
    "ActivationReport",
    "ActivationSparsityConfig",
    "ActivationStatistics",
    "CheckpointError",
    "DenseSparsityConfig",
    "FusionReport",
    "KeepMasks",
    "ModelCompressor",
    "PruneReport",
    "QuantizationScheme",
    "Sparse24Config",
    "Sparse24Experts",
    "Sparse24Linear",
    "SparseBitmaskConfig",
    "SparseBitmaskLinear",
    "SparsityConfig",
    "__version__",
    "densify_activations",
    "distill",
    "fuse_projections",
    "keep_masks",
    "measure_activation_sparsity",
    "prune",
    "sparsify_activations",
    "unfuse_projections",
]


def __getattr__(name: str) -> Any:
    if name != "KeepMasks":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _pruning.KeepMasks

"""2:4 activations in config.json: `config.activation_sparsity`, which `from_pretrained` takes as an argument and obeys.

Without this package the key is one that Transformers does not know, and the model is the dense one.
"""

from typing import Any

from transformers import PreTrainedConfig

from hf_sparse24.activation import CONFIG_KEY, NOT_SELECTED, ActivationSparsityConfig, sparsify_activations
from hf_sparse24.errors import get_logger, warn
from hf_sparse24.modules import listed

logger = get_logger(__name__)


def install() -> None:
    """Give every config of Transformers the attribute, None by default; a second call changes nothing."""
    if not hasattr(PreTrainedConfig, CONFIG_KEY):
        setattr(PreTrainedConfig, CONFIG_KEY, property(_read, _write, doc="Which blocks multiply sparse activations: hf_sparse24."))


def _read(config: Any) -> ActivationSparsityConfig | None:
    fields = vars(config).get(CONFIG_KEY)
    return None if fields is None else ActivationSparsityConfig(**fields)


def _write(config: Any, value: Any) -> None:
    """Checked here, for config.json, too; kept as the plain fields that are written there."""
    if value is None:
        vars(config).pop(CONFIG_KEY, None)
        return
    if not isinstance(value, (dict, ActivationSparsityConfig)):
        raise ValueError(f"{CONFIG_KEY} must be an ActivationSparsityConfig or a dict of its fields, got {type(value).__name__}")
    value = ActivationSparsityConfig(**value) if isinstance(value, dict) else value
    vars(config)[CONFIG_KEY] = value.model_dump(exclude_defaults=True) | {"pattern": value.pattern}


def apply_config(model: Any) -> None:
    """Do to a model that was just loaded what its config says of activations."""
    config = getattr(model.config, CONFIG_KEY)
    if config is None:
        return
    report = sparsify_activations(model, config)
    logger.info(str(report))
    missed = {name: reason for name, reason in report.left_alone.items() if reason != NOT_SELECTED}
    if missed:
        warn(f"{len(missed)} blocks with a squared ReLU multiply all of their activations: {listed(missed)}")

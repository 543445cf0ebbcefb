"""What is wrong with a checkpoint, as an exception, and the one way in which the package warns, and logs."""

import sys
import warnings
from typing import Any

from transformers.utils import logging

# Frames in whose files a user would look in vain for what caused a warning.
OURS = ("hf_sparse24", "transformers", "contextlib")


def warn(message: str) -> None:
    """Warn at the first line outside of this package and Transformers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def get_logger(module: str) -> Any:
    """A logger below that of Transformers: its verbosity, its handlers and `warning_once` are ours, too."""
    return logging.get_logger(f"transformers.{module}")


class CheckpointError(ValueError):
    """A checkpoint contradicts itself, is damaged, or is in a form that this version cannot read; nothing was loaded."""

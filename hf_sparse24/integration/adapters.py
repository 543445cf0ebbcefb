"""PEFT: `PeftModel.save_pretrained` stores the adapter only, and would swallow `sparsity_config` without a word.

PEFT is not imported for that: its class is wrapped when somebody imports it.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "peft.peft_model"


def install() -> None:
    """Wrap `PeftModel.save_pretrained`, now or when PEFT is imported; a second call changes nothing."""
    if MODULE in sys.modules:
        _wrap(sys.modules[MODULE])
    elif not any(isinstance(finder, _PeftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftFinder())


def _wrap(module: ModuleType) -> None:
    original = module.PeftModel.save_pretrained
    if hasattr(original, "_sparse24_original"):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("sparsity_config", None) is not None:
            raise ValueError(
                "a PeftModel stores its adapter only, which is not sparse: call save_pretrained without sparsity_config, or save "
                "the base model: model.merge_and_unload() and prune again, or model.unload()"
            )
        return original(self, *args, **kwargs)

    save_pretrained._sparse24_original = original  # type: ignore[attr-defined]
    module.PeftModel.save_pretrained = save_pretrained


class _PeftFinder(importlib.abc.MetaPathFinder):
    """Finds PEFT where it would be found anyway, and wraps it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            _wrap(module)

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec

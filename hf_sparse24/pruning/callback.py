"""The Trainer's callback that keeps masks.  Not imported with the package: Transformers' module of callbacks imports PEFT."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_sparse24.pruning.masks import MaskKeeper, keep_masks, save_masks


class KeepMasks(TrainerCallback):
    """`Trainer(..., callbacks=[KeepMasks()])`: `keep_masks` for as long as it trains; each checkpoint gets the masks as a file."""

    def __init__(self) -> None:
        self.keeper: MaskKeeper | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start; what a run that failed has left is ended first."""
        self._remove()
        self.keeper = keep_masks(kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the masks."""
        if state.is_world_process_zero:
            save_masks(kwargs["model"], Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self._remove()

    def _remove(self) -> None:
        if self.keeper:
            self.keeper.remove()

"""The masks of a pruned model: where they are stored, and how training keeps them.

A mask is a buffer beside its weight, `weight_kept`: bool, the weight's shape, True = kept.  It moves and is copied with the model,
and is not saved in checkpoints, whose packed weights carry their own.  It is never derived from `weight != 0` while the model
lives: a kept weight may become 0, in bfloat16 for one, and may grow again.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_sparse24.merged import find_merged
from hf_sparse24.pattern import find_bad_groups, is_nonzero, mask_2_4

SUFFIX = "_kept"
MASKS_FILE = "sparse24_masks.safetensors"


def store_mask(module: nn.Module, mask: Tensor, parameter: str = "weight") -> None:
    """Put a mask beside its weight, in place of an earlier one."""
    module.register_buffer(f"{parameter}{SUFFIX}", mask.contiguous(), persistent=False)


def stored_masks(model: nn.Module) -> dict[str, Tensor]:
    """Every mask by the name of its weight, such as `model.layers.0.mlp.up_proj.weight`."""
    buffers = dict(model.named_buffers())
    return {
        name: buffers[f"{name}{SUFFIX}"]
        for name, _ in model.named_parameters(remove_duplicate=False)
        if buffers.get(f"{name}{SUFFIX}") is not None
    }


def masks_of_weights(model: nn.Module) -> dict[str, Tensor]:
    """Masks of a model that was loaded: of every 2:4 weight of a Linear or of merged experts, its two largest of each group of four.

    Those are the positions that a packed checkpoint stores, kept zeros included.  Weights that are sharded are put together, one at a
    time: every process has to call this.
    """
    names = {f"{name}.weight" for name, module in model.named_modules() if _is_linear(module)}.union(find_merged(model)[0])
    masks = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names or parameter.shape[-1] % 4:
            continue
        weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        rows = weight.flatten(0, -2)
        if bool(is_nonzero(rows).any()) and find_bad_groups(rows) is None:
            masks[name] = mask_2_4(rows).view(weight.shape)
    return masks


def _is_linear(module: nn.Module) -> bool:
    # A layer that FSDP2 was applied to is of a class of its own.
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and isinstance(module.weight, DTensor))


@torch.no_grad()
def apply_masks(model: nn.Module) -> None:
    """Set every pruned weight to 0 again, after something changed it: an ordinary LoRA merge, say."""
    for module, parameter, weight in _masked_weights(model):
        _zero_pruned(weight, module, parameter)


def save_masks(model: nn.Module, folder: Path | str) -> None:
    """Write the stored masks to `sparse24_masks.safetensors`, beside a training checkpoint."""
    save_file({name: mask.cpu().contiguous() for name, mask in stored_masks(model).items()}, Path(folder) / MASKS_FILE)


def load_masks(model: nn.Module, folder: Path | str) -> None:
    """Store the masks of `save_masks` beside the weights of another copy of the model.

    Raises:
        ValueError: A mask without its weight, or of another shape.
    """
    _store(model, load_file(Path(folder) / MASKS_FILE))


def _store(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            found = tuple(parameters[name].shape) if name in parameters else "no such weight"
            raise ValueError(f"the mask of {name} has shape {tuple(mask.shape)}, the model has {found}: it is of another model")
    for name, mask in masks.items():
        module, _, parameter = name.rpartition(".")
        store_mask(model.get_submodule(module), mask.to(parameters[name].device), parameter)


# ---- training ------------------------------------------------------------------------------------------------------------


class MaskKeeper:
    """Keeps pruned weights at 0 while optimizers step; `remove()`, or leaving its `with` block, ends that."""

    def __init__(self, model: nn.Module):
        self.model = model
        # Gradients are masked as they arrive, before anybody clips them by their norm.  Those of FSDP2's sharded weights arrive
        # without hooks, and are masked before the step.  Then moments stay 0, and decay has nothing to shrink.  Weights are
        # masked after the step, for optimizers that move a weight whose gradient is 0.
        self._handles: list[Any] = [
            weight.register_hook(_masking(module, parameter))
            for module, parameter, weight in _masked_weights(model)
            if weight.requires_grad and not isinstance(weight, DTensor)
        ]
        self._handles += [
            register_optimizer_step_pre_hook(lambda *_: self._mask_sharded_gradients()),
            register_optimizer_step_post_hook(lambda *_: apply_masks(model)),
        ]
        apply_masks(model)

    def remove(self) -> None:
        """Stop; the masks stay on the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "MaskKeeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _mask_sharded_gradients(self) -> None:
        for module, parameter, weight in _masked_weights(self.model):
            if isinstance(weight, DTensor) and weight.grad is not None:
                _zero_pruned(weight.grad, module, parameter)


def keep_masks(model: nn.Module) -> MaskKeeper:
    """Keep a pruned model's masks through training, whatever the optimizer.  Call it before the first backward pass.

    A model that `prune` made has its masks; one that was loaded gets those of its 2:4 weights.  Works for every optimizer of torch
    in this process, with weight decay and moments, and for FSDP2 if it is called after `fully_shard`.

    Returns:
        What ends it.

    Raises:
        ValueError: The model has no masks, and no 2:4 weights to take them from.
    """
    if not stored_masks(model):
        _store(model, masks_of_weights(model))
    if not stored_masks(model):
        raise ValueError("the model has no masks and no 2:4 weights, there is nothing to keep: prune it first")
    return MaskKeeper(model)


def _masked_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Found anew each time: FSDP2 and `.to()` replace weights and masks."""
    for module in model.modules():
        for parameter, weight in module.named_parameters(recurse=False):
            if f"{parameter}{SUFFIX}" in module._buffers:
                yield module, parameter, weight


def _masking(module: nn.Module, parameter: str) -> Any:
    def mask_gradient(gradient: Tensor) -> Tensor:
        return gradient.masked_fill(~module.get_buffer(f"{parameter}{SUFFIX}"), 0)

    return mask_gradient


def _zero_pruned(values: Tensor, module: nn.Module, parameter: str) -> None:
    mask = module.get_buffer(f"{parameter}{SUFFIX}")
    if isinstance(values, DTensor):  # each process has the whole mask, and cuts out what belongs to its shard
        mask = distribute_tensor(mask, values.device_mesh, values.placements, src_data_rank=None).to_local()
        values = values.to_local()
    values.masked_fill_(~mask, 0)

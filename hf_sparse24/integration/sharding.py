"""Models that are sharded over several processes: tensor parallelism of packed layers, and saving.

Transformers cuts every parameter of a layer as it would cut the dense weight.  The parts of a 2:4 weight have its axes and are cut
right by that; others (scales, Marlin's order) get entries of their own in the model's plan, before it is applied.  A cut through
what is stored together, a byte of the bitmask for example, is an error, before anything is read.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_sparse24.compressors.base import Cuts, specs_of
from hf_sparse24.linear import PackedLinear
from hf_sparse24.modules import packed_layers

# Transformers' styles -> which axis of the weight they cut, 0 for rows (out_features).
AXIS_OF_STYLE = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), 0),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), 1),
}
# Axis of a part -> the style of a parameter that cuts it there.
STYLE_OF_AXIS = {0: "colwise", 1: "rowwise", None: "replicate"}
# They leave parameters as they are.
WHOLE = (None, "replicate", "all_reduce", "mla_kv_a_proj", "replicated_with_grad_allreduce", "local_params")
AXES = ("rows", "columns")


def plan_parts(model: PreTrainedModel) -> None:
    """Say in the model's tensor-parallel plan how the parts of its packed layers are cut, where that is not as the layer is.

    Args:
        model: Not sharded yet; an entry of the plan is for all layers with the same name but for numbers.
    """
    for _, layer, pattern, axis, cuts in _cut_layers(model):
        if cuts is not None:
            own = {f"{pattern}.{part}": style for part, style in _styles(layer, axis, cuts).items()}
            model._tp_plan = {**own, **model._tp_plan}


def require_fitting_pieces(model: PreTrainedModel) -> None:
    """Check that every packed layer of a sharded model is cut where its parts can be, and tell layers what their pieces are.

    Raises:
        ValueError: One is not; names layer, sizes and number of processes.
    """
    num_pieces = getattr(model, "_tp_size", None) or 1
    if num_pieces == 1:
        return
    for name, layer, pattern, axis, cuts in _cut_layers(model):
        if cuts is None:
            raise ValueError(f"{name}: a weight stored as {layer.compressor.format} cannot be cut for tensor parallelism{_ADVICE}")
        for part, style in _styles(layer, axis, cuts).items():
            found = model._tp_plan.get(f"{pattern}.{part}")
            if found != style:
                raise ValueError(f"{name}: the tensor-parallel plan has {found!r} for {pattern}.{part}, expected {style!r}")
        size, multiple = (layer.out_features, layer.in_features)[axis], (cuts.rows, cuts.columns)[axis]
        # Rows that are left over go to the last process, as in dense layers; what is stored together stays together.
        if multiple > 1 and size % (multiple * num_pieces):
            raise ValueError(
                f"{name}: {size} {AXES[axis]} cannot be cut into {num_pieces} pieces: {layer.compressor.format} can be cut at multiples "
                f"of {multiple}, and {size} / {num_pieces} is {size / num_pieces:g}{_ADVICE}"
            )
        layer.local_shape = _local_shape(layer, axis, cuts)


_ADVICE = "; load with Sparse24Config(run_compressed=False), or leave the layer out of tp_plan"


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds pieces of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def require_whole_weights(model: nn.Module) -> None:
    """Check that a model whose dense weights are to be packed is not sharded.

    Raises:
        ValueError: It is.
    """
    if is_sharded(model):
        raise ValueError("dense weights cannot be packed while they are sharded over several processes: run hf-sparse24 compress first")


@contextmanager
def on_first_process(sharded: bool) -> Iterator[bool]:
    """Whether this process is the one that writes; the others leave the block when it has.

    Args:
        sharded: Whether there are others; all of them enter the block.

    Raises:
        ValueError: The first process failed, with an error of its own.
    """
    if not sharded:
        yield True
        return
    is_first, succeeded = dist.get_rank() == 0, [False]
    try:
        yield is_first
        succeeded = [True]
    finally:
        if is_first:
            dist.broadcast_object_list(succeeded, src=0)
    if not is_first:
        dist.broadcast_object_list(succeeded, src=0)
        if not succeeded[0]:
            raise ValueError("the first process could not save the model; its error says why")


def gather(model: PreTrainedModel, state_dict: Mapping[str, Tensor] | None, keep: bool) -> dict[str, Tensor]:
    """The tensors of a sharded model on the CPU, put together one by one; every process has to call this.

    Args:
        model: Whose tensors are taken if `state_dict` is None.
        state_dict: Instead of them.
        keep: Whether this process wants them; others get nothing.
    """
    whole: dict[str, Tensor] = {}
    # Tied tensors stay one, for that is how they are found.
    first: dict[tuple[int, ...], Tensor] = {}
    for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        tensor = _full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if keep:
            memory = (own.data_ptr(), *tensor.shape) if own.numel() else (id(own),)
            whole[name] = first.setdefault(memory, tensor.detach().cpu())
    return whole


def _full_tensor(tensor: DTensor) -> Tensor:
    """`full_tensor`, of bytes: gloo knows neither int16 nor float8."""
    octets = tensor.to_local().contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size((*tensor.shape, octets.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(octets, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride).full_tensor()
    return whole.view(tensor.dtype).squeeze(-1)


def _cut_layers(model: PreTrainedModel) -> Iterator[tuple[str, PackedLinear, str, int, Cuts | None]]:
    """Name, layer, its name in the plan, and axis of the cut, of the packed layers that the plan cuts; and how they can be."""
    plan = getattr(model, "_tp_plan", None) or {}
    for name, layer in packed_layers(model).items():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(pattern)
        if style in AXIS_OF_STYLE:
            yield name, layer, pattern, AXIS_OF_STYLE[style], layer.compressor.cuts(specs_of(layer.parts()))
        elif style not in WHOLE:
            raise ValueError(f"{name}: packed layers do not know the tensor-parallel style {style!r}{_ADVICE}")


def _styles(layer: PackedLinear, axis: int, cuts: Cuts) -> dict[str, str]:
    """The style of every part that is not cut like the layer."""
    wanted = {part: STYLE_OF_AXIS[axes[axis]] for part, axes in cuts.axes.items() if part in layer.part_names}
    return {part: style for part, style in wanted.items() if style != STYLE_OF_AXIS[axis]}


def _local_shape(layer: PackedLinear, axis: int, cuts: Cuts) -> tuple[int, int]:
    values = layer.values
    assert isinstance(values, DTensor)
    axis_of_part = cuts.axes[layer.compressor.value_part][axis]
    assert axis_of_part is not None
    sizes = [layer.out_features, layer.in_features]
    sizes[axis] = sizes[axis] * values.to_local().shape[axis_of_part] // values.shape[axis_of_part]
    return sizes[0], sizes[1]

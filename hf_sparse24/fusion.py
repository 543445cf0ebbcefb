"""Which layers of a model are fused: siblings with the names of projections that read the same input.

Found by name and structure; whether they do read the same is seen when the model runs, and those that do not multiply apart.
"""

import re
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_sparse24.kernels import dispatch
from hf_sparse24.linear import Sparse24Linear
from hf_sparse24.projection_group import ProjectionGroup

# Names of children that their parent gives the same input; in cross-attention, only the last two of three.
PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
MERGED = {"qkv_proj", "gate_up_proj", "c_attn", "query_key_value", "qkv", "Wqkv"}
# In these modules queries come from elsewhere than keys and values.
CROSS_ATTENTION = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)


@dataclass
class FusionReport:
    """What `fuse_projections` did.

    Attributes:
        fused: Module -> names of its children that are one product now.
        left_alone: Projection -> why it is not part of a fused one.
    """

    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)


def fuse_projections(model: nn.Module) -> FusionReport:
    """Let q/k/v and gate/up of `Sparse24Linear` layers share one packed weight and one product, in place.

    Nothing is unpacked; names, parameters and saved files stay what they are.  The group's packed bytes exist twice for a moment.

    Args:
        model: PEFT adapters may be around its layers.

    Returns:
        report: What was fused, and why other projections were not.

    Raises:
        ValueError: The layers are sharded by tensor parallelism.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(f"projections of a model that is split over {model._tp_size} devices cannot be fused: load it without tp_plan")
    report = FusionReport()
    for name, parent in model.named_modules():
        prefix = f"{name}." if name else ""
        for child in MERGED & set(parent._modules):
            report.left_alone[f"{prefix}{child}"] = "the architecture has merged it already"
        for names in PROJECTIONS:
            if not any(_layer(parent, child) for child in names):
                continue
            if len(names) == 3 and CROSS_ATTENTION.search(name):
                report.left_alone[f"{prefix}{names[0]}"] = "cross-attention: reads another input than keys and values"
                names = names[1:]
            if reason := why_not_fused(parent, names):
                report.left_alone |= {f"{prefix}{child}": reason for child in names if _layer(parent, child)}
                continue
            layers = [_layer(parent, child) for child in names]
            if layers[0].group is None:  # type: ignore[union-attr]
                ProjectionGroup(parent, layers, name or type(parent).__name__).prepare()  # type: ignore[arg-type]
            report.fused[name] = (*report.fused.get(name, ()), *names)
    _prepare_kernels(groups_of(model))
    return report


def _prepare_kernels(groups: list[ProjectionGroup]) -> None:
    """Compile what the first calls would wait for, or could not do in a CUDA graph; that there is no kernel was said on loading."""
    shapes: dict[tuple[torch.dtype, torch.device], set[tuple[int, int]]] = {}
    for group in groups:
        compressed = group.tensors("compressed")[0]
        shapes.setdefault((compressed.dtype, compressed.device), set()).add((group.out_features, group.in_features))
    for (dtype, device), of_kind in shapes.items():
        dispatch.prepare(dispatch.SPARSE24, of_kind, dtype, device)


def why_not_fused(parent: nn.Module, names: tuple[str, ...]) -> str | None:
    """Why some children of a module cannot be one product, or None.

    Args:
        parent: Holds the layers, or adapters around them.
        names: Of the children.

    Raises:
        ValueError: A layer is sharded.
    """
    layers = {name: layer for name in names if (layer := _layer(parent, name)) is not None}
    if any(isinstance(parameter, DTensor) for layer in layers.values() for parameter in layer.parameters()):
        raise ValueError(f"{', '.join(layers)} are sharded by tensor parallelism, with which projections cannot be fused: load without")
    for name in names:
        if name not in layers:
            child = parent._modules.get(name)
            return f"there is no {name} beside it" if child is None else f"{name} beside it is a {type(child).__name__}, not packed 2:4"
    facts: dict[str, list[object]] = {
        "in_features": [layer.in_features for layer in layers.values()],
        "dtype": [layer.compressed.dtype for layer in layers.values()],
        "device": [layer.compressed.device for layer in layers.values()],
        "bias": [layer.bias is not None for layer in layers.values()],
    }
    for what, values in facts.items():
        if len(set(values)) > 1:
            return f"{what} differs: " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    if len({id(layer.group) for layer in layers.values()}) > 1:
        return "fused in another way already"
    if next(iter(layers.values())).compressed.is_meta:
        return "offloaded, or without values yet"
    if len({id(layer) for layer in layers.values()}) < len(layers):
        return "the same layer under two names"
    return None


def unfuse_projections(model: nn.Module) -> None:
    """Give every fused layer a packed weight of its own again, in place.

    Args:
        model: On which `fuse_projections` was called; any other is left as it is.
    """
    for group in groups_of(model):
        group.dissolve()
        for layer in group.layers:
            layer.prepare()  # type: ignore[operator]


def groups_of(model: nn.Module) -> list[ProjectionGroup]:
    """Every group of fused layers in a model, once."""
    groups = [module.group for module in model.modules() if isinstance(module, Sparse24Linear) and module.group is not None]
    return list({id(group): group for group in groups}.values())


def _layer(parent: nn.Module, name: str) -> Sparse24Linear | None:
    """A packed child, or the one that an adapter of PEFT wraps."""
    child = parent._modules.get(name)
    child = getattr(child, "base_layer", child)
    return child if isinstance(child, Sparse24Linear) else None

"""MLP blocks whose second projection multiplies a squared ReLU.

    h = relu(up(x))^2,  or  relu(gate(x))^2 * up(x);    y = down(h)

A block keeps its class, with `SquaredReluBlock` before it, its children and the names of its parameters.  The weights stay what they
are; what kernels read besides are copies, in buffers that are not saved: in float8, and of the second projection by columns.  Copies
exist in evaluation mode only, since training changes the weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import ReLUSquaredActivation

from hf_sparse24.kernels import activation, ops, reference
from hf_sparse24.kernels.dispatch import Choice, with_index
from hf_sparse24.quantization import PRESETS, round_weight

# What a block may hold beside its projections and its activation.
NEUTRAL = (nn.Identity,)
# What the forward of a module that is no such block may raise when it is followed.
NOT_FOLLOWED = (RuntimeError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Projections:
    """Names of a block's layers."""

    up: str
    gate: str | None
    down: str

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order in which they are multiplied."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class Options:
    """How a block multiplies: see `ActivationSparsityConfig`."""

    keep_two: bool
    float8: bool
    columns: bool


class SquaredReluBlock(nn.Module):
    """Stands before the class of a block, and replaces its forward."""

    projections: Projections
    options: Options
    _built_from: tuple[Any, ...] | None
    """Which weights the copies were made from; None while there are none."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden) -> (..., hidden)."""
        if self._built_from is not None and not torch.compiler.is_compiling() and self._built_from != _stamps(self):
            self.build_copies()
        names = self.projections
        gate = None if names.gate is None else self._first_projection(names.gate, x)
        u = self._first_projection(names.up, x)
        down = self._modules[names.down]
        if why_apart(down) is not None:
            return down(ops.squared_relu(u, gate, self.options.keep_two))  # type: ignore[misc]
        return self._second_projection(down, u, gate)

    def _first_projection(self, name: str, x: Tensor) -> Tensor:
        linear: Any = self._modules[name]
        weight = self._buffers.get(f"{name}_float8")
        if weight is None or why_apart(linear) is not None or _learns(linear):
            return linear(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return ops.linear_fp8(x, weight, self._buffers[f"{name}_scale"], bias)

    def _second_projection(self, linear: Any, u: Tensor, gate: Tensor | None) -> Tensor:
        name, weight, bias, scale, columns = self.projections.down, linear.weight, linear.bias, None, None
        if not _learns(linear):
            scale, columns = self._buffers.get(f"{name}_scale"), self._buffers.get(f"{name}_columns")
            weight = weight if scale is None else self._buffers[f"{name}_float8"]
        if torch.is_autocast_enabled(u.device.type):
            dtype = torch.get_autocast_dtype(u.device.type)
            u, gate, bias = u.to(dtype), None if gate is None else gate.to(dtype), None if bias is None else bias.to(dtype)
            if scale is None and weight.dtype != dtype:
                weight, columns = weight.to(dtype), None
        return ops.squared_relu_linear(u, gate, weight, scale, columns, bias, self.options.keep_two)

    def explain(self, rows: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Choice[Any]:
        """Which path multiplies by the second projection as it is now, and why each other does not.

        Args:
            rows: Of the block's input.
            dtype: Of the input; that of the weight if None.
            device: Where the block would be moved; where it is if None.
        """
        name = self.projections.down
        down: Any = self._modules[name]
        if (reason := why_apart(down)) is not None:
            return Choice("module", None, dict.fromkeys(activation.PATHS, reason))
        copies = {} if _learns(down) else copies_of(self)
        return activation.choose(
            *down.weight.shape, rows, dtype or down.weight.dtype, with_index(torch.device(device or down.weight.device)),
            fp8=f"{name}_float8" in copies, has_columns=f"{name}_columns" in copies,
            gated=self.projections.gate is not None, keep_two=self.options.keep_two,
        )  # fmt: skip

    # ---- copies of the weights ---------------------------------------------------------------------------------------------

    def build_copies(self) -> None:
        """Make the copies that the options ask for, of the weights as they are now."""
        self.drop_copies()
        if not (self.options.float8 or self.options.columns):
            return
        for name in self.projections.names:
            linear: Any = self._modules[name]
            if why_no_copy(linear) is not None:
                continue
            weight = linear.weight.detach()
            if self.options.float8:
                # In float32: a scale of 16 bits would be off by up to half a step of its own.
                weight, scale = round_weight(weight.float(), PRESETS["fp8"])
                self.register_buffer(f"{name}_float8", weight, persistent=False)
                self.register_buffer(f"{name}_scale", scale, persistent=False)
            if self.options.columns and name == self.projections.down:
                self.register_buffer(f"{name}_columns", weight.t().contiguous(), persistent=False)
        self._built_from = _stamps(self)

    def drop_copies(self) -> None:
        """Free the copies."""
        for name in copies_of(self):
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        self._built_from = None

    def train(self, mode: bool = True) -> "SquaredReluBlock":
        """Training changes weights: copies are made when it ends."""
        super().train(mode)
        if mode:
            self.drop_copies()
        elif self._built_from is None or self._built_from != _stamps(self):
            self.build_copies()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SquaredReluBlock":
        self.drop_copies()  # a cast would make numbers of 16 bits of them
        super()._apply(fn, recurse)
        if not self.training:
            self.build_copies()
        return self

    def __reduce__(self) -> Any:
        # The class is made at run time, so that nothing finds it by its name.
        return _empty_block, (type(self).__mro__[2],), self.__dict__


def _empty_block(base: type) -> nn.Module:
    block_class = sparse_class(base)
    return block_class.__new__(block_class)


@functools.cache
def sparse_class(base: type) -> type[nn.Module]:
    """A block's class with `SquaredReluBlock` before it, under the same name."""
    return type(base.__name__, (SquaredReluBlock, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def make_sparse(block: Any, projections: Projections, options: Options) -> None:
    """Let a block multiply by `SquaredReluBlock`, in place."""
    block.__class__ = sparse_class(block.__class__)
    block.projections, block.options, block._built_from = projections, options, None
    block.register_load_state_dict_post_hook(_after_loading)
    block.train(block.training)


def make_dense(block: SquaredReluBlock) -> None:
    """Give a block its own class back, in place."""
    block.drop_copies()
    hooks = block._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _after_loading]:
        del hooks[key]
    for name in ("projections", "options", "_built_from"):
        del block.__dict__[name]
    block.__class__ = type(block).__mro__[2]


def _after_loading(block: Any, incompatible_keys: Any) -> None:
    if not block.training:
        block.build_copies()


def copies_of(block: SquaredReluBlock) -> dict[str, Tensor]:
    """The copies that a block holds now, by their names in it."""
    names = {f"{name}_{kind}" for name in block.projections.names for kind in ("float8", "scale", "columns")}
    return {name: buffer for name, buffer in block._buffers.items() if name in names and buffer is not None}


def _stamps(block: SquaredReluBlock) -> tuple[Any, ...]:
    """Of which weights there can be copies, where they lie, and the versions of their values; what writes to `.data` is not noticed."""
    layers: list[Any] = [block._modules[name] for name in block.projections.names]
    weights = [layer.weight if why_no_copy(layer) is None else None for layer in layers]
    return tuple(None if w is None else (w.data_ptr(), None if w.is_inference() else w._version) for w in weights)


def _learns(linear: Any) -> bool:
    """Whether the weight itself must be multiplied, for its gradient."""
    return torch.is_grad_enabled() and linear.weight.requires_grad


def why_apart(layer: Any) -> str | None:
    """Why a projection must be called as the module that it is, or None if it may be multiplied by its weight alone."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__module__}.{type(layer).__qualname__}, not a torch.nn.Linear"
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    if hooks or "forward" in layer.__dict__:
        return "something is hooked to it"
    if isinstance(layer.weight, DTensor):
        return "its weight is sharded"
    return None


def why_no_copy(layer: Any) -> str | None:
    """Why there is no copy of a projection's weight, or None if there can be one."""
    return why_apart(layer) or ("its weight has no values here (it is on meta, or offloaded)" if layer.weight.is_meta else None)


# ---- which modules are such blocks ---------------------------------------------------------------------------------------------


def has_squared_relu(module: nn.Module) -> bool:
    """Whether Transformers' squared ReLU (`relu2`) is a child of a module."""
    return any(isinstance(child, ReLUSquaredActivation) for child in module.children())


def find_projections(block: nn.Module) -> Projections | str:
    """The roles of a block's layers, or why it is no block that can be served.

    Its forward is followed once on random numbers, with stand-ins for its layers: no name of a layer has to be known, weights are not
    read, and what does something else than the formula above is found out.
    """
    if "forward" in block.__dict__:
        return "something is hooked to it: apply before, by from_pretrained(..., activation_sparsity=...)"
    layers = {name: child for name, child in block.named_children() if hasattr(child, "in_features") and hasattr(child, "out_features")}
    others = [
        name for name, child in block.named_children() if name not in layers and not isinstance(child, (ReLUSquaredActivation, *NEUTRAL))
    ]
    if len(layers) not in (2, 3):
        return f"{len(layers)} linear layers, expected two, or three with a gate"
    if others or block._parameters:
        return f"it has more than projections and a squared ReLU: {', '.join([*others, *block._parameters])}"
    try:
        calls, x, y = _follow(block, layers)
    except NOT_FOLLOWED as error:
        return f"its forward could not be followed: {type(error).__name__}: {str(error)[:200]}"
    first = [call for call in calls if _same(call.x, x)]
    second = [call for call in calls if not _same(call.x, x)]
    if len(calls) != len(layers) or len({call.name for call in calls}) != len(layers) or len(second) != 1 or not _same(second[0].y, y):
        return "its forward is not a projection of a squared ReLU of another"
    down = second[0]
    for up, gate in [(first[0], None)] if len(first) == 1 else [(first[1], first[0]), (first[0], first[1])]:
        if _same(down.x, reference.squared_relu(up.y, None if gate is None else gate.y)):
            return Projections(up.name, None if gate is None else gate.name, down.name)
    return "what it multiplies second is not the squared ReLU of what it multiplied first"


@dataclass(frozen=True)
class _Call:
    name: str
    x: Tensor
    y: Tensor


class _StandIn(nn.Module):
    """Gives random numbers of a layer's width, and notes the call."""

    def __init__(self, name: str, out_features: int, calls: list[_Call], generator: torch.Generator):
        super().__init__()
        self.name, self.out_features, self.calls, self.generator = name, out_features, calls, generator

    def forward(self, x: Tensor) -> Tensor:
        y = torch.randn(*x.shape[:-1], self.out_features, generator=self.generator, device="cpu")
        self.calls.append(_Call(self.name, x, y))
        return y


@torch.no_grad()
def _follow(block: nn.Module, layers: dict[str, Any]) -> tuple[list[_Call], Tensor, Any]:
    """The calls of a block's layers in its forward, its input and its result."""
    calls: list[_Call] = []
    generator = torch.Generator("cpu").manual_seed(0)
    view = object.__new__(type(block))
    view.__dict__.update(block.__dict__)
    stand_ins = {name: _StandIn(name, layer.out_features, calls, generator) for name, layer in layers.items()}
    # In training mode: a dropout that is no module shows itself.
    view.__dict__ |= {"_modules": {**block._modules, **stand_ins}, "training": True}
    x = torch.randn(1, 2, _width(layers), generator=generator, device="cpu")
    with torch.random.fork_rng(devices=[]):
        return calls, x, type(block).forward(view, x)


def _width(layers: dict[str, Any]) -> int:
    """Of the block's input: one layer is as wide as the others' results, and they are as wide as its result."""
    for name, down in layers.items():
        others = [layer for other, layer in layers.items() if other != name]
        if all((layer.out_features, layer.in_features) == (down.in_features, down.out_features) for layer in others):
            return down.out_features
    raise ValueError("the shapes of its layers do not follow each other")


def _same(found: Any, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found.float(), expected, rtol=1e-5, atol=1e-6)

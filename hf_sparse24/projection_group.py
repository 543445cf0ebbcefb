"""Sibling layers that read the same x and share one packed weight: one product instead of two or three.

    memory     compressed, bitmask and bias of the group are one allocation each; a layer's parameters are its rows of them
    product    the first layer that is called with an x multiplies by the whole weight; the others take their columns of the result

The result lives only while the forward of the module that holds the layers runs: hooks there open and close a scope.  A layer
that is called outside of it, twice, with another x, or with gradients or autocast on, multiplies by its own rows.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_sparse24.errors import get_logger
from hf_sparse24.kernels import dispatch, ops, plans
from hf_sparse24.kernels.cusparselt import CusparseltError, CusparseltWeight

logger = get_logger(__name__)
SHARED = ("compressed", "bitmask", "bias")
_APART = "{} do not all read the same input: they are multiplied one by one from now on"
_INFERENCE_MODE = "fused projections multiply one by one in torch.inference_mode, where changes of x are not counted: use torch.no_grad"


@dataclass
class Scope:
    """One run of the parent's forward: the x that the group was multiplied with, and the columns that nobody took yet."""

    x: Tensor | None = None
    version: int = 0
    columns: dict[int, Tensor] | None = None


class ProjectionGroup:
    """The layers of one parent that are multiplied together.

    Args:
        parent: Whose forward calls the layers.
        layers: `Sparse24Linear`s of equal in_features, dtype and device, all with a bias or none.
        name: Of the parent, for messages.
    """

    def __init__(self, parent: nn.Module, layers: list[nn.Linear], name: str):
        self.layers, self.name = layers, name
        self.in_features = layers[0].in_features
        self.has_bias = layers[0].bias is not None
        self.rows = [layer.out_features for layer in layers]
        self.out_features = sum(self.rows)
        self.starts = [sum(self.rows[:i]) for i in range(len(layers))]
        # Set when the parent turns out to give its layers different x.
        self.apart = False
        self._scopes: dict[int, Scope] = {}  # by thread
        self._traced: Scope | None = None  # of torch.compile, while it traces
        self._hooks = [parent.register_forward_pre_hook(self.open_scope), parent.register_forward_hook(self.close_scope, always_call=True)]
        for index, layer in enumerate(layers):
            layer.group, layer.index_in_group = self, index  # type: ignore[assignment]
        self.share()

    # ---- memory ----------------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> list[Tensor]:
        """One parameter of every layer; none if the layers have no bias."""
        if name == "bias" and not self.has_bias:
            return []
        return [layer._parameters[name] for layer in self.layers]  # type: ignore[misc]

    @property
    def is_shared(self) -> bool:
        """Whether the layers' parameters are rows of one allocation."""
        return all(plans.as_one(tensors) is not None for name in SHARED if (tensors := self.tensors(name)))

    def share(self) -> None:
        """Copy the layers' parameters into one allocation; each separate one is freed before the next kind is copied."""
        for layer in self.layers:
            layer._buffers["metadata"] = None  # it lies behind values that are left behind, and keeps them
        for name in SHARED:
            if tensors := self.tensors(name):
                self._place(name, torch.cat([tensor.detach() for tensor in tensors]))

    def _place(self, name: str, whole: Tensor) -> None:
        for layer, start, rows in zip(self.layers, self.starts, self.rows, strict=True):
            layer._parameters[name].data = whole[start : start + rows]  # type: ignore[union-attr]

    def share_again(self) -> None:
        """After one layer was moved or cast: if it was the last one, the group is where it was, together."""
        if len({(tensor.device, tensor.dtype) for tensor in self.tensors("compressed")}) > 1:
            return
        if not self.is_shared:
            self.share()
        self.prepare()

    def prepare(self) -> str | None:
        """`Sparse24Linear.prepare` for the weight of the group: the first layer holds the metadata."""
        compressed, bitmask = self.tensors("compressed"), self.tensors("bitmask")
        if self.layers[0]._buffers["metadata"] is not None:
            return None
        if reason := dispatch.why_not("cusparselt", compressed[0].device, compressed[0].dtype):
            return reason
        values, mask = plans.as_one(compressed), plans.as_one(bitmask)
        if values is None or mask is None:
            return "the layers of the group were moved apart"
        try:
            weight = CusparseltWeight.from_parts(values, mask, self.in_features)
        except (CusparseltError, torch.OutOfMemoryError) as error:
            logger.warning_once(f"fused packed layers go without cuSPARSELt: {error}")
            return str(error)
        self._place("compressed", weight.values)
        self.layers[0]._buffers["metadata"] = weight.metadata
        return None

    def dissolve(self, copy: bool = True) -> None:
        """Make the layers independent again.

        Args:
            copy: Give each layer an allocation of its own; without, the rows stay where they are.
        """
        for hook in self._hooks:
            hook.remove()
        self.layers[0]._buffers["metadata"] = None
        for layer in self.layers:
            layer.group = None  # type: ignore[assignment]
            for name in SHARED if copy else ():
                if (tensor := layer._parameters[name]) is not None:
                    tensor.data = tensor.detach().clone()

    def __getstate__(self) -> dict[str, Any]:
        # What is copied or pickled are independent layers: the hooks of the copied parent find nothing to do.
        return {**self.__dict__, "layers": [], "apart": True, "_scopes": {}, "_traced": None, "_hooks": []}

    # ---- product ---------------------------------------------------------------------------------------------------------

    def open_scope(self, parent: nn.Module, args: Any) -> None:
        """Forward pre-hook of the parent."""
        if torch.compiler.is_compiling():
            self._traced = Scope()
        else:
            self._scopes[threading.get_ident()] = Scope()

    def close_scope(self, parent: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the parent, which also runs after an exception."""
        if torch.compiler.is_compiling():
            scope, self._traced = self._traced, None
        else:
            scope = self._scopes.pop(threading.get_ident(), None)
        # After an exception there is no output, and columns that nobody had the time to take.
        if scope is not None and scope.columns and output is not None:
            self.apart = True
            if torch.compiler.is_compiling():
                from torch._dynamo.comptime import comptime

                comptime(_warn_apart)
            else:
                logger.warning_once(_APART.format(f"projections of {self.name}"))

    def columns_of(self, index: int, x: Tensor) -> Tensor | None:
        """x times the weight of layer `index`, by the product of the whole group; None if the layer shall multiply on its own."""
        compiling = torch.compiler.is_compiling()
        scope = self._traced if compiling else self._scopes.get(threading.get_ident())
        if scope is None or self.apart or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return None
        if compiling:
            from torch._dynamo.comptime import comptime  # heavy, and loaded by now

            version = 0
            if scope.columns is None:
                comptime(_note_version)
            elif scope.x is x:
                comptime(_refuse_changed_x)
        elif x.is_inference():
            logger.warning_once(_INFERENCE_MODE)
            return None
        else:
            version = x._version
        if scope.columns is None:
            if any(tensor.device != x.device for tensor in self.tensors("compressed")):
                return None  # layers that are offloaded come to the device one at a time
            scope.x, scope.version, scope.columns = x, version, self._multiply(x)
        if scope.x is not x or scope.version != version:
            return None
        y = scope.columns.pop(index, None)
        if not scope.columns:
            scope.x = None  # all are taken: x is not kept either
        return y

    def _multiply(self, x: Tensor) -> dict[int, Tensor]:
        """The columns of every layer: views of one result, which is contiguous for each if x has one row."""
        metadata = self.layers[0]._buffers["metadata"]
        compressed, bitmask, bias = [self.tensors(name) for name in SHARED]
        y = ops.linear_group(x, compressed, bitmask, bias, metadata, self.in_features)
        return {index: y[..., start : start + rows] for index, (start, rows) in enumerate(zip(self.starts, self.rows, strict=True))}


# While torch.compile traces, tensors are stand-ins: one that was multiplied -> how often it had been written to.
_TRACED_VERSIONS: Any = WeakIdKeyDictionary()


def _note_version(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _TRACED_VERSIONS[fake] = fake._version


def _refuse_changed_x(context: Any) -> None:
    """In compiled code versions cannot be read, but while it is traced."""
    fake = context.get_local("x").as_fake()
    if _TRACED_VERSIONS.get(fake, fake._version) != fake._version:
        raise RuntimeError("the input of fused projections is written to between them, which compiled code cannot follow: unfuse them")


def _warn_apart(context: Any) -> None:
    logger.warning_once(_APART.format("projections of a compiled module"))

"""Merged experts as modules of their own, for as long as they are pruned.

Each weight of each expert is then an ordinary `nn.Linear`, a view of its place in the merged parameter, which is called with the rows
that the router sends there; it is named as in checkpoints (`model.layers.0.mlp.experts.3.w1`).

An expert that saw few tokens has poor statistics H.  The layer saw all of them, and experts of a layer read the same kind of input:

    H <- (T H + K H_all) / (T + K)      T tokens of the expert, K inputs, H_all of all tokens of the layer

is what its first projection is pruned by.  The input of its second is its own, so that there is nothing to add: it takes a method
that asks for less.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse24.experts import projections_of
from hf_sparse24.merged import Merged, by_module, expert_class, find_merged
from hf_sparse24.pruning.hessian import InputSum
from hf_sparse24.pruning.masks import SUFFIX, store_mask

# Tokens for each input, below which an expert saw few.
FEW = 2


class ExpertLinear(nn.Linear):
    """One weight of one expert.

    Args:
        weight: Its place in the merged parameter; a view.
        experts: Name of the module of experts.
        projection: Name of the merged parameter.
        is_first: Whether it reads the layer's input.
        kind: The class by which targets find it.
    """

    def __init__(self, weight: Tensor, experts: str, projection: str, is_first: bool, kind: type):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.experts, self.projection, self.is_first, self.kind = experts, projection, is_first, kind


class LayerInput(nn.Identity):
    """Sees all tokens of a layer of experts."""

    def __init__(self, in_features: int):
        super().__init__()
        self.in_features = in_features


class ApartExperts(nn.Module):
    """Takes the place of a module of merged experts.

    Args:
        dense: The module.
        parameters: Its merged parameters.
    """

    dense: Any

    def __init__(self, dense: nn.Module, parameters: list[Merged]):
        super().__init__()
        self.__dict__["dense"] = dense  # no child: its weights are there already
        self.parameters_apart = {parameter.projection: parameter for parameter in parameters}
        first, _ = projections_of(dense)
        self.input = LayerInput(self.parameters_apart[first].shape[2])
        for number in range(parameters[0].shape[0]):
            self.add_module(str(number), nn.Module())
        for parameter in parameters:
            merged, kind = getattr(dense, parameter.projection), expert_class(type(dense))
            for name, place in parameter.places():
                layer = ExpertLinear(merged[place], parameter.experts, parameter.projection, parameter.projection == first, kind)
                parent, _, member = name.removeprefix(f"{parameter.experts}.").partition(".")
                self.get_submodule(parent).add_module(member, layer)

    def layers(self, projection: str) -> Iterator[tuple[ExpertLinear, tuple[int, slice]]]:
        """The layers of a merged parameter, and their places in it."""
        parameter = self.parameters_apart[projection]
        for name, place in parameter.places():
            layer = self.get_submodule(name.removeprefix(f"{parameter.experts}."))
            assert isinstance(layer, ExpertLinear)
            yield layer, place

    def together(self) -> nn.Module:
        """The module of merged experts, with masks if there are any."""
        for projection in self.parameters_apart:
            merged = getattr(self.dense, projection)
            mask = torch.ones(merged.shape, dtype=torch.bool, device=merged.device)
            found = False
            for layer, place in self.layers(projection):
                kept = layer._buffers.get(f"weight{SUFFIX}")
                if kept is not None:
                    mask[place], found = kept, True
                if layer.weight.data_ptr() != merged[place].data_ptr():  # somebody put another tensor there
                    merged.data[place] = layer.weight.to(merged)
            if found:
                store_mask(self.dense, mask, projection)
        return self.dense

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ApartExperts":
        self.dense._apply(fn, recurse)
        for projection in self.parameters_apart:
            for layer, place in self.layers(projection):
                layer.weight.data = getattr(self.dense, projection).data[place]
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the merged experts make of it, one expert after the other."""
        self.input(hidden_states)
        total = torch.zeros_like(hidden_states)
        up, down = ([layer for layer, _ in self.layers(name)] for name in projections_of(self.dense))
        num_experts = len(down)
        for number in top_k_index.unique().tolist():
            if number >= num_experts:  # of no expert
                continue
            tokens, choice = torch.where(top_k_index == number)
            rows, step = hidden_states[tokens], len(up) // num_experts
            between = torch.cat([layer(rows) for layer in up[number * step : (number + 1) * step]], dim=-1)
            between = self.dense._apply_gate(between) if self.dense.has_gate else self.dense.act_fn(between)
            weighted = down[number](between) * top_k_weights[tokens, choice, None]
            total.index_add_(0, tokens, weighted.to(total.dtype))
        return total


@contextmanager
def experts_apart(model: nn.Module) -> Iterator[dict[str, str]]:
    """Merged experts are modules of their own for as long; yields module -> why not, for those that cannot be."""
    merged, reasons = find_merged(model)
    names = by_module(merged)
    for name, parameters in names.items():
        model.set_submodule(name, ApartExperts(model.get_submodule(name), parameters))
    try:
        yield reasons
    finally:
        for name in names:
            apart = model.get_submodule(name)
            assert isinstance(apart, ApartExperts)
            model.set_submodule(name, apart.together())


def expert_inputs(model: nn.Module) -> dict[str, LayerInput]:
    """What sees the inputs of each layer of experts that are apart."""
    return {f"{name}.input": module.input for name, module in model.named_modules() if isinstance(module, ApartExperts)}


@dataclass(frozen=True)
class Fallback:
    """What was done about too few tokens; `method` in the place of another one, or None."""

    reason: str
    method: str | None = None


def statistics(
    layer: ExpertLinear, method: str, adapts: bool, own: InputSum | None, whole: InputSum
) -> tuple[Tensor | None, Fallback | None]:
    """H by which a weight of an expert is pruned, and what was done about too few tokens.

    Args:
        layer: The weight.
        method: By which it is to be pruned.
        adapts: Whether that changes the weights that stay.
        own: The inputs of this weight; None if there were none.
        whole: The inputs of the layer of experts.
    """
    if own is not None and (own.tokens >= FEW * layer.in_features or method == "magnitude"):
        return own.hessian(), None
    if layer.is_first:
        tokens, total = (0, torch.zeros_like(whole.total)) if own is None else (own.tokens, own.total)
        num_inputs = layer.in_features
        share = num_inputs / (tokens + num_inputs)
        hessian = (total + num_inputs * whole.hessian()) / (tokens + num_inputs)
        return hessian, Fallback(f"few tokens: {share:.0%} of the statistics are of the layer's {whole.tokens}")
    if own is None:
        return None, Fallback("no tokens", "magnitude")
    return own.hessian(), Fallback("few tokens", "wanda") if adapts else None

"""The experts of a mixture, held packed.

Transformers merges the experts of a layer into 3-D parameters of one module.  `Sparse24Experts` takes the place of such a module:

    y[t] = sum over the k experts e of token t of  p[t, e] * down[e] act(gate[e] x[t]) * up[e] x[t]

Rows of tokens are sorted by expert, and one operator (kernels/ops.py) multiplies each by the weight of its expert, which stays packed.
Shapes do not depend on which experts are chosen, and the host does not ask: CUDA graphs and full-graph compilation need that.  Tokens
keep their order within an expert, and a token's results are added in the order of its choices: the same input gives the same result.

Files hold each expert's weights apart; a merged tensor of parts is those of all experts, one after the other:

    gate_up_proj.compressed  (num_experts, 2 * rows, in_features / 2)     w1 of an expert above its w3
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_sparse24.compressors import BaseCompressor, PackedTensorError, Sparse24Compressor
from hf_sparse24.compressors.base import Spec, specs_of
from hf_sparse24.kernels import ops
from hf_sparse24.linear import SHAPE_PARTS, autocast, own_storage

# Names of the merged parameters, in the order in which they are multiplied by; with a gate, and without one.
GATED, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")


class ExpertWeights(nn.Module):
    """One projection of all experts, packed.

    Args:
        shape: (num_experts, out_features, in_features) of the merged weight.
        members: What files call the weights of one expert, in the order of their rows, with * for its number: ("*.w1", "*.w3").
        dtype: Of the weight.
        device: Of all tensors.
    """

    compressor: ClassVar[BaseCompressor] = Sparse24Compressor()
    compressed: nn.Parameter
    bitmask: nn.Parameter
    shape: Tensor

    def __init__(self, shape: tuple[int, ...], members: tuple[str, ...], *, dtype: torch.dtype, device: torch.device | str | None = None):
        super().__init__()
        self.num_experts, self.out_features, self.in_features = shape
        self.members = members
        for part, (part_dtype, part_shape) in merged_specs(self.compressor, shape, len(members), dtype).items():
            empty = torch.empty(part_shape, dtype=part_dtype, device=device)
            if part in SHAPE_PARTS:
                self.register_buffer(part, empty)
            else:
                self.register_parameter(part, nn.Parameter(empty, requires_grad=False))
        # Transformers initialises what it thinks is missing: never this module.
        self._is_hf_initialized = True

    @classmethod
    def from_dense(cls, weight: Tensor, members: tuple[str, ...]) -> "ExpertWeights":
        """Pack a merged weight, one expert after the other.

        Args:
            weight: (num_experts, out_features, in_features), 2:4; it is not changed.
            members: As for the class.

        Raises:
            ValueError: A weight of an expert does not fit; names it as files do, and its first offending group.
        """
        packed = cls(tuple(weight.shape), members, dtype=weight.dtype, device=weight.device)
        for (_, place), (name, stored) in zip(places(weight.shape, members), packed.parts_of_each(), strict=True):
            try:
                parts = cls.compressor.compress_weight(weight.detach()[place])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for part, value in parts.items():
                stored[part].copy_(value)
        return packed

    @property
    def part_names(self) -> tuple[str, ...]:
        """Suffixes of the parts."""
        return self.compressor.parts

    @property
    def values(self) -> Tensor:
        """The largest part."""
        return getattr(self, self.compressor.value_part)

    @property
    def num_weights(self) -> int:
        """Elements of the dense weight."""
        return self.num_experts * self.out_features * self.in_features

    @property
    def num_values(self) -> int:
        """How many values are stored."""
        return self.compressor.num_values(specs_of(self.parts()), ())

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by suffix, merged; no copies."""
        return {part: getattr(self, part).detach() for part in self.part_names}

    def parts_of_each(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each weight of each expert: its name, and its parts as files hold them, which are views."""
        merged = self.parts()
        for of_weight in zip(*(places(tensor.shape, self.members) for tensor in merged.values()), strict=True):
            yield of_weight[0][0], {part: merged[part][place] for part, (_, place) in zip(merged, of_weight, strict=True)}

    def member_names(self, name: str) -> list[str]:
        """What modules the weights would be, were they not merged; `name` is that of this module."""
        return [f"{name.rpartition('.')[0]}.{member}" for member, _ in places(self.bitmask.shape, self.members)]

    def check(self) -> None:
        """Check the values of the parts.

        Raises:
            PackedTensorError: They disagree with each other.
        """
        whole = (self.num_experts * self.out_features, self.in_features)
        size = (self.out_features // len(self.members), self.in_features)
        found = {tuple(sizes) for sizes in self.shape.view(-1, 2).tolist()}
        if found != {size}:
            raise PackedTensorError(f"shape holds {sorted(found)}, the weights are {size}")
        try:
            self.compressor.check_values({"bitmask": self.bitmask.detach().flatten(0, 1)}, whole, self.num_values)
        except PackedTensorError:
            # Whose it is: one by one takes longer.
            for member, parts in self.parts_of_each():
                try:
                    self.compressor.check_values(parts, size, math.prod(size) // 2)
                except PackedTensorError as error:
                    raise PackedTensorError(f"{member}: {error}") from None

    def unpack(self) -> Tensor:
        """The dense weight (num_experts, out_features, in_features), made anew for every call."""
        dense = ops.unpack(self.compressed, self.bitmask.flatten(0, 1), self.in_features)
        return dense.view(self.num_experts, self.out_features, self.in_features)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x (rows, in_features), sorted by expert, and the first row behind those of each -> (rows, out_features)."""
        compressed: Tensor = self.compressed
        if torch.is_autocast_enabled(x.device.type):
            x, compressed, _ = autocast(x, compressed, None)
        return ops.experts_linear(x, compressed, self.bitmask, offsets, self.in_features)

    def extra_repr(self) -> str:
        """Sizes and format."""
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, format={self.compressor.format}, num_values={self.num_values}"


class Sparse24Experts(nn.Module):
    """A module of merged experts whose weights keep two of every four values.

    Args:
        experts: The module whose place it takes, of which the activation is used; it is not changed.
        weights: The packed projections, by the names of the parameters that they stand for.
    """

    form: Any

    def __init__(self, experts: nn.Module, weights: Mapping[str, ExpertWeights]):
        super().__init__()
        self.projections = projections_of(experts)
        # The architecture's own module without weights: what happens between the projections is its business.
        self.form = _with_parameters(experts, dict.fromkeys(self.projections))
        for name in self.projections:
            self.add_module(name, weights[name])
        self.form._is_hf_initialized = self._is_hf_initialized = True

    @property
    def weights(self) -> dict[str, ExpertWeights]:
        """The packed projections by name."""
        return {name: getattr(self, name) for name in self.projections}

    def to_experts(self) -> nn.Module:
        """The plain module, with unpacked weights."""
        unpacked = {name: nn.Parameter(weight.unpack()) for name, weight in self.weights.items()}
        return _with_parameters(self.form, unpacked).train(self.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What each token's experts make of it, weighted and added.

        Args:
            hidden_states: (tokens, hidden_size).
            top_k_index: (tokens, k), which experts; a number that none has stands for no expert.
            top_k_weights: (tokens, k).

        Returns:
            (tokens, hidden_size), of the dtype of hidden_states.
        """
        up, down = (getattr(self, name) for name in self.projections)
        num_tokens, k = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)  # (tokens * k,)
        offsets = torch.searchsorted(experts, torch.arange(1, up.num_experts + 1, device=experts.device), out_int32=True)
        between = up(hidden_states[order // k], offsets)
        between = self.form._apply_gate(between) if self.form.has_gate else self.form.act_fn(between)
        weighted = down(between, offsets) * top_k_weights.flatten()[order].unsqueeze(-1)
        in_order = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[in_order].view(num_tokens, k, down.out_features).sum(1).to(hidden_states.dtype)


def merged_specs(compressor: BaseCompressor, shape: tuple[int, ...], num_members: int, dtype: torch.dtype) -> dict[str, Spec]:
    """dtype and shape of the merged parts of a merged weight."""
    num_experts, out_features, in_features = shape
    rows = out_features // num_members
    specs = compressor.part_specs((rows, in_features), dtype, rows * in_features // 2)
    return {part: (part_dtype, (num_experts, num_members * first, *rest)) for part, (part_dtype, (first, *rest)) in specs.items()}


def why_not_packed(experts: nn.Module) -> str | None:
    """Why a module of merged experts cannot be held packed, or None."""
    kind = type(experts).__name__
    facts = {name: getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_transposed")}
    if None in facts.values() or not hasattr(experts, "_apply_gate"):
        return f"{kind} does not go through Transformers' experts interface"
    if facts["is_transposed"]:
        return f"{kind} holds its weights transposed"
    if facts["has_bias"] or getattr(experts, "has_post_expert_norm", False):
        return f"{kind} has more than two weights for each expert"
    names = {name for name, parameter in experts.named_parameters() if parameter is not None}
    if names != set(projections_of(experts)) or any(parameter.ndim != 3 for parameter in experts.parameters()):
        return f"{kind} has the parameters {sorted(names)}, expected {list(projections_of(experts))} of three dimensions"
    return None


def projections_of(experts: nn.Module) -> tuple[str, str]:
    """Names of a module's merged weights."""
    return GATED if experts.has_gate else UNGATED


def packed_experts(model: nn.Module) -> dict[str, Sparse24Experts]:
    """Every module of packed experts by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Sparse24Experts)}


def packed_projections(model: nn.Module) -> dict[str, ExpertWeights]:
    """Every packed projection of experts by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertWeights)}


def places(shape: Sequence[int], members: Sequence[str]) -> Iterator[tuple[str, tuple[int, slice]]]:
    """Where each weight of each expert lies in a merged tensor.

    Args:
        shape: (num_experts, rows of all members, ...) of a weight or of one of its parts.
        members: As for `ExpertWeights`.

    Yields:
        Name of the weight, with the expert's number, and what to index the merged tensor with.
    """
    rows = shape[1] // len(members)
    for expert in range(shape[0]):
        for index, member in enumerate(members):
            yield member.replace("*", str(expert)), (expert, slice(index * rows, (index + 1) * rows))


def split_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, tuple[int, slice] | None]]:
    """The tensors of a model as files hold them: those of packed experts apart.

    Args:
        model: Owns them.
        tensors: By names in the model.

    Yields:
        Name of a tensor in the file (but for renamings), name in `tensors`, and what to index that one with, if it is merged.
    """
    projections = packed_projections(model)
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        if owner not in projections:
            yield name, name, None
            continue
        experts = owner.rpartition(".")[0]
        for member, place in places(tensor.shape, projections[owner].members):
            yield f"{experts}.{member}.{part}", name, place


def piece(merged: Tensor, place: tuple[int, slice] | None) -> Tensor:
    """A part of a merged tensor as a tensor of its own: a view, but Transformers would copy what shares a storage before it saves."""
    if place is None:
        return merged
    return merged[place] if merged.is_meta else own_storage(merged[place])


def _with_parameters(experts: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> nn.Module:
    """A module that shares everything with another one but some parameters."""
    other = copy.copy(experts)
    other._parameters = {**experts._parameters, **parameters}
    return other

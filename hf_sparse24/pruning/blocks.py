"""Running a model piece by piece, and watching what its layers are given.

A *unit* is a list of blocks (`model.layers`), or one layer outside of all lists.  Where each block is given the output of the one
before it, only the hidden states between two blocks are kept, and blocks run alone; other units (T5, whose first block makes
arguments for the others) run with the whole model each time, which is slower and gives the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_sparse24.pruning.calibration import Batch, token_mask
from hf_sparse24.pruning.hessian import InputSum


class _Stop(Exception):
    """The rest of the model need not run."""


@dataclass
class Unit:
    """Blocks, each with the names of the layers to prune in it.  `blocks` is empty where the layers stand alone.

    `is_chain`: they can run alone.  `returns_tensor`: they return their hidden states, not a tuple that begins with them.
    """

    name: str
    blocks: list[nn.Module] = field(default_factory=list)
    layers: list[list[str]] = field(default_factory=list)
    is_chain: bool = False
    returns_tensor: bool = False


def run_model(model: Any, batch: Batch) -> Any:
    """A forward pass of the whole model, where it is, without a cache."""
    extra = {"use_cache": False} if model.can_generate() else {}
    return model(**{name: value.to(model.device) for name, value in batch.items()}, **extra)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout for as long."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# ---- what a model is made of ---------------------------------------------------------------------------------------------


def find_units(model: nn.Module, names: Sequence[str], batch: Batch) -> tuple[list[Unit], list[str]]:
    """Divide a model's layers into units, in the order in which they run.

    Args:
        model: Which is run once, on one row of batch.
        names: The layers to prune.
        batch: What to run it on.

    Returns:
        The units, and the names of layers that did not run.  Inside a block they may run yet, on other rows.
    """
    modules = dict(model.named_modules())
    lists = {name: _outer_list(name, modules) for name in names}
    blocks = {block for found in lists.values() if found for block in modules[found]}
    order: list[str] = []
    seen: dict[nn.Module, tuple[Any, Any, Any]] = {}

    def note(block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        seen[block] = (args, kwargs, output)

    with ExitStack() as stack:
        for name in names:
            stack.callback(modules[name].register_forward_pre_hook(lambda *_, name=name: order.append(name)).remove)
        for block in blocks:
            stack.callback(block.register_forward_hook(note, with_kwargs=True).remove)
        run_model(model, {name: value[:1] for name, value in batch.items()})
    order = list(dict.fromkeys(order))
    units: dict[str, Unit] = {}
    for name in order:
        found = lists[name]
        if not found:
            units[name] = Unit(name, layers=[[name]])
        elif found not in units:
            blocks_of_list = list(modules[found])
            inside = [n for n in [*order, *sorted(set(names) - set(order))] if lists[n] == found]
            layers = [[n for n in inside if n.startswith(f"{found}.{index}.")] for index in range(len(blocks_of_list))]
            calls = [seen.get(block) for block in blocks_of_list]
            units[found] = Unit(found, blocks_of_list, layers, _is_chain(calls), calls[0] is not None and isinstance(calls[0][2], Tensor))
    placed = {name for unit in units.values() for layers in unit.layers for name in layers}
    return list(units.values()), [name for name in names if name not in placed]


def _outer_list(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) - 1))
    return next((prefix for prefix in prefixes if isinstance(modules[prefix], nn.ModuleList)), None)


def _is_chain(calls: list[tuple[Any, Any, Any] | None]) -> bool:
    """Whether each block's hidden states are the very output of the one before it, and nothing else of its arguments is."""
    made: set[int] = set()
    for before, call in zip([None, *calls], calls, strict=False):
        if call is None or (hidden := _hidden(call[0], call[1])) is None:
            return False
        others = {id(leaf) for leaf in tree_leaves((call[0], call[1])) if isinstance(leaf, Tensor) and leaf is not hidden}
        if before is not None:
            if hidden is not _first(before[2]):
                return False
            made |= {id(leaf) for leaf in tree_leaves(before[2])}
        if others & made:
            return False
    return True


def _hidden(args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) else None


def _first(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


# ---- running blocks ------------------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """The blocks of a unit, and for each batch the hidden states before the next block, and what each block is called with."""

    blocks: list[nn.Module]
    hidden: list[Tensor]
    calls: list[list[tuple[tuple, dict[str, Any]]]]

    def run(self, index: int, batch: int, device: torch.device) -> Tensor:
        """The output of a block for a batch."""
        args, kwargs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, self.calls[batch][index])
        hidden = self.hidden[batch].to(device)
        output = (
            self.blocks[index](hidden, *args, **kwargs)
            if "hidden_states" not in kwargs
            else self.blocks[index](**{**kwargs, "hidden_states": hidden})
        )
        return _first(output)

    def advance(self, index: int, device: torch.device) -> None:
        """Replace the hidden states by the block's outputs."""
        for batch, hidden in enumerate(self.hidden):
            self.hidden[batch] = self.run(index, batch, device).to(hidden.device)


def start_chain(model: Any, unit: Unit, batches: Sequence[Batch]) -> Chain:
    """Run the model up to the unit; the blocks of the unit only note what they are called with."""
    chain = Chain(unit.blocks, [], [])

    def noting(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if block is unit.blocks[0]:
                chain.hidden.append(hidden)
                chain.calls.append([])
            chain.calls[-1].append((args[1:], kwargs if args else {**kwargs, "hidden_states": None}))
            if block is unit.blocks[-1]:
                raise _Stop
            return hidden if unit.returns_tensor else (hidden,)

        return forward

    with ExitStack() as stack:
        for block in unit.blocks:
            block.forward = noting(block)
            stack.callback(delattr, block, "forward")
        for batch in batches:
            with suppress(_Stop):
                run_model(model, batch)
    return chain


# ---- watching layers -----------------------------------------------------------------------------------------------------


class Watcher:
    """Adds up the inputs of layers; those that are given the very same tensor (q, k and v) share one sum."""

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device, in_features: Callable[[nn.Module], int]):
        self._device, self._in_features = device, in_features
        self._layers = dict(layers)
        self.sums: dict[str, InputSum] = {}
        self.leaders: dict[str, str] = {}
        self._given: dict[str, Tensor] = {}
        self._mask: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator["Watcher"]:
        """Hooks are there for as long."""
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                stack.callback(layer.register_forward_pre_hook(lambda layer, args, name=name: self._add(name, layer, args[0])).remove)
            yield self
        self._given.clear()

    def next_batch(self, batch: Batch) -> None:
        """Of which padding is not counted."""
        self._given.clear()
        self._mask = token_mask(batch)

    def _add(self, name: str, layer: nn.Module, x: Tensor) -> None:
        if not x.numel():  # an expert that no token was routed to: it counts as one that did not run
            return
        if name not in self.leaders:
            self.leaders[name] = next((leader for leader, given in self._given.items() if given is x), name)
        leader = self.leaders[name]
        if leader != name:
            assert self._given[leader] is x
            return
        self._given[name] = x
        total = self.sums.setdefault(name, InputSum(self._in_features(layer), self._device))
        total.add(_counted(x, self._mask))

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Layers with one input, in the order given; those that did not run are left out."""
        found: dict[str, list[str]] = {}
        for name in names:
            if name in self.leaders:
                found.setdefault(self.leaders[name], []).append(name)
        return list(found.values())


def _counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens that count, in_features)."""
    rows = x.flatten(0, -2)
    # A layer that is given something else than one row for each token (a pooler) has no padding.
    if mask is None or len(rows) != mask.numel():
        return rows
    return rows[mask.flatten().to(rows.device)]

"""`prune`: a model's layers one block after the other, each from the inputs that the pruned blocks before it make."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_sparse24.config import Sparse24Config
from hf_sparse24.journal import Journal
from hf_sparse24.linear import PackedLinear
from hf_sparse24.merged import expert_class
from hf_sparse24.modules import listed, match_modules, tied_names
from hf_sparse24.pattern import is_nonzero
from hf_sparse24.pruning import methods
from hf_sparse24.pruning.alps import alps
from hf_sparse24.pruning.blocks import Chain, Unit, Watcher, evaluating, find_units, run_model, start_chain
from hf_sparse24.pruning.calibration import BATCH_SIZE, NUM_WINDOWS, WINDOW, Batch, make_batches
from hf_sparse24.pruning.experts import ExpertLinear, Fallback, LayerInput, expert_inputs, experts_apart, statistics
from hf_sparse24.pruning.hessian import InputSum, full_precision, squared_error
from hf_sparse24.pruning.masks import store_mask
from hf_sparse24.pruning.progress import prune_once
from hf_sparse24.pruning.report import LayerReport, PruneReport
from hf_sparse24.pruning.sparsity import Sparsity, as_sparsity

METHODS: dict[str, methods.Method] = {
    "magnitude": methods.magnitude,
    "wanda": methods.wanda,
    "ria": methods.ria,
    "sparsegpt": methods.sparsegpt,
    "obs": methods.obs,
    "alps": alps,
}
# The best that was measured (benchmarks/prune.py); and what is left without data.
DEFAULT, WITHOUT_DATA = "alps", "magnitude"
# These change the weights that stay, and fit them to a sample that has too few tokens for the width.
ADAPTING, FEW_TOKENS = ("sparsegpt", "obs", "alps"), 8
AfterLayer = Callable[[str, nn.Module, Tensor | None], None]


@torch.no_grad()
def prune(
    model: nn.Module,
    calibration: Any = None,
    method: str | Mapping[str, str] | None = None,
    *,
    refine: str | None = None,
    tokenizer: Any = None,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = ("lm_head",),
    pattern: str | float = "2:4",
    damp: float = 0.01,
    true_sequential: bool = False,
    num_windows: int = NUM_WINDOWS,
    window: int = WINDOW,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    device: torch.device | str | None = None,
    after_layer: AfterLayer | None = None,
    journal: Journal | None = None,
) -> PruneReport:
    """Make a model's linear layers 2:4, in place; each gets its mask as the buffer `weight_kept` (see masks.py).

    Experts that Transformers merges are pruned one by one, under the names of their weights in checkpoints, each from the tokens that
    the router sends there (see experts.py for those that get few).

    Args:
        model: Dense.
        calibration: A text file, texts, rows with a "text", or token batches (see `make_batches`): what the layers' inputs are
            taken from.  The more the better, at least 8 tokens for each input of the widest layer; 128 windows of 1024 are usual.
        method: "magnitude", "wanda", "ria", "sparsegpt", "obs" or "alps"; or one for each class name, module name or
            "re:PATTERN", the first that fits counts.  "alps" by default, "magnitude" without calibration.
        refine: "cg" lets conjugate gradient improve the weights that stay ("alps" always does so).
        tokenizer: For texts.
        targets: Modules to prune, as in `Sparse24Config`; "Conv1D" is known as well.
        ignore: Modules that are never touched.
        pattern: "2:4", another N:M, or a ratio of zeros anywhere in a row, such as 0.5.
        damp: What is added to the diagonal of X^T X, as a share of its mean.
        true_sequential: Inside a block too, take a layer's inputs after those before it are pruned: one run of the block for
            each kind of input, not one in all.
        num_windows: At most so many windows of a text, drawn at random.
        window: Tokens in a window.
        batch_size: Windows that run together.
        seed: Of the draw; the rest is deterministic.
        device: Where blocks are moved to, one at a time, to run and to be pruned; by default all stays where it is.
        after_layer: Called with name, module and X^T X / tokens (None without calibration) of each pruned layer, before
            anything runs on it: the place to quantise it.
        journal: Of a task that may be interrupted (journal.py): blocks that it holds are put back, others are put into it.

    Returns:
        The error of each layer, and which targeted layers were not pruned.

    Raises:
        ValueError: A setting or target that does not fit; a weight tied to another that is targeted by its name: pruning it would
            prune the embedding as well; a layer whose inputs no damping makes usable.
    """
    started = time.perf_counter()
    sparsity = as_sparsity(pattern)
    if journal and after_layer:
        raise ValueError("after_layer cannot be combined with journal: blocks that are put back would not be given to it")
    if refine not in (None, "cg"):
        raise ValueError(f"refine must be 'cg' or None, got {refine!r}")
    with experts_apart(model) as merged:
        layers, left_dense = _select(model, targets, ignore, sparsity, merged)
        chosen = _choose_methods(model, list(layers), method or (WITHOUT_DATA if calibration is None else DEFAULT))
        to = None if device is None else torch.device(device)
        pruner = _Pruner(layers, chosen, sparsity, refine == "cg", damp, to, after_layer, expert_inputs(model), journal)
        label = method if isinstance(method, str) else "/".join(dict.fromkeys(chosen.values()))
        report = PruneReport(f"{label}+cg" if refine else label, str(sparsity), left_dense=left_dense)
        if calibration is None:
            if needing := {name: f"method {how!r}" for name, how in chosen.items() if how != WITHOUT_DATA or refine}:
                raise ValueError(f"without calibration there is only method 'magnitude', without refinement; {listed(needing)}")
            report.layers += [pruner.prune_layer(name, None, 0) for name in layers]
        else:
            if not isinstance(model, PreTrainedModel):
                raise ValueError(f"calibration needs a PreTrainedModel, got a {type(model).__name__}")
            batches = make_batches(calibration, model, tokenizer, num_windows=num_windows, window=window, batch_size=batch_size, seed=seed)
            with full_precision(), evaluating(model):
                units, never_run = find_units(model, list(layers), batches[0])
                for unit in units:
                    report.layers += pruner.prune_unit(model, unit, batches, true_sequential)
            _report_never_run(report, never_run + pruner.never_run)
            _warn_of_few_tokens(report, layers, refine == "cg")
    report.seconds = round(time.perf_counter() - started, 3)
    return report


# ---- what is pruned, and how ---------------------------------------------------------------------------------------------


def _select(
    model: nn.Module, targets: Sequence[str], ignore: Sequence[str], sparsity: Sparsity, merged: Mapping[str, str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers to prune, and those that are targeted and cannot be; `merged` says why experts cannot be taken apart."""
    modules = dict(model.named_modules())
    classes = _classes(model) | {name: expert_class(type(modules[name])) for name in merged}
    selected = match_modules(classes, Sparse24Config(targets=list(targets), ignore=list(ignore)))
    tied = tied_names(model)
    if named := [name for name in selected if name in targets and f"{name}.weight" in tied]:
        raise ValueError(f"{named[0]}.weight is tied to another parameter, which would be pruned with it: untie it, or do not target it")
    reasons = {name: merged.get(name) or _why_not(modules[name], f"{name}.weight" in tied, sparsity) for name in selected}
    left_dense = {name: reason for name, reason in reasons.items() if reason}
    layers = {name: modules[name] for name in selected if name not in left_dense}
    if not layers:
        raise ValueError(f"no targeted layer can be pruned: {left_dense or 'none has a weight'}")
    if absent := [name for name, layer in layers.items() if layer.weight.is_meta]:
        raise ValueError(f"the weight of {absent[0]} is not in memory: load the model without offloading, and prune with device=")
    return layers, left_dense


def _classes(model: nn.Module) -> dict[str, type]:
    modules = model.named_modules()
    return {name: module.kind if isinstance(module, ExpertLinear) else type(module) for name, module in modules}


def _why_not(module: nn.Module, tied: bool, sparsity: Sparsity) -> str | None:
    if tied:
        return "tied to another parameter"
    if isinstance(module, PackedLinear):
        return "packed already"
    if not isinstance(module, nn.Linear | Conv1D):
        return f"a {type(module).__name__}, not a Linear"
    return sparsity.why_not(_weight_rows(module).shape[1])


def _weight_rows(module: Any) -> Tensor:
    """(out_features, in_features), a view; Conv1D stores it transposed."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def _num_inputs(module: Any) -> int:
    return module.in_features if isinstance(module, LayerInput) else _weight_rows(module).shape[1]


def _choose_methods(model: nn.Module, names: list[str], method: str | Mapping[str, str]) -> dict[str, str]:
    given = {"re:.*": method} if isinstance(method, str) else dict(method)
    if unknown := [name for name in given.values() if name not in METHODS]:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {unknown[0]!r}")
    chosen: dict[str, str] = {}
    classes = _classes(model)
    for entry, how in given.items():
        for name in match_modules(classes, Sparse24Config(targets=[entry], ignore=[])):
            chosen.setdefault(name, how)
    if missing := [name for name in names if name not in chosen]:
        raise ValueError(f"no method is given for {missing[0]} and {len(missing) - 1} more; add 're:.*' as the last entry, or ignore them")
    return {name: chosen[name] for name in names}


# ---- the work ------------------------------------------------------------------------------------------------------------


@dataclass
class _Pruner:
    layers: dict[str, nn.Module]
    chosen: dict[str, str]
    sparsity: Sparsity
    is_refined: bool
    damp: float
    device: torch.device | None
    after_layer: AfterLayer | None
    expert_inputs: dict[str, LayerInput]
    journal: Journal | None = None
    never_run: list[str] = field(default_factory=list)

    def prune_unit(self, model: Any, unit: Unit, batches: list[Batch], true_sequential: bool) -> Iterator[LayerReport]:
        """Its blocks in turn."""
        chain = start_chain(model, unit, batches) if unit.is_chain else None
        for index, names in logging.tqdm(list(enumerate(unit.layers)), desc=f"Pruning {unit.name}"):
            with _moved(unit.blocks[index] if chain else None, self.device) as device:
                prune = partial(self._prune_block, _runs(model, chain, index, batches, device), names, true_sequential)
                if self.journal and names:
                    layers = {name: self.layers[name] for name in names}
                    yield from prune_once(self.journal, f"{unit.name}.{index}", layers, prune, self.never_run)
                else:
                    yield from prune()
                if chain and index + 1 < len(unit.blocks):
                    chain.advance(index, device)

    def _prune_block(self, runs: "Runs", names: list[str], true_sequential: bool) -> Iterator[LayerReport]:
        if not names:
            return
        stages = [names]
        if true_sequential:
            seen = self._watch(runs[:1], names)
            stages = self._stages([*seen.groups(names), *([name] for name in names if name not in seen.leaders)])
        for stage in stages:
            watcher = self._watch(runs, stage)
            experts = [name for name in stage if isinstance(self.layers[name], ExpertLinear)]
            whole = {name: watcher.sums.get(watcher.leaders.get(name, "")) for name in self.expert_inputs}
            self.never_run += [name for name in stage if name not in watcher.leaders and name not in experts]
            for group in watcher.groups(stage):
                inputs = watcher.sums.pop(watcher.leaders[group[0]])
                if group[0] in experts:
                    yield from self._prune_experts(group, inputs, whole)
                    continue
                hessian = inputs.hessian()
                for name in group:
                    yield self.prune_layer(name, hessian, inputs.tokens)
            yield from self._prune_experts([name for name in experts if name not in watcher.leaders], None, whole)

    def _stages(self, stages: list[list[str]]) -> list[list[str]]:
        """Experts of a layer do not read each other's results: a projection of all of them is one stage."""
        joined: dict[Any, list[str]] = {}
        for stage in stages:
            layer = self.layers[stage[0]]
            key = (layer.experts, layer.projection) if isinstance(layer, ExpertLinear) else stage[0]
            joined.setdefault(key, []).extend(stage)
        return list(joined.values())

    def _prune_experts(self, names: list[str], own: InputSum | None, whole: Mapping[str, InputSum | None]) -> Iterator[LayerReport]:
        """Weights of experts with one input, of which `own` is the sum; None if no token was sent there."""
        for name in names:
            layer = self.layers[name]
            assert isinstance(layer, ExpertLinear)
            of_layer = whole[f"{layer.experts}.input"]
            if of_layer is None:
                self.never_run.append(name)
                continue
            hessian, fallback = statistics(layer, self.chosen[name], self.chosen[name] in ADAPTING or self.is_refined, own, of_layer)
            yield self.prune_layer(name, hessian, own.tokens if own else 0, fallback)

    def _watch(self, runs: "Runs", names: list[str]) -> Watcher:
        layers = {name: self.layers[name] for name in names}
        experts = {f"{layer.experts}.input" for layer in layers.values() if isinstance(layer, ExpertLinear)}
        layers |= {name: self.expert_inputs[name] for name in sorted(experts)}
        watcher = Watcher(layers, self._device(names[0]), _num_inputs)
        with watcher.watching():
            for batch, run in runs:
                watcher.next_batch(batch)
                run()
        return watcher

    def _device(self, name: str) -> torch.device:
        return self.device or _weight_rows(self.layers[name]).device

    def prune_layer(self, name: str, hessian: Tensor | None, tokens: int, fallback: Fallback | None = None) -> LayerReport:
        """Prune one layer, and store its mask beside it."""
        started, layer, how = time.perf_counter(), self.layers[name], self.chosen[name]
        is_refined = self.is_refined
        if fallback and fallback.method:
            how, is_refined = fallback.method, False
        adapts = is_refined or how in ADAPTING
        stored = _weight_rows(layer)
        dense = stored.to(self._device(name), torch.float32, copy=True)
        try:
            pruned = self._prune_weight(how, dense, hessian, is_refined)
        except ValueError as error:
            raise ValueError(f"{name} cannot be pruned by {how}: {error}") from error
        mask = pruned.mask.to(stored.device)
        dropped = int((is_nonzero(stored) & ~mask).sum())
        if adapts:  # of what only lost weights, the others stay as they are, in float64 too
            stored.copy_(pruned.weight.to(stored))
        stored.masked_fill_(~mask, 0)  # and no zero keeps a sign
        store_mask(layer, mask.T if isinstance(layer, Conv1D) else mask)
        lost = squared_error(dense, stored.to(dense), hessian)
        if self.after_layer:
            self.after_layer(name, layer, hessian)
        seconds = round(time.perf_counter() - started, 4)
        reason = "; ".join(filter(None, (fallback.reason if fallback else None, pruned.fallback))) or None
        return LayerReport(name, how, dropped, mask.numel(), tokens, lost, pruned.damping, reason, seconds)

    def _prune_weight(self, how: str, dense: Tensor, hessian: Tensor | None, is_refined: bool) -> methods.Pruned:
        if hessian is None:
            return METHODS[how](dense, dense, self.sparsity, self.damp)
        if not bool(torch.isfinite(hessian).all()):
            raise ValueError("its inputs hold NaN or infinity; calibrate in float32 or bfloat16, or ignore the layer")
        if (is_refined or how in ADAPTING) and not bool(torch.isfinite(dense).all()):
            raise ValueError("its weight holds NaN or infinity")
        pruned = METHODS[how](dense, hessian, self.sparsity, self.damp)
        if is_refined and how != "alps":
            pruned = methods.refine(dense, pruned, hessian, self.damp, methods.REFINE_STEPS)
        return pruned


Runs = list[tuple[Batch, Callable[[], Any]]]


def _runs(model: Any, chain: Chain | None, index: int, batches: list[Batch], device: torch.device) -> Runs:
    """For each batch, how to run the block."""
    if chain is None:
        return [(batch, partial(run_model, model, batch)) for batch in batches]
    return [(batch, partial(chain.run, index, number, device)) for number, batch in enumerate(batches)]


@contextmanager
def _moved(block: nn.Module | None, device: torch.device | None) -> Iterator[torch.device]:
    """A block on the device for as long."""
    if block is None:
        yield torch.device("cpu")
        return
    home = next(block.parameters()).device
    if device and device != home:
        block.to(device)
    try:
        yield device or home
    finally:
        if device and device != home:
            block.to(home)


def _report_never_run(report: PruneReport, names: list[str]) -> None:
    if names:
        reasons = dict.fromkeys(names, "no calibration input reached it")
        warnings.warn(f"{len(names)} layers stay dense: {listed(reasons)}", stacklevel=4)
        report.left_dense |= reasons


def _warn_of_few_tokens(report: PruneReport, layers: Mapping[str, nn.Module], is_refined: bool) -> None:
    few = {
        layer.name: f"{layer.tokens} tokens for {width} inputs"
        for layer in report.layers
        if (is_refined or layer.method in ADAPTING) and layer.tokens < FEW_TOKENS * (width := _weight_rows(layers[layer.name]).shape[1])
    }
    if few:
        warnings.warn(
            f"{len(few)} layers were fitted to fewer than {FEW_TOKENS} tokens for each input, which over-fits: {listed(few)}; "
            "calibrate with more text",
            stacklevel=4,
        )

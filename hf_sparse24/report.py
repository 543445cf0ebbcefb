"""What a checkpoint folder holds: the structure and the bytes of every weight, and what `from_pretrained` makes of it here.

The tensors are read one at a time; a packed weight is unpacked to be looked at, and dropped.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from hf_sparse24.checkpoint import Checkpoint, PackedSlice, as_dense, find_packed, open_checkpoint, read_json, size_bytes
from hf_sparse24.config import DenseSparsityConfig, ParsedConfig, parse_config
from hf_sparse24.conversion import skeleton
from hf_sparse24.errors import CheckpointError, warn
from hf_sparse24.integration.load import why_unpacked
from hf_sparse24.integration.quantizer import checkpoint_names, complete_scheme, place_packed_layers
from hf_sparse24.kernel_report import KernelsReport, explain_layers
from hf_sparse24.model_compressor import local_folder
from hf_sparse24.modules import packed_layers
from hf_sparse24.pattern import structure
from hf_sparse24.table import render_columns

COLUMNS = ("weight", "module", "shape", "dtype", "stored as", "structure", "zeros", "bytes", "of dense", "on load")
NUMERIC = {"zeros", "bytes", "of dense"}
# What `hf-sparse24 prune` writes beside the weights: the error of each layer.
PRUNE_REPORT = "prune_report.json"


@dataclass(frozen=True)
class Sizes:
    """Numbers and bytes, from headers alone.  `stored` is what the tensors take in the files, `dense` what they would take unpacked."""

    num_files: int
    file_bytes: int
    num_weights: int
    num_packed: int
    stored_bytes: int
    dense_bytes: int
    packed_stored_bytes: int
    packed_dense_bytes: int


@dataclass(frozen=True)
class OnLoad:
    """What becomes of a weight: `layer` is "packed", "dense", or "other" where that is not ours to say."""

    layer: str
    reason: str
    keepable: bool
    """Whether `run_compressed=True` keeps it packed."""


@dataclass(frozen=True)
class WeightReport:
    """One tensor of the dense checkpoint that the folder stands for."""

    name: str
    module: str
    """Class of the module that owns it, empty if that is not known."""
    shape: tuple[int, ...]
    dtype: str
    format: str
    structure: str
    zeros: int
    elements: int
    stored_bytes: int
    dense_bytes: int
    on_load: OnLoad
    pruning_error: float | None = None
    """|(W - W') X|^2 / |W X|^2 as `prune` measured it, if PRUNE_REPORT lies in the folder."""


@dataclass(frozen=True)
class FolderReport:
    """Every weight of a folder."""

    path: str
    architecture: str | None
    format: str | None
    """What config.json says; the files decide."""
    sizes: Sizes
    weights: tuple[WeightReport, ...]
    kernels: KernelsReport | None
    """Of the layers that can stay packed; None if there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def inspect_folder(path_or_repo_id: str | Path, **hub_kwargs: Any) -> FolderReport:
    """Read a checkpoint and say what is in it.

    Args:
        path_or_repo_id: Folder, or repository on the Hub.
        hub_kwargs: Those of `huggingface_hub.snapshot_download`.

    Raises:
        CheckpointError: The folder is damaged or in a form that cannot be read.
    """
    with open_checkpoint(local_folder(path_or_repo_id, **hub_kwargs)) as checkpoint:
        parsed, packed = _find(checkpoint)
        dense = as_dense(checkpoint.tensors, packed)
        owners, on_load, kernels = _outcomes(checkpoint, parsed, packed, list(dense))
        errors = _pruning_errors(checkpoint.path / PRUNE_REPORT, {name: owner for name, (owner, _) in owners.items()})
        reading = logging.tqdm(dense.items(), desc="Reading weights")
        weights = tuple(_describe(name, value, owners[name][1], on_load[name], errors.get(name)) for name, value in reading)
        names = checkpoint.config.get("architectures")
        return FolderReport(
            path=str(path_or_repo_id),
            architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None,
            format=parsed.sparsity.format if parsed.sparsity else None,
            sizes=_sizes(checkpoint, packed),
            weights=weights,
            kernels=kernels,
        )


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint, and its model without values, in which the layers that can stay packed are packed."""

    checkpoint: Checkpoint
    packed: dict[str, PackedSlice]
    model: PreTrainedModel
    kept: dict[str, str]
    """Name of the weight -> module, of those layers."""


@contextmanager
def open_model(path_or_repo_id: str | Path, **hub_kwargs: Any) -> Iterator[OpenedModel]:
    """Open a checkpoint to look at its layers; only headers are read.

    Args:
        path_or_repo_id: Folder, or repository on the Hub.
        hub_kwargs: Those of `huggingface_hub.snapshot_download`.

    Raises:
        CheckpointError: The folder is damaged or in a form that cannot be read.
        ValueError: Transformers has no class for the model.
    """
    with open_checkpoint(local_folder(path_or_repo_id, **hub_kwargs)) as checkpoint:
        parsed, packed = _find(checkpoint)
        model = skeleton(checkpoint)
        yield OpenedModel(checkpoint, packed, model, _place(model, parsed, packed)[0])


def measure_folder(path: str | Path) -> Sizes:
    """The sizes of a checkpoint folder, without reading weights.

    Raises:
        CheckpointError: As for `inspect_folder`.
    """
    with open_checkpoint(path) as checkpoint:
        return _sizes(checkpoint, _find(checkpoint)[1])


def render_table(report: FolderReport) -> str:
    """The report as text.  Weights that differ only by a number in their names share a row: `layers.0-29.mlp.up_proj.weight`."""
    groups: dict[tuple, list[WeightReport]] = defaultdict(list)
    for weight in report.weights:
        kind = (weight.module, weight.shape, weight.dtype, weight.format, weight.structure, weight.on_load)
        groups[(re.sub(r"\d+", "#", weight.name), *kind)].append(weight)
    return "\n".join([render_columns(COLUMNS, map(_row, groups.values()), NUMERIC), "", *_summary(report)])


def show_bytes(size_bytes: int) -> str:
    """`269.1 MB`; decimal, as on the Hub."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes} B"


# ---- reading -------------------------------------------------------------------------------------------------------------


def _find(checkpoint: Checkpoint) -> tuple[ParsedConfig, dict[str, PackedSlice]]:
    parsed = parse_config(checkpoint.config)
    return parsed, find_packed(checkpoint.tensors, checkpoint.file_of, declared=parsed.sparsity is not None)


def _sizes(checkpoint: Checkpoint, packed: Mapping[str, PackedSlice]) -> Sizes:
    dense = as_dense(checkpoint.tensors, packed)
    packed_stored, packed_dense = sum(w.stored_bytes for w in packed.values()), sum(size_bytes(w) for w in packed.values())
    dense_bytes = sum(size_bytes(value) for value in dense.values() if not isinstance(value, Tensor))  # none is: files hold slices
    return Sizes(
        num_files=len(checkpoint.shards),
        file_bytes=sum((checkpoint.path / file).stat().st_size for file in checkpoint.shards),
        num_weights=len(dense),
        num_packed=len(packed),
        stored_bytes=dense_bytes - packed_dense + packed_stored,
        dense_bytes=dense_bytes,
        packed_stored_bytes=packed_stored,
        packed_dense_bytes=packed_dense,
    )


def _describe(name: str, value: Any, module: str, on_load: OnLoad, pruning_error: float | None) -> WeightReport:
    tensor = value[...]
    found = structure(tensor)
    is_packed = isinstance(value, PackedSlice)
    return WeightReport(
        name=name,
        module=module,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        format=value.compressor.format if is_packed else DenseSparsityConfig.format,
        structure=found.kind,
        zeros=found.zeros,
        elements=found.elements,
        stored_bytes=value.stored_bytes if is_packed else tensor.nbytes,
        dense_bytes=tensor.nbytes,
        on_load=on_load,
        pruning_error=pruning_error,
    )


def _pruning_errors(file: Path, owners: Mapping[str, str]) -> dict[str, float]:
    """Weight -> error, as `PruneReport.to_dict` has it by module; nothing if there is no such file.

    Raises:
        CheckpointError: It is not one that `prune` wrote.
    """
    if not file.exists():
        return {}
    try:
        errors = {str(layer["name"]): float(layer["relative_error"]) for layer in read_json(file)["layers"]}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not a report of hf-sparse24 prune ({type(error).__name__}: {error}): move it elsewhere") from None
    if strangers := errors.keys() - set(owners.values()):
        warn(f"{file}: {len(strangers)} of its {len(errors)} layers are not in this checkpoint, such as {min(strangers)}")
    return {name: errors[owner] for name, owner in owners.items() if owner in errors and name.endswith(".weight")}


# ---- what loading will do ------------------------------------------------------------------------------------------------


def _outcomes(
    checkpoint: Checkpoint, parsed: ParsedConfig, packed: Mapping[str, PackedSlice], names: list[str]
) -> tuple[dict[str, tuple[str, str]], dict[str, OnLoad], KernelsReport | None]:
    """By weight, its module's name and class, and what becomes of it; and what multiplies by the layers that can stay packed."""
    unknown = {name: (name.rpartition(".")[0], "") for name in names}
    stock = "quantised by another method, which Transformers opens"
    others = parsed.quantized and (parsed.sparsity is None or isinstance(parsed.sparsity, DenseSparsityConfig))
    if others or (parsed.sparsity is None and "quantization_config" in checkpoint.config):
        return unknown, dict.fromkeys(names, OnLoad("other", stock, False)), None
    try:
        model = skeleton(checkpoint)
    except ValueError as error:
        other = OnLoad("other", str(error), False)
        return unknown, {name: other if name in packed else OnLoad("dense", "stored dense", False) for name in names}, None
    targets = {name: target.rpartition(".")[0] for name, (target, _) in checkpoint_names(model, names).items()}
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    owners = unknown | {name: (owner, classes.get(owner, "")) for name, owner in targets.items()}
    kept, left_dense = _place(model, parsed, packed)
    why = _why_unpacked(parsed)
    outcomes = dict.fromkeys(names, OnLoad("dense", "stored dense", False))
    outcomes |= {name: OnLoad("dense", reason, False) for name, reason in left_dense.items()}
    outcomes |= dict.fromkeys(kept, OnLoad("packed" if why is None else "dense", why or "packed layers are faster here", True))
    layers = packed_layers(model)
    return owners, outcomes, explain_layers(layers, _dtype(checkpoint.config)) if layers else None


def _place(model: PreTrainedModel, parsed: ParsedConfig, packed: Mapping[str, PackedSlice]) -> tuple[dict[str, str], dict[str, str]]:
    """As loading does it: weight -> module of those that can stay packed, and -> reason for the others."""
    kept, _, left_dense = place_packed_layers(model, packed, get_model_conversion_mapping(model))
    if parsed.sparsity is not None:
        complete_scheme(packed_layers(model), parsed.sparsity)
    return kept, left_dense


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Of x, after loading without options."""
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return named if isinstance(named, torch.dtype) else torch.float32


def _why_unpacked(parsed: ParsedConfig) -> str | None:
    """Why `from_pretrained`, without options, unpacks every packed weight; None if it keeps those of `nn.Linear`."""
    if parsed.sparsity is None or isinstance(parsed.sparsity, DenseSparsityConfig):
        return "config.json does not say that weights are packed"
    return why_unpacked(None, parsed.sparsity.run_compressed, parsed.sparsity.compressor.format)


# ---- text ----------------------------------------------------------------------------------------------------------------


def _row(group: list[WeightReport]) -> tuple[str, ...]:
    first = group[0]
    stored, dense = sum(w.stored_bytes for w in group), sum(w.dense_bytes for w in group)
    zeros, elements = sum(w.zeros for w in group), sum(w.elements for w in group)
    shape = "x".join(map(str, first.shape)) or "scalar"
    return (
        _shared_name([w.name for w in group]),
        first.module or "?",
        shape if len(group) == 1 else f"{len(group)} of {shape}",
        first.dtype,
        first.format,
        first.structure,
        f"{zeros / elements:.1%}" if elements else "-",
        show_bytes(stored),
        f"{stored / dense:.4f}" if dense else "-",
        first.on_load.layer,
    )


def _shared_name(names: list[str]) -> str:
    """`a.0.b`, `a.1.b`, `a.3.b` -> `a.0-1,3.b`; `*` where the numbers do not combine freely."""
    texts = re.split(r"\d+", names[0])
    numbers = [sorted(set(column)) for column in zip(*([int(n) for n in re.findall(r"\d+", name)] for name in names), strict=True)]
    free = prod(map(len, numbers)) == len(names)
    shown = [_ranges(column) if free or len(column) == 1 else "*" for column in numbers]
    return "".join(part for pair in zip(texts, [*shown, ""], strict=True) for part in pair)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _summary(report: FolderReport) -> list[str]:
    sizes = report.sizes
    files = f"{sizes.num_weights} weights in {sizes.num_files} files"
    lines = [
        f"{report.path}: {report.architecture or 'no architecture'}, config.json says {report.format or 'nothing of sparsity'}",
        f"{files}: {show_bytes(sizes.stored_bytes)}, dense {show_bytes(sizes.dense_bytes)}",
    ]
    if sizes.num_packed:
        share = sizes.packed_stored_bytes / max(1, sizes.packed_dense_bytes)
        packed = f"{show_bytes(sizes.packed_stored_bytes)}, dense {show_bytes(sizes.packed_dense_bytes)}, a share of {share:.4f}"
        lines += [f"{sizes.num_packed} of them packed: {packed}"]
    return [*lines, *describe_outcomes(report)]


def describe_outcomes(report: FolderReport) -> list[str]:
    """What loading makes of packed weights, and which dense ones could be packed, as sentences."""
    lines = []
    for on_load, number in Counter(w.on_load for w in report.weights if w.format != DenseSparsityConfig.format).items():
        keep = "; run_compressed=True keeps them packed" if on_load.keepable and on_load.layer == "dense" else ""
        lines += [f"on load here, {number} packed weights become {on_load.layer} layers: {on_load.reason}{keep}"]
    dense_linears = [w for w in report.weights if w.module == "Linear" and w.format == DenseSparsityConfig.format]
    if number := sum(w.structure in ("2:4", "1:4") for w in dense_linears):
        lines += [f"{number} weights are 2:4 and stored dense: hf-sparse24 compress packs them"]
    return lines

"""Whether a checkpoint folder keeps its promises, as far as files can say: no model is made, two tensors at most are in memory.

Each check is a row: what was looked at, what is wrong, and what is worth knowing though nothing is wrong.  Checks that an earlier
failure makes impossible have no row.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_sparse24.checkpoint import (
    CONFIG_NAME,
    DTYPES,
    INDEX_NAME,
    PICKLE_NAMES,
    WEIGHTS_NAME,
    Checkpoint,
    PackedSlice,
    as_dense,
    find_packed,
    open_checkpoint,
    read_json,
    size_bytes,
)
from hf_sparse24.comparison import Comparison, compare_tensors
from hf_sparse24.compressors import PackQuantizedCompressor
from hf_sparse24.config import GUARD, DenseSparsityConfig, ParsedConfig, Sparse24Config, parse_config
from hf_sparse24.errors import CheckpointError
from hf_sparse24.pattern import find_bad_groups
from hf_sparse24.quantization import GPTQ_MARLIN
from hf_sparse24.staging import STAGE_PREFIX, WEIGHT_FILES
from hf_sparse24.table import render_columns

SUMS_NAME = "SHA256SUMS"
# Elements of a tensor, and bytes of a file, that are looked at together.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    """What there was."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know, though the files are as they must be."""


@dataclass(frozen=True)
class VerifyReport:
    """Every check of a folder, and how its tensors compare with those of a second one."""

    path: str
    checks: tuple[Check, ...]
    against: str | None = None
    comparison: Comparison | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong."""
        return [problem for check in self.checks for problem in check.problems]

    @property
    def notes(self) -> list[str]:
        """What is worth knowing."""
        return [note for check in self.checks for note in check.notes]

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "is_right": self.is_right}


def verify_folder(folder: str | Path, against: str | Path | None = None) -> VerifyReport:
    """Check everything that a folder's files say of each other.

    Args:
        folder: A checkpoint, packed in any format that is read, or dense.
        against: A second checkpoint, as a rule the dense one.  Every tensor must have its bits; one that is quantised must be no
            farther from it than rounding explains.  A zero whose sign is lost is a note: the formats do not keep it.

    Returns:
        The report.  What is wrong with `folder` is in it, not raised.

    Raises:
        CheckpointError: `against` is damaged, or no checkpoint.
    """
    checks: list[Check] = []
    comparison = None
    with ExitStack() as stack:
        other = None if against is None else stack.enter_context(open_checkpoint(against))
        others = {} if other is None else as_dense(other.tensors, find_packed(other.tensors, other.file_of))
        try:
            checkpoint = stack.enter_context(open_checkpoint(folder))
            files = f"{len(checkpoint.tensors)} tensors in {counted(len(checkpoint.shards), 'file')}"
            checks += [Check("opening", files), _check_index(checkpoint), _check_files(checkpoint), _check_sums(checkpoint)]
        except CheckpointError as error:
            checks.append(Check("opening", "config.json and the weights files", (str(error),)))
        else:
            parsed, configured = _check_config(checkpoint)
            checks += [*configured, *_check_weights(checkpoint, parsed)]
            if other is not None and all(check.name != "parts" or not check.problems for check in checks):
                tensors = as_dense(checkpoint.tensors, find_packed(checkpoint.tensors, checkpoint.file_of, _is_declared(parsed)))
                comparison = compare_tensors(tensors, others)
                checks.append(_check_comparison(comparison, str(against)))
    return VerifyReport(str(folder), tuple(checks), None if against is None else str(against), comparison)


def render_report(report: VerifyReport) -> str:
    """The report as text: a row for each check, then every problem and note."""
    rows = [(check.name, "FAILED" if check.problems else "ok", check.found) for check in report.checks]
    problems, notes = [f"FAILED: {problem}" for problem in report.problems], [f"note: {note}" for note in report.notes]
    number = len(report.problems)
    verdict = "is right" if report.is_right else f"is not right: {counted(number, 'problem')}"
    return "\n".join([render_columns(("check", "", "what was looked at"), rows), "", *problems, *notes, f"{report.path} {verdict}"])


# ---- files ---------------------------------------------------------------------------------------------------------------


def _check_index(checkpoint: Checkpoint) -> Check:
    """The other direction than `open_checkpoint`: what the files hold and the index does not say."""
    if not checkpoint.is_sharded:
        return Check("index", "none, for there is one file")
    file, problems = checkpoint.path / INDEX_NAME, []
    index = read_json(file)
    if unnamed := [name for name in checkpoint.tensors if name not in index["weight_map"]]:
        problems.append(f"{file}: does not name {_listed(unnamed)}")
    total = sum(size_bytes(value) for value in checkpoint.tensors.values())
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if stated is not None and stated != total:
        problems.append(f"{file}: total_size is {stated}, but the tensors have {total} bytes")
    if (checkpoint.path / WEIGHTS_NAME).exists():
        problems.append(f"{file}: {WEIGHTS_NAME} is there as well, which Transformers prefers to the files that the index names")
    return Check("index", f"{len(index['weight_map'])} names, {total:,} bytes", tuple(problems))


def _check_files(checkpoint: Checkpoint) -> Check:
    """What else is in the folder that a reader could take for weights."""
    notes, others = [], sorted(path.name for path in checkpoint.path.iterdir() if path.name not in checkpoint.shards)
    for name in others:
        if name.endswith(".safetensors") and WEIGHT_FILES.fullmatch(name) and name != WEIGHTS_NAME:
            notes.append(f"{name} belongs to another set of weights")
        elif any(Path(name).match(pattern) for pattern in PICKLE_NAMES):
            notes.append(f"{name} is a pickle, which may run code, and is not looked at")
        elif name.startswith(STAGE_PREFIX):
            notes.append(f"{name} is what an interrupted save left: it can be deleted")
    return Check("files", f"{len(others)} beside the weights", notes=tuple(notes))


def _check_sums(checkpoint: Checkpoint) -> Check:
    sums = _stated_sums(checkpoint.path)
    problems = []
    for name, stated in logging.tqdm(sums.items(), desc="Checking sums", disable=not sums):
        path = checkpoint.path / name
        if not path.is_file():
            problems.append(f"{path}: has a sum, but is missing")
        elif (found := _sha256(path)) != stated:
            problems.append(f"{path}: its SHA-256 is {found}, expected {stated}")
    return Check("sums", f"SHA-256 of {counted(len(sums), 'file')}" if sums else "none are stated", tuple(problems))


def _stated_sums(folder: Path) -> dict[str, str]:
    """SHA-256 by file name: of SHA256SUMS, and of the Hub's cache, in which large files are links to blobs of that name."""
    blobs = {path.name: path.resolve().name for path in folder.iterdir() if path.is_symlink() and path.resolve().parent.name == "blobs"}
    stated = {name: blob for name, blob in blobs.items() if re.fullmatch(r"[0-9a-f]{64}", blob)}
    if (folder / SUMS_NAME).is_file():
        text = (folder / SUMS_NAME).read_text(encoding="utf-8", errors="replace")
        stated |= {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](?:\./)?(.+?)\r?$", text, re.MULTILINE)}
    return stated


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while block := opened.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


# ---- config.json ---------------------------------------------------------------------------------------------------------


def _check_config(checkpoint: Checkpoint) -> tuple[ParsedConfig | None, list[Check]]:
    """What config.json says, None if that cannot be read; and the rows."""
    file = checkpoint.path / CONFIG_NAME
    if not file.exists():
        return ParsedConfig(None, False), [Check("config", "none", (f"{file}: no such file",))]
    try:
        parsed = parse_config(checkpoint.config)
    except CheckpointError as error:
        return None, [Check("config", "quantization_config", (f"{file}: {error}",))]
    if parsed.sparsity is None or isinstance(parsed.sparsity, DenseSparsityConfig):
        return parsed, [Check("config", "nothing of sparsity")]
    scheme = parsed.sparsity.quantization
    quantized = f", {scheme.num_bits} bits ({scheme.format})" if scheme else ""
    return parsed, [Check("config", f"{parsed.sparsity.format}, {parsed.sparsity.structure}{quantized}"), _check_guard(checkpoint, parsed)]


def _check_guard(checkpoint: Checkpoint, parsed: ParsedConfig) -> Check:
    """What makes stock Transformers stop, instead of returning random weights."""
    assert parsed.sparsity is not None
    block = checkpoint.config.get("quantization_config")
    groups = block.get("config_groups") if isinstance(block, Mapping) else None
    if isinstance(groups, Mapping) and GUARD in groups:
        return Check("guard", "stops Transformers without hf_sparse24 before it reads weights")
    if parsed.sparsity.quantization is not None and parsed.sparsity.quantization.format == GPTQ_MARLIN:
        return Check("guard", "none: other readers of GPTQ's names do without")
    if parsed.sparsity.readable_by == "compressed-tensors":
        return Check("guard", "none: readable_by is compressed-tensors")
    note = f"{checkpoint.path / CONFIG_NAME}: no guard, so that Transformers 5 without hf_sparse24 may return random weights in silence"
    return Check("guard", "none", notes=(f"{note}; hf-sparse24 convert writes one",))


def _is_declared(parsed: ParsedConfig | None) -> bool:
    return parsed is None or parsed.sparsity is not None


# ---- weights -------------------------------------------------------------------------------------------------------------


def _check_weights(checkpoint: Checkpoint, parsed: ParsedConfig | None) -> list[Check]:
    try:
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=_is_declared(parsed))
    except CheckpointError as error:
        return [Check("parts", "headers of packed weights", (str(error),))]
    formats = Counter(weight.compressor.format for weight in packed.values())
    found = ", ".join(f"{counted(number, 'weight')} packed as {name}" for name, number in formats.items()) or "no packed weight"
    parts = Check("parts", found, tuple(_disagreements(checkpoint, parsed, packed)))
    return [parts, *([_check_positions(packed)] if packed else []), _check_values(as_dense(checkpoint.tensors, packed))]


def _disagreements(checkpoint: Checkpoint, parsed: ParsedConfig | None, packed: Mapping[str, PackedSlice]) -> list[str]:
    """Where config.json and the tensors' names say different things."""
    if parsed is None:
        return []
    file, sparsity = checkpoint.path / CONFIG_NAME, parsed.sparsity
    says_sparse = sparsity is not None and not isinstance(sparsity, DenseSparsityConfig)
    sparse = {name: weight for name, weight in packed.items() if weight.compressor.config_format != DenseSparsityConfig.format}
    if says_sparse != bool(sparse):
        weights = f"{counted(len(sparse), 'weight')} are packed" if sparse else "no weight is packed"
        return [f"{file}: {'says' if says_sparse else 'does not say'} that weights are packed, but {weights}"]
    others = [name for name, weight in sparse.items() if sparsity is not None and weight.compressor.config_format != sparsity.format]
    if others:
        stored = sparse[others[0]].compressor.format
        return [f"{file}: says {sparsity.format if sparsity else None}, but {_listed(others)} packed as {stored}"]
    return []


def _check_positions(packed: Mapping[str, PackedSlice]) -> Check:
    """Set bits against values, two of every four, padding, row offsets, scales: whatever a format stores beside its values."""
    problems = []
    for weight in logging.tqdm(packed.values(), desc="Checking positions"):
        try:
            weight.check_values()
            problems += _broken_pattern(weight)
        except CheckpointError as error:
            problems.append(str(error))
    beside = sorted({part for weight in packed.values() for part in weight.parts if part != weight.compressor.value_part})
    return Check("positions", f"{', '.join(beside)} of {counted(len(packed), 'weight')}", tuple(problems))


def _broken_pattern(weight: PackedSlice) -> list[str]:
    """Of the one format that stores the zeros of a 2:4 weight, too."""
    compressor = weight.compressor
    if not isinstance(compressor, PackQuantizedCompressor) or compressor.config_format != Sparse24Config.format or weight.shape[1] % 4:
        return []
    bad = find_bad_groups(compressor.decompress_integers({part: value[...] for part, value in weight.parts.items()})[0])
    return [f"{weight.where}: packed weight {weight.name}: not 2:4: {bad}"] if bad else []


def _check_values(dense: Mapping[str, Any]) -> Check:
    """Read every value once.  NaN and infinity are stored like any other, but seldom wanted."""
    notes, num_bytes = [], 0
    for name, value in logging.tqdm(dense.items(), desc="Reading weights"):
        stored = value.parts[value.compressor.value_part] if isinstance(value, PackedSlice) else value
        num_bytes += size_bytes(stored)
        if stored.get_dtype() not in DTYPES:
            notes.append(f"{name} is {stored.get_dtype()}, which torch does not know")
        elif number := _count_non_finite(stored):
            notes.append(f"{name}: {number} values are NaN or infinite")
    return Check("values", f"{num_bytes:,} bytes of {counted(len(dense), 'tensor')}", notes=tuple(notes))


def _count_non_finite(stored: Any) -> int:
    shape = stored.get_shape()
    if not DTYPES[stored.get_dtype()].is_floating_point or 0 in shape:
        return 0
    if not shape:
        return int((~stored[...].float().isfinite()).sum())
    step = max(1, CHUNK * shape[0] // prod(shape))
    return sum(int((~stored[start : start + step].float().isfinite()).sum()) for start in range(0, shape[0], step))


def _check_comparison(comparison: Comparison, against: str) -> Check:
    found = f"{comparison.num_equal} of {counted(comparison.num_tensors, 'tensor')} equal {against} bit by bit"
    notes = []
    if comparison.num_lost_signs:
        notes.append(f"{counted(comparison.num_lost_signs, 'zero')} of the other sign than in {against}: the format does not keep it")
    if comparison.num_rounded:
        found += f", {comparison.num_rounded} rounded"
    if comparison.largest_error is not None:
        notes.append(f"the largest error of a rounded weight is {comparison.largest_error}")
    return Check("against", found, tuple(comparison.problems), tuple(notes))


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

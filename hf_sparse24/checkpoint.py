"""Checkpoint files: which weights are packed, and each of them seen as the dense tensor that it stands for.

A compressed checkpoint is the dense checkpoint in which some weights are stored as parts.  `as_dense` undoes that lazily:
the result behaves like the open files of the dense checkpoint, so that whoever reads it (Transformers' loader with its
renamings, expert merging, sharding and casts; a folder conversion) needs to know nothing of packing.

What is packed is decided by the tensors' names (docs/formats.md); `config.json` only says whose the last two are, which others read too:

    P.compressed, P.bitmask, P.shape                  the weight P.weight, sparse-24-bitmask
    the same and P.row_offsets                        the weight P.weight, sparse-bitmask
    N.compressed, N.bitmask, ... with N = P.weight    any parameter N, written by compressed-tensors <= 0.8.1
    either of the first two and P.weight_scale        the weight P.weight, quantised to 8 bits
    P.weight_packed, P.meta, P.scale_packed           the weight P.weight, marlin-24
    P.B_24, P.B_meta, P.s                             the same under GPTQ's names
    P.weight_packed, P.weight_scale, P.weight_shape   the weight P.weight, pack-quantized
    P.weight of 8 bits, P.weight_scale                the weight P.weight, quantised to 8 bits and not sparse
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_sparse24.compressors import COMPRESSORS, PART_SUFFIXES, BaseCompressor, PackedTensorError, find_compressor
from hf_sparse24.compressors.base import Spec
from hf_sparse24.errors import CheckpointError

# Suffixes of which one alone, in a checkpoint that is ours, is a part whose others are missing.
KEY_SUFFIXES = {part for compressor in COMPRESSORS.values() for part in compressor.key_parts} - {"weight"}
CONFIG_NAME = "config.json"
# Stands in a folder while files are moved into it (staging.py).
INCOMPLETE_NAME = ".hf-sparse24-incomplete"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# More sizes than any weight has; a longer `shape` is not read.
MAX_AXES = 8
MAX_NESTING = 100
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
PICKLE_NAMES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Slice(Protocol):
    """A tensor in an open safetensors file: its header is known, indexing reads it."""

    def get_shape(self) -> list[int]:
        """Sizes of the axes."""

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""

    def __getitem__(self, index: Any) -> Tensor: ...


class TensorSlice:
    """A tensor in memory with the interface of `Slice`."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        """Sizes of the axes."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return _dtype_name(self.tensor.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class PackedSlice:
    """A packed weight with the interface of `Slice`: header and values are those of the dense tensor.

    Args:
        name: Parameter name, for errors.
        parts: The stored tensors by suffix.
        where: File or folder, for errors.

    Raises:
        CheckpointError: The headers of the parts disagree; nothing but `shape` was read.
    """

    def __init__(
        self, name: str, parts: Mapping[str, Slice], where: str, base: str | None = None, compressor: BaseCompressor | None = None
    ):
        self.name, self.parts, self.where = name, dict(parts), where
        self.base = base or name.removesuffix(".weight")
        """What stands before the suffixes of its parts."""
        self.device: torch.device | None = None
        """Where to unpack; None is the CPU."""
        self.specs: dict[str, Spec] = {part: _spec(value) for part, value in parts.items()}
        found = compressor or find_compressor(self.specs, declared=True)
        assert found is not None
        self.compressor = found
        if "shape" in found.parts:
            self._check_shape_part()
        try:
            self.shape = found.read_shape(parts)
            found.check_parts(self.specs, self.shape)
        except PackedTensorError as error:
            raise self._error(str(error)) from None
        if "shape" in found.parts:
            # Files write (2, 1) or (2,): layers and what is written again have the format's own form.
            sparsity = getattr(found, "sparsity", found)
            written = sparsity.part_specs(self.shape, torch.float32, self.num_values)["shape"][1]
            self.parts["shape"] = TensorSlice(torch.tensor(self.shape, dtype=torch.int64).view(written))
            self.specs["shape"] = (torch.int64, written)

    def _check_shape_part(self) -> None:
        if "shape" not in self.parts:
            raise self._error(f"missing part {name_of_part(self.name, 'shape')}")
        dtype, sizes = self.specs["shape"]
        if dtype != torch.int64 or torch.Size(sizes).numel() > MAX_AXES:
            raise self._error(f"shape is {dtype} of shape {sizes}, expected torch.int64 and at most {MAX_AXES} sizes")

    def get_shape(self) -> list[int]:
        """Sizes of the dense weight."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the weight's dtype."""
        return _dtype_name(self.compressor.dense_dtype(self.specs))

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        rows = index[0] if index else None
        # Some rows only, of a format in which rows can be unpacked on their own.
        if isinstance(rows, slice) and rows != slice(None) and (cut := self.compressor.cut_rows(self.parts, rows, self.shape)):
            return self._unpack(cut)[(slice(None), *index[1:])]
        dense = self._unpack({part: value[...] for part, value in self.parts.items()})
        return dense if index == (...,) else dense[index]

    def _unpack(self, parts: dict[str, Tensor]) -> Tensor:
        if self.device is not None:
            parts = {part: value.to(self.device) if part != "shape" else value for part, value in parts.items()}
        try:
            return self.compressor.decompress_weight(parts)
        except PackedTensorError as error:
            raise self._error(str(error)) from None

    def check_values(self) -> None:
        """Read what is stored beside the values, a bitmask for example, and check it.

        Raises:
            CheckpointError: It does not fit the number of values, or sets padding bits.
        """
        try:
            beside = {part: value[...] for part, value in self.parts.items() if part != self.compressor.value_part}
            self.compressor.check_values(beside, self.shape, self.num_values)
        except PackedTensorError as error:
            raise self._error(str(error)) from None

    @property
    def num_values(self) -> int:
        """How many values are stored."""
        return self.compressor.num_values(self.specs, self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts in the file."""
        return sum(size_bytes(value) for value in self.parts.values())

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: packed weight {self.name}: {message}")


def size_bytes(value: Slice) -> int:
    """Bytes of the tensor that a slice stands for."""
    dtype, shape = _spec(value)
    return dtype.itemsize * torch.Size(shape).numel()


def name_of_part(parameter: str, part: str) -> str:
    """`P.weight`, `bitmask` -> `P.bitmask`."""
    return f"{parameter.removesuffix('.weight')}.{part}"


def find_packed(
    tensors: Mapping[str, Slice | Tensor], where: Callable[[str], str] = lambda name: "checkpoint", declared: bool = False
) -> dict[str, PackedSlice]:
    """Find the packed weights among the tensors of a checkpoint.

    Args:
        tensors: Every tensor of the checkpoint, by name; headers suffice.
        where: The file that holds a tensor, for errors.
        declared: Whether the config says that the checkpoint is sparse: then a stray part is an error even if it is the only one.

    Returns:
        Parameter name (`P.weight`) -> the packed weight, in the order of the files.

    Raises:
        CheckpointError: A part is missing, left over or contradicts another, or a weight is stored twice.
    """
    bases: dict[str, dict[str, Slice]] = {}
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        if base and (suffix in PART_SUFFIXES or suffix == "weight"):
            bases.setdefault(base, {})[suffix] = TensorSlice(tensor) if isinstance(tensor, Tensor) else tensor
    # Most weights are one dense tensor.
    bases = {base: parts for base, parts in bases.items() if set(parts) != {"weight"}}
    complete = _find_complete(bases, declared)
    if complete and not declared:
        complete = _find_complete(bases, declared=True)
    named_by_parameter = any(base.endswith(".weight") and "row_offsets" in bases[base] for base in complete)
    plain = next((name for name in tensors if name.rpartition(".")[2] not in PART_SUFFIXES), None)
    packed = {}
    for base, parts in bases.items():
        if base not in complete:
            if (complete or declared) and (stray := [part for part in parts if part in KEY_SUFFIXES]):
                raise CheckpointError(
                    f"{where(f'{base}.{stray[0]}')}: {base}.{stray[0]} is left over: {_what_is_missing(base, parts, stray)}"
                )
            continue
        compressor = complete[base]
        file = where(f"{base}.{min(set(parts) & set(compressor.parts))}")
        if named_by_parameter and "row_offsets" in parts and not base.endswith(".weight") and plain:
            # The old spelling packs every tensor.
            raise CheckpointError(
                f"{file}: {base}.bitmask: others are named P.weight.bitmask, as compressed-tensors <= 0.8.1 did, "
                f"which packed every tensor, but {plain} is not packed"
            )
        parameter = base if base.endswith(".weight") or (named_by_parameter and "row_offsets" in parts) else f"{base}.weight"
        if base.removesuffix(".weight") != base and base.removesuffix(".weight") in complete:
            raise CheckpointError(f"{file}: {parameter} is stored packed twice, as {base}.bitmask too")
        if parameter in tensors and "weight" not in compressor.parts:
            raise CheckpointError(f"{where(parameter)}: {parameter} is stored both dense and packed")
        if f"{parameter}_scale" in bases or (base == parameter and f"{parameter}_scale" in tensors):
            raise CheckpointError(
                f"{file}: {parameter} is quantised and packed in a way that no known version wrote: its scale is not beside it"
            )
        parts = {part: value for part, value in parts.items() if part != "weight" or "weight" in compressor.parts}
        packed[parameter] = PackedSlice(parameter, parts, file, base, compressor)
    return packed


def _find_complete(bases: Mapping[str, Mapping[str, Slice]], declared: bool) -> dict[str, BaseCompressor]:
    found = {base: find_compressor({part: _spec(value) for part, value in parts.items()}, declared) for base, parts in bases.items()}
    return {base: compressor for base, compressor in found.items() if compressor is not None}


def _what_is_missing(base: str, parts: Mapping[str, Slice], stray: list[str]) -> str:
    missing = [c.key_parts - set(parts) for c in COMPRESSORS.values() if c.key_parts & set(stray)]
    fewest = min(missing, key=len)
    return f"{base}.{sorted(fewest)[0]} is missing" if fewest else f"{base}.weight is {_spec(parts['weight'])[0]}, expected 8 bits"


def as_dense(
    tensors: Mapping[str, Slice | Tensor], packed: Mapping[str, PackedSlice], keep: Iterable[str] = ()
) -> dict[str, Slice | Tensor | PackedSlice]:
    """The tensors of the dense checkpoint that a compressed one stands for.

    Args:
        tensors: Every tensor of the compressed checkpoint.
        packed: `find_packed(tensors)`.
        keep: Parameters that stay as parts, under the names `P.compressed`, `P.bitmask`, ...

    Returns:
        Name -> tensor; a packed one is unpacked when it is indexed.
    """
    parts = {f"{value.base}.{part}" for value in packed.values() for part in value.parts}
    dense: dict[str, Slice | Tensor | PackedSlice] = {name: tensor for name, tensor in tensors.items() if name not in parts}
    keep = set(keep)
    for name, value in packed.items():
        if name in keep:
            dense |= {name_of_part(name, part): tensor for part, tensor in value.parts.items()}
        else:
            dense[name] = value
    return dense


@dataclass
class Checkpoint(AbstractContextManager):
    """The open safetensors files of one folder.

    `shards` maps each file name to the tensors in it, `tensors` each tensor name to its slice, `config` is config.json.
    """

    path: Path
    config: dict[str, Any]
    shards: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, Slice] = field(default_factory=dict)
    _shard_of: dict[str, str] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.__exit__(None, None, None)

    def shard_of(self, name: str) -> str | None:
        """Name of the file that holds a tensor."""
        return self._shard_of.get(name)

    def file_of(self, name: str) -> str:
        """Path of the file that holds a tensor; the folder for a tensor that none holds."""
        return str(self.path / self._shard_of.get(name, ""))

    @property
    def is_sharded(self) -> bool:
        """Whether an index names the files."""
        return (self.path / INDEX_NAME).exists()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open every weights file of a checkpoint folder; only headers are read.

    Args:
        path: Folder with config.json and model.safetensors, or an index and its shards.

    Returns:
        The open checkpoint, a context manager.

    Raises:
        CheckpointError: No folder, no safetensors weights, a missing, truncated or foreign file (named), a tensor in two
            files, or an index that disagrees with the files.
    """
    path = Path(path)
    files, index = checkpoint_files(path)
    if (path / INCOMPLETE_NAME).exists():
        raise CheckpointError(f"{path}: a save into this folder was interrupted, its files are of two checkpoints: save again")
    checkpoint = Checkpoint(path, read_json(path / CONFIG_NAME) if (path / CONFIG_NAME).exists() else {})
    for file in files:
        handle = open_file(path / file)
        checkpoint._handles.append(handle)
        checkpoint.shards[file] = list(handle.keys())
        for name in checkpoint.shards[file]:
            if name in checkpoint.tensors:
                raise CheckpointError(f"{path / file}: tensor {name} is also in {checkpoint.file_of(name)}")
            checkpoint.tensors[name] = handle.get_slice(name)
            checkpoint._shard_of[name] = file
    for name, file in index.items():
        if checkpoint.shard_of(name) != file:
            raise CheckpointError(f"{path / INDEX_NAME}: says that {name} is in {file}, which does not hold it")
    return checkpoint


def checkpoint_files(path: Path) -> tuple[list[str], dict[str, str]]:
    """The weights files of a folder, in the order of their names, and the index's weight map (empty if there is none).

    Raises:
        CheckpointError: There are none, or the index is damaged or names a file that is missing or outside the folder.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if (path / INDEX_NAME).exists():
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path / INDEX_NAME}: weight_map must map tensor names to file names")
        files = sorted(set(weight_map.values()))
        if not files:
            raise CheckpointError(f"{path / INDEX_NAME}: weight_map is empty")
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{path / INDEX_NAME}: {file[:60]!r} is not the name of a safetensors file in this folder")
            # os.path: a name that the system refuses is a missing file, too.
            if not os.path.exists(path / file):
                raise CheckpointError(f"{path / INDEX_NAME}: names {file[:60]}, which is missing")
        if left_out := sorted(_shards_left_out(path, files)):
            raise CheckpointError(f"{path / INDEX_NAME}: does not name {left_out[0]}, which is a shard of the same checkpoint")
        return files, weight_map
    if (path / WEIGHTS_NAME).exists():
        return [WEIGHTS_NAME], {}
    pickles = [p.name for pattern in PICKLE_NAMES for p in path.glob(pattern)]
    hint = f"; {pickles[0]} is a pickle, which may run code: load it with a trusted tool and save it as safetensors" if pickles else ""
    raise CheckpointError(f"{path}: holds neither {WEIGHTS_NAME} nor {INDEX_NAME}{hint}")


def _shards_left_out(path: Path, files: list[str]) -> set[str]:
    series = {match.groups() for file in files if (match := SHARD.fullmatch(file))}
    return {p.name for p in path.iterdir() if (match := SHARD.fullmatch(p.name)) and match.groups() in series} - set(files)


def open_file(file: str | Path) -> Any:
    """A safetensors file, open on the CPU.

    Raises:
        CheckpointError: The file is missing, truncated or no safetensors file; a pointer of Git LFS is called by its name.
    """
    try:
        return safe_open(str(file), framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {_why_unreadable(Path(file), error)}") from None


def read_json(file: str | Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: It does not.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
    if _is_deeper(content, MAX_NESTING):
        raise CheckpointError(f"{file}: nested deeper than {MAX_NESTING} levels")
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _is_deeper(content: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper: what recurses over them (copies, `repr`) would fail later."""
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(levels):
        level = [v for node in level for v in (node.values() if isinstance(node, dict) else node) if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def write_json(file: str | Path, content: Mapping[str, Any]) -> None:
    """Write JSON as Transformers does: two spaces, sorted keys, a newline at the end."""
    Path(file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _why_unreadable(file: Path, error: Exception) -> str:
    if not file.exists():
        return "no such file"
    if not file.is_file():
        return "is not a file"
    with file.open("rb") as opened:
        start = opened.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file: fetch it with `git lfs pull` or download it again"
    return f"not a complete safetensors file of {file.stat().st_size} bytes ({str(error)[:200]}); download or copy it again"


def _dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def _spec(value: Slice) -> tuple[torch.dtype, tuple[int, ...]]:
    # A dtype that torch does not have cannot be the right one either: report it as one that no part may have.
    return DTYPES.get(value.get_dtype(), torch.complex128), tuple(value.get_shape())

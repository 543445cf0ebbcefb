"""The folder that a conversion makes: written shard by shard, gone on with after a kill, and checked before anybody sees it."""

import functools
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from hf_sparse24.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    PICKLE_NAMES,
    Checkpoint,
    PackedSlice,
    Slice,
    as_dense,
    find_packed,
    open_checkpoint,
    open_file,
    read_json,
    size_bytes,
    write_json,
)
from hf_sparse24.errors import CheckpointError
from hf_sparse24.journal import Journal, fingerprint, open_journal, require_new
from hf_sparse24.modules import listed
from hf_sparse24.staging import STAGE_PREFIX, WEIGHT_FILES


def new_folder(out: str | Path, source: str | Path) -> Path:
    """The folder that a conversion may write.

    Raises:
        ValueError: It is inside of the source, a file, or holds files that no interrupted conversion left.
    """
    out = Path(out)
    if Path(source).resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out}: the result needs a folder of its own, outside {source}")
    require_new(out)
    return out


@contextmanager
def converted_folder(source: Checkpoint, out: Path, **options: Any) -> Iterator["ConvertedFolder"]:
    """A folder made of another; it appears when the block ends without an error, and a run that is killed is gone on with.

    Args:
        source: What is converted.
        out: From `new_folder`.
        options: What decides the result, beside the source: plain data.

    Raises:
        CheckpointError: What was written is not what was meant, or the source changed meanwhile.
        ValueError: Another process is writing into the folder.
    """
    files = fingerprint(source.path)
    versions = {"hf_sparse24": vars(sys.modules["hf_sparse24"])["__version__"], "torch": torch.__version__}
    with open_journal(out, {**options, **versions, "source": files}) as journal:
        yield ConvertedFolder(source, journal)
        if fingerprint(source.path) != files:
            raise CheckpointError(f"{source.path}: changed while it was read")
        journal.publish()


class ConvertedFolder:
    """What is written of a new folder; the journal knows what earlier runs did."""

    def __init__(self, source: Checkpoint, journal: Journal):
        self.source, self.journal = source, journal

    def write_shards(self, make: Callable[[str], tuple[dict[str, Tensor], Mapping[str, int]]], title: str) -> None:
        """Write every shard that no earlier run finished.

        Args:
            make: Name of the source's shard -> the tensors of the new one, and numbers to note, see `total`.
            title: Of the progress bar.
        """
        for file in logging.tqdm(self.source.shards, desc=title):
            name = f"{self.journal.stage.name}/{file}"
            if name not in self.journal.finished:
                self._write_shard(name, *make(file))

    def _write_shard(self, name: str, tensors: dict[str, Tensor], noted: Mapping[str, int]) -> None:
        # A shard that held nothing but parts of weights that are at home in others has nothing left.
        if tensors:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            self.journal.finish(name, functools.partial(save_file, contiguous, metadata={"format": "pt"}), **noted)

    def total(self, name: str) -> int:
        """The sum of a number that was noted with the shards."""
        return sum(entry[name] for entry in self.journal.finished.values())

    def write_rest(self, config: Mapping[str, Any], dense: Mapping[str, Slice | Tensor | PackedSlice], packed: Collection[str]) -> None:
        """Write the index, the config, and copies of every other file; then check all of it.

        Args:
            config: Content of config.json.
            dense: The tensors that the folder stands for.
            packed: Names of those that are stored packed.

        Raises:
            CheckpointError: The files hold something else.
        """
        stage = self.journal.stage
        if self.source.is_sharded:
            metadata = read_json(self.source.path / INDEX_NAME).get("metadata", {})
            weight_map, total_size = _read_headers(stage)
            write_json(stage / INDEX_NAME, {"metadata": {**metadata, "total_size": total_size}, "weight_map": weight_map})
        write_json(stage / CONFIG_NAME, config)
        for path in sorted(self.source.path.iterdir()):
            weights = WEIGHT_FILES.fullmatch(path.name) or any(path.match(pattern) for pattern in PICKLE_NAMES)
            if path.name == CONFIG_NAME or weights or path.name in (".git", ".cache") or path.name.startswith(STAGE_PREFIX):
                continue
            if path.is_dir():
                shutil.copytree(path, stage / path.name)
            else:
                shutil.copy2(path, stage / path.name)
        self._check(dense, packed)

    def _check(self, dense: Mapping[str, Slice | Tensor | PackedSlice], packed: Collection[str]) -> None:
        stage = self.journal.stage
        wrong = {}
        for file, entry in self.journal.finished.items():
            size = (stage.parent / file).stat().st_size
            if size != entry["size"]:
                wrong[file] = f"has {size} bytes, {entry['size']} were written"
        with open_checkpoint(stage) as written:
            found_packed = find_packed(written.tensors, written.file_of, declared=bool(packed))
            found = as_dense(written.tensors, found_packed)
            expected_forms, found_forms = (
                {name: _form(value, name in packed) for name, value in tensors.items()} for tensors in (dense, found)
            )
            for name in sorted({*dense, *found, *packed, *found_packed}):
                form, expected = found_forms.get(name), expected_forms.get(name)
                if form != expected:
                    wrong[name] = f"is {form or 'missing'}, expected {expected or 'none'}"
                elif (name in packed) != (name in found_packed):
                    wrong[name] = f"is {'not ' if name in packed else ''}packed"
        if wrong:
            raise CheckpointError(f"{stage.parent.parent}: what was written is not what was meant: {listed(wrong)}")


def _form(value: Any, packed: bool) -> str:
    """Shape and dtype; a weight that was quantised comes back in the dtype of its scales."""
    return f"{value.get_shape()}" if packed else f"{value.get_shape()} {value.get_dtype()}"


def _read_headers(folder: Path) -> tuple[dict[str, str], int]:
    """The index of the shards in a folder, and the bytes of their tensors."""
    weight_map, total_size = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        handle = open_file(path)
        for name in list(handle.keys()):
            weight_map[name] = path.name
            total_size += size_bytes(handle.get_slice(name))
        handle.__exit__(None, None, None)
    return weight_map, total_size

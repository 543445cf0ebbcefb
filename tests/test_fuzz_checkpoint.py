"""Damaged and hostile checkpoints: right or loud, never wrong.

Each case copies a good checkpoint, damages it, and reads it in every way there is.  A way may refuse, with an error of ours that
names a file or a tensor; or it must give exactly what the damaged files say, decoded anew below without the package (a flipped
bit of a stored value cannot be seen).  HF_SPARSE24_FUZZ=20 runs twenty times as many cases.

Run as a script, this file is the child process of the tests that limit memory and watch what is executed.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config, SparseBitmaskConfig
from hf_sparse24.checkpoint import as_dense, find_packed, open_checkpoint
from hf_sparse24.conversion import decompress_folder

ROOT = Path(__file__).parents[1]
INDEX = "model.safetensors.index.json"
TIMES = int(os.environ.get("HF_SPARSE24_FUZZ", "1"))
LONGEST_MESSAGE = 5_000
PARTS = ("compressed", "bitmask", "row_offsets", "shape")
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "C64": 8, "F8_E8M0": 1,
}  # fmt: skip
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
SOURCES = ("sparse-24-bitmask", "sparse-bitmask", "sharded")


# ---- safetensors files as plain data -----------------------------------------------------------------------------------------


@dataclass
class Stored:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass
class File:
    """A safetensors file taken apart: header entries in their order (a name may come twice), and the data behind them."""

    entries: list[tuple[str, Any]]
    data: bytes

    @classmethod
    def read(cls, path: Path) -> "File":
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        return cls(json.loads(raw[8 : 8 + length], object_pairs_hook=list), raw[8 + length :]).with_dicts()

    def with_dicts(self) -> "File":
        self.entries = [(name, dict(value) if isinstance(value, list) else value) for name, value in self.entries]
        return self

    def write(self, path: Path) -> None:
        header = ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in self.entries) + "}").encode()
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + self.data)

    def tensors(self) -> list[tuple[str, Stored]]:
        return [
            (name, Stored(entry["dtype"], tuple(entry["shape"]), self.data[slice(*entry["data_offsets"])]))
            for name, entry in self.entries
            if name != "__metadata__"
        ]

    @classmethod
    def of(cls, tensors: list[tuple[str, Stored]]) -> "File":
        entries: list[tuple[str, Any]] = [("__metadata__", {"format": "pt"})]
        data = b""
        for name, stored in tensors:
            offsets = [len(data), len(data) + len(stored.content)]
            entries.append((name, {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": offsets}))
            data += stored.content
        return cls(entries, data)


class Broken(Exception):
    """The files contradict themselves: whoever reads them must say so."""


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [folder / file for file in dict.fromkeys(weight_map.values())]
        if any(file.resolve().parent != folder.resolve() and not file.is_symlink() for file in files):
            raise Broken("a file outside the folder")
        return files
    return [folder / "model.safetensors"]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder, or Broken."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        pairs = json.loads(raw[8 : 8 + length], object_pairs_hook=list)
        data, covered = raw[8 + length :], 0
        spans = []
        for name, entry in dict(pairs).items():
            if name == "__metadata__":
                continue
            entry = dict(entry)
            shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)) or stop > len(data):
                raise Broken(f"{name}: numbers")
            if ITEM_SIZES[entry["dtype"]] * int(np.prod([*map(int, shape)], dtype=object)) != stop - start:
                raise Broken(f"{name}: size")
            if name in found:
                raise Broken(f"{name}: twice")
            found[name] = Stored(entry["dtype"], shape, data[start:stop])
            spans.append((start, stop))
        for start, stop in sorted(spans):
            if start != covered:
                raise Broken(f"{path.name}: gap or overlap")
            covered = stop
        if covered != len(data):
            raise Broken(f"{path.name}: bytes of no tensor")
    return found


def dense_tensors(folder: Path) -> dict[str, Stored]:
    """What the files of a folder stand for, or Broken."""
    stored = stored_tensors(folder)
    bases: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix in PARTS and base:
            bases.setdefault(base, {})[suffix] = tensor
    dense = dict(stored)
    for base, parts in bases.items():
        if set(parts) == {"shape"}:
            continue
        if not {"compressed", "bitmask", "shape"} <= set(parts):
            raise Broken(f"{base}: only {sorted(parts)}")
        name = base if base.endswith(".weight") else f"{base}.weight"
        if name in dense:
            raise Broken(f"{name}: twice")
        dense[name] = unpacked(parts)
        for part in parts:
            del dense[f"{base}.{part}"]
    return dense


def unpacked(parts: dict[str, Stored]) -> Stored:
    """docs/formats.md, sections 1 and 2, bit by bit."""
    values, bitmask = parts["compressed"], parts["bitmask"]
    if parts["shape"].dtype != "I64" or bitmask.dtype != "U8":
        raise Broken("dtypes")
    shape = tuple(np.frombuffer(parts["shape"].content, "<i8").tolist())
    if not shape or min(shape) < 0 or bitmask.shape != (*shape[:-1], -(-shape[-1] // 8)):
        raise Broken("shape")
    size = ITEM_SIZES[values.dtype]
    if 0 in shape:
        expected_values = (0,) if "row_offsets" in parts else (shape[0], shape[1] // 2)
        if values.shape != expected_values or bytes(parts.get("row_offsets", values).content).strip(b"\0"):
            raise Broken("empty")
        return Stored(values.dtype, shape, b"")
    rows = np.frombuffer(bitmask.content, np.uint8).reshape(-1, bitmask.shape[-1])
    bits = np.unpackbits(rows, axis=1, bitorder="little").astype(bool)  # (rows, columns and padding)
    mask, padding = bits[:, : shape[-1]], bits[:, shape[-1] :]
    if padding.any() or mask.sum() * size != len(values.content):
        raise Broken("bits")
    if "row_offsets" in parts:
        per_row = mask.sum(1)
        expected = (np.cumsum(per_row) - per_row).astype("<i8").tobytes()
        if parts["row_offsets"].content != expected or parts["row_offsets"].dtype != "I64" or len(values.shape) != 1:
            raise Broken("row_offsets")
    elif values.shape != (shape[0], shape[1] // 2) or (mask.reshape(-1, 4).sum(1) != 2).any():
        raise Broken("2:4")
    dense = np.zeros((*mask.shape, size), np.uint8)
    dense[mask] = np.frombuffer(values.content, np.uint8).reshape(-1, size)
    return Stored(values.dtype, shape, dense.tobytes())


def tensor_of(stored: Stored) -> Tensor:
    dtype = TORCH_DTYPES[stored.dtype]
    if not stored.content:
        return torch.zeros(stored.shape, dtype=torch.uint8).to(dtype)
    return torch.frombuffer(bytearray(stored.content), dtype=dtype).view(stored.shape)


def stored_of(tensor: Tensor) -> Stored:
    dtype = next(name for name, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)
    flat = tensor.detach().contiguous().view(-1)
    return Stored(dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


# ---- every way to read a checkpoint ------------------------------------------------------------------------------------------


def read_slices(folder: Path) -> dict[str, Stored]:
    with open_checkpoint(folder) as checkpoint:
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        return {name: stored_of(value[...]) for name, value in as_dense(checkpoint.tensors, packed).items()}


def read_converted(folder: Path) -> dict[str, Stored]:
    out = folder.parent / f"{folder.name}-out"
    try:
        decompress_folder(folder, out)
        return stored_tensors(out)
    except BaseException:
        assert not out.exists() or list(out.iterdir()) == [], "something was written"
        raise
    finally:
        shutil.rmtree(out, ignore_errors=True)


def read_into_model(folder: Path) -> dict[str, Stored]:
    model = empty_model()
    try:
        ModelCompressor.from_pretrained(folder).decompress(folder, model)
    except BaseException:
        assert all(bool((value == 7).all()) for value in model.state_dict().values()), "the model was changed"
        raise
    return {name: stored_of(value) for name, value in model.state_dict().items()}


def read_dense_model(folder: Path) -> dict[str, Stored]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: stored_of(value) for name, value in model.state_dict().items()}


def read_kept_model(folder: Path) -> dict[str, Stored]:
    config = (
        SparseBitmaskConfig if b"row_offsets" in b"".join(path.read_bytes() for path in folder.glob("*.safetensors")) else Sparse24Config
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(run_compressed=True))
    if hasattr(model, "hf_quantizer"):
        model.dequantize()
    return {name: stored_of(value) for name, value in model.state_dict().items()}


_MODEL: list[LlamaForCausalLM] = []


def empty_model() -> LlamaForCausalLM:
    """The model of the golden checkpoints; every weight is 7."""
    if not _MODEL:
        config = json.loads((ROOT / "tests" / "golden" / "dense" / "config.json").read_text())
        config.pop("quantization_config", None)
        _MODEL.append(LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16))
    with torch.no_grad():
        for value in _MODEL[0].state_dict().values():
            value.fill_(7)
    return _MODEL[0]


OWN_WAYS = (read_slices, read_converted, read_into_model)
FROM_PRETRAINED = (read_dense_model, read_kept_model)


# ---- the verdict -------------------------------------------------------------------------------------------------------------


@dataclass
class Damage:
    """What was done to a folder, and what must come of it."""

    what: str
    must: str = "either"
    """"refuse", "load", "same" (as the undamaged one), or "either": refuse, or give what the files say."""
    words: tuple[str, ...] = ()
    """Texts of which an error may name one, beside the folder and its tensors."""
    differing: int | None = None
    """How many elements differ from the undamaged checkpoint, if it loads."""
    ways: tuple[Callable[[Path], dict[str, Stored]], ...] = OWN_WAYS
    names: set[str] = field(default_factory=set)


def verdict(way: Callable[[Path], dict[str, Stored]], folder: Path, damage: Damage, original: dict[str, Stored]) -> str | None:
    """What is wrong with how a way dealt with a damaged folder, or None."""
    try:
        found = way(folder)
    except AssertionError as error:
        return f"{error} (after {error.__context__!r:.300})"
    except Exception as error:
        return why_bad_error(way, folder, damage, error)
    if damage.must == "refuse":
        return "was loaded"
    try:
        expected = original if damage.must == "same" else dense_tensors(folder)
    except Exception as error:
        return f"was loaded, but is damaged: {error!r:.200}"
    if way not in (read_slices, read_converted):
        expected = {as_the_model_calls_it(name, found): stored for name, stored in expected.items()}
    if way in OWN_WAYS and set(found) != set(expected):
        return f"wrong names: {sorted(set(found) ^ set(expected))[:4]}"
    for name, value in found.items():
        if name not in expected:
            return f"{name} was made up"
        want = expected[name]
        if way not in (read_slices, read_converted):  # models have a dtype of their own
            want = stored_of(tensor_of(want).to(TORCH_DTYPES[value.dtype]))
        if value != want:
            return f"wrong values: {name}, {value.dtype} {value.shape}, expected {want.dtype} {want.shape}"
    if damage.differing is not None:
        differing = sum(elements_that_differ(value, original[name]) for name, value in found.items())
        if differing > damage.differing:
            return f"{differing} elements differ, expected {damage.differing}"
    return None


def as_the_model_calls_it(name: str, found: dict[str, Stored]) -> str:
    """Transformers reads a model with or without its prefix."""
    return next((each for each in (name, f"model.{name}", name.removeprefix("model.")) if each in found), name)


def elements_that_differ(one: Stored, other: Stored) -> int:
    size = ITEM_SIZES[one.dtype]
    a, b = (np.frombuffer(each.content, np.uint8).reshape(-1, size) for each in (one, other))
    return int((a != b).any(1).sum())


def why_bad_error(way: Callable, folder: Path, damage: Damage, error: Exception) -> str | None:
    message = str(error)
    shown = f"{type(error).__name__}: {message:.300}"
    if damage.must in ("load", "same"):
        return f"was refused: {shown}"
    if isinstance(error, CheckpointError) or type(error) is ValueError:
        if len(message) > LONGEST_MESSAGE:
            return f"a message of {len(message)} characters: {shown}"
        if any(text in message for text in (str(folder), *damage.words, *damage.names)):
            return None
        return f"names neither file nor tensor: {shown}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = any(Path(frame.filename).is_relative_to(ROOT / "hf_sparse24") for frame in frames)
    theirs = OSError | RuntimeError | SafetensorError if ours else OSError | RuntimeError | SafetensorError | AttributeError | TypeError
    if way in FROM_PRETRAINED and isinstance(error, theirs) and not isinstance(error, RecursionError):
        return None
    where = frames[-1]
    return f"raised {shown} ({Path(where.filename).name}:{where.lineno})"


def names_in(folder: Path) -> set[str]:
    """Tensor names, and the names of the layers, of an undamaged folder."""
    names = set(stored_tensors(folder))
    return names | {name.rpartition(".")[0] for name in names}


# ---- damages to a weights file -----------------------------------------------------------------------------------------------


def any_file(rng: random.Random, folder: Path, holding: str = "") -> Path:
    return rng.choice([path for path in sorted(folder.glob("model*.safetensors")) if holding in str(dict(File.read(path).entries))])


def flip_in(suffixes: tuple[str, ...], what: str, **expected: Any) -> Callable[[random.Random, Path], Damage]:
    def damage(rng: random.Random, folder: Path) -> Damage:
        path = any_file(rng, folder, f".{suffixes[0]}'")
        file = File.read(path)
        name, entry = rng.choice([(n, e) for n, e in file.entries if n.rpartition(".")[2] in suffixes])
        start, stop = entry["data_offsets"]
        byte, bit = rng.randrange(start, stop), rng.randrange(8)
        data = bytearray(file.data)
        data[byte] ^= 1 << bit
        file.data = bytes(data)
        file.write(path)
        return Damage(f"{what} of {name} in {path.name}: byte {byte - start}, bit {bit}", **expected)

    damage.__name__ = f"flip_{what}"
    return damage


flip_value = flip_in(("compressed",), "value", must="load", differing=1)
flip_bitmask = flip_in(("bitmask",), "bitmask", must="refuse")
flip_shape = flip_in(("shape",), "shape", must="refuse")
flip_dense = flip_in(("weight",), "dense", must="load", differing=1)
flip_row_offsets = flip_in(("row_offsets",), "row_offsets", must="refuse")


def flip_header(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    raw = bytearray(path.read_bytes())
    position = rng.randrange(8, 8 + int.from_bytes(raw[:8], "little"))
    raw[position] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return Damage(f"header of {path.name}: byte {position} is {bytes(raw[position : position + 1])!r}")


def replace_in_header(rng: random.Random, folder: Path) -> Damage:
    """A character of the header becomes another printable one: mostly still JSON."""
    path = any_file(rng, folder)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    position = rng.choice([i for i in range(8, 8 + length) if chr(raw[i]).isalnum()])
    old = chr(raw[position])
    raw[position] = ord(rng.choice("0123456789" if old.isdigit() else "abcxyzBFU8.-_ "))
    path.write_bytes(raw)
    return Damage(
        f"header of {path.name}: byte {position} {old!r} -> {chr(raw[position])!r}: {bytes(raw[position - 20 : position + 20])!r}"
    )


def change_header_length(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    choices = [0, 1, 7, length - 1, length + 1, length + 8, len(raw), 1 << 24, 99_999_999, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
    new = rng.choice(choices)
    path.write_bytes(new.to_bytes(8, "little") + raw[8:])
    return Damage(f"header length of {path.name}: {length} -> {new}", must="refuse")


def flip_several_bytes(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    raw = bytearray(path.read_bytes())
    positions = [rng.randrange(len(raw)) for _ in range(rng.randint(1, 30))]
    for position in positions:
        raw[position] = rng.randrange(256)
    path.write_bytes(raw)
    return Damage(f"bytes {positions[:6]}... of {path.name}")


def cut_or_lengthen(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    raw = path.read_bytes()
    at = rng.randrange(len(raw))
    kind = rng.choice(["end", "start", "middle", "append", "repeat", "one-byte-more", "one-byte-less"])
    new = {
        "end": raw[:at],
        "start": raw[at + 1 :],
        "middle": raw[: at // 2] + raw[at // 2 + rng.randint(1, 100) :],
        "append": raw + rng.randbytes(rng.randint(1, 1000)),
        "repeat": raw + raw,
        "one-byte-more": raw + b"\0",
        "one-byte-less": raw[:-1],
    }[kind]
    path.write_bytes(new)
    return Damage(f"{path.name}: {kind} at {at}: {len(raw)} -> {len(new)} bytes", must="refuse")


def zero_a_stretch(rng: random.Random, folder: Path) -> Damage:
    """What an interrupted download into a preallocated file leaves."""
    path = any_file(rng, folder)
    raw = path.read_bytes()
    start = rng.choice([0, rng.randrange(len(raw)), rng.randrange(len(raw) - 64)])
    stop = rng.choice([len(raw), min(len(raw), start + rng.choice([8, 64, 512, 4096]))])
    path.write_bytes(raw[:start] + bytes(stop - start) + raw[stop:])
    return Damage(f"{path.name}: bytes {start}..{stop} are zero")


def edit_tensors(
    what: str, edit: Callable[[random.Random, list[tuple[str, Stored]]], str | Damage]
) -> Callable[[random.Random, Path], Damage]:
    """A damage that leaves a well-formed safetensors file."""

    def damage(rng: random.Random, folder: Path) -> Damage:
        path = any_file(rng, folder, "compressed")
        tensors = File.read(path).tensors()
        done = edit(rng, tensors)
        File.of(tensors).write(path)
        if (folder / INDEX).exists():
            index = json.loads((folder / INDEX).read_text())
            weight_map = {name: file for name, file in index["weight_map"].items() if file != path.name}
            index["weight_map"] = weight_map | dict.fromkeys((name for name, _ in tensors), path.name)
            (folder / INDEX).write_text(json.dumps(index))
        done = done if isinstance(done, Damage) else Damage(done)
        done.what = f"{what}, {path.name}: {done.what}"
        return done

    damage.__name__ = what
    return damage


def pick(rng: random.Random, tensors: list[tuple[str, Stored]], *suffixes: str) -> int:
    return rng.choice([i for i, (name, _) in enumerate(tensors) if not suffixes or name.rpartition(".")[2] in suffixes])


def delete_part(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    name, _ = tensors.pop(pick(rng, tensors, *PARTS))
    return Damage(name, must="refuse", words=(name.rpartition(".")[0],))


def delete_tensors(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    return str([tensors.pop(rng.randrange(len(tensors)))[0] for _ in range(rng.randint(1, 3))])


def delete_layer(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    base = tensors[pick(rng, tensors, "bitmask")][0].removesuffix(".bitmask")
    tensors[:] = [(name, stored) for name, stored in tensors if not name.startswith(f"{base}.")]
    return base


def rename_tensor(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    i = rng.randrange(len(tensors))
    name, stored = tensors[i]
    base, _, suffix = name.rpartition(".")
    new = rng.choice(
        [
            f"{base}.{rng.choice(PARTS)}", f"{base}.weight", f"{base}.weight.{suffix}", f"{base}.weight_packed", f"{base}.B_24", suffix,
            f".{suffix}", f"{base}.{suffix}s", f"{base}.{suffix.upper()}", name.replace(".0.", ".1."), name.replace(".layers.", ".layer."),
            f"model.{name}", name.removeprefix("model."), "", "x" * 20_000, f"{name}\0", f"{name}é🦙", f"../{name}", name[::-1],
            "__class__",
        ]
    )  # fmt: skip
    if any(new == other for other, _ in tensors):
        new = f"{name}.more"
    tensors[i] = (new, stored)
    return f"{name} -> {new:.80}"


def rename_layer(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    base = tensors[pick(rng, tensors, "bitmask")][0].removesuffix(".bitmask")
    new = rng.choice([f"{base}.weight", f"{base}_more", base.replace("self_attn", "attn"), f"x.{base}", "lm_head", "model.norm"])
    tensors[:] = [(name.replace(base, new, 1) if name.startswith(f"{base}.") else name, stored) for name, stored in tensors]
    return f"{base} -> {new}"


def duplicate_tensor(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    name, stored = rng.choice(tensors)
    base, _, suffix = name.rpartition(".")
    taken = {other for other, _ in tensors}
    new = rng.choice(
        [f"{base}.{part}" for part in (*PARTS, "weight", "weight_scale")] + [f"{base}.weight.{suffix}", f"{name}.copy", suffix]
    )
    if new in taken:
        new = f"copy.{name}"
    tensors.append((new, stored))
    return f"{name} as {new}"


def duplicate_layer(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    base = tensors[pick(rng, tensors, "bitmask")][0].removesuffix(".bitmask")
    new = rng.choice([f"{base}.weight", f"copy.{base}", "lm_head", "model.layers.0.input_layernorm"])
    parts = [(name.replace(base, new, 1), stored) for name, stored in tensors if name.startswith(f"{base}.")]
    tensors.extend(parts)
    return f"{base} as {new}"


def dense_twin(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    base = tensors[pick(rng, tensors, "bitmask")][0].removesuffix(".bitmask")
    tensors.append((f"{base}.weight", rng.choice(tensors)[1]))
    return Damage(base, must="refuse")


def swap_names(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    i, j = rng.sample(range(len(tensors)), 2)
    tensors[i], tensors[j] = (tensors[i][0], tensors[j][1]), (tensors[j][0], tensors[i][1])
    return f"{tensors[i][0]} <-> {tensors[j][0]}"


def swap_parts(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    part = rng.choice([part for part in PARTS if sum(name.endswith(f".{part}") for name, _ in tensors) > 1])
    i, j = rng.sample([i for i, (name, _) in enumerate(tensors) if name.endswith(f".{part}")], 2)
    tensors[i], tensors[j] = (tensors[i][0], tensors[j][1]), (tensors[j][0], tensors[i][1])
    return f"{tensors[i][0]} <-> {tensors[j][0]}"


def shuffle_order(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    rng.shuffle(tensors)
    return Damage("any order", must="same")


def change_dtype(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    i = rng.randrange(len(tensors))
    name, stored = tensors[i]
    old = stored.dtype
    size = ITEM_SIZES[old]
    dtype = rng.choice([dtype for dtype, other in ITEM_SIZES.items() if other == size and dtype != old])
    tensors[i] = (name, Stored(dtype, stored.shape, stored.content))
    return f"{name} {old} -> {dtype}"


def change_shape(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    """Another shape of as many elements."""
    i = rng.randrange(len(tensors))
    name, stored = tensors[i]
    count = int(np.prod(stored.shape))
    shapes = [(count,), (*stored.shape, 1), (1, *stored.shape), stored.shape[::-1], (2, count // 2) if count % 2 == 0 else (count, 1)]
    new = rng.choice([*shapes, (1,) * 70 + stored.shape])
    tensors[i] = (name, Stored(stored.dtype, new, stored.content))
    return f"{name} {stored.shape} -> {new}"


def resize_tensor(rng: random.Random, tensors: list[tuple[str, Stored]]) -> str:
    """More, fewer or no rows, with the bytes for them."""
    i = rng.randrange(len(tensors))
    name, stored = tensors[i]
    rows = stored.shape[0] if stored.shape else 1
    row = len(stored.content) // max(rows, 1)
    new_rows = rng.choice([0, 1, rows - 1, rows + 1, 2 * rows, rows // 2])
    content = (stored.content * 2)[: new_rows * row]
    tensors[i] = (name, Stored(stored.dtype, (new_rows, *stored.shape[1:]), content))
    return f"{name} {rows} -> {new_rows} rows"


def hostile_shape_part(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    i = pick(rng, tensors, "shape")
    name, stored = tensors[i]
    rows, columns = np.frombuffer(stored.content, "<i8").tolist()
    kind = rng.choice(["integers", "float", "complex", "unsigned", "many", "none"])
    if kind == "integers":
        pair = rng.choice(
            [
                (columns, rows) if rows != columns else (0, 0), (-rows, columns), (rows, -columns), (-rows, -columns),
                (-1, -1), (0, columns),
                (rows, 0), (1 << 62, 1 << 62), ((1 << 63) - 1, columns), (rows, (1 << 63) - 1), (-(1 << 63), columns), (1 << 32, 1 << 32),
                (rows * columns, 1), (1, rows * columns), (rows, columns + 1), (rows, columns - 1), (rows + 1, columns),
                (rows, columns + 8),
            ]
        )  # fmt: skip
        new = Stored("I64", stored.shape, np.array(pair, "<i8").tobytes())
    elif kind == "float":
        pair = rng.choice([(float("nan"), 1.0), (float("inf"), 1.0), (float("-inf"), 1.0), (float(rows), float(columns)), (1e300, 1e300)])
        new = Stored("F64", stored.shape, np.array(pair, "<f8").tobytes())
    elif kind == "complex":
        new = Stored("C64", stored.shape, np.array([rows, columns], "<c8").tobytes())
    elif kind == "unsigned":
        new = Stored("U64", stored.shape, np.array([rows, columns], "<u8").tobytes())
    elif kind == "many":
        count = rng.choice([1, 3, 4, 65, 1000, 10_000])
        new = Stored("I64", (count,), np.ones(count, "<i8").tobytes())
    else:
        new = Stored("I64", (0,), b"")
    tensors[i] = (name, new)
    return Damage(f"{name} {kind} {new.shape} {new.content[:16]!r}", must="refuse")


def fewer_columns_than_bits(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    """A shape that asks for as many bytes of bitmask, and cuts columns off: their bits are then padding."""
    i = pick(rng, tensors, "shape")
    name, stored = tensors[i]
    rows, columns = np.frombuffer(stored.content, "<i8").tolist()
    new = columns - rng.randint(1, 7)
    tensors[i] = (name, Stored("I64", stored.shape, np.array([rows, new], "<i8").tobytes()))
    return Damage(f"{name} {columns} -> {new} columns", must="refuse")


def move_bits(rng: random.Random, tensors: list[tuple[str, Stored]]) -> Damage:
    """Two bits of one bitmask change places: the total stays right."""
    i = pick(rng, tensors, "bitmask")
    name, stored = tensors[i]
    bits = np.unpackbits(np.frombuffer(stored.content, np.uint8), bitorder="little")
    one, zero = rng.choice(np.flatnonzero(bits)), rng.choice(np.flatnonzero(bits == 0))
    bits[one], bits[zero] = 0, 1
    tensors[i] = (name, Stored("U8", stored.shape, np.packbits(bits, bitorder="little").tobytes()))
    return Damage(f"{name}: bit {one} to {zero}")


def edit_header(rng: random.Random, folder: Path) -> Damage:
    """A header entry becomes nonsense."""
    path = any_file(rng, folder)
    file = File.read(path)
    i = rng.choice([i for i, (name, _) in enumerate(file.entries) if name != "__metadata__"])
    name, entry = file.entries[i]
    start, stop = entry["data_offsets"]
    other = rng.choice([e for n, e in file.entries if n not in ("__metadata__", name)])
    key, value = rng.choice(
        [
            ("dtype", rng.choice(["F63", "", "bf16", "BF16 ", 5, None, [], {}, "x" * 100_000, "F4", "F8_E8M0", "PICKLE", "C128"])),
            ("shape", rng.choice([None, "64", 64, {}, [[64]], [64.0, 32.0], ["64", "32"], [None], [True], [1 << 70], [-1]])),
            ("shape", [-size for size in entry["shape"]]),
            ("shape", [*entry["shape"], 1 << rng.choice([10, 31, 40, 62, 63, 64])]),
            ("shape", [*entry["shape"], 0]),
            ("shape", [0, 1 << 62]),
            ("shape", [size + rng.choice([-1, 1]) for size in entry["shape"]]),
            ("shape", [1 << 32, 1 << 32]),
            ("shape", [1] * 100_000),
            ("data_offsets", other["data_offsets"]),
            ("data_offsets", [stop, start]),
            ("data_offsets", [start, stop + 1]),
            ("data_offsets", [start - 1, stop - 1]),
            ("data_offsets", [start, start]),
            ("data_offsets", [-1, stop]),
            ("data_offsets", [0, 1 << 63]),
            ("data_offsets", [1 << 62, (1 << 62) + stop - start]),
            ("data_offsets", [len(file.data), len(file.data) + stop - start]),
            (
                "data_offsets",
                rng.choice([None, [], [start], [start, stop, stop], "0", {"0": 1}, [float(start), float(stop)], [None, None]]),
            ),
            ("extra", "x"),
        ]
    )
    file.entries[i] = (name, entry | {key: value})
    file.write(path)
    return Damage(f"{path.name}, {name}: {key} = {value!r:.60}")


def edit_header_as_a_whole(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    file = File.read(path)
    names = [name for name, _ in file.entries if name != "__metadata__"]
    kind = rng.choice(["twice", "twice-otherwise", "metadata", "metadata-twice", "lacks-a-key", "entry", "nothing", "nested", "deep"])
    i = next(i for i, (name, _) in enumerate(file.entries) if name == rng.choice(names[:1]))
    name, entry = file.entries[i]
    if kind == "twice":
        file.entries.append((name, entry))
    elif kind == "twice-otherwise":
        file.entries.append((name, next(e for n, e in file.entries if n == names[-1])))
    elif kind == "metadata":
        file.entries[0] = ("__metadata__", rng.choice([None, 5, [], "pt", {"format": 5}, {"format": "tf"}, {"format": "x" * 100_000}, {}]))
    elif kind == "metadata-twice":
        file.entries.append(("__metadata__", {"format": "pt"}))
    elif kind == "lacks-a-key":
        file.entries[i] = (name, {k: v for k, v in entry.items() if k != rng.choice(list(entry))})
    elif kind == "entry":
        file.entries[i] = (name, rng.choice([None, 5, [], "x", {}, True]))
    elif kind == "nothing":
        file.entries, file.data = rng.choice([([], b""), ([], file.data), (file.entries[:1], b"")])
    elif kind == "nested":
        file.entries = [("tensors", dict(file.entries))]
    if kind == "deep":
        header = b'{"a":' * 100_000
        path.write_bytes(len(header).to_bytes(8, "little") + header + file.data)
    else:
        file.write(path)
    return Damage(f"{path.name}: header, {kind}")


def not_a_weights_file(rng: random.Random, folder: Path) -> Damage:
    path = any_file(rng, folder)
    size = path.stat().st_size
    path.unlink()
    kind = rng.choice(
        ["lfs", "lfs-crlf", "empty", "folder", "missing", "loop", "null", "random", "html", "text", "config", "zeros", "dangling"]
    )
    if kind == "folder":
        path.mkdir()
    elif kind in ("loop", "null", "config", "dangling"):
        target = {"loop": path, "null": "/dev/null", "config": folder / "config.json", "dangling": folder / "gone"}[kind]
        path.symlink_to(target)
    elif kind != "missing":
        path.write_bytes(
            {
                "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize %d\n" % size,
                "lfs-crlf": b"version https://git-lfs.github.com/spec/v1\r\noid sha256:" + b"a" * 64 + b"\r\nsize 5\r\n",
                "empty": b"",
                "random": rng.randbytes(size),
                "html": b"<!DOCTYPE html><html><body>Entry not found</body></html>",
                "text": b"{}",
                "zeros": bytes(size),
            }[kind]
        )
    words = (f"{path.name}",) if kind in ("missing", "dangling", "loop") else ()
    return Damage(f"{path.name}: {kind}", must="refuse", words=words)


FILE_DAMAGES = [
    flip_value, flip_bitmask, flip_shape, flip_dense, flip_header, replace_in_header, change_header_length, flip_several_bytes,
    cut_or_lengthen, zero_a_stretch, edit_header, edit_header_as_a_whole, not_a_weights_file,
    *(edit_tensors(edit.__name__, edit) for edit in (
        delete_part, delete_tensors, delete_layer, rename_tensor, rename_layer, duplicate_tensor, duplicate_layer, dense_twin, swap_names,
        swap_parts, shuffle_order, change_dtype, change_shape, resize_tensor, hostile_shape_part, fewer_columns_than_bits, move_bits,
    )),
]  # fmt: skip


# ---- damages to an index -----------------------------------------------------------------------------------------------------


def edit_index(rng: random.Random, folder: Path) -> Damage:
    index = json.loads((folder / INDEX).read_text())
    weight_map: dict[str, Any] = index["weight_map"]
    names, files = list(weight_map), sorted(set(weight_map.values()))
    name = rng.choice(names)
    kind = rng.choice(["swap", "shuffle", "wrong", "unknown-tensor", "remove", "remove-shard", "unknown-file", "path", "value", "order"])
    damage = Damage(kind, words=(INDEX,))
    if kind == "swap":
        other = rng.choice([n for n in names if weight_map[n] != weight_map[name]])
        weight_map[name], weight_map[other] = weight_map[other], weight_map[name]
        damage.must = "refuse"
    elif kind == "shuffle":
        values = list(weight_map.values())
        while values == list(weight_map.values()):
            rng.shuffle(values)
        index["weight_map"] = dict(zip(names, values, strict=True))
        damage.must = "refuse"
    elif kind == "wrong":
        weight_map[name] = rng.choice([file for file in files if file != weight_map[name]])
        damage.must = "refuse"
    elif kind == "unknown-tensor":
        weight_map[rng.choice(["ghost", f"{name}.more", "", "model.layers.0.self_attn.q_proj.weight"])] = rng.choice(files)
        damage.must = "refuse"
    elif kind == "remove":
        del weight_map[name]
        damage.must = "same"
    elif kind == "remove-shard":
        file = rng.choice(files)
        index["weight_map"] = {n: f for n, f in weight_map.items() if f != file}
        damage.must = "refuse"
        damage.what += f" {file}"
    elif kind == "unknown-file":
        weight_map[name] = rng.choice(["model-00009-of-00003.safetensors", "model.safetensors", "x" * 5_000, "\ud800", "\0", ""])
        damage.must = "refuse"
    elif kind == "path":
        outside = folder.parent / f"{folder.name}-outside.safetensors"
        shutil.copy2(folder / weight_map[name], outside)
        (folder / "sub").mkdir()
        shutil.copy2(outside, folder / "sub" / "inside.safetensors")
        file = weight_map[name]
        new = rng.choice(
            [f"../{outside.name}", str(outside), "sub/inside.safetensors", f"./{file}", f"{file}/", f"sub/../{file}", "..", "."]
        )
        if file not in new:
            (folder / file).unlink()  # the other one would fit
        index["weight_map"] = {n: new if f == file else f for n, f in weight_map.items()}
        damage.what += f" {new}"
        damage.must = "refuse"
    elif kind == "value":
        weight_map[name] = rng.choice([None, 5, [], {}, True, [weight_map[name]]])
        damage.must = "refuse"
    elif kind == "order":
        rng.shuffle(names)
        index["weight_map"] = {n: weight_map[n] for n in names}
        index["metadata"] = rng.choice([{}, {"total_size": -5}, {"total_size": "x"}, {"x": None}])
        damage.must = "same"
    (folder / INDEX).write_text(json.dumps(index))
    damage.what = f"index: {damage.what}, {name}"
    return damage


def damage_index_file(rng: random.Random, folder: Path) -> Damage:
    path = folder / INDEX
    text = path.read_text()
    contents = ["", "{", "[]", "null", "{}", '{"weight_map": []}', text[: rng.randrange(len(text))], "[" * 50_000, text + "}", f"[{text}]"]
    contents += [
        '{"weight_map": ' + "7" * 5_000 + "}",
        '{"weight_map": {"a": ' + "[" * 900 + "]" * 900 + "}}",
        "version https://git-lfs",
        text * 2,
    ]
    path.write_text(rng.choice(contents))
    return Damage(f"index: {path.read_text()[:60]!r}", must="refuse", words=(INDEX,))


def swap_shards(rng: random.Random, folder: Path) -> Damage:
    one, two = rng.sample(sorted(folder.glob("model*.safetensors")), 2)
    contents = one.read_bytes(), two.read_bytes()
    one.write_bytes(contents[1]), two.write_bytes(contents[0])
    return Damage(f"{one.name} <-> {two.name}", must="refuse", words=(INDEX,))


def copy_into_another_shard(rng: random.Random, folder: Path) -> Damage:
    one, two = rng.sample(sorted(folder.glob("model*.safetensors")), 2)
    name, stored = rng.choice(File.read(one).tensors())
    File.of([*File.read(two).tensors(), (name, stored)]).write(two)
    return Damage(f"{name} of {one.name} in {two.name} too", must="refuse")


def link_shards(rng: random.Random, folder: Path) -> Damage:
    """As in the cache of the Hub: the files lie elsewhere."""
    elsewhere = folder.parent / f"{folder.name}-blobs"
    elsewhere.mkdir()
    for path in sorted(folder.glob("model*")):
        shutil.move(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    return Damage("links", must="same")


INDEX_DAMAGES = [edit_index, edit_index, edit_index, damage_index_file, swap_shards, copy_into_another_shard, link_shards]


# ---- damages to config.json ------------------------------------------------------------------------------------------------------


def nested(depth: int, kind: type) -> Any:
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"model_type": "llama", "a": value}
    return value


def hostile_values(folder: Path) -> list[Any]:
    evil = folder.parent / "evil.py"
    return [
        None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**3000, "", "x" * 1_000_000, "🦙" * 1000,
        "\ud800", "\0", "\x1b[2J",
        "evil:X", "evil.py:X", f"{evil}:X", f"../{evil.name}:X", "evil.X", "os.system", "__class__", "__import__('evil')",
        "{0.__class__}", "%s%s%n",
        "$(touch marker)", "`touch marker`", "!!python/object:evil.X", "sparse-24-bitmask ", "Sparse-24-Bitmask", "dense",
        "2:4", "9" * 400 + ":4",
        [], {}, [[]], [None], [5], {"a": {}}, ["evil:X"], {"evil": "X"},
        ["re:("], ["re:" + "(" * 5_000 + ")" * 5_000], ["re:x{4294967296}"],
        ["re:(?P<a>x)(?P<a>y)"], ["re:" + "a" * 100_000], ["x"] * 50_000, nested(30, list), nested(600, list),
        nested(300, dict), nested(30, dict),
        {"__class__": "evil.X"}, {"py/object": "evil.X"}, {"quant_method": "evil:X"}, {"format": "evil:X"},
    ]  # fmt: skip


CONFIG_WORDS = ("config", "quant_method", "sparsity_structure", "this checkpoint", "checkpoint is")
BLOCK_KEYS = (
    "format",
    "sparsity_structure",
    "targets",
    "ignore",
    "global_sparsity",
    "registry_requires_subclass",
    "readable_by",
    "unknown",
)
TOP_KEYS = (
    "sparsity_config",
    "quant_method",
    "version",
    "config_groups",
    "transform_config",
    "kv_cache_scheme",
    "run_compressed",
    "unknown",
)
OUTER_KEYS = ("quantization_config", "compression_config", "sparsity_config", "architectures", "auto_map", "unknown", "text_config")
# Of what stands there every value is tried, elsewhere a few.
PARSED_KEYS = ("quantization_config", "sparsity_config", "quant_method", "config_groups", *BLOCK_KEYS[:5], "readable_by")
CONFIG_PLACES = [(k,) for k in OUTER_KEYS] + [("quantization_config", k) for k in TOP_KEYS]
CONFIG_PLACES += [("quantization_config", "sparsity_config", k) for k in BLOCK_KEYS] + [("quantization_config", "config_groups", "group_0")]


def edit_config(rng: random.Random, folder: Path, place: tuple[str, ...] | None = None, value: Any = ...) -> Damage:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    place = place or rng.choice(CONFIG_PLACES)
    value = rng.choice(hostile_values(folder)) if value is ... else value
    owner = config
    for key in place[:-1]:
        owner = owner.setdefault(key, {})
    owner[place[-1]] = value
    path.write_text(json.dumps(config))
    shown = json.dumps(value)
    return Damage(f"{'.'.join(place)} = {shown:.60}", words=CONFIG_WORDS)


def delete_from_config(rng: random.Random, folder: Path) -> Damage:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    place = rng.choice(CONFIG_PLACES)
    owner = config
    for key in place[:-1]:
        owner = owner.setdefault(key, {})
    owner.pop(place[-1], None)
    path.write_text(json.dumps(config))
    return Damage(f"without {'.'.join(place)}", words=CONFIG_WORDS)


def damage_config_file(rng: random.Random, folder: Path) -> Damage:
    path = folder / "config.json"
    raw = path.read_bytes()
    kind = rng.choice(["cut", "flip", "nothing", "list", "null", "latin", "deep", "twice", "lfs", "digits"])
    new = bytearray(raw)
    new[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(
        {
            "cut": raw[: rng.randrange(len(raw))],
            "flip": bytes(new),
            "nothing": b"",
            "list": b"[" + raw + b"]",
            "null": b"null",
            "latin": raw.replace(b"llama", b"ll\xe4ma"),
            "deep": raw.replace(b'"2:4"', b"[" * 100_000),
            "twice": raw + raw,
            "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n",
            "digits": raw.replace(b'"2:4"', b"1" * 5_000),
        }[kind]
    )
    return Damage(f"config.json, {kind}", words=CONFIG_WORDS)


# ---- running cases -----------------------------------------------------------------------------------------------------------


def make_source(name: str, folder: Path) -> Path:
    """A golden checkpoint; "sharded" is one whose weights' parts lie in three files."""
    golden = ROOT / "tests" / "golden" / ("sparse-24-bitmask" if name == "sharded" else name)
    folder.mkdir(parents=True)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy2(golden / file, folder)
    if name == "sharded":
        tensors = File.read(folder / "model.safetensors").tensors()
        (folder / "model.safetensors").unlink()
        weight_map = {}
        for number in range(3):
            file = f"model-{number + 1:05}-of-00003.safetensors"
            # Neighbours in a file are in different shards, so most weights lie in three.
            shard = [item for i, item in enumerate(tensors) if i % 3 == number]
            File.of(shard).write(folder / file)
            weight_map |= dict.fromkeys((name for name, _ in shard), file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("sources")
    return {name: make_source(name, folder / name) for name in SOURCES}


def run_cases(
    source: Path, tmp_path: Path, damages: Iterator[tuple[int, Callable[[random.Random, Path], Damage]]], pretrained_every: int
) -> None:
    """Damage copies of a source, read each in every way, and fail with all that went wrong."""
    original, names = dense_tensors(source), names_in(source)
    wrong, number = [], -1
    for number, (seed, damage_folder) in enumerate(damages):
        rng = random.Random(f"{source.name}, {damage_folder.__name__}, {seed}")
        folder = tmp_path / f"case-{number}"
        shutil.copytree(source, folder)
        damage = damage_folder(rng, folder)
        damage.names |= names
        ways = [*damage.ways, *(FROM_PRETRAINED if number % pretrained_every == 0 else ())]
        for way in ways:
            reason = verdict(way, folder, damage, original)
            if reason:
                wrong.append(f"{damage_folder.__name__}, seed {seed} ({damage.what}): {way.__name__}: {reason}")
        for path in tmp_path.glob(f"case-{number}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert number >= 0
    assert not wrong, f"{len(wrong)} of {number + 1} cases:\n" + "\n".join(wrong)


@pytest.mark.parametrize("source", SOURCES)
def test_an_undamaged_checkpoint_is_read_right_in_every_way(sources, source):
    original = dense_tensors(sources[source])
    for way in (*OWN_WAYS, *FROM_PRETRAINED):
        assert verdict(way, sources[source], Damage("nothing", must="same", differing=0), original) is None


@pytest.mark.parametrize("source", SOURCES)
def test_the_oracle_agrees_with_the_dense_original(sources, source):
    original = File.read(
        ROOT / "tests" / "golden" / ("sparse-24-bitmask" if source == "sharded" else source) / "dense_original.safetensors"
    )
    found = dense_tensors(sources[source])
    assert set(found) == {name for name, _ in original.tensors()}
    for name, stored in original.tensors():
        assert torch.equal(tensor_of(found[name]), tensor_of(stored))


@pytest.mark.parametrize("damage", FILE_DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("source", SOURCES)
def test_a_damaged_weights_file_is_read_right_or_refused(sources, tmp_path, source, damage):
    run_cases(sources[source], tmp_path, ((seed, damage) for seed in range(3 * TIMES)), pretrained_every=6)


def test_damaged_row_offsets_are_refused(sources, tmp_path):
    run_cases(sources["sparse-bitmask"], tmp_path, ((seed, flip_row_offsets) for seed in range(5 * TIMES)), pretrained_every=3)


@pytest.mark.parametrize("kind", ["every-part-renamed", "every-weight-deleted", "every-layer-deleted", "nothing-left"])
@pytest.mark.parametrize("way", [*OWN_WAYS, *FROM_PRETRAINED], ids=lambda way: way.__name__)
@pytest.mark.parametrize("source", ["sparse-24-bitmask", "sparse-bitmask"])
def test_a_checkpoint_that_only_claims_to_be_sparse_is_never_filled_up(sources, tmp_path, source, way, kind):
    """Its config says that weights are packed, and none is: what is missing must not be made up."""
    folder = tmp_path / "folder"
    shutil.copytree(sources[source], folder)
    tensors = File.read(folder / "model.safetensors").tensors()
    if kind == "every-part-renamed":
        tensors = [(f"{name}_" if name.rpartition(".")[2] in PARTS else name, stored) for name, stored in tensors]
    elif kind == "every-weight-deleted":
        tensors = [(name, stored) for name, stored in tensors if name.rpartition(".")[2] not in PARTS]
    else:
        tensors = [(name, stored) for name, stored in tensors if ".layers." not in name and kind != "nothing-left"]
    File.of(tensors).write(folder / "model.safetensors")
    damage = Damage(kind, must="either" if way is read_slices else "refuse", words=("model.layers.0.", "embed_tokens"))
    assert verdict(way, folder, damage, {}) is None


@pytest.mark.parametrize("extra", ["model.layers.7.mlp.up_proj", "model.extra", "lm_head.more"])
@pytest.mark.parametrize("way", [read_into_model, *FROM_PRETRAINED], ids=lambda way: way.__name__)
@pytest.mark.parametrize("source", ["sparse-24-bitmask", "sparse-bitmask"])
def test_a_packed_weight_that_no_module_takes_is_refused(sources, tmp_path, source, way, extra):
    folder = tmp_path / "folder"
    shutil.copytree(sources[source], folder)
    tensors = File.read(folder / "model.safetensors").tensors()
    base = "model.layers.0.mlp.up_proj"
    File.of([*tensors, *((name.replace(base, extra), stored) for name, stored in tensors if base in name)]).write(
        folder / "model.safetensors"
    )
    assert verdict(way, folder, Damage(extra, must="refuse", words=(extra,)), {}) is None


# A dense tensor that is there twice is Transformers' affair in from_pretrained.
@pytest.mark.parametrize(
    "way,base",
    [(read_into_model, "model.norm"), *((way, "model.layers.0.self_attn.k_proj") for way in (read_into_model, *FROM_PRETRAINED))],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_two_tensors_for_one_parameter_are_refused(sources, tmp_path, way, base):
    """Transformers reads names with and without the model's prefix, and lets the later one win."""
    folder = tmp_path / "folder"
    shutil.copytree(sources["sparse-24-bitmask"], folder)
    tensors = File.read(folder / "model.safetensors").tensors()
    other = "model.layers.1.self_attn.k_proj" if "k_proj" in base else "model.layers.1.input_layernorm"
    twins = [(name.replace(other, base.removeprefix("model.")), stored) for name, stored in tensors if name.startswith(f"{other}.")]
    assert twins
    File.of([*tensors, *twins]).write(folder / "model.safetensors")
    assert verdict(way, folder, Damage(base, must="refuse", words=(base,)), {}) is None


@pytest.mark.parametrize("damage", dict.fromkeys(INDEX_DAMAGES), ids=lambda damage: damage.__name__)
def test_a_damaged_index_is_read_right_or_refused(sources, tmp_path, damage):
    number = 30 if damage is edit_index else 4
    run_cases(sources["sharded"], tmp_path, ((seed, damage) for seed in range(number * TIMES)), pretrained_every=10)


@pytest.mark.parametrize("place", CONFIG_PLACES, ids=".".join)
def test_a_hostile_config_is_read_right_or_refused(sources, tmp_path, place):
    """The weights are whole, so what is read is right only if it is the original."""
    source = sources["sparse-24-bitmask"]
    original = dense_tensors(source)
    wrong = []
    step = 1 if place[-1] in PARSED_KEYS or TIMES > 1 else 7
    for number in range(CONFIG_PLACES.index(place) % step, len(hostile_values(tmp_path)), step):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        damage = edit_config(random.Random(0), folder, place, hostile_values(folder)[number])
        for way in (read_converted, read_into_model) if number % 6 == len(place) else (read_into_model,):
            reason = verdict(way, folder, damage, original)
            if reason:
                wrong.append(f"{damage.what}: {way.__name__}: {reason}")
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("damage", [delete_from_config, damage_config_file], ids=lambda damage: damage.__name__)
def test_a_damaged_config_is_read_right_or_refused(sources, tmp_path, damage):
    run_cases(sources["sparse-bitmask"], tmp_path, ((seed, damage) for seed in range(12 * TIMES)), pretrained_every=1000)


@pytest.mark.parametrize("depth", (250, 600, 900, 940, 970))
def test_nesting_just_below_the_limit_of_the_json_parser_is_no_crash(sources, tmp_path, depth):
    # What is parsed at the limit is shown, copied and written a few frames deeper.
    original = dense_tensors(sources["sparse-24-bitmask"])
    for place in (("unknown",), ("quantization_config", "unknown"), ("quantization_config", "sparsity_config", "format")):
        for kind in (list, dict):
            folder = tmp_path / f"{'-'.join(place)}-{kind.__name__}"
            shutil.copytree(sources["sparse-24-bitmask"], folder)
            text = (folder / "config.json").read_text()
            config = json.loads(text)
            owner = config
            for key in place[:-1]:
                owner = owner[key]
            owner[place[-1]] = "@"
            deep = "[" * depth + "]" * depth if kind is list else '{"model_type": 1, "a": ' * depth + "1" + "}" * depth
            (folder / "config.json").write_text(json.dumps(config).replace('"@"', deep))
            for way in (read_converted, read_into_model):
                assert verdict(way, folder, Damage("deep", words=CONFIG_WORDS), original) is None


# ---- memory, time, and what is executed ----------------------------------------------------------------------------------------

# Far above what reading a file of 120 KB takes, far below what the hostile ones claim.
MEMORY_LIMIT = 512 << 20
MEMORY_PER_CASE = 48 << 20
SECONDS_PER_CASE = 10


def bombs(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Small files that claim huge sizes, each in a folder of its own."""

    def case(name: str) -> Path:
        shutil.copytree(source, folder / name)
        return folder / name

    def packed(name: str, parts: dict[str, Stored]) -> tuple[str, Path]:
        path = case(name) / "model.safetensors"
        tensors = [(n, stored) for n, stored in File.read(path).tensors() if ".q_proj." not in n or ".0." not in n]
        File.of([*tensors, *((f"model.layers.0.self_attn.q_proj.{part}", stored) for part, stored in parts.items())]).write(path)
        return name, path.parent

    def integers(*values: int) -> Stored:
        return Stored("I64", (len(values),), np.array(values, "<i8").tobytes())

    for rows, columns in ((1 << 62, 1 << 62), (1 << 20, 1 << 20), (1 << 31, 64), (64, 1 << 40), (1 << 14, 1 << 14), (-1, -(1 << 62))):
        small = {"compressed": Stored("BF16", (64, 32), bytes(4096)), "bitmask": Stored("U8", (64, 8), b"\x33" * 512)}
        yield packed(f"shape-{rows}-{columns}", small | {"shape": integers(rows, columns)})
    for rows in (1 << 30, 1 << 36, 1 << 60):
        empty = {"compressed": Stored("BF16", (rows, 0), b""), "bitmask": Stored("U8", (rows, 0), b"")}
        yield packed(f"rows-of-nothing-{rows}", empty | {"shape": integers(rows, 0)})
    for columns in (1 << 40, 1 << 62):
        empty = {"compressed": Stored("BF16", (0, columns // 2), b""), "bitmask": Stored("U8", (0, columns // 8), b"")}
        yield packed(f"columns-of-nothing-{columns}", empty | {"shape": integers(0, columns)})
        empty |= {"compressed": Stored("BF16", (0,), b""), "row_offsets": Stored("I64", (0,), b"")}
        yield packed(f"columns-of-nothing-bitmask-{columns}", empty | {"shape": integers(0, columns)})
    many = Stored("I64", (1 << 20,), bytes(8 << 20))
    yield packed(
        "long-shape", {"compressed": Stored("BF16", (64, 32), bytes(4096)), "bitmask": Stored("U8", (64, 8), b"\x33" * 512), "shape": many}
    )
    for shape in ([1 << 62, 1 << 62], [1 << 40], [1 << 40, 0], [1 << 33, 1 << 31], [1 << 30, 4]):
        path = case(f"header-{shape}") / "model.safetensors"
        file = File.read(path)
        name = next(name for name, _ in file.entries if name.endswith(".compressed"))
        file.entries = [(n, e | {"shape": shape} if n == name else e) for n, e in file.entries]
        file.write(path)
        yield path.parent.name, path.parent
    for length in (1 << 26, 99_999_999, 1 << 40, (1 << 64) - 1):
        path = case(f"header-length-{length}") / "model.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
        yield path.parent.name, path.parent
    path = case("hole") / "model.safetensors"
    with path.open("r+b") as opened:
        opened.truncate(1 << 28)
    yield "hole", path.parent


def import_strings(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Configs that name code where a name belongs; `evil.py` lies beside them and in the folder."""
    evil = f"import pathlib; pathlib.Path({str(folder / 'marker')!r}).touch()\nclass X: pass\nEvilConfig = EvilModel = X\n"
    (folder / "evil.py").write_text(evil)
    strings = ["evil:X", "evil.py:X", f"{folder}/evil.py:X", "evil.X", "__import__('evil')", "evil"]
    places = [("quantization_config", "sparsity_config", k) for k in ("format", "sparsity_structure", "targets", "unknown")]
    places += [("quantization_config", k) for k in ("quant_method", "version", "sparsity_config", "config_groups", "format", "unknown")]
    places += [("architectures",), ("compression_config",), ("sparsity_config",), ("quantization_config",)]
    for place in places:
        for number, text in enumerate(strings):
            name = f"{'.'.join(place)}-{number}"
            shutil.copytree(source, folder / name)
            (folder / name / "evil.py").write_text(evil)
            value = [text] if place[-1] in ("targets", "architectures") else text
            edit_config(random.Random(0), folder / name, place, value)
            yield name, folder / name
    for number, classes in enumerate(({"AutoConfig": "evil.EvilConfig"}, {"AutoModelForCausalLM": "evil.EvilModel"}, "evil.X")):
        name = f"auto_map-{number}"
        shutil.copytree(source, folder / name)
        (folder / name / "evil.py").write_text(evil)
        edit_config(random.Random(0), folder / name, ("auto_map",), classes)
        yield name, folder / name


@pytest.fixture(scope="module")
def in_a_child(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every hostile case, read in a process that is limited and watched: name -> way -> what came of it."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = dict(bombs(sources["sparse-24-bitmask"], folder)) | dict(import_strings(sources["sparse-24-bitmask"], folder))
    manifest = {
        "good": str(sources["sparse-24-bitmask"]),
        "folder": str(folder),
        "cases": {name: str(path) for name, path in cases.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(folder / "manifest.json")]
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == set(cases)
    return results | {"marker": (folder / "marker").exists()}


def outcomes(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, ways in results.items():
        if name != "marker":
            for way, outcome in ways.items():
                yield f"{name}, {way}", outcome


def test_hostile_files_are_read_right_or_refused_under_a_limit_of_memory(in_a_child):
    wrong = [f"{name}: {outcome['wrong']}" for name, outcome in outcomes(in_a_child) if outcome["wrong"]]
    assert not wrong, "\n".join(wrong)


def test_hostile_files_take_no_more_memory_than_small_ones(in_a_child):
    wrong = [f"{name}: {outcome['bytes'] >> 20} MiB" for name, outcome in outcomes(in_a_child) if outcome["bytes"] > MEMORY_PER_CASE]
    assert not wrong, "\n".join(wrong)


def test_hostile_files_execute_import_and_write_nothing(in_a_child):
    wrong = [f"{name}: {outcome['events']}" for name, outcome in outcomes(in_a_child) if outcome["events"]]
    assert not wrong, "\n".join(wrong)
    assert not in_a_child["marker"]


# What may still be imported once everything has run: parts of packages that are already there.
KNOWN_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "safetensors", "pydantic", "huggingface_hub", "hf_sparse24"}
KNOWN_PACKAGES |= {
    "accelerate",
    "tqdm",
    "rich",
    "regex",
    "yaml",
    "packaging",
    "pydantic_core",
    "typing_extensions",
    "hf_xet",
    "requests",
    "httpx",
}
EXECUTING = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn", "pickle.find_class")
REACHING_OUT = ("socket.connect", "socket.bind", "urllib.Request", "ctypes.dlopen", "webbrowser.open")


class TooSlow(BaseException):
    """Raised by the alarm of the child; nothing that is tested catches it."""


def too_slow(*_: object) -> None:
    raise TooSlow


class Watch:
    """An audit hook: which imports, executions, writes and connections happened while it was on."""

    def __init__(self, folder: str):
        self.folder, self.events, self.on = folder, [], False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        suspicious = self.why_suspicious(event, arguments)
        if suspicious and len(self.events) < 5:
            self.events.append(f"{event}: {suspicious:.200}")

    def why_suspicious(self, event: str, arguments: tuple) -> str | None:
        if event == "import":
            return None if str(arguments[0]).split(".")[0] in KNOWN_PACKAGES else str(arguments[0])
        if event == "exec":  # dataclasses, named tuples and modules of the library run code of their own
            file = getattr(arguments[0], "co_filename", "")
            return file if str(file).startswith(self.folder) or "evil" in str(file) else None
        if event == "compile":
            return repr(arguments[0]) if "evil" in repr(arguments[0]) or str(arguments[1]).startswith(self.folder) else None
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            outside = isinstance(path, str) and not path.startswith((self.folder, "/dev/null", "/proc/self"))
            return f"{path} {mode}" if writes and outside else None
        return repr(arguments) if event.startswith(EXECUTING) or event in REACHING_OUT else None


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def reset_peak() -> int:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def child(manifest_file: str) -> None:
    manifest = json.loads(Path(manifest_file).read_text())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    good, folder = Path(manifest["good"]), manifest["folder"]
    original, names = dense_tensors(good), names_in(good)
    warm = Path(folder) / "warm"
    shutil.copytree(good, warm)
    for way in (*OWN_WAYS, *FROM_PRETRAINED):
        assert verdict(way, warm, Damage("nothing", must="same"), original) is None
    with suppress(CheckpointError):  # imports of the error paths
        edit_config(random.Random(0), warm, ("quantization_config", "sparsity_config", "targets"), 5)
        read_into_model(warm)
    watch = Watch(folder)
    signal.signal(signal.SIGALRM, too_slow)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
    results: dict[str, dict[str, Any]] = {}
    for number, (name, path) in enumerate(manifest["cases"].items()):
        damage = Damage(name, words=CONFIG_WORDS, names=set(names))
        ways = (*OWN_WAYS, *FROM_PRETRAINED) if number % 4 == 0 or "auto_map" in name else OWN_WAYS
        for way in ways:
            before, start = reset_peak(), time.monotonic()
            watch.events, watch.on = [], True
            signal.alarm(SECONDS_PER_CASE)
            try:
                wrong = verdict(way, Path(path), damage, original)
            except TooSlow:
                wrong = f"took more than {SECONDS_PER_CASE} s"
            signal.alarm(0)
            watch.on = False
            used_bytes, seconds = peak_bytes() - before, time.monotonic() - start
            outcome = {"wrong": wrong, "bytes": used_bytes, "seconds": seconds, "events": list(watch.events)}
            results.setdefault(name, {})[way.__name__] = outcome
    Path(folder, "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    child(sys.argv[1])

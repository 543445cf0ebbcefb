"""Runs conversions in child processes and kills them: `python -m tests.killing DENSE PACKED WORK MODE-COMMAND-SEED ...`.

A process of its own, since a child may only be forked where no thread pool of torch was used.  MODE:

    points    before every seventh file operation, one after another, from the SEED-th on
    chain     before a random one, again and again, until a run survives
    shard     in the middle of each shard's bytes
    clock     after a random time

The next run, or the one that survives, has to end with the same bytes as an uninterrupted one.  Prints how many runs were killed, or
what went wrong.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging

from hf_sparse24 import CheckpointError, Sparse24Config, converted_folder
from hf_sparse24.checkpoint import open_checkpoint
from hf_sparse24.conversion import compress_folder, convert_folder, decompress_folder
from hf_sparse24.journal import WORK_NAME
from tests.models import files_of

COMMANDS: dict[str, Callable[[Path, Path], None]] = {
    "compress": lambda source, out: compress_folder(source, out, Sparse24Config(targets=["Linear"])),
    "decompress": decompress_folder,
    "convert": lambda source, out: convert_folder(source, out, "sparse-bitmask"),
}
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.copyfile", "shutil.rmtree")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(number: int, out: Path) -> None:
    """Die before the `number`-th operation on a file below a folder."""
    seen = []

    def hook(event: str, args: tuple) -> None:
        if event in FILE_EVENTS and any(isinstance(arg, str | os.PathLike) and str(arg).startswith(str(out)) for arg in args):
            seen.append(event)
            if len(seen) == number:
                die()

    sys.addaudithook(hook)


def kill_in_shard(number: int) -> None:
    """Die when half of the `number`-th shard is written."""
    original, calls = converted_folder.save_file, []

    def save_half(tensors: dict, path: Path, metadata: dict) -> None:
        original(tensors, path, metadata=metadata)
        calls.append(path)
        if len(calls) == number:
            os.truncate(path, path.stat().st_size // 2)
            die()

    converted_folder.save_file = save_half


def start(convert: Callable[[Path, Path], None], source: Path, out: Path, before: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before()
            convert(source, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def wait(child: int) -> bool:
    """Whether it was killed; any other end but success is an error."""
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, status
    return killed


def is_complete(out: Path, expected: dict[str, bytes]) -> bool:
    """Whether a folder is the result; if not, nothing may take it for one."""
    found = {name: content for name, content in files_of(out).items() if not name.startswith(WORK_NAME)} if out.exists() else {}
    if found == expected:
        return True
    assert "config.json" not in found, sorted(found)
    try:
        with open_checkpoint(out) as checkpoint:
            # Everything but the config is there, and the sign that it is not has gone.
            assert found.keys() == expected.keys() - {"config.json"}, sorted(found)
            assert checkpoint.tensors
    except CheckpointError:
        pass
    return False


def count_kills(source: Path, work: Path, mode: str, command: str, seed: int) -> int:
    convert, draw, out = COMMANDS[command], random.Random(seed), work / "out"
    convert(source, work / "first")  # what is imported on the way is then there
    began = time.perf_counter()
    assert not wait(start(convert, source, work / "expected", lambda: None))
    seconds, expected, num_killed = time.perf_counter() - began, files_of(work / "expected"), 0
    again = mode in ("chain", "clock")
    for number in range(1 + seed, 1000, int(os.environ.get("STEP", "7"))) if mode == "points" else range(1, 13 if again else 1000):
        at = draw.randrange(1, 60) if mode == "chain" else number
        before = {"shard": lambda at=at: kill_in_shard(at), "clock": lambda: None}.get(mode, lambda at=at: kill_at(at, out))
        child = start(convert, source, out, before)
        if mode == "clock":
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        was_killed, was_complete = wait(child), is_complete(out, expected)
        assert was_killed or was_complete
        num_killed += was_killed
        if was_complete and not (out / WORK_NAME / "journal").exists():
            shutil.rmtree(out)  # nothing is left to do, and a run would say that the folder is not empty
        elif not again:
            finish(convert, source, out, expected)
        if not was_killed and mode != "clock":
            break
    if out.exists():
        finish(convert, source, out, expected)
    return num_killed


def finish(convert: Callable[[Path, Path], None], source: Path, out: Path, expected: dict[str, bytes]) -> None:
    """Run to the end; the bytes must be the expected ones, and shards that were written must not be written again."""
    inodes = {path.name: path.stat().st_ino for path in out.glob(f"{WORK_NAME}/stage/*.safetensors")}
    assert not wait(start(convert, source, out, lambda: None))
    assert files_of(out) == expected
    written_again = [name for name, inode in inodes.items() if (out / name).stat().st_ino != inode]
    assert len(written_again) <= 1, written_again  # the last was moved into its place, and not noted yet
    shutil.rmtree(out)


def main(dense: Path, packed: Path, work: Path, *jobs: str) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.simplefilter("error")
    results: dict[str, int | str] = {}
    for job in jobs:
        mode, command, seed = job.split("-")
        (work / job).mkdir()
        try:
            results[job] = count_kills(dense if command == "compress" else packed, work / job, mode, command, int(seed))
        except AssertionError:
            results[job] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])

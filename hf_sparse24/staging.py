"""Writing a checkpoint folder so that an interrupted write cannot be mistaken for a complete one.

Files are written into a subfolder of the target, then moved: `config.json` of the target goes first, and comes last.  Until
the moving starts the old checkpoint is intact; while it lasts the folder has no config, so Transformers does not open it, and a
marker, so that we do not either.
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_sparse24.checkpoint import CONFIG_NAME, INCOMPLETE_NAME

STAGE_PREFIX = ".hf-sparse24-incomplete-"
# Weights and index of one checkpoint, with the optional variant that Transformers puts before "safetensors" or the number.
WEIGHT_FILES = re.compile(r"model(\.[\w-]+?)?(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\.[\w-]+)?\.json")


@contextmanager
def staged(folder: str | Path, variant: str | None = None) -> Iterator[Path]:
    """A folder to write into; what is in it takes the place of the target's files when the block ends without an error.

    Args:
        folder: Made if missing.  Its other files stay, weights of an earlier save with the same variant go.
        variant: Transformers' name of a second set of weights in the same folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=STAGE_PREFIX, dir=folder))
    try:
        yield stage
        publish(stage, folder, variant)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """No other process is in such a block with the same folder, where the file system knows locks.

    Args:
        folder: Which exists.
        wait: For another process to leave its block.

    Raises:
        BlockingIOError: Another process is in its block, and `wait` is False.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def publish(stage: Path, folder: Path, variant: str | None = None) -> None:
    """Move the files of a stage into the folder, where they take the place of the checkpoint that was there.

    Args:
        stage: On the same file system.
        folder: Its other files stay.
        variant: See `staged`.
    """
    with locked(folder):
        _move(stage, folder, variant)


def _move(stage: Path, folder: Path, variant: str | None) -> None:
    new = sorted(path.relative_to(stage) for path in stage.rglob("*") if path.is_file())
    if Path(CONFIG_NAME) in new:
        (folder / CONFIG_NAME).unlink(missing_ok=True)
    (folder / INCOMPLETE_NAME).touch()
    for old in folder.iterdir():
        match = WEIGHT_FILES.fullmatch(old.name)
        is_file = old.is_symlink() or not old.is_dir()
        if match and is_file and (match[1] or match[3] or "") == (f".{variant}" if variant else "") and Path(old.name) not in new:
            old.unlink(missing_ok=True)
    for name in new:
        if name != Path(CONFIG_NAME):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / name, folder / name)
    (folder / INCOMPLETE_NAME).unlink(missing_ok=True)
    if Path(CONFIG_NAME) in new:
        os.replace(stage / CONFIG_NAME, folder / CONFIG_NAME)

"""Long writes that go on after a kill.

    OUT/.hf-sparse24-incomplete-work/
        journal     the task, facts found on the way, each finished file with its size and checksum, what is moved into OUT
        stage/      what will be moved into OUT, when all of it is there

The next run of the same task takes finished files over, after reading each; files of another task are thrown away.  Nothing is
trusted that the journal does not name: a file is written under another name, moved, and then noted; a note that was cut short is
none.  Killed while files were moved into OUT, the next run moves them back, looks at them again, and begins to move anew.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_sparse24.checkpoint import INCOMPLETE_NAME
from hf_sparse24.errors import warn
from hf_sparse24.staging import STAGE_PREFIX, locked, publish

WORK_NAME = f"{STAGE_PREFIX}work"
READ_BYTES = 2**22


class Journal:
    """What a task has finished so far.  `facts` and `finished` are what earlier runs noted; see `open_journal`."""

    def __init__(self, work: Path):
        self.work = work
        self.stage = work / "stage"
        self.facts: dict[str, Any] = {}
        self.finished: dict[str, dict[str, Any]] = {}

    def fact(self, name: str, find: Callable[[], Any]) -> Any:
        """What was found once, by this run or an earlier one; plain data."""
        if name not in self.facts:
            found = find()
            self._note({"fact": name, "value": found})
            self.facts[name] = found
        return self.facts[name]

    def finish(self, name: str, write: Callable[[Path], Any], **facts: Any) -> None:
        """Write a file, and note it.

        Args:
            name: Path inside of the work folder, `stage/...` for what will be published.
            write: Called with a path.
            facts: What is noted beside size and checksum.
        """
        partial = self.work / "partial"
        write(partial)
        entry = {**_measure(partial), **facts}
        (self.work / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, self.work / name)
        self._note({"file": name, **entry})
        self.finished[name] = entry

    def publish(self) -> None:
        """Move what is in the stage into the folder, as `staging.publish` does."""
        moving = [path.relative_to(self.stage).as_posix() for path in sorted(self.stage.rglob("*")) if path.is_file()]
        self._note({"moving": moving})
        publish(self.stage, self.work.parent)

    def _note(self, entry: Mapping[str, Any]) -> None:
        with (self.work / "journal").open("ab") as opened:
            opened.write(_line(entry))

    def _take_over(self, task: Mapping[str, Any]) -> None:
        """Keep what an earlier run of the same task finished, and remove the rest."""
        entries, folder = _read(self.work), self.work.parent
        moving = _moving(entries)
        moved = [name for name in moving if (folder / name).is_file()]
        if entries and entries[0] != {"task": task}:
            if moved:
                raise ValueError(
                    f"{folder}: holds files of an interrupted run with another source or other options: remove it, or name another folder"
                )
            warn(f"{folder}: starting over, for what an interrupted run left there is of another source or other options")
            entries = []
        for name in moved:
            (self.stage / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, self.stage / name)
        for parent in sorted({parent for name in moving for parent in Path(name).parents[:-1]}, reverse=True):
            with suppress(OSError):  # never made, or not empty
                (folder / parent).rmdir()
        (folder / INCOMPLETE_NAME).unlink(missing_ok=True)
        for entry in entries:
            if "fact" in entry:
                self.facts[entry["fact"]] = entry["value"]
            elif "file" in entry and self._is_whole(entry):
                self.finished[entry["file"]] = {key: value for key, value in entry.items() if key != "file"}
        _remove_others(self.work, {self.work / name for name in self.finished} | {self.work / "journal"})
        self.stage.mkdir(exist_ok=True)
        kept = [{"task": task}, *({"fact": name, "value": value} for name, value in self.facts.items())]
        kept += [{"file": name, **entry} for name, entry in self.finished.items()]
        (self.work / "partial").write_bytes(b"".join(map(_line, kept)))
        os.replace(self.work / "partial", self.work / "journal")

    def _is_whole(self, entry: Mapping[str, Any]) -> bool:
        path = self.work / entry["file"]
        if path.is_file() and _measure(path).items() <= entry.items():
            return True
        warn(f"{path}: is not what an interrupted run wrote, it is written again")
        return False


@contextmanager
def open_journal(folder: str | Path, task: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of a task whose result is a new folder; the folder is complete once `publish` was called.

    An error in the input (ValueError) removes everything that was written.  What else ends the block leaves the work folder, and the
    next run goes on.

    Args:
        folder: New, empty, or left by an interrupted run.
        task: Everything that decides what the files hold; plain data.

    Raises:
        ValueError: The folder holds other files, or another process is writing into it.
    """
    folder = Path(folder)
    require_new(folder)
    is_new = not folder.exists()
    work = folder / WORK_NAME
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(work, wait=False))
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is writing into this folder") from None
        require_new(folder)  # another process may have finished meanwhile
        journal = Journal(work)
        journal._take_over(json.loads(json.dumps(task)))
        try:
            yield journal
        except ValueError:
            shutil.rmtree(work)
            if is_new:
                folder.rmdir()
            raise
        # The journal last: until then the next run goes on, and ends as this one.
        _remove_others(work, {work / "journal"})
        shutil.rmtree(work)


def require_new(folder: Path) -> None:
    """Check that a folder is new, empty, or holds only what an interrupted run left.

    Raises:
        ValueError: It is a file, or holds other files.
    """
    if not folder.exists():
        return
    if folder.is_file():
        raise ValueError(f"{folder}: exists and is not an empty folder; name a new one")
    moving = _moving(_read(folder / WORK_NAME))
    ours = {INCOMPLETE_NAME, *(Path(name).parts[0] for name in moving)} if moving else set()
    if {path.name for path in folder.iterdir() if not path.name.startswith(STAGE_PREFIX)} - ours:
        raise ValueError(f"{folder}: exists and is not an empty folder; name a new one")


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """Size and times of every file of a checkpoint, by which a change is seen without reading it."""
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        for name, found in stats.items()
        if not name.startswith((".git/", ".cache/", STAGE_PREFIX))
    }


def _moving(entries: list[dict[str, Any]]) -> list[str]:
    """The files that an interrupted run was moving into the folder."""
    return next((entry["moving"] for entry in entries if "moving" in entry), [])


def _remove_others(folder: Path, keep: set[Path]) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_others(path, keep)
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in keep:
            path.unlink()


def _measure(path: Path) -> dict[str, int]:
    checksum, size = 0, 0
    with path.open("rb") as opened:
        while read := opened.read(READ_BYTES):
            checksum, size = zlib.crc32(read, checksum), size + len(read)
    return {"size": size, "crc32": checksum}


def _line(entry: Mapping[str, Any]) -> bytes:
    """An entry after its own checksum."""
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(work: Path) -> list[dict[str, Any]]:
    """The journal's entries, up to the first that is damaged or was cut short."""
    entries: list[dict[str, Any]] = []
    lines = (work / "journal").read_bytes().split(b"\n") if (work / "journal").exists() else []
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if not text or checksum != b"%08x" % zlib.crc32(text):
            break
        entries.append(json.loads(text))
    return entries

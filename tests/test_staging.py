"""A folder that is written to is the old checkpoint, the new one, or one that nothing opens."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes

from hf_sparse24.checkpoint import open_checkpoint
from hf_sparse24.conversion import decompress_folder
from hf_sparse24.errors import CheckpointError
from hf_sparse24.staging import STAGE_PREFIX, WEIGHT_FILES, staged

OLD = {
    "config.json": b'{"old": true}',
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00003.safetensors"}}',
    "model-00001-of-00003.safetensors": b"old 1",
    "model-00002-of-00003.safetensors": b"old 2",
    "model-00003-of-00003.safetensors": b"old 3",
    "generation_config.json": b"old generation config",
    "tokenizer.json": b"tokenizer",
    "assets/picture.png": b"picture",
}
NEW = {
    "config.json": b'{"new": true}',
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    "model-00001-of-00002.safetensors": b"new 1",
    "model-00002-of-00002.safetensors": b"new 2",
    "generation_config.json": b"new generation config",
    "code/modeling.py": b"new code",
    "code/deep/er.py": b"deeper",
}
# New shards under the names of old ones: a mixture would look complete.
NEW_SAME_NAMES = {name: content.replace(b"old", b"new") for name, content in OLD.items() if name.endswith((".safetensors", ".json"))}
STALE = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")


class Interrupted(BaseException):
    """Like KeyboardInterrupt: no `except Exception` may catch it."""


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expected_after(old: dict[str, bytes], new: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in old.items() if name not in STALE} | new


def raise_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int, error: type[BaseException] = Interrupted) -> list[int]:
    """Let the `number`-th call (from 1) of `owner.name` raise; returns a list that counts the calls."""
    original, calls = getattr(owner, name), []

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise error(f"{name}, call {number}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)
    return calls


def save(folder: Path, files: dict[str, bytes], variant: str | None = None) -> None:
    with staged(folder, variant) as stage:
        write(stage, files)


def assert_old_or_nothing(folder: Path, old: dict[str, bytes]) -> None:
    assert not any(path.name.startswith(STAGE_PREFIX) for path in folder.iterdir())
    found = files_of(folder)
    assert found == old or "config.json" not in found


# ---- a save that ends ------------------------------------------------------------------------------------------------------


def test_a_save_makes_the_folder(tmp_path):
    save(tmp_path / "not" / "there", NEW)
    assert files_of(tmp_path / "not" / "there") == NEW


def test_a_save_replaces_its_files_removes_stale_weights_and_keeps_the_rest(tmp_path):
    write(tmp_path, OLD)
    save(tmp_path, NEW)
    assert files_of(tmp_path) == expected_after(OLD, NEW)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_seen_in_the_folder_before_the_block_ends(tmp_path):
    write(tmp_path, OLD)
    with staged(tmp_path) as stage:
        write(stage, NEW)
        assert stage.parent == tmp_path
        assert stage.name.startswith(STAGE_PREFIX)
        assert without_stages(files_of(tmp_path)) == OLD
    assert not stage.exists()


def test_a_single_file_takes_the_place_of_shards_and_their_index(tmp_path):
    write(tmp_path, OLD)
    save(tmp_path, {"config.json": b"{}", "model.safetensors": b"whole"})
    assert {name for name in files_of(tmp_path) if WEIGHT_FILES.fullmatch(name)} == {"model.safetensors"}


def test_shards_take_the_place_of_a_single_file(tmp_path):
    write(tmp_path, {"config.json": b"{}", "model.safetensors": b"whole"})
    save(tmp_path, NEW)
    assert files_of(tmp_path) == NEW


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors", "model.bin", "pytorch_model.bin", "model.safetensors.bak", "mymodel.safetensors", "model.onnx",
        "model-1-of-2.safetensors", "dense_original.safetensors", "sub/model.safetensors", "model.safetensors.index.json.old",
    ],
)  # fmt: skip
def test_files_that_are_not_weights_of_this_checkpoint_stay(tmp_path, name):
    write(tmp_path, OLD | {name: b"mine"})
    save(tmp_path, NEW)
    assert files_of(tmp_path)[name] == b"mine"


def test_a_folder_named_like_a_weights_file_does_not_stop_a_save(tmp_path):
    write(tmp_path, OLD | {"model-00007-of-00009.safetensors/inside": b"mine"})
    save(tmp_path, NEW)
    assert files_of(tmp_path) == expected_after(OLD, NEW) | {"model-00007-of-00009.safetensors/inside": b"mine"}


# ---- variants --------------------------------------------------------------------------------------------------------------

WEIGHTS_OF_VARIANT = {
    None: ["model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
    "fp16": [
        "model.fp16.safetensors", "model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors",
        "model.safetensors.index.fp16.json",
    ],
    "my-variant_2": [
        "model.my-variant_2.safetensors", "model.my-variant_2-00001-of-00002.safetensors", "model.my-variant_2-00002-of-00002.safetensors",
        "model.safetensors.index.my-variant_2.json",
    ],
}  # fmt: skip


@pytest.mark.parametrize("variant", WEIGHTS_OF_VARIANT)
def test_a_save_removes_the_weights_of_its_own_variant_and_of_no_other(tmp_path, variant):
    write(tmp_path, {name: b"old" for names in WEIGHTS_OF_VARIANT.values() for name in names} | {"config.json": b"{}"})
    new = f"model.{variant}-00001-of-00009.safetensors" if variant else "model-00001-of-00009.safetensors"
    save(tmp_path, {"config.json": b"{}", new: b"new"}, variant)
    others = {name for other, names in WEIGHTS_OF_VARIANT.items() if other != variant for name in names}
    assert set(files_of(tmp_path)) == {"config.json", new, *others}


# ---- a save that is interrupted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [NEW, NEW_SAME_NAMES], ids=["other-names", "same-names"])
def test_interrupted_while_writing_leaves_the_old_checkpoint(tmp_path, new):
    write(tmp_path, OLD)
    for number in range(len(new) + 1):
        with pytest.raises(Interrupted), staged(tmp_path) as stage:
            write(stage, dict(list(new.items())[:number]))
            raise Interrupted
        assert files_of(tmp_path) == OLD
    assert all(not path.name.startswith(STAGE_PREFIX) for path in tmp_path.iterdir())


@pytest.mark.parametrize("new", [NEW, NEW_SAME_NAMES], ids=["other-names", "same-names"])
@pytest.mark.parametrize("error", [Interrupted, OSError])
@pytest.mark.parametrize(("owner", "function"), [(os, "replace"), (Path, "unlink")], ids=["moving", "removing"])
def test_interrupted_at_any_call_the_folder_is_the_old_checkpoint_or_has_no_config(tmp_path, owner, function, error, new):
    number, total = 1, None
    while total is None or number <= total:
        folder = write(tmp_path / str(number), OLD)
        with pytest.MonkeyPatch.context() as patch:
            calls = raise_at(patch, owner, function, number, error)
            try:
                save(folder, new)
            except error:
                pass
            else:
                total = len(calls)
                break
        assert_old_or_nothing(folder, OLD)
        # The next save is not disturbed by what the interrupted one left.
        save(folder, new)
        found = files_of(folder)
        assert {name: found.get(name) for name in new} == new
        number += 1
    assert total is not None and number == total + 1
    assert total >= {"replace": len(new), "unlink": 1}[function]


def save_until_killed(folder: Path, files: dict[str, bytes], number: int) -> None:
    """In a child process: save, and die before the `number`-th move."""
    original, calls = os.replace, []

    def replace(*args):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    os.replace = replace
    save(folder, files)
    os._exit(0)


def without_stages(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.startswith(STAGE_PREFIX)}


@pytest.mark.parametrize("new", [NEW, NEW_SAME_NAMES], ids=["other-names", "same-names"])
def test_killed_at_any_move_the_folder_is_the_old_checkpoint_or_has_no_config(tmp_path, new):
    folder = write(tmp_path / "folder", OLD)
    for number in range(1, len(new) + 1):
        process = os.fork()
        if process == 0:
            save_until_killed(folder, new, number)
        _, status = os.waitpid(process, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found = without_stages(files_of(folder))
        assert found == OLD or "config.json" not in found
        save(folder, new)
        found = without_stages(files_of(folder))
        assert {name: found.get(name) for name in new} == new
        write(folder, OLD)


def test_what_an_interrupted_move_leaves_is_not_opened_by_our_tools_before_the_next_save(tmp_path, golden):
    # Shards of two checkpoints under names that fit together: without a word of it, a conversion would mix their weights.
    tensors = load_file(golden / "sparse-24-bitmask" / "model.safetensors")
    folder, old, new = tmp_path / "folder", {}, {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        old[file] = safetensors_bytes({name: tensors[name] for name in names}, metadata={"format": "pt"})
        negated = {name: -tensors[name] if name.endswith(".compressed") else tensors[name] for name in names}
        new[file] = safetensors_bytes(negated, metadata={"format": "pt"})
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    others = {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(), "config.json": b"{}"}
    write(folder, old | others)
    with pytest.MonkeyPatch.context() as patch:
        raise_at(patch, os, "replace", 2)
        with pytest.raises(Interrupted):
            save(folder, new | others)
    found = files_of(folder)
    assert {name: found[name] for name in old} not in (old, new)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        decompress_folder(folder, tmp_path / "out")
    save(folder, new | others)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)


def test_a_target_that_cannot_be_replaced_is_an_error_and_leaves_no_config(tmp_path):
    write(tmp_path, {"config.json": b"{}", "model.safetensors/in the way": b""})
    with pytest.raises(OSError):
        save(tmp_path, {"config.json": b"{}", "model.safetensors": b"new"})
    assert not (tmp_path / "config.json").exists()


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError), staged(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_bytes() == b"mine"


# ---- links -------------------------------------------------------------------------------------------------------------------


def test_links_to_files_elsewhere_are_replaced_and_what_they_point_to_is_kept(tmp_path):
    # The cache of the Hub: every file is a link to a blob.
    blobs = write(tmp_path / "blobs", OLD)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in OLD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(blobs / name)
    save(folder, NEW)
    assert files_of(folder) == expected_after(OLD, NEW)
    assert files_of(blobs) == OLD
    assert not (folder / "config.json").is_symlink()


def test_a_dangling_link_to_stale_weights_is_removed(tmp_path):
    write(tmp_path, OLD)
    (tmp_path / "model-00004-of-00004.safetensors").symlink_to(tmp_path / "gone")
    save(tmp_path, NEW)
    assert not (tmp_path / "model-00004-of-00004.safetensors").is_symlink()


# ---- two at once -------------------------------------------------------------------------------------------------------------


def test_two_stages_at_once_do_not_see_each_other_and_the_last_to_end_stays(tmp_path):
    write(tmp_path, OLD)
    with staged(tmp_path) as first:
        write(first, {"config.json": b"first", "model.safetensors": b"first"})
        with staged(tmp_path) as second:
            assert second != first
            write(second, NEW)
        assert files_of(first) == {"config.json": b"first", "model.safetensors": b"first"}
        assert without_stages(files_of(tmp_path)) == expected_after(OLD, NEW)
    found = files_of(tmp_path)
    assert {name for name in found if WEIGHT_FILES.fullmatch(name)} == {"model.safetensors"}
    assert (found["config.json"], found["model.safetensors"]) == (b"first", b"first")


def test_an_interrupted_stage_leaves_another_one_alone(tmp_path):
    write(tmp_path, OLD)
    with staged(tmp_path) as first:
        write(first, NEW)
        with pytest.raises(Interrupted), staged(tmp_path) as second:
            write(second, {"config.json": b"second"})
            raise Interrupted
        assert files_of(first) == NEW
    assert files_of(tmp_path) == expected_after(OLD, NEW)


def test_a_stale_file_that_another_save_removed_meanwhile_is_no_error(tmp_path, monkeypatch):
    write(tmp_path, OLD)
    original = Path.unlink

    def unlink(path, missing_ok=False):
        if path.name == STALE[1]:
            monkeypatch.setattr(Path, "unlink", original)
            path.unlink()
        return original(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    save(tmp_path, NEW)
    assert files_of(tmp_path) == expected_after(OLD, NEW)


def test_two_threads_that_save_the_same_leave_that(tmp_path):
    for attempt in range(10):
        folder = write(tmp_path / str(attempt), OLD)
        barrier, errors = threading.Barrier(4), []

        def work(folder=folder, barrier=barrier, errors=errors):
            try:
                with staged(folder) as stage:
                    write(stage, NEW)
                    barrier.wait(timeout=60)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert files_of(folder) == expected_after(OLD, NEW)


def test_a_save_inside_another_ones_move_does_not_end_in_a_mixture(tmp_path, monkeypatch):
    """A second process saves another model under the same names while the files of the first are moved."""
    names = ("config.json", "model.safetensors.index.json", *STALE)
    write(tmp_path, dict.fromkeys(names, b"old"))
    original, calls, others = os.replace, [], []

    def replace(*args):
        calls.append(1)
        if len(calls) == 3:
            process = os.fork()
            if process == 0:
                os.replace = original
                save(tmp_path, dict.fromkeys(names, b"theirs"))
                os._exit(0)
            others.append(process)
            end = time.monotonic() + 2
            # Either it is done soon, or it waits for us.
            while time.monotonic() < end and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                time.sleep(0.01)
        return original(*args)

    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, dict.fromkeys(names, b"mine"))
    os.waitpid(others[0], 0)
    found = files_of(tmp_path)
    assert "config.json" not in found or found == dict.fromkeys(names, found["config.json"])

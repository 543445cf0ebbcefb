"""A conversion that is killed goes on where it was, trusts nothing that it did not note, and ends with the same bytes."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparse24 import CheckpointError, Sparse24Config, converted_folder
from hf_sparse24.checkpoint import open_checkpoint
from hf_sparse24.conversion import compress_folder, convert_folder, decompress_folder
from hf_sparse24.journal import WORK_NAME, open_journal
from tests.models import files_of, llama

ROOT = Path(__file__).parents[1]
TASK = {"what": "a test"}


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder, max_shard_size="30KB")
    (folder / "nested").mkdir()
    (folder / "nested" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def packed(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "packed"
    compress_folder(dense, folder)
    return folder


def interrupt_at(number, monkeypatch, error=Interrupted):
    """Let the `number`-th shard fail, after it was written to half; returns the list of paths that were written."""
    original, paths = save_file, []

    def failing(tensors, path, metadata):
        original(tensors, path, metadata=metadata)
        paths.append(path)
        if len(paths) == number:
            os.truncate(path, path.stat().st_size // 2)
            raise error

    monkeypatch.setattr(converted_folder, "save_file", failing)
    return paths


@pytest.fixture
def interrupted(dense, monkeypatch, tmp_path):
    """A folder in which two shards are finished, and the third is half there."""
    interrupt_at(3, monkeypatch)
    with pytest.raises(Interrupted):
        compress_folder(dense, tmp_path / "out")
    monkeypatch.undo()
    return tmp_path / "out"


def negated():
    """Another model whose files have the same names and sizes."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    return model


def count_shards(monkeypatch):
    return interrupt_at(0, monkeypatch)


# ---- kills -----------------------------------------------------------------------------------------------------------------


KILLS = {
    "points-compress-0": 8,
    "points-decompress-1": 8,
    "points-convert-2": 8,
    "shard-compress-0": 4,
    "chain-compress-1": 2,
    "chain-decompress-2": 2,
    "clock-compress-3": 1,
}


@pytest.fixture(scope="module")
def kills(dense, packed, tmp_path_factory):
    """How many runs were killed, of each job; or what went wrong."""
    run = [sys.executable, "-m", "tests.killing", dense, packed, tmp_path_factory.mktemp("kills"), *KILLS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("job", KILLS)
def test_killed_at_any_moment_the_next_run_ends_with_the_same_bytes(job, kills):
    assert isinstance(kills[job], int), kills[job]
    assert kills[job] >= KILLS[job]


# ---- what is taken over ------------------------------------------------------------------------------------------------------


def test_finished_shards_are_not_written_again(dense, packed, interrupted, monkeypatch):
    with pytest.raises(CheckpointError, match="holds neither"):
        open_checkpoint(interrupted)
    written = count_shards(monkeypatch)
    compress_folder(dense, interrupted)
    assert len(written) == len(list(dense.glob("*.safetensors"))) - 2
    assert files_of(interrupted) == files_of(packed)


def test_weights_are_not_checked_again(dense, interrupted, monkeypatch):
    from hf_sparse24 import conversion

    monkeypatch.setattr(conversion, "_select", lambda *_: pytest.fail("the choice was noted"))
    compress_folder(dense, interrupted)


def test_dense_weights_are_listed_by_the_run_that_goes_on_too(dense, monkeypatch, tmp_path):
    config = Sparse24Config(targets=["re:.*(up_proj|embed_tokens|norm)"], ignore=[], on_dense="skip")
    with pytest.warns(UserWarning, match="stored dense.*embed_tokens"):
        compress_folder(dense, tmp_path / "whole", config)
    interrupt_at(3, monkeypatch)
    with pytest.raises(Interrupted), pytest.warns(UserWarning, match="stored dense.*embed_tokens"):
        compress_folder(dense, tmp_path / "out", config)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="stored dense.*embed_tokens"):
        compress_folder(dense, tmp_path / "out", config)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_disk_that_is_full_keeps_what_is_finished(dense, packed, monkeypatch, tmp_path):
    interrupt_at(3, monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        compress_folder(dense, tmp_path / "out")
    monkeypatch.undo()
    written = count_shards(monkeypatch)
    compress_folder(dense, tmp_path / "out")
    assert len(written) == len(list(dense.glob("*.safetensors"))) - 2
    assert files_of(tmp_path / "out") == files_of(packed)


def test_a_bad_source_leaves_nothing(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "broken")
    last = max(file for file in folder.glob("*.safetensors") if any(name.endswith(".bitmask") for name in load_file(file)))
    tensors = load_file(last)
    tensors[next(name for name in tensors if name.endswith(".bitmask"))][0, 0] = 0xFF
    save_file(tensors, last, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        decompress_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- what is not -------------------------------------------------------------------------------------------------------------


def damage_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize("damage", [damage_byte, cut, Path.unlink])
def test_a_finished_shard_that_changed_is_written_again_with_a_warning(damage, dense, packed, interrupted, monkeypatch):
    damage(interrupted / WORK_NAME / "stage" / "model-00001-of-00004.safetensors")
    written = count_shards(monkeypatch)
    with pytest.warns(UserWarning, match="model-00001-of-00004.safetensors: is not what an interrupted run wrote"):
        compress_folder(dense, interrupted)
    assert len(written) == 3
    assert files_of(interrupted) == files_of(packed)


@pytest.mark.parametrize("keep", ["half a line", "a wrong line", "nothing"])
def test_a_journal_that_was_cut_short_is_believed_up_to_there(keep, dense, packed, interrupted, monkeypatch):
    journal = interrupted / WORK_NAME / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4  # the task, the choice of weights, two shards
    last = {"half a line": lines[3][:-9], "a wrong line": lines[3].replace(b'"size": ', b'"size": 1'), "nothing": b""}[keep]
    journal.write_bytes(b"".join(lines[:3]) + last if keep != "nothing" else b"")
    written = count_shards(monkeypatch)
    compress_folder(dense, interrupted)
    assert len(written) == (4 if keep == "nothing" else 3)
    assert files_of(interrupted) == files_of(packed)


def test_a_shard_that_is_not_noted_is_written_again(dense, packed, interrupted):
    save_file({"model.foreign": torch.zeros(3)}, interrupted / WORK_NAME / "stage" / "model-00003-of-00004.safetensors")
    (interrupted / WORK_NAME / "stage" / "foreign").write_text("foreign")
    compress_folder(dense, interrupted)
    assert files_of(interrupted) == files_of(packed)


def test_work_on_another_source_is_thrown_away_with_a_warning(dense, interrupted, tmp_path):
    other = tmp_path / "other"
    negated().save_pretrained(other, max_shard_size="30KB")
    assert [path.stat().st_size for path in sorted(other.glob("*.safetensors"))] == [
        path.stat().st_size for path in sorted(dense.glob("*.safetensors"))
    ]
    compress_folder(other, tmp_path / "whole")
    with pytest.warns(UserWarning, match="starting over.*of another source or other options"):
        compress_folder(other, interrupted)
    assert files_of(interrupted) == files_of(tmp_path / "whole")


def test_a_source_that_was_written_anew_is_another_one(monkeypatch, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    llama().save_pretrained(source, max_shard_size="30KB")
    times = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    interrupt_at(3, monkeypatch)
    with pytest.raises(Interrupted):
        compress_folder(source, out)
    monkeypatch.undo()
    negated().save_pretrained(source, max_shard_size="30KB")
    for path, time in times.items():  # as a copy with its times does
        os.utime(path, ns=(time, time))
    with pytest.warns(UserWarning, match="starting over"):
        compress_folder(source, out)
    compress_folder(source, tmp_path / "whole")
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["other options", "another command"])
def test_work_on_another_task_is_thrown_away_with_a_warning(name, dense, interrupted, tmp_path):
    run = {
        "other options": lambda out: compress_folder(dense, out, Sparse24Config(ignore=["lm_head", "re:.*up_proj"])),
        "another command": lambda out: convert_folder(dense, out, "sparse-bitmask"),
    }[name]
    run(tmp_path / "whole")
    with pytest.warns(UserWarning, match="starting over"):
        run(interrupted)
    assert files_of(interrupted) == files_of(tmp_path / "whole")


# ---- killed while files are moved --------------------------------------------------------------------------------------------


@pytest.fixture
def half_moved(dense, monkeypatch, tmp_path):
    """A folder into which half of the files were moved."""
    original, calls = os.replace, []

    def failing(old, new):
        if Path(new).parent == tmp_path / "out":
            calls.append(new)
            if len(calls) == 4:
                raise Interrupted
        original(old, new)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(Interrupted):
        compress_folder(dense, tmp_path / "out")
    monkeypatch.undo()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    return tmp_path / "out"


def test_half_moved_files_are_moved_in_the_end(dense, packed, half_moved, monkeypatch):
    with pytest.raises(CheckpointError):
        open_checkpoint(half_moved)
    written = count_shards(monkeypatch)
    compress_folder(dense, half_moved)
    assert written == []
    assert files_of(half_moved) == files_of(packed)


def test_half_moved_files_of_another_task_are_not_touched(dense, half_moved):
    before = files_of(half_moved)
    with pytest.raises(ValueError, match="holds files of an interrupted run with another source or other options: remove it"):
        compress_folder(dense, half_moved, Sparse24Config(ignore=["lm_head", "re:.*up_proj"]))
    assert files_of(half_moved) == before


def test_a_file_of_the_user_among_them_is_not_touched(dense, half_moved):
    (half_moved / "mine").write_text("mine")
    before = files_of(half_moved)
    with pytest.raises(ValueError, match="is not an empty folder"):
        compress_folder(dense, half_moved)
    assert files_of(half_moved) == before


# ---- the check at the end ----------------------------------------------------------------------------------------------------


def lose_one(tensors):
    tensors.popitem()


def rename_one(tensors):
    name, tensor = tensors.popitem()
    tensors[f"{name}x"] = tensor


def reshape_norm(tensors):
    for name in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[name] = tensors[name][:-1]


def cast_norm(tensors):
    for name in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[name] = tensors[name].double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_one, "what was written is not what was meant|is missing|left over|missing part"),
        (rename_one, "what was written is not what was meant|is missing|left over|missing part"),
        (reshape_norm, r"norm.weight: is \[31\] F32, expected \[32\] F32"),
        (cast_norm, r"norm.weight: is \[32\] F64, expected \[32\] F32"),
    ],
)
@pytest.mark.parametrize("command", ["compress", "decompress", "convert"])
def test_what_is_written_is_compared_with_what_was_meant(change, message, command, dense, packed, monkeypatch, tmp_path):
    original = save_file

    def wrong(tensors, path, metadata):
        change(tensors)
        original(tensors, path, metadata=metadata)

    monkeypatch.setattr(converted_folder, "save_file", wrong)
    with pytest.raises(CheckpointError, match=message):
        if command == "compress":
            compress_folder(dense, tmp_path / "out")
        elif command == "decompress":
            decompress_folder(packed, tmp_path / "out")
        else:
            convert_folder(packed, tmp_path / "out", "sparse-bitmask")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_was_not_packed_is_found(dense, monkeypatch, tmp_path):
    from hf_sparse24 import conversion

    original = conversion._pack_shard
    monkeypatch.setattr(conversion, "_pack_shard", lambda checkpoint, file, _, compressor: original(checkpoint, file, (), compressor))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight: is not packed"):
        compress_folder(dense, tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_an_error(dense, monkeypatch, tmp_path):
    source = shutil.copytree(dense, tmp_path / "source")
    original = save_file

    def touching(tensors, path, metadata):
        original(tensors, path, metadata=metadata)
        (source / "config.json").touch()

    monkeypatch.setattr(converted_folder, "save_file", touching)
    with pytest.raises(CheckpointError, match="source: changed while it was read"):
        compress_folder(source, tmp_path / "out")


# ---- the journal itself ------------------------------------------------------------------------------------------------------


def test_a_second_process_is_turned_away(tmp_path):
    script = """
        import sys
        from hf_sparse24.journal import open_journal
        with open_journal(sys.argv[1], {"what": "a test"}):
            pass
    """
    with open_journal(tmp_path / "out", TASK) as journal:
        journal.finish("stage/file", lambda path: path.write_bytes(b"mine"))
        run = [sys.executable, "-c", textwrap.dedent(script), tmp_path / "out"]
        other = subprocess.run(run, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
        assert "ValueError" in other.stderr and "another process is writing into this folder" in other.stderr
        assert (journal.stage / "file").read_bytes() == b"mine"
        journal.publish()
    assert files_of(tmp_path / "out") == {"file": b"mine"}


def test_facts_and_files_are_there_in_the_next_run(tmp_path):
    with pytest.raises(Interrupted), open_journal(tmp_path / "out", TASK) as journal:
        assert journal.fact("fact", lambda: {"a": [1, 2.5, None]}) == {"a": [1, 2.5, None]}
        journal.finish("stage/file", lambda path: path.write_bytes(b"content"), number=7)
        raise Interrupted
    with open_journal(tmp_path / "out", TASK) as journal:
        assert journal.fact("fact", lambda: pytest.fail("is known")) == {"a": [1, 2.5, None]}
        assert journal.finished == {"stage/file": {"size": 7, "crc32": zlib.crc32(b"content"), "number": 7}}
        journal.publish()
    assert files_of(tmp_path / "out") == {"file": b"content"}

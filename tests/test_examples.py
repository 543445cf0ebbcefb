"""Every script in examples/ runs, as a user would run it, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.models import same_bytes, tensors_of
from tests.test_demo import chat_folder

__all__ = ["chat_folder"]

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def verify_roundtrip(tmp_path, golden, chat_folder):
    result = run("verify_roundtrip.py", "--model", chat_folder, "--prompt", "word1 word2")
    assert result.returncode == 0, result.stderr
    assert "pruned 14 layers" in result.stdout
    assert "21 of 21 parameters are equal" in result.stdout


def compress_checkpoint(tmp_path, golden, chat_folder):
    result = run("compress_checkpoint.py", golden / "sparse-24-bitmask", tmp_path)
    assert result.returncode == 0, result.stderr
    old = load_file(golden / "sparse-24-bitmask" / "model.safetensors")
    for name in ("kept", "compressed"):
        new = tensors_of(tmp_path / name)
        assert new.keys() == old.keys()
        assert all(same_bytes(new[key], old[key]) for key in old)
    assert not any(name.endswith(".bitmask") for name in tensors_of(tmp_path / "dense"))


def train_squared_relu(tmp_path, golden, chat_folder):
    out = tmp_path / "result.json"
    options = ("--size", "tiny", "--steps", 20, "--batch-size", 4, "--window", 64, "--device", "cpu", "--out", out)
    result = run("train_squared_relu.py", *options)
    assert result.returncode == 0, result.stderr
    runs = json.loads(out.read_text())["runs"]
    assert set(runs) == {"dense", "2:4"}
    for found in runs.values():
        assert found["losses"][-1]["loss"] < found["losses"][0]["loss"] - 0.5
        # Untrained, a half is negative.
        assert all(0.3 < layer["zeros"] < 0.95 and 0 < layer["dropped_energy"] < 0.2 for layer in found["layers"].values())
        assert set(found["bits_per_byte"]) == {"dense", "2:4", "2:4, float8"}
    # One start, the same batches, another product.
    first = [found["losses"][0]["loss"] for found in runs.values()]
    assert first[0] != first[1] and abs(first[0] - first[1]) < 0.01
    assert runs["dense"]["bits_per_byte"] != runs["2:4"]["bits_per_byte"]


CHECKS = {
    "train_squared_relu.py": train_squared_relu,
    "verify_roundtrip.py": verify_roundtrip,
    "compress_checkpoint.py": compress_checkpoint,
}


@pytest.mark.parametrize("name", CHECKS)
def test_example_runs(name, tmp_path, golden, chat_folder):
    CHECKS[name](tmp_path, golden, chat_folder)


def test_every_example_has_a_check():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS)

"""Every script in examples/ runs, as a user would run it, on a tiny model."""

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


CHECKS = {"verify_roundtrip.py": verify_roundtrip, "compress_checkpoint.py": compress_checkpoint}


@pytest.mark.parametrize("name", CHECKS)
def test_example_runs(name, tmp_path, golden, chat_folder):
    CHECKS[name](tmp_path, golden, chat_folder)


def test_every_example_has_a_check():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS)

"""The benchmark of generation runs on a CPU, in small, and compares every kind of model."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.test_demo import chat_folder

__all__ = ["chat_folder"]

ROOT = Path(__file__).parents[1]


def test_generation_is_measured_dense_kept_and_fused(chat_folder, tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "generate.py", "--tiny", "--device", "cpu", "--out", out, "--model", chat_folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert not result["errors"]
    assert not result["skipped"]
    records = {(record["part"], record["size"]): record for record in result["records"]}
    parts = [("decode step", 1), ("decode step", 16), ("prefill", 16), ("prefill", 32), ("memory of weights", 2)]
    for record in (records[key] for key in parts):
        assert all(record[kind] > 0 for kind in ("dense", "kept", "fused"))
        assert record["ratio"] > 0 < record["fused_ratio"]
    assert records["memory of weights", 2]["kept"] == records["memory of weights", 2]["fused"]
    for part in ("logits error", f"logits error, {chat_folder.name}"):
        assert records[part, 24]["met"]
        assert records[part, 24]["fused_met"]
    # q/k/v are 64 + 2 * 32 rows, gate/up 2 * 128.
    assert {"128x64 M=1", "256x64 M=1"} <= set(result["paths"])

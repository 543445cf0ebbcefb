"""Checkpoints of ours where hf_sparse24 is not imported, and checkpoints of compressed-tensors where it is: each in a process of its own.

HF_SPARSE24_TEST_CT names a folder into which a compressed-tensors of today was installed with `pip install --target`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_sparse24 import Sparse24Config
from tests.conftest import GOLDEN
from tests.models import llama, logits

ROOT = Path(__file__).parents[2]
COMPRESSED_TENSORS = os.environ.get("HF_SPARSE24_TEST_CT")

# `attempt` says how a step ended: the logits and the class of the quantizer, or the error.
PRELUDE = """
import json, sys, warnings
import torch
import transformers
from transformers import AutoModelForCausalLM
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
report = {}
def attempt(step, folder):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except BaseException as error:
        report[step] = {"error": type(error).__name__, "text": str(error)}
    else:
        quantizer = getattr(model, "hf_quantizer", None)
        with torch.no_grad():
            values = model(input_ids=torch.tensor([[1, 5, 9, 33, 77, 2, 8]])).logits
        report[step] = {"logits": values.float().flatten().tolist(), "quantizer": str(type(quantizer))}
        report[step]["config"] = str(type(getattr(model.config, "quantization_config", None)))
"""


def run(script, *folders, compressed_tensors=False):
    """Run a script after PRELUDE with `folders` as sys.argv[1:]; the package is importable only from ROOT."""
    paths = [str(ROOT), *([COMPRESSED_TENSORS] if compressed_tensors else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    code = PRELUDE + script + "\nprint('REPORT' + json.dumps(report))"
    result = subprocess.run([sys.executable, "-c", code, *map(str, folders)], env=env, capture_output=True, text=True, timeout=300, cwd="/")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.rpartition("REPORT")[2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of ours, and the same without its weights file."""
    folder, headers_only = (tmp_path_factory.mktemp(name) for name in ("ours", "ours-without-weights"))
    llama().save_pretrained(folder, sparsity_config=Sparse24Config())
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, headers_only)
    return folder, headers_only


@pytest.fixture(scope="module")
def expected():
    return logits(llama()).flatten().tolist()


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """What compressed-tensors of today writes: pack-quantized, nothing sparse."""
    folder = tmp_path_factory.mktemp("ordinary")
    source = GOLDEN / "pack-quantized+sparse-24-bitmask"
    shutil.copy(source / "model.safetensors", folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["sparsity_config"] = {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_our_import_and_without_compressed_tensors(saved, expected):
    if importlib.util.find_spec("compressed_tensors"):
        pytest.skip("compressed-tensors is installed here")
    report = run(
        """
ours, without_weights = sys.argv[1:]
assert "hf_sparse24" not in sys.modules
attempt("stock", ours)
attempt("stock, no weights", without_weights)
import hf_sparse24
attempt("imported after transformers", ours)
""",
        *saved,
    )
    for step in ("stock", "stock, no weights"):
        assert report[step]["error"] == "ImportError"
        assert "compressed-tensors" in report[step]["text"] or "compressed_tensors" in report[step]["text"]
    assert report["imported after transformers"]["logits"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(not COMPRESSED_TENSORS, reason="HF_SPARSE24_TEST_CT names no folder with compressed-tensors")
def test_quantised_checkpoint_stops_stock_code_beside_compressed_tensors(tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(quantization="fp8"))
    report = run(
        """
import compressed_tensors
attempt("stock", sys.argv[1])
import hf_sparse24
attempt("ours", sys.argv[1])
""",
        tmp_path,
        compressed_tensors=True,
    )
    assert report["stock"]["error"] == "KeyError" and "IMPORT HF_SPARSE24" in report["stock"]["text"].upper()
    assert "logits" in report["ours"]


@pytest.mark.skipif(not COMPRESSED_TENSORS, reason="HF_SPARSE24_TEST_CT names no folder with compressed-tensors")
def test_beside_compressed_tensors(saved, expected, ordinary):
    report = run(
        """
import importlib, compressed_tensors
from transformers import modeling_utils, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs, AUTO_QUANTIZER_MAPPING as quantizers
ours, without_weights, ordinary = sys.argv[1:]
assert "hf_sparse24" not in sys.modules
attempt("ours, not imported", ours)
attempt("ours, not imported, no weights", without_weights)
attempt("ordinary, not imported", ordinary)
stock = {"config": configs["compressed-tensors"], "quantizer": quantizers["compressed-tensors"]}
import hf_sparse24
wrapped = modeling_utils.get_hf_quantizer, PreTrainedModel.save_pretrained, quantizers["sparse24"]
import hf_sparse24
importlib.reload(hf_sparse24)
assert wrapped == (modeling_utils.get_hf_quantizer, PreTrainedModel.save_pretrained, quantizers["sparse24"])
assert stock == {"config": configs["compressed-tensors"], "quantizer": quantizers["compressed-tensors"]}
attempt("ours, imported", ours)
attempt("ordinary, imported", ordinary)
report["version"] = compressed_tensors.__version__
""",
        *saved,
        ordinary,
        compressed_tensors=True,
    )
    assert tuple(int(number) for number in report["version"].split(".")[:2]) >= (0, 15)
    for step in ("ours, not imported", "ours, not imported, no weights"):
        assert "error" in report[step], f"{step}: a model without its weights was returned"
        # compressed-tensors 0.20 prints names of presets in capitals.
        assert "pip install hf-sparse24, then import hf_sparse24" in report[step]["text"].lower()
    assert report["ours, imported"]["logits"] == pytest.approx(expected, abs=1e-6)
    assert "error" not in report["ordinary, not imported"], report["ordinary, not imported"]
    assert report["ordinary, imported"] == report["ordinary, not imported"]
    assert "CompressedTensorsHfQuantizer" in report["ordinary, imported"]["quantizer"]


def test_form_for_compressed_tensors_is_what_it_wrote_itself(tmp_path):
    llama(torch.bfloat16).save_pretrained(tmp_path, sparsity_config=Sparse24Config(readable_by="compressed-tensors"))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    golden = json.loads((GOLDEN / "sparse-24-bitmask" / "config.json").read_text())["quantization_config"]
    assert written.keys() <= golden.keys()
    assert golden["sparsity_config"].keys() <= written["sparsity_config"].keys()

"""`hf-sparse24 push` and `verify` as programs against the Hub of tests/hub_server.py: the whole way there and back."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import RepoCard
from safetensors.torch import load_file, save_file

from hf_sparse24.cli import main
from hf_sparse24.conversion import compress_folder
from tests.hub_server import HubServer
from tests.models import llama

COMMAND = """
from hf_sparse24.cli import main
sys.exit(main(sys.argv[1:]))
"""
# Each list of arguments in a run of its own, in one process; the last line is their exit codes.
COMMANDS = """
import json
from hf_sparse24.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    print("$", " ".join(arguments), flush=True)
    print("$", " ".join(arguments), file=sys.stderr, flush=True)
    codes.append(main(arguments))
print(json.dumps(codes))
"""
BASE_CARD = "---\nlicense: other\nlicense_name: their-licence\nlicense_link: LICENSE.md\nlanguage: nl\npipeline_tag: text-generation\n---\n"
MAKE_BASES = """
from huggingface_hub import HfApi
for name in ("base", "unlicensed"):
    HfApi().create_repo(f"me/{name}")
HfApi().upload_file(path_in_repo="README.md", path_or_fileobj=sys.argv[1].encode(), repo_id="me/base")
"""
BACK = """
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from hf_sparse24 import Sparse24Config, Sparse24Linear
from hf_sparse24.cli import main
from transformers import AutoModelForCausalLM

dense, out = Path(sys.argv[1]), Path(sys.argv[2])
original = load_file(dense / "model.safetensors")

def load(repo, **kwargs):
    return AutoModelForCausalLM.from_pretrained(repo, quantization_config=Sparse24Config(**kwargs), revision=revision)

def check(model):
    torch.testing.assert_close(dict(model.state_dict()), original, rtol=0, atol=0)

revision = "v2"
check(load("me/branched", run_compressed=False))
revision = None
folder = snapshot_download("me/tiny", local_dir=out)
for found in (folder, "me/tiny"):  # by its name, the copy in the cache
    assert main(["verify", found, "--against", str(dense)]) == 0
check(load("me/tiny", run_compressed=False))
kept = load("me/tiny", run_compressed=True)
assert sum(isinstance(module, Sparse24Linear) for module in kept.modules()) == 14
check(kept.dequantize())
"""
PRUNED = {
    "method": "alps",
    "pattern": "2:4",
    "layers": [{"name": f"layer.{i}", "relative_error": 0.01 * (i + 1), "tokens": 4096, "dropped": 1024} for i in range(14)],
    "distillation": {"steps": 30, "seconds": 61.5, "losses": [2.0, 1.0]},
}
EVALUATED = {"windows": 8, "tokens": 4096, "perplexity": 21.5, "dense_perplexity": 18.25}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`dense`, `packed` from it in many shards, and `damaged`, in which a bit is wrong."""
    root = tmp_path_factory.mktemp("folders")
    llama(torch.bfloat16).save_pretrained(root / "dense")
    llama(torch.bfloat16).save_pretrained(root / "dense-many", max_shard_size="10KB")
    compress_folder(root / "dense-many", root / "packed")
    for name in ("damaged", "incomplete"):
        shutil.copytree(root / "packed", root / name)
    damage(root / "damaged", "bitmask", lambda tensors, name: tensors[name].view(-1)[5:6].bitwise_xor_(1))
    damage(root / "incomplete", "input_layernorm.weight", lambda tensors, name: tensors.pop(name))
    (root / "prune.json").write_text(json.dumps(PRUNED))
    (root / "eval.json").write_text(json.dumps(EVALUATED))
    return root


def damage(folder: Path, suffix: str, change) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(suffix):
                change(tensors, name)
                save_file(tensors, file, metadata={"format": "pt"})
                index = json.loads((folder / "model.safetensors.index.json").read_text())
                index["weight_map"] = {key: shard for key, shard in index["weight_map"].items() if key in tensors or shard != file.name}
                index["metadata"].pop("total_size")
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
                return
    raise AssertionError


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = HubServer(tmp_path_factory.mktemp("hub"))
    yield server
    server.close()
    assert server.outside_requests() == []


def push_arguments(folders: Path) -> list[str]:
    card = ["--prune-report", folders / "prune.json", "--calibration", "some texts", "--eval", folders / "eval.json", "--limit", "Tiny."]
    options = ["--private", "--message", "Say it", "--base-model", "me/base", "--tags", "mine", *card, "--json"]
    return [str(part) for part in ["push", folders / "packed", "me/tiny", *options]]


@pytest.fixture(scope="module")
def interrupted(hub, folders):
    """A push whose third upload failed: the process, and the uploads and commits of the repository then."""
    hub.run(MAKE_BASES, BASE_CARD)
    hub.fail_after_uploads(2)
    run = hub.run(COMMAND, *push_arguments(folders), check=False)
    hub.stop_failing()
    return run, list(hub.repos["me/tiny"].uploads), hub.repos["me/tiny"].pushes()


@pytest.fixture(scope="module")
def pushed(hub, folders, interrupted):
    """The same push again: its result."""
    return json.loads(hub.run(COMMAND, *push_arguments(folders)).stdout)


@pytest.fixture(scope="module")
def others(hub, folders, interrupted):
    """Several further pushes: exit code, standard output and standard error of each by its repository."""
    packed = str(folders / "packed")
    commands = [
        ["push", str(folders / "damaged"), "me/damaged"],
        ["push", str(folders / "incomplete"), "me/incomplete"],
        ["push", packed, "me/branched", "--revision", "v2", "--base-model", "me/unlicensed"],
        ["push", packed, "me/asked", "--create-pr"],
        ["push", packed, "me/base", "--private"],
        ["push", packed, "me/slow", "--speed", str(folders / "eval.json")],
    ]
    run = hub.run(COMMANDS, json.dumps(commands))
    stdout, codes = run.stdout.strip().rsplit("\n", 1)
    out, err = (re.split(r"^\$ .*\n", text, flags=re.MULTILINE)[1:] for text in (f"{stdout}\n", run.stderr))
    names = [command[2] for command in commands]
    return dict(zip(names, zip(json.loads(codes), out, err, strict=True), strict=True))


# ---- there -----------------------------------------------------------------------------------------------------------------


def test_interrupted_push_says_what_to_do_and_shows_nothing(interrupted):
    run, uploads, commits = interrupted
    assert (run.returncode, run.stdout, len(uploads), commits) == (1, "", 2, [])
    last = run.stderr.splitlines()[-1]
    assert re.match(r"hf-sparse24 push: Error while uploading 'model-\d{5}-of-\d{5}.safetensors' to the Hub. Push again: ", last)
    assert "Traceback" not in run.stderr and "403" in last


def test_repeated_push_sends_what_is_missing_in_one_private_commit(hub, folders, pushed):
    repo = hub.repos["me/tiny"]
    shards = {hashlib.sha256(shard.read_bytes()).hexdigest() for shard in (folders / "packed").glob("*.safetensors")}
    assert len(shards) > 3 and sorted(repo.uploads) == sorted(shards)
    (commit,) = repo.pushes()
    assert repo.private and commit.message == "Say it" and pushed["commit"] == commit.oid
    assert pushed["url"] == f"{hub.url}/me/tiny/commit/{commit.oid}" and pushed["pull_request"] is None
    assert {path.name for path in (folders / "packed").iterdir()} < set(commit.files)


def test_card_has_the_evidence_and_what_is_carried_over(hub, pushed):
    card = RepoCard(hub.repos["me/tiny"].read("README.md").decode())
    assert card.data.to_dict() == {
        "library_name": "transformers", "license": "other", "license_name": "their-licence", "license_link": "LICENSE.md",
        "language": "nl", "pipeline_tag": "text-generation", "base_model": "me/base", "base_model_relation": "quantized",
        "tags": ["sparse24", "2:4", "mine"],
    }  # fmt: skip
    words = " ".join(card.text.split())
    assert "The licence, their-licence, is that of the base model." in words
    assert "14 layers were pruned to 2:4 by `alps`, calibrated on some texts. Up to 4,096 tokens" in words
    assert "14,336 weights became zero" in words
    assert "is 0.0750 in the mean over layers, and 0.1400 in the worst of them, `layer.13`" in words
    assert "for 30 steps (61.5 s)" in words
    assert "| perplexity | 8 windows of held-out text, 4,096 tokens | 18.2 | 21.5 |" in words
    assert "- Tiny." in words and "- Speed was not measured" in words and "quality was not measured" not in words


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("damaged", r"packed weight model\.\S+: bitmask .*: what does not verify is not pushed, see hf-sparse24 verify"),
        ("incomplete", r"input_layernorm\.weight: not in the checkpoint: what does not verify is not pushed"),
        ("slow", r"eval\.json: not a file of benchmarks/matmul\.py or benchmarks/quantized\.py: benchmark, cells, environment expected"),
    ],
)
def test_what_is_not_right_is_refused_before_there_is_a_repository(hub, others, name, message):
    code, out, err = others[f"me/{name}"]
    assert (code, out) == (1, "") and f"me/{name}" not in hub.repos
    (line,) = [line for line in err.splitlines() if line.startswith("hf-sparse24")]
    assert re.search(message, line)


def test_private_push_to_a_public_repository_is_refused(hub, others):
    code, _, err = others["me/base"]
    assert code == 1 and "me/base exists and is public" in err and not hub.repos["me/base"].uploads


def test_revision_and_pull_request(hub, others):
    (on_branch,), (asked,) = hub.repos["me/branched"].pushes("v2"), hub.repos["me/asked"].pushes("refs/pr/1")
    assert hub.repos["me/branched"].pushes() == hub.repos["me/asked"].pushes() == []
    assert "config.json" in on_branch.files and "config.json" in asked.files
    assert others["me/branched"][1].strip().endswith(on_branch.oid)
    assert others["me/asked"][1].strip() == f"{hub.url}/me/asked/discussions/1"


def test_no_licence_is_invented_and_its_absence_is_said(hub, others, interrupted, pushed):
    for name, revision in (("branched", "v2"), ("asked", "refs/pr/1")):
        assert "license" not in RepoCard(hub.repos[f"me/{name}"].read("README.md", revision).decode()).data
        assert "the model card names no licence" in others[f"me/{name}"][2]
    assert "names no licence" not in interrupted[0].stderr


# ---- and back --------------------------------------------------------------------------------------------------------------


def test_what_was_pushed_is_downloaded_verified_and_loaded_dense_and_kept(hub, folders, pushed, others, tmp_path):
    run = hub.run(BACK, folders / "dense", tmp_path)
    assert run.stdout.count("21 of 21 tensors equal") == 2
    # Large files of the cache are links to blobs that are called as their SHA-256.
    num_shards = len(list((folders / "packed").glob("*.safetensors")))
    assert f"sums       ok  SHA-256 of {num_shards} files" in run.stdout


# ---- without the Hub -------------------------------------------------------------------------------------------------------


def test_dry_run_prints_the_card_and_needs_no_network(folders, capsys, monkeypatch):
    monkeypatch.setattr("socket.socket", None)
    assert main(["push", str(folders / "packed"), "me/tiny", "--dry-run", "--base-model", "org/dense"]) == 0
    card = RepoCard(capsys.readouterr().out)
    assert card.data.base_model == "org/dense" and 'from_pretrained("me/tiny")' in card.text
    assert main(["push", str(folders / "damaged"), "me/tiny", "--dry-run"]) == 1


def test_dry_run_keeps_the_users_card(folders, tmp_path, capsys):
    shutil.copytree(folders / "packed", tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert main(["push", str(tmp_path / "mine"), "me/tiny", "--dry-run", "--json"]) == 0
    card = RepoCard(json.loads(capsys.readouterr().out)["card"])
    assert card.data.license == "mit" and card.text.startswith("# Mine\n")


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--prune-report", "{}", "not a file of hf-sparse24 prune: layers, method, pattern expected"),
        ("--prune-report", "not json", "not readable as JSON"),
        ("--prune-report", json.dumps({**PRUNED, "layers": PRUNED["layers"][1:]}), "of 13 layers, but 14 weights are packed"),
        ("--eval", "{}", "neither a perplexity nor spearman, cosine, nearest"),
        ("--speed", json.dumps({"benchmark": "matmul", "environment": {}, "cells": []}), "of no layer of this checkpoint (16 x 32, "),
    ],
)
def test_evidence_of_something_else_is_refused(folders, tmp_path, capsys, option, content, message):
    (tmp_path / "evidence.json").write_text(content)
    assert main(["push", str(folders / "packed"), "me/tiny", "--dry-run", option, str(tmp_path / "evidence.json")]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""

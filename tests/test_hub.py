"""hub.py, and the save hook through it, against the Hub of tests/hub_server.py, in a few processes that do many things each."""

import hashlib
import json
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from huggingface_hub import RepoCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_sparse24 import CheckpointError, Sparse24Config
from hf_sparse24.card import card_for
from hf_sparse24.config import GUARD
from hf_sparse24.conversion import convert_folder
from tests.hub_server import HubServer, Repo

BEGIN, END = "<!-- hf-sparse24: begin", "<!-- hf-sparse24: end -->"
MODEL_INDEX = [{"name": "mine", "results": [], "note": "a key that ModelCardData drops"}]
USERS_CARD = f"""---
license: cc-by-4.0
model-index: {json.dumps(MODEL_INDEX)}
tags:
- theirs
---
# My model

Words of *mine*, with a \\1 and a {{{{ brace }}}}.
"""


def open_golden(golden: Path, run_compressed: bool):
    return AutoModelForCausalLM.from_pretrained(
        golden / "sparse-24-bitmask", quantization_config=Sparse24Config(run_compressed=run_compressed)
    )


def checkpoint_copy(folder: Path, out: Path, **files: str) -> Path:
    """A copy of a checkpoint with further files, whose names lack the suffix .md."""
    shutil.copytree(folder, out)
    for name, text in files.items():
        (out / f"{name}.md").write_text(text)
    return out


def section_of(text: str) -> str:
    assert text.count(BEGIN) == text.count(END) == 1
    return text[text.index(BEGIN) : text.index(END) + len(END)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, golden) -> Path:
    """The golden model packed by the save hook: `one` file, `many` files, `open` to compressed-tensors, and `dense`."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = open_golden(golden, run_compressed=False)
    model.save_pretrained(root / "one", sparsity_config=Sparse24Config())
    model.save_pretrained(root / "many", sparsity_config=Sparse24Config(), max_shard_size="30KB")
    model.save_pretrained(root / "open", sparsity_config=Sparse24Config(readable_by="compressed-tensors"))
    model.save_pretrained(root / "dense")
    return root


# ---- the card --------------------------------------------------------------------------------------------------------------


def test_card_states_the_sizes_that_the_files_have(checkpoints, golden):
    stored = load_file(checkpoints / "one" / "model.safetensors")
    dense = load_file(golden / "dense" / "model.safetensors")
    parts = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[2] in ("compressed", "bitmask", "shape")}
    packed = [f"{name.removesuffix('.compressed')}.weight" for name in parts if name.endswith(".compressed")]
    stored_bytes, dense_bytes = sum(t.nbytes for t in parts.values()), sum(dense[name].nbytes for name in packed)
    card = card_for(checkpoints / "one").content
    assert f"| {len(packed)} | {stored_bytes:,} | {dense_bytes:,} | {stored_bytes / dense_bytes:.4f} |" in card
    assert f"{len(stored) - len(parts)} further tensors" in card
    assert f"| 1 | {(checkpoints / 'one' / 'model.safetensors').stat().st_size:,} |" in card


def test_card_counts_every_shard(checkpoints):
    shards = list((checkpoints / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert f"| {len(shards)} | {sum(shard.stat().st_size for shard in shards):,} |" in card_for(checkpoints / "many").content


@pytest.mark.parametrize("base_model", [None, "org/dense"])
def test_card_metadata_has_what_is_known_and_invents_no_license(checkpoints, base_model):
    data = card_for(checkpoints / "one", base_model=base_model, tags="mine").data.to_dict()
    relation = {"base_model": base_model, "base_model_relation": "quantized"} if base_model else {}
    assert data == {"library_name": "transformers", "tags": ["sparse24", "2:4", "mine"], **relation}


def test_card_of_an_unstructured_checkpoint_does_not_call_it_2_4(golden):
    card = card_for(golden / "sparse-bitmask")
    assert card.data.tags == ["sparse24"]
    assert "2:4" not in card.text and "SparseBitmaskConfig(run_compressed=False)" in card.text


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("float-quantized+sparse-24-bitmask", ("rounded to 8 bits (float8_e4m3fn), with a scale per\nrow", "one bit per weight")),
        ("float-quantized-static+sparse-24-bitmask", ("with a scale per\nweight",)),
        ("marlin-24-w4-g128", ("rounded to 4 bits (integers), with a scale per\n128 columns of a row", "a code for each four")),
    ],
)
def test_card_of_a_quantised_checkpoint_says_how_it_is_rounded(golden, name, texts):
    card = card_for(golden / name)
    assert card.data.tags == ["sparse24", "2:4"]
    assert "Sparse24Config(run_compressed=False)" in card.text and all(text in card.text for text in texts)


def test_card_of_weights_that_are_not_stored_sparse_says_so(golden, tmp_path):
    text = card_for(golden / "pack-quantized+sparse-24-bitmask").text
    assert "`pack-quantized`: every value is stored, zeros too." in text and "Stored are" not in text
    shutil.copytree(golden / "float-quantized+sparse-24-bitmask", tmp_path / "mixed")
    tensors = load_file(tmp_path / "mixed" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    text = card_for(tmp_path / "mixed").text
    assert "`quantized dense`: every value is stored, zeros too." in text and "zeros may be anywhere" not in text
    assert "`quantized sparse-24-bitmask`: at most two values" in text


def test_card_of_the_gptq_spelling_says_who_reads_it(golden, tmp_path):
    convert_folder(golden / "marlin-24-w4-g128", tmp_path / "gptq", "gptq-marlin-24")
    text = card_for(tmp_path / "gptq").text
    assert "loaders of GPTQ's `marlin_24` checkpoints" in text and "random weights" not in text


def test_card_needs_no_network(checkpoints, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(socket, "socket", None)
    card_for(checkpoints / "one", base_model="org/dense", repo_id="me/x")


def test_card_says_what_happens_without_the_package(checkpoints, golden):
    assert GUARD in card_for(checkpoints / "one").text
    for folder in (checkpoints / "open", golden / "sparse-24-bitmask"):
        text = card_for(folder).text
        assert GUARD not in text and "random weights" in text
        assert ("compressed-tensors 0.9 to 0.14" in text) == (folder.name == "open")


@pytest.mark.parametrize(
    ("architectures", "name"),
    [
        (["LlamaForCausalLM"], "AutoModelForCausalLM"),
        (["T5ForConditionalGeneration"], "T5ForConditionalGeneration"),
        (["LlamaModel"], "AutoModel"),
        (["NobodysForNothing"], "AutoModel"),
        (None, "AutoModel"),
    ],
)
def test_card_loads_with_the_class_that_has_the_head(checkpoints, tmp_path, architectures, name):
    folder = checkpoint_copy(checkpoints / "one", tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    assert f"from transformers import {name}\n" in card_for(folder).text


def test_users_card_keeps_text_and_metadata_and_gets_one_section(checkpoints):
    card = card_for(checkpoints / "one", existing=USERS_CARD, tags=["mine"])
    users_text = USERS_CARD.split("---\n", 2)[2]
    assert card.text == f"{users_text}\n{section_of(card.text)}\n"
    data = card.data.to_dict()
    assert (data["license"], data["model-index"], data["tags"]) == ("cc-by-4.0", MODEL_INDEX, ["theirs", "sparse24", "2:4", "mine"])


def test_section_is_replaced_where_it_stands(checkpoints, golden):
    first = card_for(checkpoints / "one", existing=USERS_CARD).content
    edited = first.replace(END, f"{END}\n\nAdded later.")
    second = card_for(golden / "sparse-bitmask", existing=edited).content
    assert second.partition(BEGIN)[0] == first.partition(BEGIN)[0] and second.endswith(f"{END}\n\nAdded later.\n")
    assert section_of(second) == section_of(card_for(golden / "sparse-bitmask").content)


def test_own_card_is_written_again_alike(checkpoints):
    first = card_for(checkpoints / "one", base_model="org/dense").content
    assert card_for(checkpoints / "one", base_model="org/dense", existing=first).content == first


def test_a_begin_without_its_end_takes_no_text_with_it(checkpoints):
    broken = card_for(checkpoints / "one", existing=USERS_CARD).content.replace(END, "Written below.")
    once = card_for(checkpoints / "one", existing=broken).content
    twice = card_for(checkpoints / "one", existing=once).content
    assert once == twice and "Written below." in twice


def test_base_model_of_the_users_card_wins(checkpoints):
    existing = "---\nbase_model: org/theirs\n---\n# Mine\n"
    card = card_for(checkpoints / "one", base_model="org/dense", existing=existing)
    assert card.data.base_model == "org/theirs" and "base_model_relation" not in card.data
    assert "org/theirs" in card.text and "org/dense" not in card.text


def test_other_metadata_of_the_users_card_win(checkpoints):
    existing = "---\nlibrary_name: peft\nbase_model: [org/dense]\nbase_model_relation: finetune\n---\n# Mine\n"
    data = card_for(checkpoints / "one", base_model="org/dense", existing=existing).data.to_dict()
    data.pop("tags")
    assert data == {"library_name": "peft", "base_model": ["org/dense"], "base_model_relation": "finetune"}


@pytest.mark.parametrize(("written", "kept"), [("/home/me/runs/7", None), ("[./out, org/dense]", ["org/dense"])])
def test_local_base_model_in_a_card_is_dropped_with_a_warning(checkpoints, written, kept):
    with pytest.warns(UserWarning, match="base_model .* is not the name of a repository"):
        card = card_for(checkpoints / "one", existing=f"---\nbase_model: {written}\n---\n# Mine\n")
    assert card.data.get("base_model") == kept


def test_unreadable_metadata_of_a_card_is_an_error(checkpoints):
    with pytest.raises(ValueError, match="metadata of this model card cannot be parsed"):
        card_for(checkpoints / "one", existing="---\nlicense: [mit\n---\n")


def test_only_packed_and_declared_checkpoints_have_a_card(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="none of its weights is packed"):
        card_for(checkpoints / "dense")
    undeclared = checkpoint_copy(checkpoints / "one", tmp_path / "undeclared")
    shutil.copy(checkpoints / "dense" / "config.json", undeclared)
    with pytest.raises(CheckpointError, match=r"config\.json: does not say that weights are packed"):
        card_for(undeclared)


# ---- push_folder -----------------------------------------------------------------------------------------------------------

PUSHES = """
import json, os
from huggingface_hub import HfApi
from transformers.utils.hub import create_and_tag_model_card
from hf_sparse24.hub import push_folder

root, api, results = Path(sys.argv[1]), HfApi(), {}
os.chdir(root)

def attempt(name, folder, repo_id, **kwargs):
    try:
        results[name] = str(push_folder(root / folder, repo_id, **kwargs))
    except ValueError as error:
        results[name] = f"{type(error).__name__}: {error}"

def upload(repo_id, files):
    api.create_repo(repo_id)
    for name, content in files.items():
        api.upload_file(path_in_repo=name, path_or_fileobj=content.encode(), repo_id=repo_id)

for folder in ("damaged", "dense", "undeclared", "bad_card"):
    attempt(folder, folder, f"me/{folder}")

upload("me/base", {})
attempt("plain", "one", "me/plain", base_model="me/base", tags=["mine"], commit_message="Say it", private=True)
attempt("again", "one", "plain", base_model="me/base", tags=["mine"], private=True)
attempt("users", "users", "me/users", base_model="runs/sft")
attempt("some", "users", "me/some", files=["config.json", "model.safetensors"], base_model="me/some")
attempt("path", "one", "me/path", base_model="dense")

upload("me/public", {"notes.md": "Public."})
attempt("public", "one", "me/public", private=True)

old = {f"model-0000{i}-of-00002.safetensors": f"old {i}" for i in (1, 2)} | {"model.safetensors.index.json": "{}"}
card = (root / "users_card.md").read_text().replace("\\n", "\\r\\n")
upload("me/old", {**old, "README.md": card, "notes.md": "Notes.", "model.fp16.safetensors": "other"})
attempt("old", "one", "me/old")
attempt("older", "many", "me/old")

default = create_and_tag_model_card("me/base", ["custom"])
default.data.license = "mit"
upload("me/default", {"README.md": str(default)})
attempt("default", "one", "me/default")
upload("me/filled", {"README.md": str(default).replace("[More Information Needed]", "Me.", 1)})
attempt("filled", "one", "me/filled")

attempt("branch", "one", "me/branched", revision="v2")
attempt("pull request", "one", "me/asked", create_pr=True)
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Pushes:
    """`results` has the URL, or the error, of each push of PUSHES by its name; `warnings` is the stderr."""

    server: HubServer
    results: dict[str, str]
    stderr: str

    def __getitem__(self, name: str) -> Repo:
        return self.server.repos[f"me/{name}"]

    def card(self, name: str, revision: str = "main") -> RepoCard:
        return RepoCard(self[name].read("README.md", revision).decode())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = HubServer(tmp_path_factory.mktemp("hub"))
    yield server
    server.close()
    assert server.outside_requests() == []


@pytest.fixture(scope="module")
def pushes(hub, checkpoints, tmp_path_factory) -> Pushes:
    root = tmp_path_factory.mktemp("pushes")
    for name in ("one", "many", "dense"):
        shutil.copytree(checkpoints / name, root / name)
    (root / "users_card.md").write_text(USERS_CARD)
    users = checkpoint_copy(root / "one", root / "users", README=USERS_CARD, notes="Notes.")
    (users / ".env").write_text("secret")
    for folder in ("sub", ".cache"):
        (users / folder).mkdir()
        (users / folder / "more.txt").write_text("More.")
    shard = next(checkpoint_copy(root / "many", root / "damaged").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    shutil.copy(root / "dense" / "config.json", checkpoint_copy(root / "one", root / "undeclared"))
    checkpoint_copy(root / "one", root / "bad_card", README="---\n- a list\n---\n")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    run = hub.run(PUSHES, root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    return Pushes(hub, json.loads(run.stdout.splitlines()[-1]), run.stderr)


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("damaged", r"CheckpointError: .*model-\d{5}-of-\d{5}\.safetensors: not a complete safetensors file"),
        ("dense", "CheckpointError: .*none of its weights is packed"),
        ("undeclared", r"CheckpointError: .*config\.json: does not say"),
        ("bad_card", r"ValueError: .*README\.md: the metadata of this model card cannot be parsed"),
    ],
)
def test_folder_is_refused_before_its_repository_is_made(pushes, folder, error):
    assert re.match(error, pushes.results[folder])
    assert f"me/{folder}" not in pushes.server.repos


def test_first_push_is_one_commit_with_config_weights_and_card(pushes, checkpoints):
    [commit] = pushes["plain"].pushes()
    files = {path.name: path.read_bytes() for path in (checkpoints / "one").iterdir()}
    assert set(commit.changed) == {*files, "README.md"} and commit.message == "Say it"
    assert {name: commit.files[name].content for name in files} == files
    assert "quantization_config" in json.loads(commit.files["config.json"].content)
    assert pushes["plain"].private
    assert pushes.results["plain"] == f"{pushes.server.url}/me/plain/commit/{commit.oid}"


def test_card_on_the_hub_is_card_for_with_the_full_name(pushes, checkpoints):
    expected = card_for(checkpoints / "one", repo_id="me/plain", base_model="me/base", tags=["mine"])
    assert pushes["plain"].read("README.md").decode() == expected.content


def test_pushing_the_same_again_makes_no_commit(pushes):
    assert pushes.results["again"] == pushes.results["plain"]


def test_users_readme_goes_up_with_our_section_and_hidden_files_stay(pushes):
    [commit] = pushes["users"].pushes()
    assert {"notes.md", "sub/more.txt"} < set(commit.changed)
    assert not any(".env" in name or ".cache" in name for name in commit.files)
    card = pushes.card("users")
    assert "Words of *mine*, with a \\1 and a {{ brace }}." in card.text and section_of(card.text)
    assert card.data.license == "cc-by-4.0"


def test_base_model_that_cannot_be_linked_is_left_out(pushes):
    for name in ("users", "some", "path"):
        assert "base_model" not in pushes.card(name).data
    assert pushes.stderr.count("the Hub does not know the base model") == 1
    assert "the Hub does not know the base model runs/sft" in pushes.stderr


def test_only_named_files_go_up(pushes):
    assert set(pushes["some"].pushes()[0].changed) == {"config.json", "model.safetensors", "README.md"}


def test_private_push_to_a_public_repository_uploads_nothing(pushes):
    assert re.match("ValueError: private=True, but me/public exists and is public", pushes.results["public"])
    assert not pushes["public"].uploads and len(pushes["public"].pushes()) == 1


def test_old_weights_go_and_other_files_and_the_remote_card_stay(pushes):
    *_, first, second = pushes["old"].pushes()
    assert set(first.files) >= {"notes.md", "model.fp16.safetensors", "model.safetensors"}
    assert not [name for name in first.files if "-of-" in name or "index" in name]
    assert "model.safetensors" not in second.files and "model.safetensors.index.json" in second.files
    assert second.files["model.fp16.safetensors"].content == b"other"
    for commit in (first, second):
        text = commit.files["README.md"].content.decode()
        assert "Words of *mine*" in text and section_of(text) and "license: cc-by-4.0" in text


def test_transformers_default_card_is_replaced_with_its_metadata_kept(pushes):
    card = pushes.card("default")
    assert "automatically generated" not in card.text and section_of(card.text)
    assert card.data.license == "mit" and card.data.tags == ["custom", "sparse24", "2:4"]


def test_default_card_that_was_filled_in_stays(pushes):
    assert "Me." in pushes.card("filled").text and section_of(pushes.card("filled").text)


def test_revision_is_made_and_main_is_left_alone(pushes):
    repo = pushes["branched"]
    assert repo.pushes() == [] and len(repo.pushes("v2")) == 1
    assert 'from_pretrained("me/branched", revision="v2")' in pushes.card("branched", "v2").text


def test_create_pr_leaves_main_alone(pushes):
    repo = pushes["asked"]
    assert repo.pushes() == [] and {"README.md", "config.json"} < set(repo.pushes("refs/pr/1")[0].changed)


# ---- through save_pretrained and push_to_hub -------------------------------------------------------------------------------

SAVE = """
import hf_sparse24
from hf_sparse24 import Sparse24Config
from transformers import AutoModelForCausalLM

golden, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(golden, quantization_config=Sparse24Config(run_compressed=False))
model.add_model_tags("models")
model.save_pretrained(
    out, sparsity_config=Sparse24Config(), push_to_hub=True, repo_id="me/saved", private=True, max_shard_size="30KB"
)
model.push_to_hub("me/pushed", sparsity_config=Sparse24Config(), tags=["mine"], commit_message="Say it")
kept = AutoModelForCausalLM.from_pretrained(golden, quantization_config=Sparse24Config(run_compressed=True))
kept.config._name_or_path = model.config._name_or_path = "me/pushed"
kept.push_to_hub("me/kept", max_shard_size="30KB")
model.push_to_hub("me/based", sparsity_config=Sparse24Config())
refused = Path(out).parent / "refused"
try:
    model.save_pretrained(refused, sparsity_config=Sparse24Config(), push_to_hub=True, variant="fp16")
    raise SystemExit("a variant was pushed")
except ValueError:
    assert not refused.exists()
"""
LOAD = """
import os, re
import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
import hf_sparse24
from hf_sparse24 import ModelCompressor, Sparse24Config, Sparse24Linear
from transformers import AutoConfig, AutoModelForCausalLM

original = load_file(sys.argv[1])

def check(tensors):
    torch.testing.assert_close(dict(tensors), original, rtol=0, atol=0)

for repo in ("me/saved", "me/pushed", "me/kept"):
    model = AutoModelForCausalLM.from_pretrained(repo)
    check(model.state_dict())
    kept = AutoModelForCausalLM.from_pretrained(repo, quantization_config=Sparse24Config(run_compressed=True))
    assert sum(isinstance(module, Sparse24Linear) for module in kept.modules()) == 14
    kept.dequantize()
    check(kept.state_dict())

    config = AutoConfig.from_pretrained(repo)
    del config.quantization_config
    empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ModelCompressor.from_pretrained(repo).decompress(model_path=repo, model=empty)
    check(empty.state_dict())

    folder = Path(sys.argv[2]) / repo
    folder.mkdir(parents=True)
    os.chdir(folder)
    for block in re.findall(r"```python\\n(.*?)```", Path(hf_hub_download(repo, "README.md")).read_text(), re.DOTALL):
        exec(block)
    check(load_file("dense/model.safetensors"))
"""
WITHOUT = """
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("me/pushed")
"""


@pytest.fixture(scope="module")
def interrupted(hub, golden, tmp_path_factory):
    """A push that broke off after two uploads, and what the repository was then: its uploads and commits."""
    out = tmp_path_factory.mktemp("saved") / "out"
    out.mkdir()
    (out / "README.md").write_text(USERS_CARD)
    (out / "optimizer.pt").write_text("Not of this save.")
    hub.fail_after_uploads(2)
    run = hub.run(SAVE, golden / "sparse-24-bitmask", out, check=False)
    hub.stop_failing()
    assert run.returncode != 0 and "403" in run.stderr, run.stderr[-3000:]
    repo = hub.repos["me/saved"]
    return out, list(repo.uploads), repo.pushes(), repo.private


@pytest.fixture(scope="module")
def saved(hub, golden, interrupted):
    """The same push and the others, without a fault."""
    out, *_ = interrupted
    hub.run(SAVE, golden / "sparse-24-bitmask", out)
    return out


def test_interrupted_push_shows_nothing_and_repeating_it_sends_what_is_missing(hub, interrupted, saved):
    _, uploads, commits, was_private = interrupted
    assert len(uploads) == 2 and commits == [] and was_private
    repo = hub.repos["me/saved"]
    shards = {hashlib.sha256(shard.read_bytes()).hexdigest() for shard in saved.glob("*.safetensors")}
    assert len(shards) > 3
    assert sorted(repo.uploads) == sorted(shards)
    assert len(repo.pushes()) == 1 and repo.private


@pytest.mark.parametrize("name", ["saved", "pushed", "kept"])
def test_first_commit_has_config_card_and_every_shard(hub, saved, name):
    [commit] = hub.repos[f"me/{name}"].pushes()
    config = json.loads(commit.files["config.json"].content)
    assert GUARD in config["quantization_config"]["config_groups"]
    card = RepoCard(commit.files["README.md"].content.decode())
    assert f'from_pretrained("me/{name}")' in card.text
    tags = {"saved": ["theirs", "sparse24", "2:4", "models"], "pushed": ["sparse24", "2:4", "models", "mine"], "kept": ["sparse24", "2:4"]}
    assert card.data.tags == tags[name] and "base_model" not in card.data
    assert ("license" in card.data) == ("Words of *mine*" in card.text) == (name == "saved")
    assert "optimizer.pt" not in commit.files
    index = commit.files.get("model.safetensors.index.json")
    shards = set(json.loads(index.content)["weight_map"].values()) if index else {"model.safetensors"}
    assert shards <= set(commit.files) and (len(shards) > 1) == (name != "pushed")


def test_card_names_what_the_dense_model_was_loaded_from(hub, saved):
    data = RepoCard(hub.repos["me/based"].read("README.md").decode()).data
    assert (data.base_model, data.base_model_relation) == ("me/pushed", "quantized")


def test_pushed_models_load_with_the_same_weights_dense_kept_and_as_their_card_says(hub, golden, saved, tmp_path):
    hub.run(LOAD, golden / "dense" / "model.safetensors", tmp_path)


def test_without_the_package_the_pushed_model_does_not_load(hub, saved):
    run = hub.run(WITHOUT, check=False)
    assert run.returncode != 0
    assert GUARD in run.stderr or re.search("ImportError: .*compressed-tensors", run.stderr), run.stderr[-2000:]

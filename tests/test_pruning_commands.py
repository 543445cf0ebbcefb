"""`hf-sparse24 prune` and `eval` on tiny models."""

import importlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse24.cli import main
from hf_sparse24.journal import WORK_NAME
from hf_sparse24.pattern import structure
from hf_sparse24.pruning import make_batches, perplexity
from hf_sparse24.report import PRUNE_REPORT, inspect_folder
from tests.models import KEPT, files_of, load_dense, packed_names, tensors_of
from tests.pruning.test_one_shot import build
from tests.test_demo import chat_folder, save_tokenizer

__all__ = ["chat_folder"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 8 tokens.*:UserWarning")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(" ".join(f"word{(i * j + j) % 93}" for j in range(40)) for i in range(1, 30)))
    return file


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "tiny"
    build("bert").save_pretrained(folder)
    save_tokenizer(folder)
    AutoTokenizer.from_pretrained(folder, pad_token="</s>").save_pretrained(folder)
    return folder


def run(capsys, *command):
    code = main([str(word) for word in command])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prune_saves_a_compressed_model_with_its_tokenizer_and_report(capsys, chat_folder, text, tmp_path):
    options = ("--calibration", text, "--window", 32, "--report", tmp_path / "report.svg", "--json")
    code, out, _ = run(capsys, "prune", chat_folder, tmp_path / "out", *options)
    result = json.loads(out)
    assert code == 0 and len(result["layers"]) == 14 and result["method"] == "alps"
    assert result["layers"][0]["tokens"] > 1000 and 0 < result["relative_error"] < 0.5
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=KEPT)
    assert len(packed_names(kept)) == 14
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    errors = {f"{layer['name']}.weight": layer["relative_error"] for layer in result["layers"]}
    assert {weight.name: weight.pruning_error for weight in inspect_folder(tmp_path / "out").weights if weight.pruning_error} == errors
    assert (tmp_path / "report.svg").read_text().startswith("<svg")


class Interrupted(BaseException):
    """As Ctrl-C."""


def interrupt_after(number, monkeypatch):
    """Let the `number`-th layer that is pruned be the last; returns the list of those that were."""
    one_shot = importlib.import_module("hf_sparse24.pruning.one_shot")
    original, pruned = one_shot._Pruner.prune_layer, []

    def prune_layer(self, name, *args):
        report = original(self, name, *args)
        pruned.append(name)
        if len(pruned) == number:
            raise Interrupted
        return report

    monkeypatch.setattr(one_shot._Pruner, "prune_layer", prune_layer)
    return pruned


def files_but_times(folder):
    """Every file; the report without the seconds that each layer took."""
    files = files_of(folder)
    report = json.loads(files[PRUNE_REPORT])
    for part in (report, *report["layers"]):
        del part["seconds"]
    return files | {PRUNE_REPORT: report}


@pytest.fixture(scope="module")
def pruned_folder(chat_folder, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(["prune", str(chat_folder), str(out), "--calibration", str(text), "--window", "32"]) == 0
    return out


@pytest.mark.parametrize("layers", [1, 7, 8, 14])
def test_an_interrupted_run_goes_on_with_the_next_block(layers, capsys, chat_folder, text, pruned_folder, tmp_path, monkeypatch):
    command = ("prune", chat_folder, tmp_path / "out", "--calibration", text, "--window", 32, "--json")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(layers, patch)
        run(capsys, *command)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK_NAME]
    pruned = interrupt_after(0, monkeypatch)
    code, out, _ = run(capsys, *command)
    assert code == 0 and len(json.loads(out)["layers"]) == 14
    # Of a block in which it stopped, nothing is kept.
    assert len(pruned) == (14 if layers < 8 else 7)
    assert files_but_times(tmp_path / "out") == files_but_times(pruned_folder)


def test_what_other_options_pruned_is_not_taken_over(capsys, chat_folder, text, pruned_folder, tmp_path, monkeypatch):
    command = ("prune", chat_folder, tmp_path / "out", "--calibration", text, "--window", 32)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_after(8, patch)
        run(capsys, *command, "--damp", 0.1)
    pruned = interrupt_after(0, monkeypatch)
    code, _, err = run(capsys, *command)
    assert code == 0 and "starting over" in err
    assert len(pruned) == 14 and files_but_times(tmp_path / "out") == files_but_times(pruned_folder)


def test_a_run_that_stopped_while_saving_prunes_nothing_again(capsys, chat_folder, text, pruned_folder, tmp_path, monkeypatch):
    command = ("prune", chat_folder, tmp_path / "out", "--calibration", text, "--window", 32)

    def fail(*_):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("hf_sparse24.journal.publish", fail)
        run(capsys, *command)
    pruned = interrupt_after(0, monkeypatch)
    assert run(capsys, *command)[0] == 0
    assert pruned == [] and files_but_times(tmp_path / "out") == files_but_times(pruned_folder)


def test_distilling_lowers_the_loss_and_keeps_the_pattern(capsys, chat_folder, text, tmp_path, monkeypatch):
    # A clock that goes on by a quarter of a second each time it is looked at: a busy machine takes as many steps.
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 4)
    monkeypatch.setattr(importlib.import_module("hf_sparse24.pruning.distill"), "time", clock)
    options = ("--calibration", text, "--window", 32, "--method", "obs", "--distill-minutes", 0.05, "--json")
    code, out, _ = run(capsys, "prune", chat_folder, tmp_path / "out", *options)
    learnt = json.loads(out)["distillation"]
    assert code == 0 and learnt["steps"] == len(learnt["losses"]) > 5
    assert sum(learnt["losses"][-3:]) < sum(learnt["losses"][:3])
    assert sum(name.endswith(".bitmask") for name in tensors_of(tmp_path / "out")) == 14


def test_other_patterns_are_saved_as_bitmasks(capsys, chat_folder, text, tmp_path):
    options = ("--calibration", text, "--window", 32, "--pattern", "4:8", "--method", "wanda", "--ignore", "lm_head", "re:.*mlp")
    assert run(capsys, "prune", chat_folder, tmp_path / "out", *options)[0] == 0
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["sparsity_config"]["format"] == "sparse-bitmask"
    )
    weights = load_dense(tmp_path / "out").state_dict()
    kinds = {name: structure(weight).kind for name, weight in weights.items() if "proj" in name}
    assert {name for name, kind in kinds.items() if kind == "4:8"} == {name for name in kinds if "self_attn" in name}


def test_eval_is_the_perplexity_of_packed_windows(capsys, chat_folder, text):
    code, out, _ = run(capsys, "eval", chat_folder, "--text", text, "--window", 32, "--windows", 5, "--seed", 3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_folder), AutoTokenizer.from_pretrained(chat_folder)
    ids = torch.cat([batch["input_ids"] for batch in make_batches(text, model, tokenizer, window=32, num_windows=5, seed=3)])
    assert code == 0 and ids.shape == (5, 32)
    assert f"perplexity: {perplexity(model, ids):.4f}" in out and "tokens: 160" in out


def test_encoders_are_pruned_and_compared(capsys, encoder_folder, text, tmp_path):
    assert run(capsys, "prune", encoder_folder, tmp_path / "out", "--calibration", text)[0] == 0
    assert sum(name.endswith(".bitmask") for name in tensors_of(tmp_path / "out")) == 14
    code, out, err = run(capsys, "eval", tmp_path / "out", "--text", text)
    assert code == 1 and "give --against MODEL" in err
    code, out, _ = run(capsys, "eval", tmp_path / "out", "--text", text, "--against", encoder_folder, "--json")
    assert code == 0 and 0 < json.loads(out)["spearman"] < 1 and json.loads(out)["texts"] == 29


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --calibration FILE, or --method magnitude"),
        (("--method", "magnitude", "--distill-minutes", "1"), "give --calibration FILE"),
        (("--method", "magnitude", "--report", "report.pdf"), "--report must end in .json, .svg or .txt"),
        (("--calibration", "no/such.txt"), "'no/such.txt' is not a file"),
    ],
)
def test_bad_usage_says_what_to_do_and_writes_nothing(capsys, options, message, chat_folder, tmp_path):
    code, _, err = run(capsys, "prune", chat_folder, tmp_path / "out", *options)
    assert code == 1 and message in err and not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_refused(capsys, chat_folder, text, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = run(capsys, "prune", chat_folder, tmp_path, "--calibration", text)
    assert code == 1 and "not an empty folder" in err

"""A model whose layers stay packed, in the hands of the libraries around Transformers."""

import importlib
import json
import logging as stock_logging
import os
import pkgutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments, pipeline
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

import hf_sparse24
from hf_sparse24 import Sparse24Config, prune
from hf_sparse24.conversion import compress_folder, decompress_folder
from hf_sparse24.report import inspect_folder
from tests.models import IDS, KEPT, files_of, llama, load_dense, load_kept, logits, packed_names, tensors_of
from tests.test_demo import save_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = "word1 word7 word12"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed checkpoint with a tokenizer, whose config.json says that layers stay packed."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    llama().save_pretrained(folder, sparsity_config=Sparse24Config())
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["run_compressed"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- pipelines and servers ---------------------------------------------------------------------------------------------------


def test_a_pipeline_generates_with_packed_layers(folder, products):
    texts = [
        pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))(PROMPT, max_new_tokens=6, do_sample=False)
        for model in (load_dense(folder), str(folder))
    ]
    assert texts[0] == texts[1] and len(texts[1][0]["generated_text"]) > len(PROMPT)
    assert len(products) == 6 * 14


def test_a_pipeline_takes_our_config(folder, products):
    options = {"quantization_config": Sparse24Config(run_compressed=False)}
    generate = pipeline("text-generation", model=str(folder), model_kwargs=options)
    assert generate(PROMPT, max_new_tokens=2) and not products and not packed_names(generate.model)


@pytest.mark.skipif(not is_serve_available(), reason="transformers[serving] is not installed")
def test_transformers_serve_answers(folder, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = "import hf_sparse24; from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", script, "serve", str(folder), "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    body = {"model": str(folder), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with ExitStack() as stack, open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        for _ in range(120):
            if server.poll() is not None or _is_open(port):
                break
            time.sleep(0.5)
        assert server.poll() is None, (tmp_path / "log").read_text()
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        # The client, without us; offline it would not even talk to this machine.
        online = {**environment, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://localhost:9"}
        client = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), f"http://localhost:{port}/v1"]
        chat = subprocess.run(
            [*client, "max_new_tokens=5", "do_sample=False"],
            input=f"{PROMPT}\nN\n!exit\n", env=online, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    tokens = load_kept(folder).generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    said = AutoTokenizer.from_pretrained(folder).decode(tokens).split()
    assert answer["choices"][0]["message"]["content"].split() == said
    assert chat.returncode == 0 and " ".join(said) in " ".join(chat.stdout.split()), chat.stdout + chat.stderr


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


# ---- training ----------------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """The same row, sixteen times."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": IDS[0], "labels": IDS[0]}


def arguments(out, **more):
    return TrainingArguments(
        str(out), per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2, report_to="none", use_cpu=True, logging_steps=1, **more
    )


def test_the_trainer_trains_adapters_on_packed_layers(folder, tmp_path):
    peft = pytest.importorskip("peft")
    base = load_kept(folder)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(model, arguments(tmp_path, save_steps=4), train_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(name.startswith("base_model") and "lora_" in name for name in tensors_of(tmp_path / "checkpoint-8"))
    unloaded = model.unload()
    assert len(packed_names(unloaded)) == 14
    assert all(torch.equal(value, before[name]) for name, value in unloaded.state_dict().items())
    again = peft.PeftModel.from_pretrained(load_kept(folder), tmp_path / "checkpoint-8")
    trainer = Trainer(again, arguments(tmp_path / "eval"), eval_dataset=Rows())
    assert trainer.evaluate()["eval_loss"] < losses[0]


def test_the_trainer_refuses_packed_layers_without_an_adapter(folder, tmp_path):
    with pytest.raises(ValueError, match="adapters"):
        Trainer(load_kept(folder), arguments(tmp_path), train_dataset=Rows())


def test_accelerate_prepares_trains_and_unwraps(folder):
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    model = peft.get_peft_model(load_kept(folder), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Rows(), batch_size=8))
    losses = []
    for batch in [*loader] * 3:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(packed_names(accelerator.unwrap_model(model))) == 14


# ---- placing -----------------------------------------------------------------------------------------------------------------


def dispatched(accelerate, model, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)


OFFLOADS = {
    "cpu_offload": lambda accelerate, model, tmp_path: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda accelerate, model, tmp_path: accelerate.disk_offload(model, tmp_path, torch.device("cpu")),
    "dispatch_model": dispatched,
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_accelerate_moves_packed_layers(folder, name, tmp_path, products):
    accelerate = pytest.importorskip("accelerate")
    wanted = logits(load_dense(folder))
    model = OFFLOADS[name](accelerate, load_kept(folder), tmp_path)
    assert any(value.device.type == "meta" for value in model.parameters())
    for _ in range(2):  # the hooks put everything back
        assert torch.equal(logits(model), wanted)
    assert len(products) == 2 * 14


def test_accelerate_sees_the_packed_size(folder):
    accelerate = pytest.importorskip("accelerate")
    kept, dense = (accelerate.utils.compute_module_sizes(load(folder))["model.layers.0.mlp"] for load in (load_kept, load_dense))
    # 17/32 of float32, and 16 bytes of `shape` for each of three layers.
    assert kept == dense * 17 // 32 + 3 * 16


# ---- evaluation --------------------------------------------------------------------------------------------------------------


def log_likelihoods(model, pairs, pad=0):
    """As evaluation harnesses do it: of continuations after contexts, in one padded batch."""
    rows = [torch.tensor(context + continuation)[:-1] for context, continuation in pairs]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.inference_mode():
        scores = F.log_softmax(model(input_ids=batch, attention_mask=mask).logits.float(), dim=-1)
    found = []
    for index, (context, continuation) in enumerate(pairs):
        span = scores[index, len(context) - 1 : len(context) - 1 + len(continuation)]
        chosen = torch.tensor(continuation)
        found.append((span.gather(1, chosen[:, None]).sum().item(), bool((span.argmax(-1) == chosen).all())))
    return found


def test_a_harness_loads_it_and_scores_it_like_the_dense_model(folder, products):
    pytest.importorskip("accelerate")
    pairs = [([1, 5, 9], [33, 7]), ([4], [8, 15, 16, 23]), ([42, 3, 3, 3], [2])]
    options = {"revision": "main", "dtype": "auto", "trust_remote_code": False, "device_map": {"": "cpu"}}
    kept = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    kept.tie_weights()
    assert kept.device.type == "cpu" and kept.dtype == torch.float32 and len(packed_names(kept)) == 14
    dense = log_likelihoods(load_dense(folder), pairs)
    assert not products
    assert log_likelihoods(kept, pairs) == dense and len(products) == 14
    assert all(score < 0 for score, _ in dense)


# ---- what stays as it was ----------------------------------------------------------------------------------------------------

OPENED = """
import json, sys
{first}
from transformers import AutoConfig, AutoTokenizer
config, tokenizer = AutoConfig.from_pretrained({folder!r}), AutoTokenizer.from_pretrained({folder!r})
print(json.dumps([type(config).__name__, config.to_dict(), type(tokenizer).__name__, tokenizer({prompt!r})["input_ids"]], default=str))
"""


def test_configs_and_tokenizers_open_as_they_do_without_us(folder):
    told = [
        subprocess.run(
            [sys.executable, "-c", OPENED.format(first=first, folder=str(folder), prompt=PROMPT)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout
        for first in ("", "import hf_sparse24")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert json.loads(told[0])[0] == "LlamaConfig" and len(json.loads(told[0])[3]) == 3


def test_a_config_and_a_tokenizer_are_saved_as_they_were(folder, tmp_path):
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is LlamaConfig and isinstance(config.quantization_config, dict)
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert files_of(tmp_path)["tokenizer.json"] == files_of(folder)["tokenizer.json"]


def test_the_package_is_typed():
    assert resources.files("hf_sparse24").joinpath("py.typed").is_file()


# ---- switches ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def every_step(tmp_path):
    """All that shows a progress bar, but `hf-sparse24 bench`."""

    def run():
        dense, packed, again = tmp_path / "dense", tmp_path / "packed", tmp_path / "again"
        model = llama()
        prune(model, [IDS.repeat(20, 1)], "wanda")
        model.save_pretrained(packed, sparsity_config=Sparse24Config())
        decompress_folder(packed, dense)
        compress_folder(dense, again, Sparse24Config())
        inspect_folder(again)
        load_kept(again), load_dense(again)

    return run


def test_progress_bars_respect_the_switch_of_transformers(every_step, capfd, tmp_path):
    shown = ["Pruning", "Writing model shards", "Unpacking shards", "Packing shards", "Reading weights"]
    try:
        logging.enable_progress_bar()
        every_step()
        err = capfd.readouterr().err
        assert [name for name in shown if name not in err] == []
        for folder in ("dense", "packed", "again"):
            (tmp_path / folder).rename(tmp_path / f"{folder}-1")
        logging.disable_progress_bar()
        every_step()
        captured = capfd.readouterr()
        assert captured.err == "" and captured.out == ""
    finally:
        logging.enable_progress_bar()


def test_messages_go_through_the_logger_of_transformers(folder, caplog):
    logger, before = logging.get_logger("transformers"), logging.get_verbosity()
    logger.addHandler(caplog.handler)
    try:
        for verbosity, told in ((logging.INFO, True), (logging.ERROR, False)):
            caplog.clear()
            logging.set_verbosity(verbosity)
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=Sparse24Config(run_compressed=False))
            assert any("loading dense layers" in record.getMessage() for record in caplog.records) == told
    finally:
        logging.set_verbosity(before)
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(hf_sparse24.__path__, "hf_sparse24.")])
def test_every_logger_is_below_that_of_transformers(name):
    found = [value for value in vars(importlib.import_module(name)).values() if isinstance(value, stock_logging.Logger)]
    assert all(logger.name == f"transformers.{name}" for logger in found)


def test_nothing_deprecated_is_called(every_step, folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", PendingDeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        every_step()
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KEPT)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        model.save_pretrained(tmp_path / "kept")
        model.dequantize()

"""Heads that share the embedding's weight: stored once, never packed, and one object again after loading."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_sparse24
from hf_sparse24 import Sparse24Config, Sparse24Linear
from tests.models import ENCODER_SIZES, IDS, SIZES, load_dense, load_kept, logits, make_2_4, tensors_of

MODELS = {
    "llama": (LlamaForCausalLM, lambda tie: LlamaConfig(**SIZES, tie_word_embeddings=tie), "lm_head"),
    "gpt2": (GPT2LMHeadModel, lambda tie: GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tie), "lm_head"),
    "t5": (
        T5ForConditionalGeneration,
        lambda tie: T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, tie_word_embeddings=tie),
        "lm_head",
    ),
    "bert-mlm": (
        BertForMaskedLM,
        lambda tie: BertConfig(**ENCODER_SIZES, vocab_size=96, tie_word_embeddings=tie),
        "cls.predictions.decoder",
    ),
}
SUFFIXES = ("compressed", "bitmask", "shape")


@pytest.mark.parametrize("targeted", [True, False], ids=["head-targeted", "head-ignored"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_head_is_stored_once_and_comes_back_as_it_was(name, tie, targeted, tmp_path):
    model_class, config, head = MODELS[name]
    torch.manual_seed(0)
    model = make_2_4(model_class(config(tie)).eval())
    tie = model.get_output_embeddings().weight is model.get_input_embeddings().weight  # T5 ties whatever its config says
    model.save_pretrained(tmp_path / "stock")
    sparsity = Sparse24Config(ignore=[] if targeted else [head], on_dense="skip")
    if tie and targeted:
        with pytest.warns(UserWarning, match=f"{head}: tied to another parameter"):
            model.save_pretrained(tmp_path / "packed", sparsity_config=sparsity)
    elif name == "gpt2":
        with pytest.warns(UserWarning, match="Conv1D"):
            model.save_pretrained(tmp_path / "packed", sparsity_config=sparsity)
    else:
        model.save_pretrained(tmp_path / "packed", sparsity_config=sparsity)

    # The tensors of the stock checkpoint, each once, packed or not.
    stored, stock = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "stock")
    bases = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in SUFFIXES}
    assert {f"{base}.weight" for base in bases} | {key for key in stored if key.rpartition(".")[2] not in SUFFIXES} == set(stock)
    assert len(stored) == len(stock) + 2 * len(bases)
    assert (head in bases) is (targeted and not tie)

    inputs = {"input_ids": IDS, **({"decoder_input_ids": IDS} if name == "t5" else {})}
    wanted = logits(model_class.from_pretrained(tmp_path / "stock"), **inputs)
    # A dense checkpoint of which nothing can be packed is not "kept".
    for load in (load_dense, load_kept) if bases else (load_dense,):
        again, info = load(tmp_path / "packed", model_class, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.equal(logits(again, **inputs), wanted)
        output, embedding = again.get_output_embeddings(), again.get_input_embeddings()
        packed_head = load is load_kept and targeted and not tie
        assert isinstance(output, Sparse24Linear) is packed_head
        if not packed_head:
            assert (output.weight is embedding.weight) is tie
            assert (output.weight.data_ptr() == embedding.weight.data_ptr()) is tie


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("load", [load_dense, load_kept])
def test_head_and_embedding_on_disk(tie, load, tmp_path):
    pytest.importorskip("accelerate")
    model_class, config, _ = MODELS["llama"]
    torch.manual_seed(0)
    make_2_4(model_class(config(tie)).eval()).save_pretrained(tmp_path / "packed", sparsity_config=Sparse24Config())
    model = load(tmp_path / "packed", device_map={"model": "disk", "lm_head": "disk"}, offload_folder=str(tmp_path / "offload"))
    assert model.lm_head.weight.device.type == "meta"
    assert torch.equal(logits(model), logits(load_dense(tmp_path / "packed")))
    model.save_pretrained(tmp_path / "again", sparsity_config=Sparse24Config())
    again, before = tensors_of(tmp_path / "again"), tensors_of(tmp_path / "packed")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], before[key]) for key in before)


@pytest.mark.parametrize("name", MODELS)
def test_pruning_a_tied_head_by_its_name_is_refused(name):
    model_class, config, head = MODELS[name]
    model = model_class(config(True)).eval()
    before = model.get_input_embeddings().weight.detach().clone()
    with pytest.raises(ValueError, match=f"{head}.weight is tied"):
        hf_sparse24.prune(model, targets=[head], ignore=[])
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_tie_by_hand_is_seen(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    report = hf_sparse24.prune(model, ignore=[])
    assert report.left_dense == {"lm_head": "tied to another parameter"}
    assert all(isinstance(model.get_submodule(layer.name), nn.Linear) for layer in report.layers)

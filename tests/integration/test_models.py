"""Every family: saved packed, opened dense and kept, saved again."""

from contextlib import nullcontext

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_sparse24 import Sparse24Config
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.experts import packed_experts
from tests.models import FAMILIES, dense_names, files_of, load_dense, load_kept, logits, packed_names, tensors_of

SHARD = "30KB"


class Saved:
    """One family with its dense and its packed checkpoint."""

    def __init__(self, name, root):
        self.name, self.family = name, FAMILIES[name]
        model = self.family.build()
        self.dense, self.packed = root / "dense", root / "packed"
        model.save_pretrained(self.dense)
        # BERT's masked-language head is no lm_head by name: it is targeted, and found to be tied.
        tied = "cls.predictions.decoder: tied to another parameter"
        with pytest.warns(UserWarning, match=tied) if name == "bert-mlm" else nullcontext():
            model.save_pretrained(self.packed, sparsity_config=Sparse24Config(), max_shard_size=SHARD)
        self.reference = self.family.model_class.from_pretrained(self.dense)

    def logits(self, model):
        return logits(model, **self.family.inputs)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


def no_complaint(info):
    return not any(info.values())


@pytest.mark.parametrize("load", [load_dense, load_kept])
def test_opens_with_the_logits_of_the_dense_checkpoint(saved, load):
    model, info = load(saved.packed, saved.family.model_class, output_loading_info=True)
    assert no_complaint(info), info
    assert torch.equal(saved.logits(model), saved.logits(saved.reference))


def test_kept_layers_are_those_that_the_config_selects(saved):
    model = load_kept(saved.packed, saved.family.model_class)
    assert len(packed_names(model)) == saved.family.num_packed
    assert dense_names(model) == saved.family.dense
    assert len(packed_experts(model)) == saved.family.num_packed_experts // 12  # four experts, three weights
    dense = load_dense(saved.packed, saved.family.model_class)
    assert not packed_names(dense) and not packed_experts(dense)


def test_is_sharded_and_smaller(saved):
    assert len(list(saved.packed.glob("*.safetensors"))) > 1
    assert "model.safetensors.index.json" in files_of(saved.packed)

    def weight_bytes(folder):
        return sum(tensor.nbytes for tensor in tensors_of(folder).values())

    assert weight_bytes(saved.packed) < weight_bytes(saved.dense)


def resaved(model, folder, saved):
    """Saved from a reload: a composite config built in memory is written differently once, by stock Transformers."""
    model.save_pretrained(folder / "first", max_shard_size=SHARD)
    if saved.name != "llava":
        return files_of(folder / "first"), files_of(saved.packed)
    load_kept(folder / "first", saved.family.model_class).save_pretrained(folder / "second", max_shard_size=SHARD)
    return files_of(folder / "second"), files_of(folder / "first")


def test_kept_model_saves_the_same_bytes(saved, tmp_path):
    again, before = resaved(load_kept(saved.packed, saved.family.model_class), tmp_path, saved)
    assert again.keys() == before.keys()
    assert [name for name in again if again[name] != before[name]] == []
    # The weights of the first save already.
    files, original = files_of(tmp_path / "first"), files_of(saved.packed)
    assert [name for name in original if name.endswith(".safetensors") and files[name] != original[name]] == []


def test_model_opened_dense_saves_the_dense_checkpoint(saved, tmp_path):
    load_dense(saved.packed, saved.family.model_class).save_pretrained(tmp_path / "ours")
    saved.reference.save_pretrained(tmp_path / "stock")
    ours, stock = files_of(tmp_path / "ours"), files_of(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    assert [name for name in ours if ours[name] != stock[name]] == []


def test_dense_checkpoint_is_packed_while_it_loads(saved, monkeypatch, tmp_path):
    packed = []
    original = Sparse24Compressor.compress_weight
    monkeypatch.setattr(Sparse24Compressor, "compress_weight", lambda self, weight: packed.append(weight.shape) or original(self, weight))
    model, info = saved.family.model_class.from_pretrained(saved.dense, quantization_config=Sparse24Config(), output_loading_info=True)
    assert no_complaint(info), info
    assert len(packed) == saved.family.num_packed + saved.family.num_packed_experts
    assert len(packed_names(model)) == saved.family.num_packed
    assert len(packed_experts(model)) == saved.family.num_packed_experts // 12
    assert dense_names(model) == saved.family.dense
    assert torch.equal(saved.logits(model), saved.logits(saved.reference))
    model.save_pretrained(tmp_path)
    again, info = load_kept(tmp_path, saved.family.model_class, output_loading_info=True)
    assert no_complaint(info), info
    assert torch.equal(saved.logits(again), saved.logits(saved.reference))


# ---- GPT-2, whose layers are no Linear ---------------------------------------------------------------------------------------


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def test_gpt2_is_refused_with_its_conv1d_layers_named(gpt2, tmp_path):
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn: a Conv1D, which holds its weight transposed"):
        gpt2.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert files_of(tmp_path) == {}


def test_gpt2_with_skip_is_saved_dense_and_says_so(gpt2, tmp_path):
    with pytest.warns(UserWarning, match="8 targeted weights are stored dense"):
        gpt2.save_pretrained(tmp_path / "skip", sparsity_config=Sparse24Config(on_dense="skip"))
    gpt2.save_pretrained(tmp_path / "stock")
    assert files_of(tmp_path / "skip") == files_of(tmp_path / "stock")
    assert b"quantization_config" not in files_of(tmp_path / "skip")["config.json"]
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "skip")
    assert torch.equal(logits(model), logits(gpt2))

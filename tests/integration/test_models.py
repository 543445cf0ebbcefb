"""Every family: saved packed, opened dense and kept, saved again."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hf_sparse24 import Sparse24Config
from hf_sparse24.compressors import Sparse24Compressor
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
    assert not packed_names(load_dense(saved.packed, saved.family.model_class))


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
    assert len(packed) == len(packed_names(model)) == saved.family.num_packed
    assert dense_names(model) == saved.family.dense
    assert torch.equal(saved.logits(model), saved.logits(saved.reference))
    model.save_pretrained(tmp_path)
    again, info = load_kept(tmp_path, saved.family.model_class, output_loading_info=True)
    assert no_complaint(info), info
    assert torch.equal(saved.logits(again), saved.logits(saved.reference))


# ---- experts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_are_stored_apart_and_packed_where_a_target_names_them(name, tmp_path):
    family = FAMILIES[name]
    model = family.build()
    model.save_pretrained(tmp_path / "dense")
    dense = tensors_of(tmp_path / "dense")
    experts = {key for key in dense if ".experts." in key}
    assert len(experts) == 2 * 4 * 3
    hand_packed = tmp_path / "packed"
    model.save_pretrained(hand_packed, sparsity_config=Sparse24Config())
    pack_by_hand(hand_packed, experts)

    reference = logits(family.model_class.from_pretrained(tmp_path / "dense"))
    for load in (load_dense, load_kept):
        opened, info = load(hand_packed, family.model_class, output_loading_info=True)
        assert no_complaint(info), info
        assert torch.equal(logits(opened), reference)
    load_dense(hand_packed, family.model_class).save_pretrained(tmp_path / "again")
    again = tensors_of(tmp_path / "again")
    assert again.keys() == dense.keys()
    assert all(torch.equal(again[key], dense[key]) for key in dense)


def pack_by_hand(folder, names):
    """Replace dense tensors of a single-file checkpoint by parts."""
    tensors = tensors_of(folder)
    for name in names:
        parts = Sparse24Compressor().compress_weight(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_routers_stay_dense(name, tmp_path):
    FAMILIES[name].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    routers = [key for key in tensors_of(tmp_path) if key.endswith(".gate.weight")]
    assert len(routers) == 2


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

"""LoRA on a model whose layers stay packed."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Linear
from tests.models import IDS, files_of, llama, load_dense, load_kept, logits, packed_names, tensors_of

peft = pytest.importorskip("peft")

TARGETS = {"two": ["q_proj", "v_proj"], "all-linear": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    llama().save_pretrained(folder, sparsity_config=Sparse24Config())
    return folder


def with_adapter(model, targets, **options):
    """LoRA whose delta is not zero, the same for every model."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def pair(request, folder):
    """The same adapter on the kept and on the dense model."""
    return with_adapter(load_kept(folder), request.param), with_adapter(load_dense(folder), request.param)


def test_forward_is_that_of_the_dense_model_with_the_adapter(pair, folder):
    kept, dense = pair
    assert packed_names(kept)
    assert torch.equal(logits(kept), logits(dense))
    assert not torch.equal(logits(kept), logits(load_dense(folder)))


def test_only_the_adapter_gets_gradients(pair):
    kept, dense = pair
    for model in pair:
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: parameter.grad for name, parameter in kept.named_parameters() if parameter.grad is not None}
    assert grads
    assert all("lora_" in name for name in grads)
    assert all(parameter.grad is not None for name, parameter in kept.named_parameters() if "lora_" in name)
    expected = {name: parameter.grad for name, parameter in dense.named_parameters() if parameter.grad is not None}
    assert grads.keys() == expected.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name])


def test_training_leaves_the_base_alone(pair):
    kept, _ = pair
    base = {name: value.clone() for name, value in kept.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.AdamW(kept.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = kept(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    state = kept.state_dict()
    assert all(torch.equal(state[name], value) for name, value in base.items())


def test_disabled_adapter_is_the_base(pair, folder):
    kept, _ = pair
    with kept.disable_adapter():
        assert torch.equal(logits(kept), logits(load_kept(folder)))


def test_adapter_is_saved_alone_and_comes_back(pair, folder, tmp_path):
    kept, dense = pair
    kept.save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    assert tensors
    assert all("lora_" in name for name in tensors)
    for base in (load_kept(folder), load_dense(folder)):
        again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        assert torch.equal(logits(again), logits(dense))


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merge_is_refused_and_changes_nothing(pair, merge):
    kept, dense = pair
    with pytest.raises(RuntimeError, match=r"weight of a packed layer would be lost: call model.dequantize\(\)"):
        getattr(kept, merge)()
    assert torch.equal(logits(kept), logits(dense))


def test_safe_merge_is_refused(pair):
    kept, dense = pair
    with pytest.raises(RuntimeError, match="weight of a packed layer would be lost"):
        kept.merge_and_unload(safe_merge=True)
    assert torch.equal(logits(kept), logits(dense))


def test_merged_after_dequantize(folder, tmp_path):
    model = load_kept(folder)
    with_adapter(model, TARGETS["two"]).save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(load_kept(folder).dequantize(), tmp_path).merge_and_unload()
    expected = peft.PeftModel.from_pretrained(load_dense(folder), tmp_path).merge_and_unload()
    assert torch.equal(logits(merged), logits(expected))


def test_unloaded_model_is_the_kept_base(pair, folder, tmp_path):
    kept, _ = pair
    base = kept.unload()
    assert len(packed_names(base)) == 14
    base.save_pretrained(tmp_path)
    assert files_of(tmp_path)["model.safetensors"] == files_of(folder)["model.safetensors"]


def test_dora_trains_on_packed_layers(folder):
    kept, dense = (with_adapter(load(folder), TARGETS["two"], use_dora=True) for load in (load_kept, load_dense))
    torch.testing.assert_close(logits(kept), logits(dense))


# ---- saving a model that carries an adapter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_kept, load_dense])
def test_packing_a_model_with_adapter_layers_is_refused(folder, load, tmp_path):
    base = with_adapter(load(folder), TARGETS["two"]).get_base_model()
    with pytest.raises(ValueError, match="adapter"):
        base.save_pretrained(tmp_path, sparsity_config=Sparse24Config(on_dense="skip"))
    assert files_of(tmp_path) == {}


def test_merged_lora_is_no_longer_sparse_and_is_refused_by_name(folder, tmp_path):
    merged = with_adapter(load_dense(folder), TARGETS["two"]).merge_and_unload()
    with pytest.raises(ValueError, match=r"4 targeted weights are not 2:4.*model\.layers\.0\.self_attn\.q_proj"):
        merged.save_pretrained(tmp_path / "raise", sparsity_config=Sparse24Config())
    with pytest.warns(UserWarning, match="4 targeted weights are stored dense"):
        merged.save_pretrained(tmp_path / "skip", sparsity_config=Sparse24Config(on_dense="skip"))
    assert len(packed_names(load_kept(tmp_path / "skip"))) == 10
    assert torch.equal(logits(load_dense(tmp_path / "skip")), logits(merged))


def test_natively_loaded_adapter_is_refused(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="PEFT adapter"):
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert files_of(tmp_path) == {}
    assert not any(isinstance(module, Sparse24Linear) for module in model.modules())

"""Training with the mask kept: AdamW with decay, resumed runs, adapters."""

import copy

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_sparse24 import KeepMasks, Sparse24Config, keep_masks, prune
from hf_sparse24.pruning import add_masked_lora, apply_masks, load_masks, merge_masked_lora, save_masks, stored_masks
from tests.models import IDS as SHORT
from tests.models import llama, load_dense, logits
from tests.pruning.test_one_shot import IDS, build

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 8 tokens.*:UserWarning")


@pytest.fixture
def pruned():
    model = build()
    prune(model, [IDS], "sparsegpt")
    return model


def is_kept(model, masks):
    return all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())


def train(model, steps, optimizer, clip=None):
    losses = []
    for step in range(steps):
        ids = IDS[step % 3 * 2 : step % 3 * 2 + 2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def test_fifty_steps_of_adamw_with_decay_keep_the_pattern_and_lower_the_loss(pruned):
    masks = {name: mask.clone() for name, mask in stored_masks(pruned).items()}
    optimizer = adamw(pruned)
    with keep_masks(pruned):
        losses = train(pruned, 50, optimizer)
    assert is_kept(pruned, masks) and len(masks) == 14
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    for name, mask in masks.items():  # nothing leaks into the moments
        state = optimizer.state[pruned.get_parameter(name)]
        assert not state["exp_avg"][~mask].any() and not state["exp_avg_sq"][~mask].any()
        assert state["exp_avg"][mask].any()
    pruned.get_parameter(name).grad = None
    train(pruned, 1, optimizer)
    assert not is_kept(pruned, masks)  # outside of the block nothing is kept


def test_optimizers_that_move_a_weight_without_gradient_are_kept_too(pruned):
    class Restless(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(1e-3)

    masks = stored_masks(pruned)
    with keep_masks(pruned):
        train(pruned, 1, Restless(pruned.parameters(), lr=1e-3))
    assert is_kept(pruned, masks)


def test_pruned_places_do_not_count_when_gradients_are_clipped(pruned):
    with keep_masks(pruned):
        pruned(input_ids=IDS, labels=IDS).loss.backward()
    for name, mask in stored_masks(pruned).items():
        assert not pruned.get_parameter(name).grad[~mask].any()


def test_a_kept_zero_may_grow_again(pruned):
    layer = pruned.model.layers[0].mlp.up_proj
    row, column = layer.weight_kept.nonzero()[0].tolist()
    with torch.no_grad():
        layer.weight[row, column] = 0
    with keep_masks(pruned):
        train(pruned, 2, adamw(pruned))
    assert layer.weight[row, column] != 0


def test_a_saved_and_resumed_run_equals_an_uninterrupted_one(pruned, tmp_path):
    whole = copy.deepcopy(pruned)
    with keep_masks(whole):
        train(whole, 6, adamw(whole))
    first, optimizer = copy.deepcopy(pruned), adamw(pruned)
    optimizer = adamw(first)
    with keep_masks(first):
        train(first, 3, optimizer)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    save_masks(first, tmp_path)

    second = build()  # another process: no masks
    saved = torch.load(tmp_path / "state.pt")
    second.load_state_dict(saved["model"])
    load_masks(second, tmp_path)
    optimizer = adamw(second)
    optimizer.load_state_dict(saved["optimizer"])
    with keep_masks(second):
        train(second, 3, optimizer)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name


class Rows(Dataset):
    def __len__(self):
        return len(IDS)

    def __getitem__(self, index):
        return {"input_ids": IDS[index], "labels": IDS[index]}


def trainer(model, folder, steps=6):
    options = {"max_steps": steps, "save_steps": 3, "learning_rate": 3e-3, "weight_decay": 0.1, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(str(folder), **options, report_to=[], use_cpu=True, disable_tqdm=True, seed=1)
    return Trainer(model, arguments, train_dataset=Rows(), callbacks=[KeepMasks()])


def test_trainer_keeps_the_masks_and_resumes_exactly(pruned, tmp_path):
    whole, again = copy.deepcopy(pruned), build()
    trainer(whole, tmp_path).train()
    assert is_kept(whole, stored_masks(pruned))
    assert not torch.equal(whole.model.layers[0].mlp.up_proj.weight, pruned.model.layers[0].mlp.up_proj.weight)
    assert (tmp_path / "checkpoint-3" / "sparse24_masks.safetensors").is_file()
    load_masks(again, tmp_path / "checkpoint-3")
    trainer(again, tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_training_again_after_an_error_leaves_no_keeper_behind(pruned):
    callback = KeepMasks()
    for _ in range(2):  # the Trainer ends no callback when it fails
        callback.on_train_begin(None, None, None, model=pruned)
    callback.on_train_end(None, None, None)
    masks = stored_masks(pruned)
    train(pruned, 1, adamw(pruned))
    assert not is_kept(pruned, masks)


def test_masks_of_a_loaded_model_are_those_of_its_weights(pruned, tmp_path):
    with torch.no_grad():
        pruned.model.layers[0].mlp.up_proj.weight[0, :4] = 0  # a group whose kept weights became 0
    pruned.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    loaded = load_dense(tmp_path)
    with keep_masks(loaded):
        train(loaded, 2, adamw(loaded))
    masks = stored_masks(loaded)
    assert set(masks) == set(stored_masks(pruned)) and is_kept(loaded, masks)
    for name, mask in masks.items():
        assert bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all())
        if "0.mlp.up_proj" not in name:
            assert torch.equal(mask, stored_masks(pruned)[name])


def test_a_dense_model_has_nothing_to_keep():
    with pytest.raises(ValueError, match="no masks and no 2:4 weights"):
        keep_masks(build())


def test_masks_of_another_model_are_refused(pruned, tmp_path):
    save_masks(pruned, tmp_path)
    with pytest.raises(
        ValueError, match=r"the mask of model\.layers\.0\.mlp\.down_proj\.weight has shape \(32, 64\), the model has \(32, 48\)"
    ):
        load_masks(llama(intermediate_size=48), tmp_path)
    smaller = llama(num_hidden_layers=1)
    with pytest.raises(ValueError, match="no such weight"):
        load_masks(smaller, tmp_path)
    assert not stored_masks(smaller)


def test_masks_move_and_are_copied_with_the_model(pruned):
    copied = copy.deepcopy(pruned).to(torch.bfloat16)
    assert all(torch.equal(mask, stored_masks(copied)[name]) and mask.dtype == torch.bool for name, mask in stored_masks(pruned).items())


# ---- adapters --------------------------------------------------------------------------------------------------------------


def test_masked_lora_learns_and_merges_into_the_pattern(pruned):
    before = copy.deepcopy(pruned.state_dict())
    names = add_masked_lora(pruned, rank=4)
    assert len(names) == 14
    trained = [parameter for parameter in pruned.parameters() if parameter.requires_grad]
    assert len(trained) == 28
    torch.testing.assert_close(logits(pruned), logits(with_weights(before)))
    losses = train(pruned, 40, torch.optim.AdamW(trained, lr=1e-2))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    expected = logits(pruned)
    merge_masked_lora(pruned)
    assert set(pruned.state_dict()) == set(before)
    torch.testing.assert_close(logits(pruned), expected)
    masks = stored_masks(pruned)
    assert len(masks) == 14 and is_kept(pruned, masks)
    assert not torch.equal(pruned.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match="no masked LoRA deltas"):
        merge_masked_lora(pruned)


def with_weights(state):
    model = build()
    model.load_state_dict(state)
    return model


def test_masked_lora_needs_masks():
    with pytest.raises(ValueError, match="no targeted layer has a mask"):
        add_masked_lora(build())


def test_an_ordinary_merge_is_refused_on_saving_until_it_is_masked_again(pruned, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(pruned, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    merged = adapted.merge_and_unload()
    assert len(stored_masks(merged)) == 14 and not is_kept(merged, stored_masks(merged))
    with pytest.raises(ValueError, match=r"self_attn\.q_proj"):
        merged.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    apply_masks(merged)
    merged.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert torch.equal(logits(load_dense(tmp_path), input_ids=SHORT), logits(merged))

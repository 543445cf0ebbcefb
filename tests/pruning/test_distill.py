"""Distillation of tiny models."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_sparse24 import distill, prune
from hf_sparse24.pruning import sample_windows, stored_masks
from hf_sparse24.pruning.distill import TOKENS_AT_ONCE, _Divergence
from tests.pruning.test_masks import is_kept
from tests.pruning.test_one_shot import IDS, build


@pytest.fixture
def pair():
    dense = build()
    model = copy.deepcopy(dense)
    prune(model)
    return model, dense


def run(model, dense, **options):
    return distill(
        model, dense, IDS, **{"steps": 30, "warmup": 3, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 3e-3, **options}
    )


def test_the_pruned_model_comes_nearer_to_the_dense_one_and_stays_pruned(pair):
    model, dense = pair
    expected, masks = copy.deepcopy(dense.state_dict()), stored_masks(model)
    report = run(model, dense)
    assert report.steps == len(report.losses) == 30 and report.seconds > 0
    assert sum(report.losses[-5:]) < 0.4 * sum(report.losses[:5])
    assert is_kept(model, masks) and len(masks) == 14
    assert all(torch.equal(weight, expected[name]) for name, weight in dense.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and not model.training


def test_the_first_loss_is_the_divergence_of_the_predictions(pair):
    model, dense = pair
    with torch.no_grad():
        found, expected = (m(input_ids=IDS).logits.softmax(-1) for m in pair)
    divergence = (expected * (expected / found).log()).sum(-1).mean()
    assert run(model, dense, steps=1, batch_size=6, micro_batch_size=3).losses[0] == pytest.approx(divergence.item(), rel=1e-4)


def test_with_steps_it_depends_on_the_seed_alone():
    results = []
    for seed in (1, 1, 2):
        dense = build()
        model = copy.deepcopy(dense)
        prune(model)
        run(model, dense, steps=4, seed=seed)
        results.append(model.state_dict()["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_it_stops_when_its_minutes_are_over(pair):
    report = run(*pair, steps=None, minutes=0.02)
    assert report.steps >= 1 and 1.2 <= report.seconds < 10


def test_a_model_in_bfloat16_comes_back_in_bfloat16():
    dense = build().to(torch.bfloat16)
    model = copy.deepcopy(dense)
    prune(model)
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    report = run(model, dense)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == buffers
    assert report.losses[-1] < report.losses[0]


def test_encoders_learn_hidden_states_and_padding_does_not_count():
    dense = build("bert").bert
    model = copy.deepcopy(dense)
    prune(model)
    twin = copy.deepcopy(model)
    mask = torch.ones_like(IDS)
    mask[:, 20:] = 0
    other = IDS.clone()
    other[:, 20:] = 5
    options = {"steps": 20, "warmup": 2, "learning_rate": 3e-3, "batch_size": 6}
    report = distill(model, dense, [{"input_ids": IDS, "attention_mask": mask}], **options)
    expected = distill(twin, dense, [{"input_ids": other, "attention_mask": mask}], **options)
    assert report.losses[-1] < 0.5 * report.losses[0]
    assert report.losses == pytest.approx(expected.losses, rel=1e-3)


def test_it_needs_an_end(pair):
    with pytest.raises(ValueError, match="needs minutes or steps"):
        distill(*pair, IDS)


def test_what_is_refused_keeps_its_dtype():
    model = build().to(torch.bfloat16)
    with pytest.raises(ValueError, match="no masks and no 2:4 weights"):
        run(model, build())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_writes_windows():
    dense = build()
    windows = sample_windows(dense, 5, 12, start=3, batch_size=2, seed=1)
    assert windows.shape == (5, 12) and bool((windows[:, 0] == 3).all())
    assert torch.equal(windows, sample_windows(dense, 5, 12, start=3, batch_size=2, seed=1))
    assert not torch.equal(windows, sample_windows(dense, 5, 12, start=3, batch_size=2, seed=2))
    dense.config.bos_token_id = None
    with pytest.raises(ValueError, match="no bos_token_id"):
        sample_windows(dense, 1, 4)


def test_a_model_writes_without_dropout_in_training_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=3, eos_token_id=1)).eval()
    expected = sample_windows(model, 4, 12)
    assert torch.equal(sample_windows(model.train(), 4, 12), expected) and model.training


def test_the_divergence_and_its_gradient_are_those_of_kl_div():
    """Over more tokens than are taken at once."""
    torch.manual_seed(0)
    student, dense, weights = (
        torch.randn(TOKENS_AT_ONCE + 90, 50, requires_grad=True),
        torch.randn(TOKENS_AT_ONCE + 90, 50),
        torch.rand(TOKENS_AT_ONCE + 90),
    )
    exact = student.detach().double().requires_grad_()
    expected = torch.nn.functional.kl_div(exact.log_softmax(-1), dense.double().log_softmax(-1), reduction="none", log_target=True).sum(-1)
    found = _Divergence.apply(student, dense)
    torch.testing.assert_close(found, expected.float())
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(student.grad, exact.grad.float())

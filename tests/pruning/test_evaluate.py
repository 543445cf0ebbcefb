"""Perplexity and agreement against plain definitions."""

import math

import pytest
import torch

from hf_sparse24.pruning import agreement, embed, make_batches, perplexity
from tests.pruning.test_one_shot import IDS, build


def test_perplexity_is_that_of_the_model_loss():
    model = build()
    with torch.no_grad():
        expected = math.exp(sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in IDS) / len(IDS))
    for batch_size in (1, 4, 8):
        assert perplexity(model, IDS, batch_size) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("windows", [IDS[0], IDS[:, :1], IDS[:0]])
def test_perplexity_needs_windows(windows):
    with pytest.raises(ValueError, match="two tokens or more"):
        perplexity(build(), windows)


def test_embeddings_are_means_over_tokens_without_padding():
    model = build("bert")
    mask = torch.ones_like(IDS)
    mask[0, 5:] = 0
    found = embed(model, [{"input_ids": IDS[:2], "attention_mask": mask[:2]}, {"input_ids": IDS[2:], "attention_mask": mask[2:]}])
    with torch.no_grad():
        short = model.bert(input_ids=IDS[:1, :5]).last_hidden_state.mean(1)[0]
        other = model.bert(input_ids=IDS[3:4]).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(found[0], short / short.norm())
    torch.testing.assert_close(found[3], other / other.norm())


def test_agreement_with_itself_is_perfect_and_with_noise_it_is_not():
    generator = torch.Generator().manual_seed(0)
    dense = torch.nn.functional.normalize(torch.randn(20, 8, generator=generator), dim=1)
    same = agreement(dense, dense)
    assert (same.spearman, same.cosine, same.nearest) == (pytest.approx(1), pytest.approx(1), 1)
    noisy = torch.nn.functional.normalize(dense + 0.2 * torch.randn(20, 8, generator=generator), dim=1)
    near = agreement(dense, noisy)
    assert 0.5 < near.spearman < 1 and 0.5 < near.cosine < 1 and 0.2 < near.nearest < 1
    pairs = [(i, j) for i in range(20) for j in range(i + 1, 20)]
    ranks = [torch.tensor([float(e[i] @ e[j]) for i, j in pairs]).argsort().argsort().double() for e in (dense, noisy)]
    n = len(pairs)
    assert near.spearman == pytest.approx(1 - 6 * float((ranks[0] - ranks[1]).square().sum()) / (n * (n * n - 1)), abs=1e-6)


def test_agreement_needs_three_texts():
    with pytest.raises(ValueError, match="three texts or more, got 2 and 2"):
        agreement(torch.ones(2, 4), torch.ones(2, 4))


def test_batches_of_make_batches_can_be_embedded():
    assert embed(build("bert"), make_batches(IDS, build("bert"))).shape == (6, 32)

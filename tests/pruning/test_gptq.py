"""Integers for a pruned weight."""

import pytest
import torch

from hf_sparse24.pruning.gptq import gptq
from hf_sparse24.pruning.hessian import squared_error
from hf_sparse24.pruning.methods import obs
from tests.pruning.test_methods import DAMP, TWO_OF_FOUR, layer, least_squares, small

__all__ = ["layer", "small"]


def dense_of(integers, scales):
    return (integers.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).flatten(1)


def rounded(weight, group_size, num_bits):
    """To the nearest, each weight alone."""
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))
    scales = groups.abs().amax(-1, keepdim=True) / (2 ** (num_bits - 1) - 0.5)
    limit = 2 ** (num_bits - 1)
    return ((groups / scales).round().clamp(-limit, limit - 1) * scales).flatten(1)


@pytest.mark.parametrize("num_bits", [3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_integers_fit_keep_the_mask_and_beat_rounding(num_bits, group_size, layer):
    weight, hessian = layer
    pruned = obs(weight, hessian, TWO_OF_FOUR, DAMP)
    integers, scales = gptq(pruned.weight, pruned.mask, hessian, num_bits=num_bits, group_size=group_size)
    assert integers.dtype == torch.int8 and scales.shape == (128, 256 // group_size if group_size else 1)
    assert int(integers.min()) >= -(2 ** (num_bits - 1)) and int(integers.max()) < 2 ** (num_bits - 1)
    assert not integers[~pruned.mask].any()
    found = squared_error(pruned.weight, dense_of(integers, scales), hessian)
    nearest = squared_error(pruned.weight, rounded(pruned.weight, group_size, num_bits), hessian)
    assert 0 < found < 0.8 * nearest


def test_columns_are_rounded_with_exact_least_squares(small):
    """A slow reference: each column's error, drift into pruned places included, is answered for by all columns to its right."""
    weight, hessian = small
    mask = obs(weight, hessian, TWO_OF_FOUR, DAMP).mask
    start = weight * mask
    damped = hessian + DAMP * hessian.diagonal().mean() * torch.eye(16, dtype=hessian.dtype)
    integers, scales = gptq(start, mask, hessian, group_size=8)
    for row, kept, found, scale in zip(start, mask, integers, scales, strict=True):
        row = row.clone()
        for j in range(16):
            step = scale[j // 8]
            if j % 8 == 0:
                torch.testing.assert_close(step, (row[j : j + 8] * kept[j : j + 8]).abs().max() / 7.5)
            value = (row[j] / step).round().clamp(-8, 7) if kept[j] else torch.zeros(())
            assert int(value) == int(found[j])
            free = torch.ones(16 - j, dtype=torch.bool)
            free[0] = False
            target = torch.zeros_like(row[j:])
            target[0] = value * step - row[j]
            row[j:] += least_squares(target, damped[j:, j:], free)


def test_a_group_without_weights_has_a_scale(layer):
    weight, hessian = layer
    integers, scales = gptq(torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bool), hessian, group_size=32)
    assert not integers.any() and bool((scales == 1).all())


@pytest.mark.parametrize(
    ("options", "message"), [({"num_bits": 9}, "num_bits must be 2 to 8"), ({"group_size": 48}, "divide in_features 256, got 48")]
)
def test_bad_settings(options, message, layer):
    weight, hessian = layer
    with pytest.raises(ValueError, match=message):
        gptq(weight, weight != 0, hessian, **options)

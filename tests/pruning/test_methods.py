"""Single layers: exact references on small ones, the order of the methods on a correlated one."""

import itertools
import math

import pytest
import torch

from hf_sparse24.pruning.hessian import factor_inverse, squared_error
from hf_sparse24.pruning.methods import magnitude, obs, refine, ria, sparsegpt, wanda
from hf_sparse24.pruning.one_shot import METHODS
from hf_sparse24.pruning.sparsity import as_sparsity

TWO_OF_FOUR = as_sparsity("2:4")
DAMP = 0.01


@pytest.fixture(scope="module")
def layer():
    """A weight of 128 x 256, and H of inputs that are correlated, with channels of very different size."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = (normal(4096, 64) @ normal(64, 256) / 8 + 0.3 * normal(4096, 256)) * torch.exp(normal(256))
    return normal(128, 256) / 16, x.T @ x / len(x)


@pytest.fixture(scope="module")
def small():
    """A weight of 5 x 16 in float64, and H."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 16, generator=generator, dtype=torch.float64) @ torch.randn(16, 16, generator=generator, dtype=torch.float64)
    return torch.randn(5, 16, generator=generator, dtype=torch.float64), x.T @ x / len(x)


def error_of(name, layer, refined=False):
    weight, hessian = layer
    pruned = METHODS[name](weight, hessian, TWO_OF_FOUR, DAMP)
    if refined:
        pruned = refine(weight, pruned, hessian, DAMP, 10)
    return squared_error(weight, pruned.weight, hessian)


def test_methods_are_in_order(layer):
    plain = [error_of(name, layer) for name in ("magnitude", "ria", "wanda", "sparsegpt", "obs")]
    assert plain == sorted(plain, reverse=True) and len(set(plain)) == 5
    refined = {name: error_of(name, layer, refined=True) for name in METHODS if name != "alps"}
    assert all(refined[name] < 0.5 * error for name, error in zip(refined, plain, strict=True))
    assert refined["magnitude"] > refined["ria"] > refined["wanda"] > refined["obs"] > error_of("alps", layer)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "6:8", "1:4", "12:16"])
@pytest.mark.parametrize("name", METHODS)
def test_each_group_keeps_exactly_n(name, pattern, layer):
    weight, hessian = layer
    sparsity = as_sparsity(pattern)
    if name == "obs" and pattern == "12:16":
        weight, hessian = weight[:16, :64], hessian[:64, :64]  # 1820 choices
    pruned = METHODS[name](weight, hessian, sparsity, DAMP)
    counts = pruned.mask.unflatten(1, (-1, sparsity.group)).sum(-1)
    assert bool((counts == sparsity.kept).all())
    assert not pruned.weight[~pruned.mask].any()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "obs"])
def test_unstructured_keeps_the_ratio_of_every_row(name, layer):
    pruned = METHODS[name](*layer, as_sparsity(0.75), DAMP)
    assert bool((pruned.mask.sum(1) == 64).all())


def test_obs_refuses_what_has_no_groups(layer):
    with pytest.raises(ValueError, match="prunes groups, such as 2:4, not 50% unstructured"):
        obs(*layer, as_sparsity("0.5"), DAMP)


@pytest.mark.parametrize("pattern", ["4:2", "2:2", "0:4", "x", "0", "1.0", "-0.5", "nan"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(ValueError, match="pattern must be N:M"):
        as_sparsity(pattern)


def test_ties_and_zeros_keep_two_of_four():
    weight = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0, 3, 0, 0, 0]])
    for name, method in METHODS.items():
        pruned = method(weight, torch.eye(12), TWO_OF_FOUR, DAMP)
        assert pruned.mask.view(3, 4).sum(-1).tolist() == [2, 2, 2], name
        assert pruned.weight[0, 8] == pytest.approx(3, abs=1e-5), name


def test_wanda_and_ria_follow_their_formulas(layer):
    weight, hessian = layer
    norms = hessian.diagonal().sqrt()
    size = weight.abs()
    scores = {
        wanda: size * norms,
        ria: (size / size.sum(0, keepdim=True) + size / size.sum(1, keepdim=True)) * norms**0.5,
        magnitude: size,
    }
    for method, score in scores.items():
        groups = score.unflatten(1, (-1, 4))
        expected = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(2).indices, True).flatten(1)
        pruned = method(weight, hessian, TWO_OF_FOUR, DAMP)
        assert torch.equal(pruned.mask, expected)
        assert torch.equal(pruned.weight, weight * expected)


# ---- exact references: every row, and every step, by its own least squares -------------------------------------------------


def least_squares(target, hessian, free):
    """The change d of a row with d = target where it is not free, that costs least: min d H d^T."""
    change = torch.zeros_like(target)
    change[~free] = target[~free]
    change[free] = -torch.linalg.solve(hessian[free][:, free], hessian[free][:, ~free] @ target[~free])
    return change


def slow_sparsegpt(row, hessian):
    """Column by column; those to the left of a column are frozen, those to its right answer for it."""
    row, kept = row.clone(), torch.ones(len(row), dtype=torch.bool)
    for j in range(len(row)):
        if j % 4 == 0:
            scores = []
            for c in range(j, j + 4):
                rest = torch.linalg.inv(hessian[c:, c:])
                scores.append(row[c] ** 2 / rest[0, 0])
            for c in torch.stack(scores).argsort()[:2].tolist():
                kept[j + c] = False
        if not kept[j]:
            target = torch.zeros_like(row[j:])
            target[0] = -row[j]
            free = torch.ones(len(target), dtype=torch.bool)
            free[0] = False
            row[j:] += least_squares(target, hessian[j:, j:], free)
    return row * kept, kept


def slow_obs(row, hessian):
    """Group by group, all six choices tried."""
    row, kept = row.clone(), torch.ones(len(row), dtype=torch.bool)
    for j in range(0, len(row), 4):
        best = None
        for pruned in itertools.combinations(range(4), 2):
            free = torch.ones(len(row) - j, dtype=torch.bool)
            free[list(pruned)] = False
            change = least_squares(-row[j:] * ~free, hessian[j:, j:], free)
            cost = change @ hessian[j:, j:] @ change
            if best is None or cost < best[0]:
                best = cost, change, pruned
        row[j:] += best[1]
        kept[[j + c for c in best[2]]] = False
    return row * kept, kept


@pytest.mark.parametrize(("method", "slow"), [(sparsegpt, slow_sparsegpt), (obs, slow_obs)], ids=["sparsegpt", "obs"])
@pytest.mark.parametrize("block", [4, 8, 128])
def test_method_equals_exact_least_squares_row_by_row(method, slow, block, small, monkeypatch):
    monkeypatch.setattr("hf_sparse24.pruning.methods.BLOCK", block)
    weight, hessian = small
    pruned = method(weight, hessian, TWO_OF_FOUR, DAMP)
    damped = hessian + DAMP * hessian.diagonal().mean() * torch.eye(16, dtype=hessian.dtype)
    for row, result, mask in zip(weight, pruned.weight, pruned.mask, strict=True):
        expected, kept = slow(row, damped)
        assert torch.equal(mask, kept)
        torch.testing.assert_close(result, expected)


def test_refinement_ends_at_least_squares_on_the_mask(small):
    weight, hessian = small
    start = magnitude(weight, hessian, TWO_OF_FOUR, DAMP)
    refined = refine(weight, start, hessian, DAMP, 40)
    damped = hessian + DAMP * hessian.diagonal().mean() * torch.eye(16, dtype=hessian.dtype)
    assert torch.equal(refined.mask, start.mask)
    for row, result, kept in zip(weight, refined.weight, refined.mask, strict=True):
        torch.testing.assert_close(result, row + least_squares(-row * ~kept, damped, kept))


def test_an_error_that_is_not_a_number_is_not_reported_as_none():
    weight = torch.tensor([[1.0, 2, float("nan"), 4]])
    assert math.isnan(squared_error(weight, weight.clone(), None))
    assert math.isnan(squared_error(torch.ones(1, 4), weight, torch.eye(4)))
    assert squared_error(torch.zeros(1, 4), torch.zeros(1, 4), torch.eye(4)) == 0


# ---- damping ---------------------------------------------------------------------------------------------------------------


def test_a_singular_matrix_gets_more_damping_and_the_report_says_so():
    x = torch.ones(3, 64)  # rank one, and a damping too small for float32
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    pruned = sparsegpt(weight, x.T @ x, TWO_OF_FOUR, 1e-9)
    assert pruned.fallback and pruned.fallback.startswith("damping raised")
    assert pruned.damping >= 1e-8
    assert bool(torch.isfinite(pruned.weight).all())


def test_damping_is_raised_tenfold():
    x = torch.ones(3, 64)
    factor = factor_inverse(x.T @ x, 1e-9)
    assert 1 <= factor.retries <= 6
    assert factor.damping == pytest.approx(3e-9 * 10**factor.retries)


@pytest.mark.parametrize("name", ["sparsegpt", "obs"])
def test_what_no_damping_helps_is_an_error(name):
    hessian = -torch.eye(8)
    with pytest.raises(ValueError, match="no positive definite matrix"):
        METHODS[name](torch.ones(2, 8), hessian, TWO_OF_FOUR, DAMP)


def test_alps_says_that_all_inputs_are_zero():
    with pytest.raises(ValueError, match="all its inputs are 0"):
        METHODS["alps"](torch.ones(2, 8), torch.zeros(8, 8), TWO_OF_FOUR, DAMP)

"""Oracle: numpy on values converted to float64, one group at a time."""

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hf_sparse24 import pattern
from hf_sparse24.pattern import BadGroup, find_bad_groups, is_nonzero, map_rows, mask_2_4, mask_n_m, structure

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, *FLOAT8, torch.int8]
FLOATS = DTYPES[:-1]
NAN, INF = math.nan, math.inf


def name(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value).replace(" ", "")


def every_code(dtype):
    """All values of a dtype of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def random_weight(dtype, shape, zeros=0.5, seed=0):
    random = np.random.default_rng(seed)
    values = random.integers(-5, 6, shape) * (random.random(shape) >= zeros)
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


@pytest.fixture(params=[1, 2], ids="{}threads".format)
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(pattern, "CPU_CHUNK", 1 << 16)  # enough chunks for every thread
    yield request.param
    torch.set_num_threads(before)


# ---- non-zeros -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=name)
def test_only_the_zeros_of_all_codes_are_zero(dtype):
    codes = every_code(dtype)
    assert torch.equal(is_nonzero(codes), codes.float() != 0)
    assert (~is_nonzero(codes)).sum() == (1 if dtype == torch.int8 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_smallest_numbers_are_non_zero_and_negative_zero_is_not(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([0.0, -0.0, tiny, -tiny, NAN, INF, 1e-30], dtype=dtype)
    denormal = torch.tensor([1, -1], dtype=torch.int32).view(torch.float32).to(dtype)
    assert is_nonzero(values).tolist() == [False, False, True, True, True, True, True]
    assert is_nonzero(denormal).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=name)
def test_other_dtypes_have_non_zeros_too(dtype):
    assert is_nonzero(torch.tensor([0, 1, 0], dtype=dtype)).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_non_zeros_of_strided_weights_and_parameters(dtype):
    weight = random_weight(dtype, (6, 8))
    expected = weight.float() != 0
    assert torch.equal(is_nonzero(weight.t()), expected.t())
    assert torch.equal(is_nonzero(weight[:, 1::2]), expected[:, 1::2])
    if dtype.is_floating_point:
        assert not is_nonzero(torch.nn.Parameter(weight)).requires_grad


# ---- bad groups ----------------------------------------------------------------------------------------------------------


def bad_groups(weight, n, m):
    """[(row, column, kept)], from the definition."""
    rows = weight.float().reshape(-1, weight.shape[-1]).numpy()
    groups = itertools.product(range(len(rows)), range(0, rows.shape[1], m))
    kept = [(row, column, int(np.count_nonzero(rows[row, column : column + m]))) for row, column in groups]
    return [group for group in kept if group[2] > n]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (4, 8), (6, 8), (8, 16), (1, 2), (1, 3), (5, 12)], ids=str)
def test_bad_groups_are_counted_and_the_first_is_named(dtype, n, m):
    for zeros in (0.9, 0.6, 0.3):
        weight = random_weight(dtype, (7, 48), zeros, seed=m)
        bad = bad_groups(weight, n, m)
        assert find_bad_groups(weight, n, m) == (BadGroup(len(bad), *bad[0][:2], m, bad[0][2]) if bad else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_nibble_of_non_zeros_is_judged(dtype):
    for nibble, place in itertools.product(itertools.product([0, 1], repeat=4), range(3)):
        weight = torch.zeros(2, 12).index_put((torch.tensor(1), torch.arange(4) + 4 * place), torch.tensor(nibble).float()).to(dtype)
        expected = BadGroup(1, 1, 4 * place, 4, sum(nibble)) if sum(nibble) > 2 else None
        assert find_bad_groups(weight) == expected


def test_one_bad_group_among_a_million_is_named(threads):
    weight = torch.zeros(1000, 4000, dtype=torch.bfloat16)
    weight.view(1000, 1000, 4)[:, :, 1:3] = 1
    assert find_bad_groups(weight) is None
    weight[777, 1236:1239] = 1
    assert str(find_bad_groups(weight)) == "1 group keeps too many values, the first in row 777, columns 1236..1239 (3 non-zeros)"
    weight[999, 3996:] = weight[778, :4] = 1
    assert str(find_bad_groups(weight)) == "3 groups keep too many values, the first in row 777, columns 1236..1239 (3 non-zeros)"


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_nan_fills_a_group_and_negative_zero_does_not(dtype):
    assert find_bad_groups(torch.tensor([[-0.0, 1, -0.0, 2]]).to(dtype)) is None
    assert find_bad_groups(torch.tensor([[NAN, 1, -0.0, 2]]).to(dtype)) == BadGroup(1, 0, 0, 4, 3)


def test_rows_of_all_leading_axes_are_counted_flat():
    weight = torch.zeros(3, 5, 8)
    weight[1, 2, 4:] = 1
    assert find_bad_groups(weight) == BadGroup(1, 7, 4, 4, 4)
    assert find_bad_groups(weight[1, 2]) == BadGroup(1, 0, 4, 4, 4)
    assert find_bad_groups(weight[1].t().expand(3, 8, 5)[..., 1:], n=0) == BadGroup(12, 4, 0, 4, 1)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,), (2, 0, 4)], ids=name)
def test_empty_weights_have_no_bad_group_and_an_empty_mask(shape):
    assert find_bad_groups(torch.zeros(shape)) is None
    assert mask_2_4(torch.zeros(shape)).shape == shape
    assert structure(torch.zeros(shape)).sparsity == 0.0


@pytest.mark.parametrize("shape", [(), (3,), (2, 6), (4, 2, 5)], ids=name)
def test_in_features_that_are_no_multiple_are_refused(shape):
    for function in (find_bad_groups, mask_2_4):
        with pytest.raises(ValueError, match=rf"multiple of 4, got {shape[-1] if shape else 0} \(shape \({shape[0] if shape else ''}"):
            function(torch.zeros(shape))


# ---- structure -----------------------------------------------------------------------------------------------------------


def with_pattern(n, m, shape=(24, 48), seed=0):
    """A weight whose groups of m keep exactly n, at random."""
    random = np.random.default_rng(seed)
    order = random.random((shape[0], shape[1] // m, m)).argsort(-1)
    return torch.from_numpy((order < n).reshape(shape) * random.uniform(1, 2, shape)).float()


def some_rows():
    weight = torch.ones(24, 44)
    weight[3:9] = 0
    return weight


UNSTRUCTURED = torch.rand(24, 44, generator=torch.Generator().manual_seed(0)) * (torch.arange(24 * 44).view(24, 44) % 7 > 0)
KINDS = {
    "2:4": with_pattern(2, 4),
    "1:4": with_pattern(1, 4),
    "3:4": with_pattern(3, 4),
    "4:8": with_pattern(4, 8),
    "6:8": with_pattern(6, 8),
    "8:16": with_pattern(8, 16),
    "rows": some_rows(),
    "columns": some_rows().t(),
    "unstructured": UNSTRUCTURED,
    "dense": torch.rand(24, 44) + 0.1,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_structure_names_the_tightest_pattern(kind, dtype):
    weight = (KINDS[kind] * 20).to(dtype)
    found = structure(weight)
    assert found.kind == kind
    assert (found.zeros, found.elements) == (int((weight.float() == 0).sum()), weight.numel())
    assert found.sparsity == found.zeros / found.elements


def test_structure_with_one_bad_place_is_not_2_4(threads):
    weight = with_pattern(2, 4, (1 << 10, 1 << 11))
    assert structure(weight).kind == "2:4"
    weight[1000, 2000:2008] = 1
    assert structure(weight).kind == "unstructured"


def test_structure_counts_rows_and_columns_that_are_zero():
    assert structure(some_rows()).reason == "6 rows and 0 columns are zero, the rest is dense"
    assert structure(some_rows().t()).reason == "0 rows and 6 columns are zero, the rest is dense"


def test_structure_below_a_tenth_of_zeros_is_dense():
    weight = torch.ones(10, 44)
    weight.view(-1)[:43:3] = 0
    assert structure(weight).kind == "dense"
    weight.view(-1)[:132:3] = 0
    assert (structure(weight).kind, structure(weight).reason) == ("unstructured", "10.0% zeros without a pattern")


@pytest.mark.parametrize("shape", [(8,), (2, 4, 4), (0, 4), ()], ids=name)
def test_only_matrices_have_a_pattern(shape):
    weight = torch.zeros(shape)
    found = structure(weight)
    assert (found.kind, found.zeros, found.elements) == ("dense", weight.numel(), weight.numel())
    assert str(tuple(weight.shape)) in found.reason


# ---- masks ---------------------------------------------------------------------------------------------------------------


def rank_mask(weight, n, m):
    """From the definition: the n first of a group, ordered by magnitude, then by column; NaN before all numbers."""
    groups = weight.double().reshape(-1, m).abs().tolist()
    mask = torch.zeros(len(groups), m, dtype=torch.bool)
    for row, group in enumerate(groups):
        keys = [(0.0, column) if math.isnan(value) else (1.0, -value, column) for column, value in enumerate(group)]
        mask[row, sorted(range(m), key=keys.__getitem__)[:n]] = True
    return mask.view(weight.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_mask_of_every_order_and_tie(dtype):
    values = [0.0, 1.0, -1.0, 2.0, -3.0] + ([-0.0, NAN] if dtype.is_floating_point else [])
    weight = torch.tensor(list(itertools.product(values, repeat=4))).to(dtype)
    mask = mask_2_4(weight)
    assert torch.equal(mask, rank_mask(weight, 2, 4))
    assert (mask.sum(-1) == 2).all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=name)
def test_mask_ranks_all_codes_by_magnitude(dtype):
    codes = every_code(dtype)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(codes) * 4) % len(codes))
    weight = codes.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)[order].view(dtype).view(-1, 64)
    assert torch.equal(mask_2_4(weight), rank_mask(weight, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float64], ids=name)
def test_mask_ranks_nan_above_infinity_above_the_largest_number(dtype):
    largest = torch.finfo(dtype).max
    groups = [[largest, -INF, largest, NAN], [largest, largest, 0, -INF], [NAN, -NAN, INF, NAN], [-INF, INF, 0, NAN]]
    weight = torch.tensor(groups, dtype=torch.float64).to(dtype)
    assert mask_2_4(weight).int().tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]]


def test_mask_of_int8_ranks_minus_128_highest():
    weight = torch.tensor([[-127, 127, -128, 0], [0, 0, -128, 0]], dtype=torch.int8)
    assert mask_2_4(weight).tolist() == [[True, False, True, False], [True, False, True, False]]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("n", "m"), [(1, 4), (3, 4), (4, 4), (4, 8), (8, 16), (1, 2), (2, 6)], ids=str)
def test_mask_keeps_n_of_m(dtype, n, m):
    weight = random_weight(dtype, (5, 3, 48), zeros=0.3, seed=m)
    assert torch.equal(mask_n_m(weight, n, m), rank_mask(weight, n, m))


def test_mask_of_a_group_larger_than_a_byte_can_count():
    weight = torch.arange(600.0).view(2, 300)
    assert torch.equal(mask_n_m(weight, 299, 300), torch.arange(300).expand(2, 300) > 0)


def test_mask_of_strided_and_large_weights_and_parameters(threads):
    weight = torch.randn(500, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.zeros(weight.shape, dtype=torch.bool)
    expected.view(-1, 4).scatter_(1, weight.float().abs().view(-1, 4).sort(dim=1, descending=True, stable=True).indices[:, :2], True)
    assert torch.equal(mask_2_4(weight), expected)
    assert torch.equal(mask_2_4(weight.t().contiguous().t()), expected)
    assert torch.equal(mask_2_4(torch.nn.Parameter(weight)), expected)


@pytest.mark.parametrize("n", [0, 5, -1])
def test_mask_of_a_count_that_does_not_fit_is_refused(n):
    with pytest.raises(ValueError, match=f"a group of 4 cannot keep {n} values, expected 1 to 4"):
        mask_n_m(torch.zeros(1, 4), n, 4)


# ---- chunks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 0), (1, 1 << 20), (400, 1 << 12), (17, 1 << 15)], ids=name)
def test_chunks_cover_the_rows_in_order(shape, threads):
    rows = [row for chunk in map_rows(lambda chunk: range(chunk.start, chunk.stop), shape) for row in chunk]
    assert rows == list(range(shape[0]))


def test_an_error_in_a_chunk_is_raised(threads):
    def fail_late(chunk):
        if chunk.start > 500:
            raise ValueError(f"row {chunk.start}")

    with pytest.raises(ValueError, match="row 5"):
        map_rows(fail_late, (1000, 1 << 12))


def test_an_error_in_another_thread_is_raised(threads):
    def fail_elsewhere(chunk):
        time.sleep(0.001)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("elsewhere")

    if threads > 1:
        with pytest.raises(ValueError, match="elsewhere"):
            map_rows(fail_elsewhere, (400, 1 << 12))
    else:
        map_rows(fail_elsewhere, (400, 1 << 12))


def test_chunks_are_shared_by_threads_unless_the_caller_has_its_own(threads):
    def names_of_threads():
        return set(map_rows(lambda chunk: (time.sleep(0.001), threading.current_thread().name)[1], (400, 1 << 12)))

    assert len(names_of_threads()) == threads
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(names_of_threads).result()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_cuda_gives_what_the_cpu_gives(dtype):
    weight = random_weight(dtype, (96, 128), zeros=0.7)
    cuda = weight.cuda()
    assert torch.equal(is_nonzero(cuda).cpu(), is_nonzero(weight))
    for n, m in ((2, 4), (4, 8), (8, 16)):
        assert find_bad_groups(cuda, n, m) == find_bad_groups(weight, n, m)
        assert torch.equal(mask_n_m(cuda, n, m).cpu(), mask_n_m(weight, n, m))
    assert structure(cuda) == structure(weight)

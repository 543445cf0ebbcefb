"""The group of four: which weights count as zero, which structure a tensor has, and masks by magnitude.

A *group* is `m` consecutive weights of one row, along the last axis.  N:M means at most N *kept* of M.
Everything here is exact: 1e-30 is a non-zero, -0.0 is a zero, NaN is a non-zero.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

ONE_BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# Integers as wide as a float: numpy has no bfloat16 and no fp8, and torch compares few of the narrow floats.
FLOAT_BITS = {
    **dict.fromkeys(ONE_BYTE_FLOATS, torch.int8), torch.float16: torch.int16, torch.bfloat16: torch.int16,
    torch.float32: torch.int32, torch.float64: torch.int64,
}  # fmt: skip
# Weights are handled in chunks of rows of about this many elements, so that what is computed on the way is never large.  On a
# CPU chunks of 2^17 fit the L2 cache, but two threads then wait for the GIL so often that they are slower than one; with 2^20
# they take 0.7 of its time (Xeon, 2 cores, 2026-11-30).
CPU_CHUNK, DEVICE_CHUNK = 1 << 20, 1 << 24
# A thread takes 1 to 2 ms to start and some megabytes to work in; many would wait for the memory and the GIL.
CHUNKS_PER_THREAD, MAX_THREADS = 4, 8
# Without a pattern, at least this share of zeros makes a tensor worth calling unstructured.
MIN_UNSTRUCTURED_ZEROS = 0.1
T = TypeVar("T")


@dataclass(frozen=True)
class BadGroup:
    """The groups of a weight that keep more values than the pattern allows, and where the first of them is."""

    count: int
    row: int
    column: int
    group_size: int
    kept: int

    def __str__(self) -> str:
        groups = "group keeps" if self.count == 1 else "groups keep"
        return (
            f"{self.count} {groups} too many values, the first in row {self.row}, "
            f"columns {self.column}..{self.column + self.group_size - 1} ({self.kept} non-zeros)"
        )


@dataclass(frozen=True)
class Structure:
    """What `structure` found.  `kind` is "2:4", another "N:M", "rows", "columns", "unstructured" or "dense"."""

    kind: str
    zeros: int
    elements: int
    reason: str

    @property
    def sparsity(self) -> float:
        """Zeros over elements, 0.0 for an empty tensor."""
        return self.zeros / self.elements if self.elements else 0.0


def is_nonzero(weight: Tensor) -> Tensor:
    """Which elements are non-zero as numbers; same shape, bool.  Works for the dtypes torch cannot compare, fp8 included."""
    return torch.as_tensor(nonzeros(_array(weight), weight.dtype))


def find_bad_groups(weight: Tensor, n: int = 2, m: int = 4) -> BadGroup | None:
    """Look for groups of `m` with more than `n` non-zeros.

    Args:
        weight: (..., in_features), any dtype; in_features is a multiple of `m`.
        n: How many a group may keep.
        m: Size of a group.

    Returns:
        None if the weight follows the pattern; else how many groups do not, and the first (row counts all leading axes flat).

    Raises:
        ValueError: in_features is not a multiple of `m`.
    """
    _require_groups(weight, m)
    rows, groups = _as_rows(weight), weight.shape[-1] // m
    bits = _array(rows)

    def look(chunk: slice) -> tuple[int, int, int]:
        """How many groups are bad; number of the first, and its non-zeros."""
        kept = _count_in_groups(nonzeros(bits[chunk], rows.dtype), m)  # (chunk's rows * groups,)
        if not len(kept) or kept.max() <= n:
            return 0, 0, 0
        kept = torch.as_tensor(kept)
        bad = (kept > n).nonzero()
        return len(bad), chunk.start * groups + int(bad[0]), int(kept[bad[0]])

    found = [bad for bad in map_rows(look, rows.shape, rows.device) if bad[0]]
    if not found:
        return None
    _, index, kept = found[0]
    return BadGroup(sum(count for count, _, _ in found), index // groups, index % groups * m, m, kept)


def structure(weight: Tensor) -> Structure:
    """Name the sparsity pattern of a tensor.

    Args:
        weight: Any shape and dtype.

    Returns:
        The tightest pattern that holds exactly: "2:4", then 1:4, 4:8 and the like, whole zero rows or columns, unstructured, dense.
    """
    elements = weight.numel()
    nonzeros, used_rows, used_columns = _count(_as_rows(weight)) if elements else (0, 0, 0)
    zeros = elements - nonzeros
    if weight.ndim != 2 or not elements:
        return Structure("dense", zeros, elements, f"only 2-D weights have a pattern, this one has shape {tuple(weight.shape)}")
    kind, reason = _classify(weight, zeros, used_rows, used_columns)
    return Structure(kind, zeros, elements, reason)


def mask_n_m(weight: Tensor, n: int, m: int) -> Tensor:
    """Mark the `n` largest magnitudes of each group of `m`.  Chosen by rank, never by a threshold: each group keeps exactly `n`.

    Args:
        weight: (..., in_features), float or int8; in_features is a multiple of `m`.  NaN ranks above every number;
            of equal magnitudes the lower column is kept.
        n: How many each group keeps.
        m: Size of a group.

    Returns:
        mask: shape of weight, bool, True = kept.

    Raises:
        ValueError: `n` or in_features does not fit `m`.
    """
    _require_groups(weight, m)
    if not 0 < n <= m:
        raise ValueError(f"a group of {m} cannot keep {n} values, expected 1 to {m}")
    rows = _as_rows(weight)
    if rows.dtype not in FLOAT_BITS:
        rows = rows.short() if rows.dtype.itemsize == 1 else rows.long()  # |-128| is no int8
    mask = torch.empty(rows.shape, dtype=torch.bool, device=weight.device)
    bits, marks = _array(rows), _array(mask)
    map_rows(lambda chunk: _mark_largest(_magnitudes(bits[chunk], rows.dtype), n, marks[chunk].reshape(-1, m)), rows.shape, rows.device)
    return mask.view(weight.shape)


def mask_2_4(weight: Tensor) -> Tensor:
    """Mark the two largest magnitudes of each group of four: `mask_n_m(weight, 2, 4)`."""
    return mask_n_m(weight, 2, 4)


def _require_groups(weight: Tensor, m: int) -> None:
    in_features = weight.shape[-1] if weight.ndim else 0
    if weight.ndim == 0 or in_features % m:
        raise ValueError(f"in_features must be a multiple of {m}, got {in_features} (shape {tuple(weight.shape)}); leave this weight dense")


# ---- chunks of rows -------------------------------------------------------------------------------------------------------


def map_rows(work: Callable[[slice], T], shape: Sequence[int], device: torch.device | str = "cpu") -> list[T]:
    """The results of `work(chunk)` for chunks of rows, in order.

    Args:
        work: Is given a slice of the rows.  On a CPU it is called from as many threads as torch uses, and should leave the
            computing to numpy, which lets the others run; torch's own threads would wait for each other at every operation.
        shape: Rows and columns of the weight.
        device: Where the weight is.
    """
    (rows, columns), on_cpu = shape, torch.device(device).type == "cpu"
    step = max(1, (CPU_CHUNK if on_cpu else DEVICE_CHUNK) // max(1, columns))
    chunks = [slice(row, min(rows, row + step)) for row in range(0, rows, step)]
    results: list[Any] = [None] * len(chunks)
    turns = iter(range(len(chunks)))  # shared by the threads: taking the next one is atomic

    def take_turns() -> None:
        for turn in turns:
            results[turn] = work(chunks[turn])

    num_helpers = _num_threads(len(chunks)) - 1 if on_cpu else 0
    if num_helpers < 1:
        take_turns()
        return results
    with ThreadPoolExecutor(num_helpers) as pool:
        helpers = [pool.submit(take_turns) for _ in range(num_helpers)]
        take_turns()
        for helper in helpers:
            helper.result()
    return results


def _num_threads(num_chunks: int) -> int:
    # Whoever calls from a thread of its own, as Transformers' loader does for every weight, has others at work already.
    if threading.current_thread() is not threading.main_thread():
        return 1
    return min(torch.get_num_threads(), num_chunks // CHUNKS_PER_THREAD, MAX_THREADS)


def _as_rows(weight: Tensor) -> Tensor:
    return weight.detach().flatten(0, -2) if weight.ndim > 1 else weight.detach().reshape(1, weight.numel())


# ---- arrays: of numpy on a CPU, where it compares several times as fast as torch 2.13 (Xeon, 2026-11-30), else of torch -----


def nonzeros(bits: Any, dtype: torch.dtype) -> Any:
    """Which elements of an array are non-zero, given a float's bits as an integer; an array of the same library and shape, bool."""
    return (_without_sign(bits, dtype) if may_hold_negative_zero(bits, dtype) else bits) != 0


def may_hold_negative_zero(bits: Any, dtype: torch.dtype) -> bool:
    """Whether -0.0 must be reckoned with; only arrays of numpy are searched, a search on a device would have to be waited for."""
    if dtype not in FLOAT_BITS or _library(bits) is torch:
        return dtype in FLOAT_BITS
    signed = bits.view(f"i{bits.itemsize}")
    return bool(signed.min(initial=0) == np.iinfo(signed.dtype).min)


def _array(weight: Tensor) -> Any:
    """The elements, floats as integers of the same bits."""
    bits = weight.detach().view(FLOAT_BITS.get(weight.dtype, weight.dtype))
    return bits.numpy() if bits.device.type == "cpu" else bits


def _library(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else torch


def _contiguous(array: Any) -> Any:
    return np.ascontiguousarray(array) if _library(array) is np else array.contiguous()


def _without_sign(bits: Any, dtype: torch.dtype) -> Any:
    """Ordered as the magnitudes are, 0 for both zeros."""
    return bits & torch.iinfo(FLOAT_BITS[dtype]).max


def _magnitudes(bits: Any, dtype: torch.dtype) -> Any:
    """Integers in the order of the magnitudes, which are equal for all NaNs."""
    if dtype not in FLOAT_BITS:
        return abs(bits)
    # Two above the largest number is the first NaN after infinity.
    largest = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(FLOAT_BITS[dtype]))
    return _without_sign(bits, dtype).clip(max=min(largest + 2, torch.iinfo(FLOAT_BITS[dtype]).max))


def _count_in_groups(nonzero: Any, m: int) -> Any:
    """(rows, C) bool -> (rows * C / m,) integers."""
    library = _library(nonzero)
    groups = _contiguous(nonzero.reshape(-1, m))
    # One multiplication adds the bytes of four or eight bools, in the highest byte.
    if m == 4:
        return (groups.view(library.int32) * 0x01010101 >> 24).reshape(-1)
    if m == 8:
        return (groups.view(library.int64) * 0x0101010101010101 >> 56).reshape(-1)
    return groups.sum(-1)


def _count(rows: Tensor) -> tuple[int, int, int]:
    """How many non-zeros there are, and how many rows and columns that hold one."""
    bits, columns = _array(rows), rows.shape[1]

    def count(chunk: slice) -> tuple[int, int, Tensor]:
        nonzero = nonzeros(bits[chunk], rows.dtype)
        total = _count_in_groups(nonzero, 8 if columns % 8 == 0 else columns).sum()
        return int(total), int(nonzero.any(1).sum()), torch.as_tensor(nonzero.any(0))

    totals, used_rows, used_columns = zip(*map_rows(count, rows.shape, rows.device), strict=True)
    return sum(totals), sum(used_rows), int(torch.stack(used_columns).any(0).sum())


def _mark_largest(magnitudes: Any, n: int, kept: Any) -> None:
    """Set kept, (groups, m).  The rank of an element is the number of those that are larger, or equal and in a lower column."""
    columns = _contiguous(magnitudes.reshape(kept.shape).T)  # (m, groups)
    library = _library(columns)
    ranks = library.zeros_like(columns, dtype=library.uint8 if len(columns) <= 256 else library.int64)
    for lower in range(len(columns)):
        for upper in range(lower + 1, len(columns)):
            lower_first = columns[lower] >= columns[upper]
            ranks[upper] += lower_first
            ranks[lower] += ~lower_first
    for column, rank in enumerate(ranks):
        kept[:, column] = rank < n


def _follows(weight: Tensor, n: int, m: int) -> bool:
    return weight.shape[-1] % m == 0 and find_bad_groups(weight, n, m) is None


def _classify(weight: Tensor, zeros: int, used_rows: int, used_columns: int) -> tuple[str, str]:
    share = zeros / weight.numel()
    if share >= 0.75 and _follows(weight, 1, 4):
        return "1:4", "at most one non-zero in every group of four"
    if share >= 0.5 and _follows(weight, 2, 4):
        return "2:4", "at most two non-zeros in every group of four"
    if share and used_rows * used_columns == weight.numel() - zeros:
        kind: Literal["rows", "columns"] = "rows" if used_rows < weight.shape[0] else "columns"
        return kind, f"{weight.shape[0] - used_rows} rows and {weight.shape[1] - used_columns} columns are zero, the rest is dense"
    for n, m in ((4, 8), (8, 16), (3, 4), (6, 8)):
        if share >= 1 - n / m and _follows(weight, n, m):
            return f"{n}:{m}", f"at most {n} non-zeros in every group of {m}"
    if share >= MIN_UNSTRUCTURED_ZEROS:
        return "unstructured", f"{share:.1%} zeros without a pattern"
    return "dense", f"{share:.1%} zeros"

"""The group of four: which weights count as zero, which structure a tensor has, and masks by magnitude.

A *group* is `m` consecutive weights of one row, along the last axis.  N:M means at most N *kept* of M.
Everything here is exact: 1e-30 is a non-zero, -0.0 is a zero, NaN is a non-zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ONE_BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# Rows are examined in pieces, so that the booleans of a large weight never exist all at once.
PIECE_ELEMENTS = 1 << 20
# Without a pattern, at least this share of zeros makes a tensor worth calling unstructured.
MIN_UNSTRUCTURED_ZEROS = 0.1


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
    if weight.dtype in ONE_BYTE_FLOATS:
        return (weight.view(torch.uint8) & 0x7F) != 0
    return weight != 0


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
    count, first = 0, None
    for row, piece in _pieces(weight):
        kept = is_nonzero(piece).view(-1, m).sum(-1)  # (rows * groups,)
        bad = kept > n
        num_bad = int(bad.sum())
        if num_bad and first is None:
            index = int(bad.int().argmax())
            groups = piece.shape[-1] // m
            first = (row + index // groups, index % groups * m, int(kept[index]))
        count += num_bad
    return None if first is None else BadGroup(count, first[0], first[1], m, first[2])


def structure(weight: Tensor) -> Structure:
    """Name the sparsity pattern of a tensor.

    Args:
        weight: Any shape and dtype.

    Returns:
        The tightest pattern that holds exactly: "2:4", then 1:4, 4:8 and the like, whole zero rows or columns, unstructured, dense.
    """
    elements = weight.numel()
    if weight.ndim != 2 or not elements:
        zeros = elements - sum(int(is_nonzero(piece).sum()) for _, piece in _pieces(weight)) if weight.ndim else 0
        return Structure("dense", zeros, elements, f"only 2-D weights have a pattern, this one has shape {tuple(weight.shape)}")
    nonzeros, used_columns = _nonzeros_by_row_and_column(weight)
    zeros = elements - int(nonzeros.sum())
    kind, reason = _classify(weight, zeros, nonzeros, used_columns)
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
    masks = [_keep_largest(piece, n, m) for _, piece in _pieces(weight)]
    return torch.cat(masks).view(weight.shape) if masks else torch.zeros_like(weight, dtype=torch.bool)


def mask_2_4(weight: Tensor) -> Tensor:
    """Mark the two largest magnitudes of each group of four: `mask_n_m(weight, 2, 4)`."""
    return mask_n_m(weight, 2, 4)


def _require_groups(weight: Tensor, m: int) -> None:
    in_features = weight.shape[-1] if weight.ndim else 0
    if weight.ndim == 0 or in_features % m:
        raise ValueError(f"in_features must be a multiple of {m}, got {in_features} (shape {tuple(weight.shape)}); leave this weight dense")


def _pieces(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of the weight as contiguous 2-D pieces of about PIECE_ELEMENTS."""
    rows = weight.flatten(0, -2) if weight.ndim > 1 else weight.reshape(1, weight.numel())
    step = max(1, PIECE_ELEMENTS // max(1, rows.shape[1]))
    for row in range(0, rows.shape[0], step):
        yield row, rows[row : row + step].contiguous()


def _keep_largest(piece: Tensor, n: int, m: int) -> Tensor:
    # float32 holds every magnitude of the narrower dtypes, |-128| of int8 included.
    magnitude = (piece if piece.dtype == torch.float64 else piece.float()).abs()
    largest = torch.finfo(magnitude.dtype).max
    groups = magnitude.nan_to_num(nan=torch.inf, posinf=largest).view(-1, m)
    mine, other = groups.unsqueeze(2), groups.unsqueeze(1)  # (groups, m, 1), (groups, 1, m)
    lower_column = torch.ones(m, m, dtype=torch.bool, device=piece.device).tril(-1)
    rank = ((other > mine) | ((other == mine) & lower_column)).sum(2)  # (groups, m)
    return (rank < n).view(piece.shape)


def _nonzeros_by_row_and_column(weight: Tensor) -> tuple[Tensor, Tensor]:
    by_row, used = [], torch.zeros(weight.shape[1], dtype=torch.bool, device=weight.device)
    for _, piece in _pieces(weight):
        nonzero = is_nonzero(piece)
        by_row.append(nonzero.sum(1))
        used |= nonzero.any(0)
    return torch.cat(by_row), used


def _follows(weight: Tensor, n: int, m: int) -> bool:
    return weight.shape[-1] % m == 0 and find_bad_groups(weight, n, m) is None


def _classify(weight: Tensor, zeros: int, nonzeros_by_row: Tensor, used_columns: Tensor) -> tuple[str, str]:
    share = zeros / weight.numel()
    dense_rows, dense_columns = int((nonzeros_by_row > 0).sum()), int(used_columns.sum())
    if share >= 0.75 and _follows(weight, 1, 4):
        return "1:4", "at most one non-zero in every group of four"
    if share >= 0.5 and _follows(weight, 2, 4):
        return "2:4", "at most two non-zeros in every group of four"
    if share and dense_rows * dense_columns == weight.numel() - zeros:
        kind: Literal["rows", "columns"] = "rows" if dense_rows < weight.shape[0] else "columns"
        return kind, f"{weight.shape[0] - dense_rows} rows and {weight.shape[1] - dense_columns} columns are zero, the rest is dense"
    for n, m in ((4, 8), (8, 16), (3, 4), (6, 8)):
        if share >= 1 - n / m and _follows(weight, n, m):
            return f"{n}:{m}", f"at most {n} non-zeros in every group of {m}"
    if share >= MIN_UNSTRUCTURED_ZEROS:
        return "unstructured", f"{share:.1%} zeros without a pattern"
    return "dense", f"{share:.1%} zeros"


"""Weights of 4 or 8 bits in the layout of marlin-24, in every shape that `marlin24.cu` can be compiled for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_sparse24.kernels.sparse_mma import Start, cuda_core


@dataclass(frozen=True)
class Marlin24At:
    """Where a weight is, and its bias: addresses of contiguous tensors, so that a starter keeps no memory.

    Args:
        weight_packed: (K / 32, num_bits / 2 * N), int32.
        meta: (K / 32, 2 * N), int16.
        scales: (K / 128 or 1, N), float16.
        bias: (N,), or 0.
        n: Rows.
        k: Columns.
        device_index: As torch counts devices.
    """

    weight_packed: int
    meta: int
    scales: int
    bias: int
    n: int
    k: int
    device_index: int

    @classmethod
    def of(cls, weight_packed: Tensor, meta: Tensor, scales: Tensor, bias: Tensor | None) -> "Marlin24At":
        """Of the tensors of a checkpoint."""
        at = (weight_packed.data_ptr(), meta.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr())
        return cls(*at, scales.shape[1], 32 * weight_packed.shape[0], scales.get_device())


def format_defines(dtype: torch.dtype, *, num_bits: int, grouped: bool, scales_permuted: bool) -> dict[str, int]:
    """The macros that say what is read, and what comes out."""
    return {"BF16": int(dtype == torch.bfloat16), "BITS": num_bits, "GROUPED": int(grouped), "PERMUTED": int(scales_permuted)}


@dataclass(frozen=True)
class Marlin24:
    """`marlin24.cu`: few rows of x, from compute capability 8.0, from 9.0 with a split.  The fields are macros of the file."""

    bn: int
    depth: int
    row_warps: int
    column_warps: int
    steps: int
    split: int = 1
    source: ClassVar[str] = "marlin24"

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.row_warps * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        x = self.bn * (128 * self.steps * self.column_warps * 2 + 16)
        return max(2 * x, self.column_warps * self.bn * (64 * self.row_warps + 4) * 4)

    def defines(self, dtype: torch.dtype, *, num_bits: int, grouped: bool, scales_permuted: bool) -> dict[str, int]:
        """The macros; see `format_defines`."""
        return {
            **format_defines(dtype, num_bits=num_bits, grouped=grouped, scales_permuted=scales_permuted),
            "BN": self.bn, "DEPTH": self.depth, "ROW_WARPS": self.row_warps, "COLUMN_WARPS": self.column_warps, "STEPS": self.steps,
            "SPLIT": self.split,
        }  # fmt: skip

    def why_not(self, n: int, k: int, *, grouped: bool, capability: tuple[int, int]) -> str | None:
        """Why the kernel cannot multiply by an (n, k) weight."""
        if self.split > 1 and capability < (9, 0):
            return f"compute capability {capability[0]}.{capability[1]} has no clusters of blocks, which come with 9.0"
        return why_not_read(n, k, grouped=grouped)

    def starter(self, kernel: Any, weight: Marlin24At, m: int) -> Start:
        """What starts the kernel for m rows of x, which is contiguous and aligned to 16 bytes, as y is."""
        n, k, at, core = weight.n, weight.k, weight, cuda_core()
        launch, stream = core.launch, core.stream_of(weight.device_index)
        grid = (-(-n // (64 * self.row_warps)), -(-m // self.bn), 1)
        # The grid counts clusters.
        configs = core.configs(grid, self.split, self.threads, self.shared_bytes)

        def start(x: Tensor, y: Tensor, early: bool) -> None:
            args = (at.weight_packed, at.meta, at.scales, x.data_ptr(), at.bias, y.data_ptr(), m, n, k)
            launch(stream(), configs[early], kernel, *args)

        return start


def why_not_read(n: int, k: int, *, grouped: bool) -> str | None:
    """Why no kernel here reads an (n, k) weight."""
    if n % 64:
        return f"out_features {n} is no multiple of 64"
    multiple = 128 if grouped else 32
    return f"in_features {k} is no multiple of {multiple}" if k % multiple else None


# ---- for many rows of x ----------------------------------------------------------------------------------------------------

EXPAND_THREADS = 128


def expand_defines(dtype: torch.dtype, *, num_bits: int, grouped: bool, scales_permuted: bool) -> dict[str, int]:
    """The macros of the kernel `marlin24_expand`."""
    return {**format_defines(dtype, num_bits=num_bits, grouped=grouped, scales_permuted=scales_permuted), "EXPAND": 1}


def expand_starter(kernel: Any, weight: Marlin24At) -> Callable[[Tensor, Tensor], None]:
    """What writes a weight as our other kernels read it.

    Args:
        kernel: `marlin24_expand`, compiled for the dtype of the values.
        weight: Where it is; its bias is left alone.

    Returns:
        Takes values (N, K / 2), scaled, and bitmask (N, K / 8), uint8, both contiguous and aligned to 16 bytes.  What multiplies by
        them must not start early: it reads weights before this has ended.
    """
    n, k, at, core = weight.n, weight.k, weight, cuda_core()
    launch, stream = core.launch, core.stream_of(weight.device_index)
    warps = n // 64 * -(-k // 128)
    config = core.configs((-(-warps * 32 // EXPAND_THREADS), 1, 1), 1, EXPAND_THREADS, 0)[0]

    def start(values: Tensor, bitmask: Tensor) -> None:
        args = (at.weight_packed, at.meta, at.scales, values.data_ptr(), bitmask.data_ptr(), n, k)
        launch(stream(), config, kernel, *args)

    return start


# ---- which configuration -----------------------------------------------------------------------------------------------------

MAX_ROWS = 64
# For up to so many rows of x: where the units of 64 rows of W are at most half of the multiprocessors, at most twice as many, and
# where they are more (benchmarks/results/tune-marlin24-h200.json: 3.8 % longer than the best of all, on average; 8 bits with groups
# and one row of x, where units are many, 45 %).
CONFIGS: dict[int, tuple[Marlin24, Marlin24, Marlin24]] = {
    8: (
        Marlin24(bn=8, depth=1, row_warps=1, column_warps=16, steps=1, split=2),
        Marlin24(bn=8, depth=1, row_warps=1, column_warps=16, steps=1),
        Marlin24(bn=8, depth=2, row_warps=2, column_warps=4, steps=2),
    ),
    16: (
        Marlin24(bn=16, depth=2, row_warps=1, column_warps=8, steps=2, split=2),
        Marlin24(bn=16, depth=1, row_warps=1, column_warps=16, steps=1),
        Marlin24(bn=16, depth=1, row_warps=2, column_warps=4, steps=1),
    ),
    32: (
        Marlin24(bn=32, depth=1, row_warps=1, column_warps=8, steps=1, split=2),
        Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1, split=2),
        Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1),
    ),
    MAX_ROWS: (
        Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1, split=2),
        Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1),
        Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1),
    ),
}
# For chips without clusters of blocks, or with less shared memory.
OTHERS = (
    Marlin24(bn=8, depth=1, row_warps=1, column_warps=8, steps=1),
    Marlin24(bn=16, depth=1, row_warps=1, column_warps=8, steps=1),
    Marlin24(bn=32, depth=1, row_warps=2, column_warps=4, steps=1),
)


def config_for(n: int, m: int, num_multiprocessors: int, capability: tuple[int, int]) -> Marlin24:
    """How the kernel is compiled for m rows of x, at most MAX_ROWS, and n rows of W."""
    if capability != (9, 0):
        return next(config for config in OTHERS if config.bn >= min(m, OTHERS[-1].bn))
    units = n // 64
    size = 0 if units <= num_multiprocessors / 2 else 1 if units <= 2 * num_multiprocessors else 2
    return next(configs for rows, configs in CONFIGS.items() if m <= rows)[size]

"""Weights of 4 or 8 bits in the layout of marlin-24, in every shape that `marlin24.cu` can be compiled for."""

from dataclasses import dataclass
from typing import ClassVar

import torch


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
        """The macros."""
        return {
            "BF16": int(dtype == torch.bfloat16), "BITS": num_bits, "GROUPED": int(grouped), "PERMUTED": int(scales_permuted),
            "BN": self.bn, "DEPTH": self.depth, "ROW_WARPS": self.row_warps, "COLUMN_WARPS": self.column_warps, "STEPS": self.steps,
            "SPLIT": self.split,
        }  # fmt: skip

    def why_not(self, n: int, k: int, *, grouped: bool) -> str | None:
        """Why the kernel cannot multiply by an (n, k) weight."""
        if n % 64:
            return f"out_features {n} is no multiple of 64"
        multiple = 128 if grouped else 32
        return f"in_features {k} is no multiple of {multiple}" if k % multiple else None


# Not measured yet: a few shapes that seem sensible.
CONFIGS = (
    Marlin24(bn=8, depth=1, row_warps=1, column_warps=8, steps=1, split=4),
    Marlin24(bn=16, depth=1, row_warps=1, column_warps=8, steps=1, split=4),
    Marlin24(bn=32, depth=1, row_warps=1, column_warps=8, steps=1, split=4),
    Marlin24(bn=8, depth=2, row_warps=2, column_warps=4, steps=2),
    Marlin24(bn=16, depth=1, row_warps=2, column_warps=4, steps=1),
)

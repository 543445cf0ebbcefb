"""Our kernels for sparse tensor cores, in every shape that they can be compiled for: `mma_sp.cu` and `wgmma_sp.cu`.

A configuration says how a kernel is compiled and started; which one is used for which problem is decided in `dispatch`.
"""

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

# Tensor maps that are kept, for the last so many tensors: a map takes longer to make than a kernel to start.
NUM_MAPS = 4096


@dataclass(frozen=True)
class MmaSp:
    """`mma_sp.cu`: few rows of x, from compute capability 8.0.  The fields are the macros of the file."""

    bn: int
    tiles: int
    depth: int
    row_warps: int
    column_warps: int
    steps: int
    buffers: int
    min_blocks: int = 1
    source: ClassVar[str] = "mma_sp"
    k_multiple: ClassVar[int] = 16

    @property
    def rows(self) -> int:
        """Rows of the weight that a block works on at a time."""
        return 16 * self.tiles * self.row_warps

    @property
    def chunk(self) -> int:
        """Columns of x that are staged at a time."""
        return 64 * self.steps * self.column_warps

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.row_warps * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        x = self.bn * (self.chunk * 2 + 16)
        partial = self.column_warps * self.bn * (self.rows + 4) * 4
        return x + partial if self.buffers == 1 else max(2 * x, partial)

    def defines(self, dtype: torch.dtype) -> dict[str, int]:
        """The macros."""
        return {
            "BF16": int(dtype == torch.bfloat16), "BN": self.bn, "TILES": self.tiles, "DEPTH": self.depth, "ROW_WARPS": self.row_warps,
            "COLUMN_WARPS": self.column_warps, "STEPS": self.steps, "BUFFERS": self.buffers, "MIN_BLOCKS": self.min_blocks,
        }  # fmt: skip

    def why_not(self, n: int, k: int) -> str | None:
        """Why the kernel cannot multiply by an (n, k) weight."""
        if k % self.k_multiple:
            return f"in_features {k} is no multiple of {self.k_multiple}"
        if self.buffers == 1 and k > self.chunk:
            return f"in_features {k} is above {self.chunk}"
        return None

    def run(self, kernel: Any, x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, y: Tensor, early: bool = False) -> None:
        """Start the kernel on the current stream.

        Args:
            kernel: This configuration, compiled and loaded.
            x: (M, K), rows contiguous and aligned to 8 bytes.
            compressed: (N, K / 2), contiguous.
            bitmask: (N, K / 8), contiguous.
            bias: (N,), contiguous, or None.
            y: (M, N), contiguous; is overwritten.
            early: Whether the kernel may start before the one before it on the stream has ended; that one must not write the weight.
        """
        (m, k), n = x.shape, y.shape[1]
        groups, slots = -(-n // self.rows), _multiprocessors(x.device.index) * self.min_blocks
        blocks = -(-groups // -(-groups // slots))  # as few as take as many turns
        grid = (blocks, -(-m // self.bn), 1)
        api = _api()
        api.launch(
            api.stream(x.device.index), api.config(grid, (1, 1, 1), self.threads, self.shared_bytes, early), kernel,
            compressed.data_ptr(), bitmask.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(),
            m, n, k, x.stride(0),
        )  # fmt: skip


@dataclass(frozen=True)
class WgmmaSp:
    """`wgmma_sp.cu`: any number of rows of x, on compute capability 9.0.  The fields are the macros of the file."""

    bm: int
    bn: int
    bk: int
    stages: int
    ahead: int = 2
    split: int = 1
    multicast: int = 1
    min_blocks: int = 1
    group: int = 8
    source: ClassVar[str] = "wgmma_sp"
    k_multiple: ClassVar[int] = 64

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.bm * 2 + 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages * (self.bm * self.bk + self.bn * self.bk * 2)
        return stages + self.bm * min(self.bn, 64) * 144 // 64 if self.split == 1 else max(stages, self.bn * (self.bm + 4) * 4)

    def defines(self, dtype: torch.dtype) -> dict[str, int]:
        """The macros."""
        return {
            "BF16": int(dtype == torch.bfloat16), "BM": self.bm, "BN": self.bn, "BK": self.bk, "STAGES": self.stages, "AHEAD": self.ahead,
            "SPLIT": self.split, "MULTICAST": self.multicast, "MIN_BLOCKS": self.min_blocks,
        }  # fmt: skip

    def why_not(self, n: int, k: int) -> str | None:
        """Why the kernel cannot multiply by an (n, k) weight."""
        return f"in_features {k} is no multiple of {self.bk}" if k % self.bk else None

    def run(self, kernel: Any, x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, y: Tensor, early: bool = False) -> None:
        """Start the kernel on the current stream.

        Args:
            kernel: This configuration, compiled and loaded.
            x: (M, K), rows contiguous and aligned to 16 bytes.
            compressed: (N, K / 2), contiguous.
            bitmask: (N, K / 8), contiguous.
            bias: (N,), contiguous, or None.
            y: (M, N), contiguous; is overwritten.
            early: Whether the kernel may start before the one before it on the stream has ended; that one must not write the weight.
        """
        (m, k), n = x.shape, y.shape[1]
        clusters, size = -(-n // (self.bm * self.multicast)) * -(-m // self.bn), self.split * self.multicast
        api = _api()
        stream = api.stream(x.device.index)
        if self.split == 1:
            clusters = min(clusters, api.resident(kernel, size, self.threads, self.shared_bytes, stream))
        api.launch(
            stream, api.config((clusters, 1, 1), (size, 1, 1), self.threads, self.shared_bytes, early), kernel,
            tensor_map(compressed, self.bm, min(64, self.bk // 2)), tensor_map(x, self.bn // self.multicast, 64),
            bitmask.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr(), m, n, k, self.group,
        )  # fmt: skip


# ---- cuda-core -------------------------------------------------------------------------------------------------------------


class _Api:
    """What of cuda-core a launch needs, with everything kept that is made anew by each call otherwise."""

    def __init__(self) -> None:
        from cuda.core import LaunchConfig, Stream, launch

        self.launch = launch
        self.config = functools.lru_cache(4096)(
            lambda grid, cluster, threads, shared, early: LaunchConfig(
                grid=grid,
                block=threads,
                shmem_size=shared,
                programmatic_stream_serialization=early,
                **({} if cluster == (1, 1, 1) else {"cluster": cluster}),
            )
        )
        # Blocks of one multiprocessor times all, but clusters do not straddle groups of multiprocessors: ask.
        self.resident = functools.lru_cache(4096)(
            lambda kernel, size, threads, shared, stream: kernel.occupancy.max_active_clusters(
                LaunchConfig(grid=1, cluster=size, block=threads, shmem_size=shared), stream=stream
            )
        )
        self._stream = functools.lru_cache(256)(Stream.from_handle)

    def stream(self, device_index: int) -> Any:
        """The current stream of torch."""
        return self._stream(torch.cuda.current_stream(device_index).cuda_stream)


@functools.cache
def _api() -> _Api:
    return _Api()


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def tensor_map(matrix: Tensor, rows: int, columns: int) -> Any:
    """How the copy engine finds boxes of a matrix, which it swizzles by the bytes of their rows.

    Args:
        matrix: 2-D, elements of two bytes, rows contiguous and aligned to 16 bytes.
        rows: Of a box.
        columns: Of a box, 32 or 64.
    """
    key = (matrix.data_ptr(), *matrix.shape, matrix.stride(0), rows, columns, matrix.device.index)
    found = _MAPS.get(key)
    if found is None:
        found = _MAPS[key] = _new_map(matrix, rows, columns)
        while len(_MAPS) > NUM_MAPS:
            _MAPS.popitem(last=False)
    return found


_MAPS: "OrderedDict[tuple[Any, ...], Any]" = OrderedDict()


def _new_map(matrix: Tensor, rows: int, columns: int) -> Any:
    import numpy as np
    from cuda.core import Buffer, TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    # By address: a map of the tensor itself would keep its memory.
    size, (pitch, _) = matrix.element_size(), matrix.stride()
    nbytes = ((matrix.shape[0] - 1) * pitch + matrix.shape[1]) * size
    buffer = Buffer.from_handle(matrix.data_ptr(), nbytes)
    view = StridedMemoryView.from_buffer(buffer, tuple(matrix.shape), (pitch, 1), itemsize=size, dtype=np.dtype("u2"))
    options = TensorMapDescriptorOptions((rows, columns), data_type=np.dtype("u2"))
    swizzles = type(options.swizzle)  # cuda-core 1.2 exports the options, but not their enumerations
    options.swizzle = {32: swizzles.SWIZZLE_64B, 64: swizzles.SWIZZLE_128B}[columns]
    return view.as_tensor_map(options=options)

"""Our kernels for sparse tensor cores, in every shape that they can be compiled for: `mma_sp.cu` and `wgmma_sp.cu`.

A configuration says how a kernel is compiled and started; which one is used for which problem is decided in `dispatch`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

# Tensor maps of x that are kept for each weight: a map takes longer to make than a kernel to start.
NUM_MAPS = 64

# Starts a kernel on the current stream of the device, which must be the current one: x (M, K), y (M, N), and whether it may start
# before the kernel before it has ended; that one must not write the weight.
Start = Callable[[Tensor, Tensor, bool], None]


@dataclass(frozen=True)
class WeightAt:
    """Where a weight is: addresses, not tensors, so that a kernel's starter keeps no memory.

    Args:
        values: Of compressed (N, K / 2), contiguous.
        bitmask: (N, K / 8), contiguous.
        bias: (N,), contiguous, or 0.
        n: Rows.
        k: Columns.
        device_index: As torch counts devices.
    """

    values: int
    bitmask: int
    bias: int
    n: int
    k: int
    device_index: int

    @classmethod
    def of(cls, compressed: Tensor, bitmask: Tensor, bias: Tensor | None) -> "WeightAt":
        """Of packed tensors."""
        n, k = compressed.shape[0], 2 * compressed.shape[1]
        bias_at = 0 if bias is None else bias.data_ptr()
        return cls(compressed.data_ptr(), bitmask.data_ptr(), bias_at, n, k, compressed.get_device())


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

    def starter(self, kernel: Any, weight: WeightAt, m: int) -> Start:
        """What starts the kernel for m rows of x, which is contiguous and aligned to 16 bytes, as y is."""
        n, k = weight.n, weight.k
        groups, slots = -(-n // self.rows), _multiprocessors(weight.device_index) * self.min_blocks
        blocks = -(-groups // -(-groups // slots))  # as few as take as many turns
        api = cuda_core()
        launch, stream, values, bitmask, bias = api.launch, api.stream_of(weight.device_index), weight.values, weight.bitmask, weight.bias
        configs = api.configs((blocks, -(-m // self.bn), 1), 1, self.threads, self.shared_bytes)

        def start(x: Tensor, y: Tensor, early: bool) -> None:
            launch(stream(), configs[early], kernel, values, bitmask, x.data_ptr(), bias, y.data_ptr(), m, n, k, k)

        return start


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

    def starter(self, kernel: Any, weight: WeightAt, m: int) -> Start:
        """What starts the kernel for m rows of x, which is contiguous and aligned to 16 bytes, as y is."""
        n, k = weight.n, weight.k
        clusters, size = -(-n // (self.bm * self.multicast)) * -(-m // self.bn), self.split * self.multicast
        api = cuda_core()
        launch, stream, bitmask, bias, group = api.launch, api.stream_of(weight.device_index), weight.bitmask, weight.bias, self.group
        if self.split == 1:
            clusters = min(clusters, api.room(kernel, size, self.threads, self.shared_bytes, stream()))
        configs = api.configs((clusters, 1, 1), size, self.threads, self.shared_bytes)
        values_map = _tensor_map(weight.values, n, k // 2, self.bm, min(64, self.bk // 2))
        x_maps: dict[int, Any] = {}

        def start(x: Tensor, y: Tensor, early: bool) -> None:
            address = x.data_ptr()
            x_map = x_maps.get(address)
            if x_map is None:
                if len(x_maps) >= NUM_MAPS:
                    x_maps.clear()
                x_map = x_maps[address] = _tensor_map(address, m, k, self.bn // self.multicast, 64)
            launch(stream(), configs[early], kernel, values_map, x_map, bitmask, y.data_ptr(), bias, m, n, k, group)

        return start


# ---- cuda-core -------------------------------------------------------------------------------------------------------------


class _Api:
    """What of cuda-core a launch needs, with everything kept that is made anew by each call otherwise."""

    def __init__(self) -> None:
        from cuda.core import LaunchConfig, Stream, launch

        self.launch, self._config, self._stream = launch, LaunchConfig, Stream

    def configs(self, grid: tuple[int, int, int], cluster: int, threads: int, shared_bytes: int) -> tuple[Any, Any]:
        """How to launch after the kernel before, and early; the grid counts clusters."""
        options = {"grid": grid, "block": threads, "shmem_size": shared_bytes, **({} if cluster == 1 else {"cluster": cluster})}
        # Before compute capability 9.0 a kernel cannot be early, and never asked to be: see `may_start_early`.
        return self._config(**options), self._config(**options, programmatic_stream_serialization=True)

    @functools.cache  # noqa: B019  there is one object
    def room(self, kernel: Any, cluster: int, threads: int, shared_bytes: int, stream: Any) -> int:
        """Clusters that run at once: they do not straddle groups of multiprocessors."""
        config = self._config(grid=1, cluster=cluster, block=threads, shmem_size=shared_bytes)
        return int(kernel.occupancy.max_active_clusters(config, stream=stream))

    @functools.cache  # noqa: B019
    def stream_of(self, device_index: int) -> Callable[[], Any]:
        """What gives torch's current stream of a device."""
        streams: dict[int, Any] = {}
        current = torch._C._cuda_getCurrentRawStream  # torch.cuda.current_stream makes an object first
        from_handle = self._stream.from_handle

        def stream() -> Any:
            handle = current(device_index)
            found = streams.get(handle)
            if found is None:
                found = streams[handle] = from_handle(handle)
            return found

        return stream


@functools.cache
def cuda_core() -> _Api:
    """What launches kernels: one for all."""
    return _Api()


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _tensor_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> Any:
    """How the copy engine finds boxes of a contiguous matrix of two-byte elements, which it swizzles by the bytes of their rows.

    By address: a map of a tensor would keep its memory.

    Args:
        address: Of the matrix, a multiple of 16.
        rows: Of the matrix.
        columns: Of the matrix, a multiple of 8.
        box_rows: Rows of a box.
        box_columns: Columns of a box, 32 or 64.
    """
    import numpy as np
    from cuda.core import Buffer, TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    buffer = Buffer.from_handle(address, rows * columns * 2)
    view = StridedMemoryView.from_buffer(buffer, (rows, columns), (columns, 1), itemsize=2, dtype=np.dtype("u2"))
    options = TensorMapDescriptorOptions((box_rows, box_columns), data_type=np.dtype("u2"))
    swizzles = type(options.swizzle)  # cuda-core 1.2 exports the options, but not their enumerations
    options.swizzle = {32: swizzles.SWIZZLE_64B, 64: swizzles.SWIZZLE_128B}[box_columns]
    return view.as_tensor_map(options=options)

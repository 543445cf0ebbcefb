"""Our kernels for sparse tensor cores, in every shape that they can be compiled for: `mma_sp.cu` and `wgmma_sp.cu`.

A configuration says how a kernel is compiled and started; which one is used for which problem is decided in `dispatch`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

# Tensor maps of activations that are kept for each weight.
NUM_MAPS = 64

# How kernels name the dtype of scales.
SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Starts a kernel on the current stream of the device, which must be the current one: x (M, K), y (M, N), and whether it may start
# before the kernel before it has ended; that one must not write the weight.  If x is rounded, also the address of its scales.
Start = Callable[..., None]


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
        value_bytes: Of a value.
        scales: Of the scales of values of 8 bits, (N,) or one.
        scale_type: A value of SCALE_TYPES.
        scale_stride: 1, or 0 if there is one scale.
    """

    values: int
    bitmask: int
    bias: int
    n: int
    k: int
    device_index: int
    value_bytes: int = 2
    scales: int = 0
    scale_type: int = 0
    scale_stride: int = 0

    @classmethod
    def of(cls, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> "WeightAt":
        """Of packed tensors; values of 8 bits have a scale for each row, or one."""
        n, k = compressed.shape[0], 2 * compressed.shape[1]
        bias_at = 0 if bias is None else bias.data_ptr()
        at = cls(compressed.data_ptr(), bitmask.data_ptr(), bias_at, n, k, compressed.get_device())
        if scale is None:
            return at
        form = {"scales": scale.data_ptr(), "scale_type": SCALE_TYPES[scale.dtype], "scale_stride": int(scale.numel() > 1)}
        return replace(at, value_bytes=1, **form)


def _types(dtype: torch.dtype, values: torch.dtype | None) -> dict[str, int]:
    """Macros for the dtypes of x and of values."""
    return {"BF16": int(dtype == torch.bfloat16), "FP8": int(values == torch.float8_e4m3fn), "INT8": int(values == torch.int8)}


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
    value_bytes: int = 2
    source: ClassVar[str] = "mma_sp"

    @property
    def k_multiple(self) -> int:
        """What in_features must be a multiple of: 16 bytes of a row of values."""
        return 32 // self.value_bytes

    @property
    def rows(self) -> int:
        """Rows of the weight that a block works on at a time."""
        return 16 * self.tiles * self.row_warps

    @property
    def chunk(self) -> int:
        """Columns of x that are staged at a time."""
        return 128 // self.value_bytes * self.steps * self.column_warps

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

    def defines(self, dtype: torch.dtype, values: torch.dtype | None = None) -> dict[str, int]:
        """The macros, for x of a dtype and values of the same or another."""
        return {
            **_types(dtype, values), "BN": self.bn, "TILES": self.tiles, "DEPTH": self.depth, "ROW_WARPS": self.row_warps,
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
        groups, slots = -(-n // self.rows), multiprocessors(weight.device_index) * self.min_blocks
        blocks = -(-groups // -(-groups // slots))  # as few as take as many turns
        api = cuda_core()
        launch, stream, values, bitmask, bias = api.launch, api.stream_of(weight.device_index), weight.values, weight.bitmask, weight.bias
        configs = api.configs((blocks, -(-m // self.bn), 1), 1, self.threads, self.shared_bytes)
        scales = weight.scales, weight.scale_type, weight.scale_stride

        def start(x: Tensor, y: Tensor, early: bool) -> None:
            launch(stream(), configs[early], kernel, values, bitmask, x.data_ptr(), bias, y.data_ptr(), m, n, k, k, *scales)

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
    value_bytes: int = 2
    window: int = 0  # 0: as long as a stage, as far as it can be
    sparse_rows: bool = False  # the sparse operand is activations, not the weight
    source: ClassVar[str] = "wgmma_sp"
    k_multiple: ClassVar[int] = 64

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.bm * 2 + (128 if self.bn >= 192 else 32)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages * (self.bm + self.bn * 2) * self.bk * self.value_bytes // 2
        return stages + self.bm * min(self.bn, 64) * 144 // 64 if self.split == 1 else max(stages, self.bn * (self.bm + 4) * 4)

    def defines(self, dtype: torch.dtype, values: torch.dtype | None = None) -> dict[str, int]:
        """The macros, for results of a dtype, and x and values of the same or another."""
        return {
            **_types(dtype, values), "BM": self.bm, "BN": self.bn, "BK": self.bk, "STAGES": self.stages, "AHEAD": self.ahead,
            "SPLIT": self.split, "MULTICAST": self.multicast, "MIN_BLOCKS": self.min_blocks,
            "WINDOW": self.window or (min(self.bk, 256) if self.value_bytes == 2 else 64), "SPARSE_ROWS": int(self.sparse_rows),
        }  # fmt: skip

    def why_not(self, n: int, k: int) -> str | None:
        """Why the kernel cannot multiply by an (n, k) weight."""
        multiple = self.bk if self.value_bytes == 2 else self.k_multiple
        if self.window == 256:
            multiple = max(multiple, 128)  # of rows of the bitmask that are multiples of 16 bytes
        return f"in_features {k} is no multiple of {multiple}" if k % multiple else None

    def starter(self, kernel: Any, weight: WeightAt, m: int) -> Start:
        """What starts the kernel for m rows of x, which is contiguous and aligned to 16 bytes, as y is."""
        n, k = weight.n, weight.k
        launch, stream, configs = self._launching(kernel, weight.device_index, n, m)
        values_map, x_map_at = self._values_map(weight.values, n, k), _Maps(lambda address: self._x_map(address, m, k))
        bitmask, bias, group, scales = weight.bitmask, weight.bias, self.group, (weight.scales, weight.scale_type, weight.scale_stride)

        def start(x: Tensor, y: Tensor, early: bool, x_scales: int = 0) -> None:
            x_map = x_map_at[x.data_ptr()]
            launch(stream(), configs[early], kernel, values_map, x_map, bitmask, y.data_ptr(), bias, m, n, k, group, *scales, x_scales)

        return start

    def activations_starter(self, kernel: Any, weight: WeightAt, m: int) -> Callable[[int, int, int, int], None]:
        """With `sparse_rows`: what starts the kernel on addresses of packed activations, values (m, k / 2), bitmask (m, k / 8) and of
        8 bits scales (m), and of y (m, n).  `weight` is where the dense weight is, (n, k), with float32 scales (n) if of 8 bits.
        """
        n, k = weight.n, weight.k
        launch, stream, configs = self._launching(kernel, weight.device_index, m, n)
        weight_map, values_map_at = self._x_map(weight.values, n, k), _Maps(lambda address: self._values_map(address, m, k))
        bias, group, weight_scales = weight.bias, self.group, weight.scales

        def start(values: int, bitmask: int, scales: int, y: int) -> None:
            values_map = values_map_at[values]
            launch(stream(), configs[True], kernel, values_map, weight_map, bitmask, y, bias, n, m, k, group, scales, 0, 1, weight_scales)

        return start

    def _launching(self, kernel: Any, device_index: int, sparse_rows: int, dense_rows: int) -> tuple[Any, Any, tuple[Any, Any]]:
        """What launches, on which stream, and with which grids: after the kernel before, and early."""
        clusters, size = -(-sparse_rows // (self.bm * self.multicast)) * -(-dense_rows // self.bn), self.split * self.multicast
        api = cuda_core()
        stream = api.stream_of(device_index)
        if self.split == 1:
            clusters = min(clusters, api.room(kernel, size, self.threads, self.shared_bytes, stream()))
        return api.launch, stream, api.configs((clusters, 1, 1), size, self.threads, self.shared_bytes)

    # Maps count in units of two bytes, which an element of 8 bits is half of.

    def _values_map(self, address: int, rows: int, k: int) -> Any:
        return _tensor_map(address, rows, k * self.value_bytes // 4, self.bm, min(64, self.bk // 4 * self.value_bytes))

    def _x_map(self, address: int, rows: int, k: int) -> Any:
        return _tensor_map(address, rows, k * self.value_bytes // 2, self.bn // self.multicast, 64)


class _Maps(dict[int, Any]):
    """Tensor maps by address, made when they are first asked for: that takes longer than to start a kernel."""

    def __init__(self, make: Callable[[int], Any]):
        self._make = make

    def __missing__(self, address: int) -> Any:
        if len(self) >= NUM_MAPS:
            self.clear()
        found = self[address] = self._make(address)
        return found


@dataclass(frozen=True)
class QuantizeRows:
    """`quantize_rows.cu`: x as values of 8 bits with a scale for each row.  The fields are the macros of the file."""

    threads: int
    held: int = 4
    source: ClassVar[str] = "quantize_rows"
    shared_bytes: ClassVar[int] = 0

    @classmethod
    def of(cls, k: int) -> "QuantizeRows":
        """For rows of k columns: few threads with several reads each keep more of the memory busy than many with one."""
        return cls(min(512, max(64, 1 << (k // 32 - 1).bit_length())))

    def defines(self, dtype: torch.dtype, values: torch.dtype | None) -> dict[str, int]:
        """The macros, from x of a dtype to float8_e4m3fn or int8."""
        return {
            "BF16": int(dtype == torch.bfloat16), "FP8": int(values == torch.float8_e4m3fn), "THREADS": self.threads, "HELD": self.held,
        }  # fmt: skip

    def starter(self, kernel: Any, device_index: int, m: int, k: int, given: Tensor | None) -> Callable[[int, int, int, bool], None]:
        """What starts the kernel on addresses of x (m, k), q (m, k) and scales (m), float32; `given` is one scale for all rows."""
        api = cuda_core()
        launch, stream, configs = api.launch, api.stream_of(device_index), api.configs((m, 1, 1), 1, self.threads, 0)
        given_at, given_type = (0, 0) if given is None else (given.data_ptr(), SCALE_TYPES[given.dtype])

        def start(x: int, q: int, scales: int, early: bool) -> None:
            launch(stream(), configs[early], kernel, x, q, scales, given_at, given_type, k)

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
def multiprocessors(device_index: int) -> int:
    """Of a device."""
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

"""How the second projection of a squared-ReLU block is multiplied, and why: kernels, their configurations, and the one choice.

    path             what                                                              where
    select_columns   one to eight rows: of W only columns at which some h is not zero   from compute capability 9.0, with W by columns
    wgmma_sp         h packed as 2:4 in one pass, then the sparse operand               compute capability 9.0, where two of four stay
    dense            h in one pass, then cuBLAS                                         everywhere

h is relu(u)^2, or relu(gate)^2 u.  Where W is float8, `select_columns` takes h as it is; the other two round each row of h to float8.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_sparse24.errors import warn
from hf_sparse24.kernels import cost
from hf_sparse24.kernels.compile import KernelCompileError, load_kernel
from hf_sparse24.kernels.dispatch import Choice, block_shared_bytes
from hf_sparse24.kernels.sparse_mma import WgmmaSp, cuda_core, multiprocessors

PATHS = ("select_columns", "wgmma_sp", "dense")
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
MAX_SELECT_ROWS = 8
COLUMNS_OF_Y = 256  # that a cluster of `select_columns` has

# Tiles of activations by rows of W, as `cost` knows them; the first fits every problem.
CONFIGS = (
    WgmmaSp(128, 128, 128, stages=4, ahead=2, window=256, sparse_rows=True),
    WgmmaSp(128, 128, 64, stages=8, ahead=4, sparse_rows=True),
    WgmmaSp(192, 128, 64, stages=7, ahead=2, window=256, sparse_rows=True),
    WgmmaSp(128, 192, 64, stages=6, ahead=2, multicast=4, window=256, sparse_rows=True),
    WgmmaSp(128, 256, 64, stages=5, ahead=2, window=256, sparse_rows=True),
    WgmmaSp(128, 256, 64, stages=5, ahead=2, multicast=4, window=256, sparse_rows=True),
)
CONFIGS_8BIT = (
    WgmmaSp(128, 128, 256, stages=4, ahead=2, value_bytes=1, window=256, sparse_rows=True),
    WgmmaSp(64, 128, 256, stages=5, ahead=4, value_bytes=1, sparse_rows=True),
    WgmmaSp(192, 128, 256, stages=3, ahead=2, value_bytes=1, window=256, sparse_rows=True),
    WgmmaSp(128, 256, 128, stages=5, ahead=2, value_bytes=1, window=256, sparse_rows=True),
    WgmmaSp(128, 256, 128, stages=5, ahead=2, multicast=2, value_bytes=1, window=256, sparse_rows=True),
    WgmmaSp(128, 256, 128, stages=5, ahead=2, multicast=4, value_bytes=1, window=256, sparse_rows=True),
)
# Rows of u from which `wgmma_sp` runs.  Fewer rows were seen to lose to a dense product in float8 on an H200; where exactly the two meet
# has not been measured: benchmarks/activation.py will.
MIN_PACKED_ROWS = {2: 1024, 1: 1024}  # by bytes of a value of W


@dataclass(frozen=True)
class SquaredRelu:
    """`squared_relu.cu`: h of rows of u, packed or dense.  The fields are macros of the file."""

    threads: int
    held: int = 4
    source: ClassVar[str] = "squared_relu"

    @classmethod
    def of(cls, k: int) -> "SquaredRelu":
        """For rows of k columns."""
        return cls(min(512, max(64, 1 << (k // 32 - 1).bit_length())))

    def defines(self, dtype: torch.dtype, *, fp8: bool, gated: bool, keep_two: bool, packed: bool) -> dict[str, int]:
        """The macros, for u of a dtype and h of the same or float8_e4m3fn."""
        return {
            "BF16": int(dtype == torch.bfloat16), "FP8": int(fp8), "GATED": int(gated), "KEEP_TWO": int(keep_two),
            "PACKED": int(packed), "THREADS": self.threads, "HELD": self.held,
        }  # fmt: skip

    def starter(self, kernel: Any, device_index: int, m: int, k: int) -> Callable[..., None]:
        """What starts the kernel on addresses: of u and gate (m, k), values, bitmask and scales."""
        api = cuda_core()
        launch, stream, configs = api.launch, api.stream_of(device_index), api.configs((m, 1, 1), 1, self.threads, 0)
        early = torch.cuda.get_device_capability(device_index) >= (9, 0)

        def start(u: int, gate: int, values: int, bitmask: int = 0, scales: int = 0) -> None:
            launch(stream(), configs[early], kernel, u, gate, values, bitmask, scales, k)

        return start


@dataclass(frozen=True)
class SelectColumns:
    """`select_columns.cu`: up to eight rows of u, of W only what is needed.  The fields are macros of the file."""

    rows: int
    split: int
    warps: int = 16
    at_once: int = 4
    source: ClassVar[str] = "select_columns"

    @classmethod
    def of(cls, n: int, m: int, num_sms: int) -> "SelectColumns":
        """For (n, k) weights and m rows: as many blocks as there are multiprocessors, about."""
        rows, tiles = 1 << (m - 1).bit_length(), -(-n // COLUMNS_OF_Y)
        split = next(split for split in (8, 4, 2, 1) if split == 1 or tiles * split <= 2 * num_sms)
        return cls(rows, split, at_once=8 if rows <= 2 else 4)

    def part(self, k: int) -> int:
        """Columns of W that a block of a cluster looks at."""
        return -(-k // 8 // self.split) * 8

    def shared_bytes(self, k: int) -> int:
        """Dynamic shared memory of a block."""
        sums = self.rows * COLUMNS_OF_Y * 4
        listed = self.part(k) * (self.rows * 4 + 2)
        return max(-(-listed // 16) * 16, self.warps * sums) + sums

    def defines(self, dtype: torch.dtype, *, fp8: bool, gated: bool, keep_two: bool) -> dict[str, int]:
        """The macros, for u of a dtype and a weight of the same or float8_e4m3fn."""
        return {
            "BF16": int(dtype == torch.bfloat16), "FP8": int(fp8), "GATED": int(gated), "KEEP_TWO": int(keep_two),
            "ROWS": self.rows, "SPLIT": self.split, "WARPS": self.warps, "AT_ONCE": self.at_once,
        }  # fmt: skip

    def starter(self, kernel: Any, device_index: int, m: int, n: int, k: int) -> Callable[..., None]:
        """What starts the kernel on addresses: of u and gate (m, k), W (k, n), scales, bias and y (m, n)."""
        api = cuda_core()
        config = api.configs((-(-n // COLUMNS_OF_Y), 1, 1), self.split, 32 * self.warps, self.shared_bytes(k))[True]
        launch, stream, part = api.launch, api.stream_of(device_index), self.part(k)

        def start(u: int, gate: int, columns: int, scales: int, scale_type: int, scale_stride: int, bias: int, y: int) -> None:
            launch(stream(), config, kernel, u, gate, columns, scales, scale_type, scale_stride, bias, y, m, n, k, part)

        return start


Config = SelectColumns | WgmmaSp


@functools.cache
def choose(
    n: int, k: int, m: int, dtype: torch.dtype, device: torch.device, *, fp8: bool, has_columns: bool, gated: bool, keep_two: bool
) -> Choice[Config]:
    """The path for m rows of u and an (n, k) weight, and why no other.

    Args:
        n: Rows of the weight.
        k: Columns of the weight.
        m: Rows of u.
        dtype: Of u.
        device: With an index, if it is a CUDA device.
        fp8: Whether the weight is float8_e4m3fn, with scales; else it has the dtype of u.
        has_columns: Whether the weight is there by columns, too.
        gated: Whether there is a gate.
        keep_two: Whether two of every four h stay.
    """
    select = SelectColumns.of(n, m, multiprocessors(device.index)) if device.type == "cuda" and 0 < m <= MAX_SELECT_ROWS else None
    reasons = {}
    reason = why_not("select_columns", dtype, device, fp8) or _why_not_select(select, n, k, m, device, has_columns)
    if select is not None and not (reason := reason or _why_not_built(select, dtype, device, fp8, gated, keep_two)):
        return Choice("select_columns", select, dict.fromkeys(("wgmma_sp", "dense"), "select_columns reads less of the weight"))
    reasons["select_columns"] = reason or ""
    configs = [config for config in (CONFIGS_8BIT if fp8 else CONFIGS) if not config.why_not(m, k)]
    best = min(configs, key=lambda config: cost.time_us(config, m, k, n), default=None)
    reason = why_not("wgmma_sp", dtype, device, fp8) or _why_not_packed(k, m, fp8, keep_two)
    if best is not None and not (reason := reason or _why_not_built(best, dtype, device, fp8, gated, keep_two)):
        return Choice("wgmma_sp", best, {**reasons, "dense": f"wgmma_sp takes {MIN_PACKED_ROWS[1 if fp8 else 2]} rows and more"})
    return Choice("dense", None, {**reasons, "wgmma_sp": reason or f"in_features {k} is no multiple of 64"})


def why_not(path: str, dtype: torch.dtype, device: torch.device, fp8: bool) -> str | None:
    """Why a path cannot run on a device with u of a dtype, or None if it can for some problems."""
    if path == "dense":
        return None
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    capability = torch.cuda.get_device_capability(device)
    if path == "wgmma_sp":
        return None if capability == (9, 0) else f"compute capability {capability} is not (9, 0)"
    return None if capability >= (9, 0) else f"compute capability {capability} is below (9, 0)"


def _why_not_select(config: SelectColumns | None, n: int, k: int, m: int, device: torch.device, has_columns: bool) -> str | None:
    if not n * k * m:
        return "a size is 0"
    if config is None:
        return f"{m} rows of u are more than {MAX_SELECT_ROWS}"
    if not has_columns:
        return "the weight is not there by columns"
    if n % 8 or k % 8:
        return f"out_features {n} or in_features {k} is no multiple of 8"
    needed, there = config.shared_bytes(k) + 1024, block_shared_bytes(device.index)
    return f"it needs {needed} bytes of shared memory, a block here has {there}" if needed > there else None


def _why_not_packed(k: int, m: int, fp8: bool, keep_two: bool) -> str | None:
    if not keep_two:
        return "all activations stay, not two of four"
    if m < (least := MIN_PACKED_ROWS[1 if fp8 else 2]):
        return f"{m} rows are fewer than {least}, below which dense is taken"
    return f"in_features {k} is no multiple of 64" if k % 64 else None


@functools.cache
def _why_not_built(config: Config, dtype: torch.dtype, device: torch.device, fp8: bool, gated: bool, keep_two: bool) -> str | None:
    try:
        kernel_of(config, dtype, device.index, fp8, gated, keep_two)
    except KernelCompileError as error:
        warn(f"{config.source} does not run on {device} with {FP8 if fp8 else dtype}: {error}")
        return str(error)
    return None


@functools.cache
def kernel_of(config: Config, dtype: torch.dtype, device_index: int, fp8: bool, gated: bool, keep_two: bool, shared_bytes: int = 0) -> Any:
    """The loaded kernel of a configuration."""
    if isinstance(config, WgmmaSp):
        defines = config.defines(dtype, FP8 if fp8 else None)
        return load_kernel(config.source, config.source, device_index, defines, config.shared_bytes)
    defines = config.defines(dtype, fp8=fp8, gated=gated, keep_two=keep_two)
    return load_kernel(config.source, config.source, device_index, defines, shared_bytes)


@functools.cache
def squared_relu_kernel(
    config: SquaredRelu, dtype: torch.dtype, device_index: int, *, fp8: bool, gated: bool, keep_two: bool, packed: bool
) -> Any:
    """The loaded kernel that writes h."""
    defines = config.defines(dtype, fp8=fp8, gated=gated, keep_two=keep_two, packed=packed)
    return load_kernel(config.source, config.source, device_index, defines)


@functools.cache
def why_not_squared_relu(dtype: torch.dtype, device: torch.device, fp8: bool) -> str | None:
    """Why `squared_relu.cu` does not run on a device, or None."""
    if device.type != "cuda" or dtype not in DTYPES:
        return f"no kernel for {dtype} on {device.type}"
    capability, least = torch.cuda.get_device_capability(device), (8, 9) if fp8 else (8, 0)
    if capability < least:
        return f"compute capability {capability} is below {least}"
    try:
        squared_relu_kernel(SquaredRelu.of(4096), dtype, device.index, fp8=fp8, gated=False, keep_two=True, packed=True)
    except KernelCompileError as error:
        warn(f"squared_relu does not run on {device} with {dtype}: {error}")
        return str(error)
    return None

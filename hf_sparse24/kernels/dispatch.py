"""Which path multiplies by a packed weight, and why: the one place that decides.

    path         what                                              where
    mma_sp       few rows of x, our kernel                         from compute capability 8.0
    wgmma_sp     any number of rows, our kernel                    compute capability 9.0
    cusparselt   many rows, NVIDIA's library                       from compute capability 8.0, with its metadata
    unpack       the dense weight, made for the call, and cuBLAS   everywhere

A kernel can be compiled in many configurations.  `CONFIGS` are those that are used: five or so for each number of rows lose less
than 2 % against trying all (benchmarks/tuning/tune.py).  `cost.time_us` picks for a problem.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.errors import warn
from hf_sparse24.kernels import cost, cusparselt
from hf_sparse24.kernels.compile import KernelCompileError, arch_of, compile_all, load_kernel
from hf_sparse24.kernels.sparse_mma import MmaSp, Start, WeightAt, WgmmaSp

KERNELS = (MmaSp, WgmmaSp)
PATHS = (*(kernel.source for kernel in KERNELS), "cusparselt", "unpack")
MIN_CAPABILITY = (8, 0)
SPARSE24 = Sparse24Compressor.format
DTYPES = (torch.bfloat16, torch.float16)
# More rows than `mma_sp` is for, and fewer than cuSPARSELt is.
MMA_ROWS = 64
# Rows for which kernels are compiled ahead of the first call.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

# How a kernel is compiled -> how its times compare with those that `cost` gives.
CONFIGS: dict[MmaSp | WgmmaSp, float] = {
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=1): 0.929,
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=2): 1.003,
    WgmmaSp(64, 8, 256, stages=5, ahead=2, min_blocks=2): 1.005,
    WgmmaSp(64, 8, 256, stages=5, ahead=2, split=2, min_blocks=2): 0.999,
    WgmmaSp(64, 8, 256, stages=5, ahead=2, split=4, min_blocks=2): 0.99,
    WgmmaSp(128, 8, 256, stages=6, ahead=2): 0.993,
    WgmmaSp(64, 16, 128, stages=8, ahead=4, split=4, min_blocks=2): 0.996,
    WgmmaSp(64, 16, 256, stages=4, ahead=2, min_blocks=2): 0.999,
    WgmmaSp(64, 16, 256, stages=4, ahead=2, split=2, min_blocks=2): 0.995,
    WgmmaSp(64, 32, 128, stages=6, ahead=4, min_blocks=2): 0.991,
    WgmmaSp(64, 32, 128, stages=6, ahead=4, split=2, min_blocks=2): 0.984,
    WgmmaSp(64, 32, 128, stages=6, ahead=4, split=4, min_blocks=2): 0.994,
    WgmmaSp(64, 32, 128, stages=8, ahead=4): 0.98,
    WgmmaSp(128, 32, 256, stages=4, ahead=2, multicast=4): 0.995,
    WgmmaSp(64, 64, 128, stages=8, ahead=4): 0.975,
    WgmmaSp(64, 64, 128, stages=8, ahead=4, split=2): 1.002,
    WgmmaSp(64, 64, 128, stages=8, ahead=4, split=4): 1.0,
    WgmmaSp(128, 64, 128, stages=6, ahead=4, split=4): 0.994,
    WgmmaSp(128, 64, 256, stages=3, ahead=2): 1.007,
    WgmmaSp(64, 128, 128, stages=5, ahead=4): 0.924,
    WgmmaSp(64, 128, 128, stages=5, ahead=4, split=2): 0.984,
    WgmmaSp(128, 128, 128, stages=4, ahead=4): 0.957,
    WgmmaSp(128, 128, 128, stages=4, ahead=4, multicast=2): 0.979,
    WgmmaSp(128, 128, 128, stages=4, ahead=4, split=2): 0.984,
    WgmmaSp(128, 128, 128, stages=4, ahead=4, split=4): 0.994,
    WgmmaSp(192, 128, 128, stages=3, ahead=4, multicast=2): 1.004,
    WgmmaSp(192, 128, 128, stages=3, ahead=4, split=2): 0.995,
    WgmmaSp(128, 192, 128, stages=3, ahead=4, multicast=2): 0.988,
    WgmmaSp(128, 192, 128, stages=3, ahead=4, multicast=4): 0.961,
    WgmmaSp(128, 256, 64, stages=5, ahead=2, multicast=2): 1.003,
}
# (n, k, up to so many rows of x, more than half of them): where another is at least 3 % faster than what the model picks.
MEASURED: dict[tuple[int, int, int], MmaSp | WgmmaSp] = {
    (1024, 2048, 128): WgmmaSp(128, 64, 128, stages=6, ahead=4, split=4),
    (1024, 2048, 2048): WgmmaSp(128, 128, 128, stages=4, ahead=4),
    (1024, 8192, 256): WgmmaSp(64, 64, 128, stages=8, ahead=4, split=2),
    (1024, 8192, 512): WgmmaSp(64, 128, 128, stages=5, ahead=4, split=2),
    (1024, 8192, 1024): WgmmaSp(128, 128, 128, stages=4, ahead=4, split=2),
    (1536, 1536, 8): WgmmaSp(64, 8, 256, stages=5, ahead=2, split=4, min_blocks=2),
    (2048, 2048, 1024): WgmmaSp(128, 128, 128, stages=4, ahead=4),
    (2048, 8192, 512): WgmmaSp(128, 128, 128, stages=4, ahead=4, split=2),
    (2560, 4096, 128): WgmmaSp(128, 128, 128, stages=4, ahead=4, split=4),
    (2560, 4096, 256): WgmmaSp(128, 128, 128, stages=4, ahead=4, split=2),
    (3072, 8192, 512): WgmmaSp(192, 128, 128, stages=3, ahead=4, split=2),
    (3584, 3584, 8): MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=1),
    (3584, 3584, 16): WgmmaSp(64, 16, 256, stages=4, ahead=2, split=2, min_blocks=2),
    (3584, 3584, 64): WgmmaSp(64, 64, 128, stages=8, ahead=4),
    (3584, 3584, 512): WgmmaSp(128, 128, 128, stages=4, ahead=4),
    (4096, 4096, 8): MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=1),
    (4096, 11008, 1): MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=2),
    (5120, 5120, 128): WgmmaSp(128, 128, 128, stages=4, ahead=4, split=2),
    (5120, 5120, 4096): WgmmaSp(128, 192, 128, stages=3, ahead=4, multicast=2),
}
# Further ones where few of those can be.
OTHERS: tuple[MmaSp | WgmmaSp, ...] = (
    # K is an odd multiple of 64.
    WgmmaSp(64, 8, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 16, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 32, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 64, 64, stages=8, ahead=4),
    WgmmaSp(64, 128, 64, stages=8, ahead=4),
    # There is no wgmma, or K is another multiple of 16; in 99 KiB of shared memory.
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=8, steps=4, buffers=2),
    MmaSp(bn=16, tiles=1, depth=2, row_warps=1, column_warps=8, steps=2, buffers=2),
    MmaSp(bn=32, tiles=2, depth=2, row_warps=2, column_warps=4, steps=2, buffers=2),
    MmaSp(bn=64, tiles=2, depth=1, row_warps=4, column_warps=2, steps=2, buffers=2),
)


@dataclass(frozen=True)
class Choice:
    """The path that runs, how its kernel is compiled, and for every other path why it does not run."""

    path: str
    config: MmaSp | WgmmaSp | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def why_not(path: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a path cannot run on a device with weights of a dtype, or None if it can for some problems.

    Args:
        path: One of PATHS.
        device: With an index, if it is a CUDA device.
        dtype: Of weight and x.
    """
    if path == "unpack":
        return None
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    if path == "cusparselt":
        # 0.8.0 on an H200: its default takes 1.6 times the dense time with float16, and its own search ends in an illegal instruction.
        return "used for bfloat16 only" if dtype != torch.bfloat16 else cusparselt.why_not(device)
    capability = torch.cuda.get_device_capability(device)
    if path == "wgmma_sp" and capability != (9, 0):
        return f"compute capability {capability} is not (9, 0)"
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability} is below {MIN_CAPABILITY}"
    return _why_not_built(path, device, dtype)


@functools.cache
def choose(n: int, k: int, m: int, dtype: torch.dtype, device: torch.device, has_metadata: bool = False) -> Choice:
    """The fastest path for a problem, by measurement, on a Hopper GPU; elsewhere the only kernel there is, where it can.

    Args:
        n: Rows of the weight.
        k: Columns of the weight.
        m: Rows of x.
        dtype: Of weight and x.
        device: With an index, if it is a CUDA device.
        has_metadata: Whether cuSPARSELt's metadata lies behind the values.
    """
    reasons = {path: reason for path in PATHS if (reason := why_not(path, device, dtype))}
    for kernel in KERNELS:
        if k % kernel.k_multiple or not n * k * m:
            reasons.setdefault(
                kernel.source, f"({n}, {k}) and {m} rows: in_features must be a multiple of {kernel.k_multiple}, and no size 0"
            )
    open_paths = set(PATHS) - set(reasons)
    fitting = []
    for config in (*CONFIGS, *(OTHERS if k % 128 or "wgmma_sp" in reasons else ())):
        if config.source not in open_paths:
            continue
        if reason := _why_not_config(config, n, k, m, device):
            reasons.setdefault(config.source, reason)
        else:
            fitting.append(config)
    times_us = {config: cost.time_us(config, n, k, m) * CONFIGS.get(config, 1.0) for config in fitting}
    best = min(times_us, key=times_us.__getitem__, default=None)
    measured = MEASURED.get((n, k, 8 if 1 < m <= 8 else 1 << max(0, m - 1).bit_length()))
    if measured is not None and measured.source in open_paths:
        best, times_us[measured] = measured, cost.time_us(measured, n, k, m)
    if not has_metadata:
        reasons.setdefault("cusparselt", "its metadata is not beside the values: see Sparse24Linear.prepare")
    elif m <= MMA_ROWS:
        reasons.setdefault("cusparselt", f"{m} rows of x are no more than {MMA_ROWS}")
    if "cusparselt" not in reasons and (best is None or cost.cusparselt_us(n, k, m) < times_us[best]):
        slower = f"cusparselt is faster: about {cost.cusparselt_us(n, k, m):.1f} us on an H200"
        return Choice("cusparselt", None, {path: reasons.get(path, slower) for path in PATHS if path != "cusparselt"})
    if best is None:
        return Choice("unpack", None, reasons)
    slower = f"{best.source} is faster: about {times_us[best]:.1f} us on an H200"
    fits = {config.source for config in fitting}
    others = {path: slower if path in fits else reasons.get(path, slower) for path in PATHS if path != best.source}
    return Choice(best.source, best, others)


def explain(
    n: int, k: int, m: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda", has_metadata: bool = False
) -> Choice:
    """Say which path a packed (n, k) weight takes with m rows of x, and why each other does not; see `choose`."""
    return choose(n, k, m, dtype, with_index(torch.device(device)), has_metadata)


def with_index(device: torch.device) -> torch.device:
    """The same device, named with its index."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def starter(config: MmaSp | WgmmaSp, weight: WeightAt, m: int, dtype: torch.dtype) -> Start:
    """What starts a configuration's kernel; see `MmaSp.starter`."""
    return config.starter(_kernel(config, dtype, weight.device_index), weight, m)


def prepare(format: str, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> str | None:
    """Compile, side by side, and load the kernels that weights of these shapes need, so that no call has to wait.

    Args:
        format: Of the weights.
        shapes: (n, k) of the weights.
        dtype: Of the weights.
        device: Where they are.

    Returns:
        Why there is no kernel for them, or None.
    """
    device = with_index(device)
    if format != SPARSE24:
        return f"there is no kernel for {format}"
    reasons = [why_not(kernel.source, device, dtype) for kernel in KERNELS]
    if None not in reasons:
        return reasons[0]
    choices = {choose(n, k, m, dtype, device).config for n, k in set(shapes) for m in ROWS}
    configs = [config for config in choices if config is not None]
    arch = arch_of(torch.cuda.get_device_capability(device))
    compile_all([(config.source, arch, config.defines(dtype)) for config in configs])
    for config in configs:
        _kernel(config, dtype, device.index)
    return None


def why_not_kept(format: str = SPARSE24) -> str | None:
    """Why `run_compressed=None` loads dense here, or None if it keeps layers packed.

    Args:
        format: Of the checkpoint.
    """
    if format != SPARSE24:
        return f"there is no kernel for {format}"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    device = with_index(torch.device("cuda"))
    reasons = [why_not(kernel.source, device, torch.bfloat16) for kernel in KERNELS]
    return None if None in reasons else reasons[0]


def _why_not_config(config: MmaSp | WgmmaSp, n: int, k: int, m: int, device: torch.device) -> str | None:
    if isinstance(config, MmaSp) and m > MMA_ROWS:
        return f"{m} rows of x are more than {MMA_ROWS}"
    # The smallest tile that holds all rows, as it was measured; only where tiles are few, or rows many, it may be another.
    if config.bn != min(128, max(8, 1 << (m - 1).bit_length())) and (m <= 64 or config.bn < (64 if m <= 128 or few_tiles(n, m) else 128)):
        return f"its tiles are for other numbers of rows of x than {m}"
    if isinstance(config, WgmmaSp) and config.split > 1 and m > 2 * config.bn:
        return f"its tiles are for fewer rows of x than {m}"
    shared_bytes = _shared_bytes(device.index)
    if config.shared_bytes + 1024 > shared_bytes:
        return f"it needs {config.shared_bytes} bytes of shared memory, a block here has {shared_bytes}"
    return config.why_not(n, k)


@functools.cache
def _shared_bytes(device_index: int) -> int:
    from cuda.core import Device  # torch has no public name for this

    return int(Device(device_index).properties.max_shared_memory_per_block_optin)


def few_tiles(n: int, m: int) -> bool:
    """Whether tiles of 128 x 128 outputs would leave many multiprocessors idle."""
    return -(-n // 128) * -(-m // 128) < 100


@functools.cache
def _kernel(config: MmaSp | WgmmaSp, dtype: torch.dtype, device_index: int) -> Any:
    return load_kernel(config.source, config.source, device_index, config.defines(dtype), config.shared_bytes)


@functools.cache
def _why_not_built(path: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Build one configuration of a kernel, to know whether it can be built here at all."""
    config = next(config for config in CONFIGS if config.source == path)
    try:
        _kernel(config, dtype, device.index)
    except KernelCompileError as error:
        warn(f"{path} does not run on {device} with {dtype}: {error}")
        return str(error)
    return None

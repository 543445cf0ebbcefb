"""Which path multiplies by a packed weight, and why: the one place that decides.

    path         what                                              where
    mma_sp       few rows of x, our kernel                         from compute capability 8.0
    wgmma_sp     any number of rows, our kernel                    compute capability 9.0
    cusparselt   many rows, NVIDIA's library                       from compute capability 8.0, with its metadata
    widen        values of 8 bits made 16 bits wide for the call   where a kernel for 16 bits runs, and none for 8
    unpack       the dense weight, made for the call, and cuBLAS   everywhere

With values of 8 bits, `mma_sp` multiplies x as it is, and `wgmma_sp` rounds x to 8 bits, with a scale for each row: only for
weights whose checkpoint asks for that.

A kernel can be compiled in many ways: configurations.py has those that are used, and `cost.time_us` picks for a problem.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hf_sparse24.compressors import GptqMarlin24Compressor, Marlin24Compressor, QuantizedCompressor, Sparse24Compressor
from hf_sparse24.errors import warn
from hf_sparse24.kernels import cost, cusparselt, marlin24
from hf_sparse24.kernels.compile import KernelCompileError, arch_of, compile_all, load_kernel
from hf_sparse24.kernels.configurations import CONFIGS, CONFIGS_8BIT, MEASURED, MEASURED_8BIT, OTHERS, OTHERS_8BIT
from hf_sparse24.kernels.marlin24 import Marlin24
from hf_sparse24.kernels.sparse_mma import MmaSp, QuantizeRows, Start, WeightAt, WgmmaSp, multiprocessors

KERNELS = (MmaSp, WgmmaSp)
PATHS = (*(kernel.source for kernel in KERNELS), "cusparselt", "widen", "unpack")
MIN_CAPABILITY = (8, 0)
SPARSE24 = Sparse24Compressor.format
QUANTIZED24 = QuantizedCompressor(Sparse24Compressor()).format
MARLIN_FORMATS = (Marlin24Compressor().format, GptqMarlin24Compressor().format)
DTYPES = (torch.bfloat16, torch.float16)
DTYPES_8BIT = (torch.float8_e4m3fn, torch.int8)
# More rows than `mma_sp` is for, and fewer than cuSPARSELt is.
MMA_ROWS = 64
# Rows for which kernels are compiled ahead of the first call.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

Config = TypeVar("Config")


@dataclass(frozen=True)
class Choice(Generic[Config]):
    """The path that runs, how its kernel is compiled, and for every other path why it does not run."""

    path: str
    config: Config | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def why_not(path: str, device: torch.device, dtype: torch.dtype, values: torch.dtype | None = None) -> str | None:
    """Why a path cannot run on a device with weights of a dtype, or None if it can for some problems.

    Args:
        path: One of PATHS.
        device: With an index, if it is a CUDA device.
        dtype: Of x.
        values: Of the weight, if it is another.
    """
    if path == "unpack":
        return None
    if device.type != "cuda" or dtype not in DTYPES:
        return _why_no_kernel(device, dtype)
    if values not in (None, *DTYPES_8BIT):
        return f"no kernel for values of {values} and x of {dtype}"
    if path == "widen":
        return "values are as wide as x" if values is None else None
    if path == "cusparselt":
        # 0.8.0 on an H200: its default takes 1.6 times the dense time with float16, and its own search ends in an illegal instruction.
        return "used for bfloat16 only" if values or dtype != torch.bfloat16 else cusparselt.why_not(device)
    capability = torch.cuda.get_device_capability(device)
    if path == "wgmma_sp" and capability != (9, 0):
        return f"compute capability {capability} is not (9, 0)"
    return _why_no_kernel(device, dtype) or _why_not_built(path, device, dtype, values)


def _why_no_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why none of our kernels runs on a device with x of a dtype."""
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    if dtype not in DTYPES:
        return f"no kernel for {dtype}"
    capability = torch.cuda.get_device_capability(device)
    return f"compute capability {capability} is below {MIN_CAPABILITY}" if capability < MIN_CAPABILITY else None


def usable_paths(device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    """Every path on a device with x of a dtype, those for values of 8 bits apart, and why it cannot run there or None."""
    found = {path: why_not(path, device, dtype) for path in PATHS if path != "widen"}
    for values in DTYPES_8BIT:
        name = str(values).removeprefix("torch.")
        found |= {f"{kernel.source} of {name}": why_not(kernel.source, device, dtype, values) for kernel in KERNELS}
    return found | {"marlin24": _why_not_marlin24(64, 128, 1, dtype, device, 4, True)}


@functools.cache
def choose(
    n: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    has_metadata: bool = False,
    *,
    values: torch.dtype | None = None,
    quantize_x: bool = False,
) -> Choice[MmaSp | WgmmaSp]:
    """The fastest path for a problem, by measurement, on a Hopper GPU; elsewhere the only kernel there is, where it can.

    Args:
        n: Rows of the weight.
        k: Columns of the weight.
        m: Rows of x.
        dtype: Of x.
        device: With an index, if it is a CUDA device.
        has_metadata: Whether cuSPARSELt's metadata lies behind the values.
        values: dtype of the weight's values, if it is another than x's.
        quantize_x: Whether x may be rounded to the dtype of the values.
    """
    reasons = {path: reason for path in PATHS if (reason := why_not(path, device, dtype, values))}
    if values is not None and not quantize_x:
        reasons.setdefault("wgmma_sp", "it rounds x to 8 bits, which this weight's checkpoint does not ask for")
    if not n * k * m:
        reasons |= {path: "a size is 0" for path in PATHS if path != "unpack"}
    open_paths = set(PATHS) - set(reasons)
    fitting = []
    configs, others = (CONFIGS, OTHERS) if values is None else (CONFIGS_8BIT, OTHERS_8BIT)
    few = k % 128 or "wgmma_sp" in reasons
    for config in (*configs, *(others if few else ())):
        if config.source not in open_paths:
            continue
        if reason := _why_not_config(config, n, k, m, device):
            reasons.setdefault(config.source, reason)
        else:
            fitting.append(config)
    fits = {config.source for config in fitting}  # one that does not may have given the reason
    times_us = {config: _time_us(config, n, k, m) for config in fitting}
    best = min(times_us, key=times_us.__getitem__, default=None)
    table = MEASURED if values is None else MEASURED_8BIT
    measured = table.get((n, k, 8 if 1 < m <= 8 else 1 << max(0, m - 1).bit_length()))
    if measured is not None and measured.source in open_paths:
        best, times_us[measured] = measured, _time_us(measured, n, k, m)
    if not has_metadata:
        reasons.setdefault("cusparselt", "its metadata is not beside the values: see Sparse24Linear.prepare")
    elif m <= MMA_ROWS:
        reasons.setdefault("cusparselt", f"{m} rows of x are no more than {MMA_ROWS}")
    if "cusparselt" not in reasons and (best is None or cost.cusparselt_us(n, k, m) < times_us[best]):
        slower = f"cusparselt is faster: about {cost.cusparselt_us(n, k, m):.1f} us on an H200"
        return Choice("cusparselt", None, {p: slower if p in fits else reasons.get(p, slower) for p in PATHS if p != "cusparselt"})
    if best is None:
        widened = None if "widen" in reasons else choose(n, k, m, dtype, device)
        if widened is not None and widened.config is not None:
            slower = f"widen runs {widened.path} without a dense weight"
            return Choice("widen", None, {path: reasons.get(path, slower) for path in PATHS if path != "widen"})
        reasons.setdefault("widen", "no kernel for 16 bits runs either")
        return Choice("unpack", None, reasons)
    slower = f"{best.source} is faster: about {times_us[best]:.1f} us on an H200"
    others_say = {path: slower if path in fits else reasons.get(path, slower) for path in PATHS if path != best.source}
    return Choice(best.source, best, others_say)


def _time_us(config: MmaSp | WgmmaSp, n: int, k: int, m: int) -> float:
    """By the model, and what was measured of this configuration; with the rounding of x, where it takes it."""
    corrections = CONFIGS if config.value_bytes == 2 else CONFIGS_8BIT
    rounding_us = cost.quantize_us(k, m) if isinstance(config, WgmmaSp) and config.value_bytes == 1 else 0
    return cost.time_us(config, n, k, m) * corrections.get(config, 1.0) + rounding_us


def explain(
    n: int, k: int, m: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda", has_metadata: bool = False
) -> Choice[MmaSp | WgmmaSp]:
    """Say which path a packed (n, k) weight takes with m rows of x, and why each other does not; see `choose`."""
    return choose(n, k, m, dtype, with_index(torch.device(device)), has_metadata)


def with_index(device: torch.device) -> torch.device:
    """The same device, named with its index."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def starter(
    config: MmaSp | WgmmaSp,
    weight: WeightAt,
    m: int,
    dtype: torch.dtype,
    values: torch.dtype | None = None,
    x_scale: Tensor | None = None,
) -> Start:
    """What starts a configuration's kernel, and before it that which rounds x to 8 bits, if the kernel takes it so.

    Args:
        config: How the kernel is compiled.
        weight: Where the weight is.
        m: Rows of x.
        dtype: Of x and the result.
        values: dtype of the weight's values, if it is another.
        x_scale: One scale for all rows of x, or None: each row gets its own.
    """
    k, index = weight.k, weight.device_index
    start = config.starter(_kernel(config, dtype, index, values), weight, m)
    if values is None or not isinstance(config, WgmmaSp):
        return start
    quantize = rounding_starter(m, k, dtype, values, index, x_scale)
    values_bytes = m * k

    def start_both(x: Tensor, y: Tensor, early: bool) -> None:
        rounded = x.new_empty(values_bytes + 4 * m, dtype=torch.uint8)  # values, and a float32 for each row
        scales = rounded.data_ptr() + values_bytes
        quantize(x.data_ptr(), rounded.data_ptr(), scales, early)
        # Always early: before this kernel only that one may still run, which does not write the weight.
        start(rounded, y, True, scales)

    return start_both


def rounding_starter(
    m: int, k: int, dtype: torch.dtype, values: torch.dtype, device_index: int, x_scale: Tensor | None
) -> Callable[[int, int, int, bool], None]:
    """What starts the kernel that rounds m rows of k columns to values of 8 bits; see `QuantizeRows.starter`."""
    config = QuantizeRows.of(k)
    return config.starter(_kernel(config, dtype, device_index, values), device_index, m, k, x_scale)


# ---- weights in Marlin's order ---------------------------------------------------------------------------------------------

MARLIN_PATHS = ("marlin24", "widen", "unpack")


def choose_marlin24(n: int, k: int, m: int, dtype: torch.dtype, device: torch.device, *, num_bits: int, grouped: bool) -> Choice[Marlin24]:
    """Which of MARLIN_PATHS multiplies by a weight in Marlin's order.

    `marlin24` reads the weight as it is stored.  `widen` writes it as 2:4 values of 16 bits for the call, which another kernel
    multiplies by: faster than a dense weight and cuBLAS, and still slower than a weight that stays dense below about 1024 rows of x.

    Args:
        n: Rows of the weight.
        k: Columns of the weight.
        m: Rows of x.
        dtype: Of x.
        device: With an index, if it is a CUDA device.
        num_bits: 4 or 8.
        grouped: Whether there are scales for groups of columns.
    """
    if reason := _why_not_marlin24(n, k, m, dtype, device, num_bits, grouped):
        return Choice("unpack", None, {"marlin24": reason, "widen": reason})
    if m <= marlin24.MAX_ROWS:
        config = marlin24.config_for(n, m, multiprocessors(device.index), torch.cuda.get_device_capability(device))
        slower = "marlin24 reads the weight as it is stored"
        return Choice("marlin24", config, {"widen": slower, "unpack": slower})
    many = f"{m} rows of x are more than {marlin24.MAX_ROWS}"
    wide = choose(n, k, m, dtype, device)
    if wide.config is None:
        return Choice("unpack", None, {"marlin24": many, "widen": "no kernel for 16 bits runs either"})
    return Choice("widen", None, {"marlin24": many, "unpack": f"widen runs {wide.path} without a dense weight"})


def _why_not_marlin24(n: int, k: int, m: int, dtype: torch.dtype, device: torch.device, num_bits: int, grouped: bool) -> str | None:
    if not n * k * m:
        return "a size is 0"
    if reason := _why_no_kernel(device, dtype) or marlin24.why_not_read(n, k, grouped=grouped):
        return reason
    return _why_marlin24_is_not_built(dtype, device, num_bits, grouped)


@functools.cache
def _why_marlin24_is_not_built(dtype: torch.dtype, device: torch.device, num_bits: int, grouped: bool) -> str | None:
    config = marlin24.config_for(4096, 1, multiprocessors(device.index), torch.cuda.get_device_capability(device))
    try:
        marlin24_kernel(config, dtype, device.index, num_bits, grouped, grouped)
    except KernelCompileError as error:
        warn(f"marlin24 does not run on {device} with {dtype}: {error}")
        return str(error)
    return None


@functools.cache
def marlin24_kernel(
    config: Marlin24 | None, dtype: torch.dtype, device_index: int, num_bits: int, grouped: bool, scales_permuted: bool
) -> Any:
    """The loaded kernel of a configuration, or with None the one that writes values of 16 bits."""
    form: dict[str, Any] = {"num_bits": num_bits, "grouped": grouped, "scales_permuted": scales_permuted}
    if config is None:
        return load_kernel("marlin24", "marlin24_expand", device_index, marlin24.expand_defines(dtype, **form), 0)
    return load_kernel("marlin24", "marlin24", device_index, config.defines(dtype, **form), config.shared_bytes)


def prepare_marlin24(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device, *, num_bits: int, grouped: bool, scales_permuted: bool
) -> str | None:
    """`prepare` for weights in Marlin's order."""
    device = with_index(device)
    form: dict[str, Any] = {"num_bits": num_bits, "grouped": grouped, "scales_permuted": scales_permuted}
    configs: dict[Marlin24 | None, None] = {}
    reasons = set()
    for n, k in set(shapes):
        for m in ROWS:
            choice = choose_marlin24(n, k, m, dtype, device, num_bits=num_bits, grouped=grouped)
            if choice.path == "unpack":
                reasons.add(choice.reasons["marlin24"])
            else:
                configs[choice.config] = None
    if not configs:
        return next(iter(reasons), None)
    arch = arch_of(torch.cuda.get_device_capability(device))
    defines = [marlin24.expand_defines(dtype, **form) if config is None else config.defines(dtype, **form) for config in configs]
    compile_all([("marlin24", arch, macros) for macros in defines])
    for config in configs:
        marlin24_kernel(config, dtype, device.index, num_bits, grouped, scales_permuted)
    return prepare(SPARSE24, shapes, dtype, device) if None in configs else None


def prepare(
    format: str,
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    values: torch.dtype | None = None,
    quantize_x: bool = False,
) -> str | None:
    """Compile, side by side, and load the kernels that weights of these shapes need, so that no call has to wait.

    Args:
        format: Of the weights.
        shapes: (n, k) of the weights.
        dtype: Of x.
        device: Where they are.
        values: dtype of the weights' values, if it is another.
        quantize_x: Whether x may be rounded to the dtype of the values.

    Returns:
        Why there is no kernel for them, or None.
    """
    device = with_index(device)
    if format not in (SPARSE24, QUANTIZED24):
        return f"there is no kernel for {format}"
    reasons = [why_not(kernel.source, device, dtype, values) for kernel in KERNELS]
    if None not in reasons:
        return reasons[0]
    shapes = set(shapes)
    builds: dict[tuple[MmaSp | WgmmaSp | QuantizeRows, torch.dtype | None], None] = {}
    for n, k in shapes:
        for m in ROWS:
            choice = choose(n, k, m, dtype, device, values=values, quantize_x=quantize_x)
            wide = choose(n, k, m, dtype, device).config if choice.path == "widen" else None
            if wide is not None:
                builds[wide, None] = None
            elif choice.config is not None:
                builds[choice.config, values] = None
                if values is not None and isinstance(choice.config, WgmmaSp):
                    builds[QuantizeRows.of(k), values] = None
    arch = arch_of(torch.cuda.get_device_capability(device))
    compile_all([(config.source, arch, config.defines(dtype, of)) for config, of in builds])
    for config, of in builds:
        _kernel(config, dtype, device.index, of)
    return None


def why_not_kept(format: str = SPARSE24) -> str | None:
    """Why `run_compressed=None` loads dense here, or None if it keeps layers packed.

    Args:
        format: Of the checkpoint.
    """
    if format not in (SPARSE24, QUANTIZED24, *MARLIN_FORMATS):
        return f"there is no kernel for {format}"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    device = with_index(torch.device("cuda"))
    reasons = [why_not(kernel.source, device, torch.bfloat16) for kernel in KERNELS]
    return None if None in reasons else reasons[0]


def _why_not_config(config: MmaSp | WgmmaSp, n: int, k: int, m: int, device: torch.device) -> str | None:
    if isinstance(config, MmaSp) and m > MMA_ROWS:
        return f"{m} rows of x are more than {MMA_ROWS}"
    # The smallest tile that holds all rows, as it was measured; of more than 64 rows also wider ones, or narrower if tiles are few.
    smallest = min(128, max(8, 1 << (m - 1).bit_length()))
    if config.value_bytes == 1:
        narrower = config.bn == 64 and (m <= 128 or few_tiles(n, m))
    else:
        narrower = config.bn == 64 and m > 128 and few_tiles(n, m) and isinstance(config, WgmmaSp) and config.bm == 128
    if config.bn != smallest and (m <= 64 or config.bn < 128) and not narrower:
        return f"its tiles are for other numbers of rows of x than {m}"
    if isinstance(config, WgmmaSp) and config.split > 1 and m > 4 * config.bn:
        return f"its tiles are for fewer rows of x than {m}"
    shared_bytes = block_shared_bytes(device.index)
    if config.shared_bytes + 1024 > shared_bytes:
        return f"it needs {config.shared_bytes} bytes of shared memory, a block here has {shared_bytes}"
    return config.why_not(n, k)


@functools.cache
def block_shared_bytes(device_index: int) -> int:
    """Of dynamic shared memory that a block may have."""
    from cuda.core import Device  # torch has no public name for this

    return int(Device(device_index).properties.max_shared_memory_per_block_optin)


def few_tiles(n: int, m: int) -> bool:
    """Whether tiles of 128 x 128 outputs would leave many multiprocessors idle."""
    return -(-n // 128) * -(-m // 128) < 100


@functools.cache
def _kernel(config: MmaSp | WgmmaSp | QuantizeRows, dtype: torch.dtype, device_index: int, values: torch.dtype | None = None) -> Any:
    return load_kernel(config.source, config.source, device_index, config.defines(dtype, values), config.shared_bytes)


@functools.cache
def _why_not_built(path: str, device: torch.device, dtype: torch.dtype, values: torch.dtype | None) -> str | None:
    """Build one configuration of a kernel, to know whether it can be built here at all."""
    configs = CONFIGS if values is None else CONFIGS_8BIT
    config = next(config for config in configs if config.source == path)
    try:
        _kernel(config, dtype, device.index, values)
    except KernelCompileError as error:
        warn(f"{path} does not run on {device} with {values or dtype}: {error}")
        return str(error)
    return None

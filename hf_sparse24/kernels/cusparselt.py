"""cuSPARSELt with everything cached: y = x W^T + bias for a 2:4 weight W (out_features N, in_features K) and M rows of x.

    the library's words       the memory that is already there
    A (N, K), row-major       W, structured sparse, in the library's compressed buffer (below)
    B (K, M), the transpose   x (M, K), row-major, given as a row-major (M, K) matrix with opB = transpose
    D (N, M), column-major    y (M, N), row-major; the library's bias has one entry per row of D, that is per column of y

so nothing is transposed or copied.  torch's operator makes handle, descriptors and plan anew in every call; here a handle
lives as long as the process, and plans lie in a bounded cache per device.

The compressed buffer is undocumented: found is `values (N, K/2) row-major | metadata`, where `values` are exactly the part
`compressed` of `sparse-24-bitmask`.  `CusparseltWeight` uses that, so that one memory serves both; `check_layout` tests it on
every device and dtype before first use.

Why ctypes: `nvmath-python` (1.0) has these calls as well, but is 22 MB, declares its binding experimental, and finds the library
on its own, where torch has loaded one already; here are the few functions that are needed.

Struct sizes and enum values: cusparseLt.h of the wheels nvidia-cusparselt-cu13 0.8.0 and -cu12 0.8.1 (equal; 0.7.1 has structs
of 1024 bytes and lacks a function), cusparse.h and library_types.h of CUDA 13.0.
"""

import ctypes
import functools
import importlib.util
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.compressors.base import pack_bits, unpack_bits
from hf_sparse24.kernels import reference

SONAME = "libcusparseLt.so.0"
CHECKED_VERSIONS = ((0, 8),)  # (major, minor): others have other structs, or nobody looked
STRUCT_BYTES, STRUCT_ALIGNMENT = 512, 16  # all five opaque structs
MIN_CAPABILITY = (8, 0)
MAX_PLANS = 512  # per device

# Enum values that are used.
SUCCESS, NOT_SUPPORTED = 0, 10
ORDER_COLUMN, ORDER_ROW = 1, 2
NO_TRANSPOSE, TRANSPOSE = 0, 1
SPARSITY_50_PERCENT = 0
COMPUTE_32F = 2
MATMUL_BIAS_POINTER = 8
ALG_DEFAULT = 0
ALG_CONFIG_ID, ALG_CONFIG_MAX_ID, ALG_SPLIT_K, ALG_SPLIT_K_MODE, ALG_SPLIT_K_BUFFERS = 0, 1, 3, 4, 5
CUDA_TYPE = {torch.float16: 2, torch.bfloat16: 14}
ALIGNMENT = 16  # bytes: of every pointer that the library gets, and of each row
SPARSE_MULTIPLE = 16  # out_features and in_features, 16-bit weights
DENSE_MULTIPLE = 8  # rows of x, where the library insists

_POINTER, _SIZE, _INT, _INT64, _UINT32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
_DESCRIPTOR = [_POINTER, _POINTER, _INT64, _INT64, _INT64, _UINT32, _INT, _INT]
_ATTRIBUTE = [_POINTER, _POINTER, _INT, _POINTER, _SIZE]
_MATMUL = [*[_POINTER] * 10, ctypes.c_int32]
# Name without the prefix `cusparseLt`, and the arguments; every function returns a status.
SIGNATURES: dict[str, list[Any]] = {
    "Init": [_POINTER],
    "GetProperty": [_INT, _POINTER],
    "DenseDescriptorInit": _DESCRIPTOR,
    "StructuredDescriptorInit": [*_DESCRIPTOR, _INT],
    "MatDescriptorDestroy": [_POINTER],
    "MatmulDescriptorInit": [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "MatmulDescSetAttribute": _ATTRIBUTE,
    "MatmulAlgSelectionInit": [_POINTER, _POINTER, _POINTER, _INT],
    "MatmulAlgSelectionDestroy": [_POINTER],
    "MatmulAlgSetAttribute": _ATTRIBUTE,
    "MatmulAlgGetAttribute": _ATTRIBUTE,
    "MatmulPlanInit": [_POINTER, _POINTER, _POINTER, _POINTER],
    "MatmulPlanDestroy": [_POINTER],
    "MatmulGetWorkspace": [_POINTER, _POINTER, _POINTER],
    "Matmul": _MATMUL,
    "MatmulSearch": _MATMUL,
    "SpMMACompressedSize2": [_POINTER, _POINTER, _POINTER, _POINTER],
    "SpMMACompress2": [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER],
}


class CusparseltError(RuntimeError):
    """A call of the library failed, or must not be made; `status` is its cusparseStatus_t, None if it was not called."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Algorithm:
    """How the library is told to multiply; None leaves its own default.

    Args:
        id: `CUSPARSELT_MATMUL_ALG_CONFIG_ID`, 0 up to `max_algorithm_id()` exclusive.
        split_k: Over how many pieces K is split.
        split_k_mode: A `cusparseLtSplitKMode_t`.
        split_k_buffers: Buffers of the reduction, 0 up to split_k - 1.
    """

    id: int | None = None
    split_k: int | None = None
    split_k_mode: int | None = None
    split_k_buffers: int | None = None

    def attributes(self) -> list[tuple[int, int]]:
        """(attribute, value) of what is not left to the library, in the order to set them."""
        values = (self.id, self.split_k, self.split_k_mode, self.split_k_buffers)
        names = (ALG_CONFIG_ID, ALG_SPLIT_K, ALG_SPLIT_K_MODE, ALG_SPLIT_K_BUFFERS)
        return [(name, value) for name, value in zip(names, values, strict=True) if value is not None]


DEFAULT = Algorithm()
# Ids of the algorithms that were fastest, or within 3 % of that, for large products (benchmarks/results/cusparselt-h200.json).
MANY_ROWS, MANY, FEWER = 768, Algorithm(17), Algorithm(20)


def choose_algorithm(capability: tuple[int, int], dtype: torch.dtype, rows: int) -> Algorithm:
    """What was measured on a Hopper GPU, else the library's default, which is up to twice as slow there."""
    if capability != (9, 0) or dtype != torch.bfloat16:
        return DEFAULT
    return MANY if rows >= MANY_ROWS else FEWER


def why_not(device: torch.device | None = None) -> str | None:
    """Why cuSPARSELt cannot be used here, or None.

    Args:
        device: A CUDA device; None asks about the library alone.

    Returns:
        No CUDA build, no library, a version that was not checked, no GPU, or a GPU without sparse tensor cores.
    """
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    library = _library()
    if isinstance(library, str):
        return library
    if reason := why_not_version(library.version):
        return reason
    if device is None:
        return None
    if not torch.cuda.is_available():
        return "no GPU is visible"
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, got {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= MIN_CAPABILITY else f"compute capability {capability} is below {MIN_CAPABILITY}"


def why_not_version(version: tuple[int, int, int]) -> str | None:
    """Why a version of the library is not used, or None."""
    if version[:2] in CHECKED_VERSIONS:
        return None
    checked = ", ".join(f"{major}.{minor}.x" for major, minor in CHECKED_VERSIONS)
    return f"cuSPARSELt {'.'.join(map(str, version))} is installed, but this binding was checked with {checked} only"


def why_not_weight(out_features: int, in_features: int, dtype: torch.dtype) -> str | None:
    """Why the library cannot hold such a weight, or None."""
    if dtype not in CUDA_TYPE:
        return f"dtype must be float16 or bfloat16 for cuSPARSELt, got {dtype}"
    for name, size in (("out_features", out_features), ("in_features", in_features)):
        if size <= 0 or size % SPARSE_MULTIPLE:
            return f"{name} must be a positive multiple of {SPARSE_MULTIPLE} for cuSPARSELt, got {size}"
    return None


def check_layout(device: torch.device, dtype: torch.dtype) -> str | None:
    """Try the library on small weights, once per device and dtype: is its buffer what we think, is its product right?

    Args:
        device: A CUDA device.
        dtype: float16 or bfloat16.

    Returns:
        None if all is well, else what differs: then this path must not be used.
    """
    if reason := why_not(device):
        return reason
    if dtype not in CUDA_TYPE:
        return why_not_weight(SPARSE_MULTIPLE, SPARSE_MULTIPLE, dtype)
    return _facts(_context(device), dtype).reason


class CusparseltWeight:
    """A 2:4 weight in cuSPARSELt's compressed buffer, whose first bytes are the packed values.

    Attributes:
        buffer: (bytes,), uint8: values, then the library's metadata.  What `linear` needs.
        values: (out_features, in_features // 2), a view of the buffer: make the layer's `compressed` this view, and the values
            exist once.
        metadata: The rest of the buffer, another view.
    """

    def __init__(self, buffer: Tensor, out_features: int, in_features: int, dtype: torch.dtype):
        self.buffer, self.out_features, self.in_features, self.dtype = buffer, out_features, in_features, dtype
        self.values = _prefix(buffer, out_features, in_features, dtype)
        self.metadata = buffer[self.values.nbytes :]

    @classmethod
    def from_parts(cls, compressed: Tensor, bitmask: Tensor, in_features: int) -> "CusparseltWeight":
        """Build the buffer from packed tensors; takes two dense weights of memory for a moment, and waits for the device.

        The metadata is what the library makes of ones at the bitmask's positions: every group of four has two of them, so it
        has no choice.  Compressing the weight itself would let it choose where a group has fewer than two non-zeros.

        Args:
            compressed: (out_features, in_features // 2), float16 or bfloat16, on a CUDA device; not changed.
            bitmask: (out_features, ceil(in_features / 8)), uint8, exactly two bits per group of four, same device.
            in_features: Columns of the weight.

        Returns:
            The weight; any stored value is kept bit for bit, NaN and -0.0 too.

        Raises:
            CusparseltError: `why_not`, `check_layout` or `why_not_weight` has a reason against it, or the library pads the shape,
                so that values would be stored twice.
        """
        out_features, device, dtype = compressed.shape[0], compressed.device, compressed.dtype
        reason = why_not_weight(out_features, in_features, dtype) or check_layout(device, dtype)
        if reason:
            raise CusparseltError(reason)
        return cls._build(_context(device), compressed.detach(), bitmask.detach(), in_features)

    @classmethod
    def _build(cls, context: "_Context", compressed: Tensor, bitmask: Tensor, in_features: int) -> "CusparseltWeight":
        out_features, dtype = compressed.shape[0], compressed.dtype
        buffer = context.compress(unpack_bits(bitmask, in_features).to(dtype))
        values = _prefix(buffer, out_features, in_features, dtype)
        expected_bytes = compressed_bytes(out_features, in_features)
        if buffer.numel() != expected_bytes or not bool((values == 1).all()):
            found = f"{buffer.numel()} bytes instead of {expected_bytes}, or values with gaps"
            raise CusparseltError(f"cuSPARSELt pads {out_features} x {in_features}: {found}")
        values.copy_(compressed)
        return cls(buffer, out_features, in_features, dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None, algorithm: Algorithm | None = None) -> Tensor:
        """`linear` with this weight; also a ValueError if x has another dtype, which the buffer alone does not tell."""
        if x.dtype != self.dtype:
            raise ValueError(f"x must be {self.dtype} as the weight, got {x.dtype}")
        return linear(x, self.buffer, self.out_features, bias, algorithm)


def compressed_bytes(out_features: int, in_features: int) -> int:
    """Bytes of the compressed buffer of a 16-bit weight that the library does not pad: values, and 2 bits of metadata a value."""
    return out_features * in_features + out_features * in_features // 8


def linear(x: Tensor, buffer: Tensor, out_features: int, bias: Tensor | None = None, algorithm: Algorithm | None = None) -> Tensor:
    """y = x W^T + bias, summed in float32, on the current stream; records nothing for autograd.

    Under a CUDA graph only memory of torch's allocator is taken; call it once for the same sizes before you capture.

    Args:
        x: (..., in_features), the dtype of the weight, any strides (other than contiguous and 16-byte aligned: copied).
        buffer: (bytes,), uint8, `CusparseltWeight.buffer`, on the device of x.
        out_features: Rows of the weight.
        bias: (out_features,), dtype and device of x, or None; added before the result is rounded.
        algorithm: None: `choose_algorithm`.

    Returns:
        y: (..., out_features), dtype of x, contiguous.

    Raises:
        CusparseltError: `check_layout` has a reason, or the library refuses the sizes or the algorithm.
        ValueError: The tensors do not fit each other.
    """
    in_features = x.shape[-1]
    if buffer.device != x.device or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous uint8 on {x.device}, where x is, got {buffer.dtype} on {buffer.device}")
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != x.dtype or bias.device != x.device):
        got = f"{bias.dtype} {tuple(bias.shape)} on {bias.device}"
        raise ValueError(f"bias must be {x.dtype} of shape ({out_features},) on {x.device}, got {got}")
    if reason := why_not_weight(out_features, in_features, x.dtype):
        raise CusparseltError(reason)
    context = _context(x.device)
    facts = _facts(context, x.dtype)
    if facts.reason:
        raise CusparseltError(facts.reason)
    y = x.new_empty((*x.shape[:-1], out_features))
    rows = y.numel() // out_features
    if rows == 0:
        return y
    x = _aligned(x.reshape(rows, in_features))
    fused = bias is not None and facts.bias != "after"
    added = _aligned(bias) if bias is not None and fused else None
    run = functools.partial(context.multiply, buffer=buffer, bias=added, plan_per_bias=facts.bias == "plan", strict=algorithm is not None)
    y2 = y.view(rows, out_features)
    step = _max_rows(in_features, out_features)
    for start in range(0, rows, step):
        x_part, y_part = (x, y2) if rows <= step else (x[start : start + step], y2[start : start + step])
        num_rows = x_part.shape[0]
        chosen = algorithm or choose_algorithm(context.capability, x.dtype, num_rows)
        if num_rows % DENSE_MULTIPLE and not facts.exact_rows:
            # The rows that fill up are whatever memory holds: they end in rows of y that are cut off.
            x_full = x.new_empty((num_rows + -num_rows % DENSE_MULTIPLE, in_features))
            y_full = x.new_empty((x_full.shape[0], out_features))
            x_full[:num_rows].copy_(x_part)
            run(x_full, y=y_full, algorithm=chosen)
            y_part.copy_(y_full[:num_rows])
        else:
            run(x_part, y=y_part, algorithm=chosen)
    return y if fused or bias is None else y.add_(bias)


@dataclass(frozen=True)
class Timing:
    """What one algorithm took; `time_us` is the best of `repeats` graph replays per multiplication, `spread` (worst - best) / best."""

    algorithm: Algorithm
    time_us: float
    spread: float


def search(
    weights: Sequence[CusparseltWeight],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    candidates: Sequence[Algorithm] | None = None,
    repeats: int = 3,
    loops: int = 1,
) -> list[Timing]:
    """Time every algorithm of the library; for tuning, never for a request: it takes seconds and captures CUDA graphs.

    An algorithm that the library refuses for these sizes, or whose result differs from the default's, is left out.

    Args:
        weights: Same sizes; enough of them to exceed the L2 cache together, since they take turns.
        x: (rows, in_features).
        bias: (out_features,) or None.
        candidates: None: `algorithms`.
        repeats: Replays that are timed.
        loops: How often one replay goes over the weights.

    Returns:
        The fastest first; the library's default (`DEFAULT`) is among them.
    """
    first = weights[0]
    expected = first.linear(x, bias, DEFAULT).float()
    found = []
    for algorithm in (DEFAULT, *(algorithms(first, x, bias) if candidates is None else candidates)):
        try:
            actual = first.linear(x, bias, algorithm).float()
        except CusparseltError:
            continue
        # Sums in another order: 2^-6 of the largest result is far above rounding, and far below a wrong tile.
        if not bool(((actual - expected).abs() <= 2**-6 * expected.abs().max()).all()):
            continue
        times_us = _replay_us([functools.partial(weight.linear, x, bias, algorithm) for weight in weights] * loops, repeats)
        best, worst = (time_us / (loops * len(weights)) for time_us in (min(times_us), max(times_us)))
        found.append(Timing(algorithm, best, (worst - best) / best))
    return sorted(found, key=lambda timing: timing.time_us)


def algorithms(weight: CusparseltWeight, x: Tensor, bias: Tensor | None = None) -> list[Algorithm]:
    """Every algorithm id for these sizes, and what the library's own search chooses if it splits K."""
    context = _context(x.device)
    x = _aligned(x.reshape(-1, weight.in_features))
    if x.shape[0] % DENSE_MULTIPLE and not _facts(context, x.dtype).exact_rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % DENSE_MULTIPLE))
    y = x.new_empty((x.shape[0], weight.out_features))
    key = _PlanKey(x.shape[0], weight.out_features, weight.in_features, x.dtype, bias is not None, DEFAULT)
    bias = None if bias is None else _aligned(bias)
    names = ALG_CONFIG_ID, ALG_SPLIT_K, ALG_SPLIT_K_MODE, ALG_SPLIT_K_BUFFERS
    with torch.cuda.device(x.device), context.lock, _Plan(context, key, bias) as plan:
        found = [Algorithm(number) for number in range(plan.attribute(ALG_CONFIG_MAX_ID))]
        try:
            before = [plan.attribute(name) for name in names]
            plan.run(x, weight.buffer, y, bias, "MatmulSearch")
            number, *split = [plan.attribute(name) for name in names]
        except CusparseltError:
            return found  # the ids are still worth trying
        finally:
            torch.cuda.current_stream(x.device).synchronize()
    return found if split == before[1:] else [*found, Algorithm(number, split[0], split[1] or None, split[2] or None)]


def clear_plans() -> None:
    """Destroy all cached plans; graphs that were captured with them should be gone, too."""
    with _LOCK:
        for context in _CONTEXTS.values():
            context.clear()


@dataclass(frozen=True)
class _Facts:
    """What the self-test found.  `bias`: "live": the pointer may change from call to call; "plan": a plan per pointer; "after"."""

    reason: str | None
    bias: str = "after"
    exact_rows: bool = False


@dataclass(frozen=True)
class _PlanKey:
    rows: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    has_bias: bool
    algorithm: Algorithm
    bias_pointer: int = 0


class _Opaque:
    """One of the library's structs: 512 bytes at an address that is a multiple of 16, and stays."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(STRUCT_BYTES + STRUCT_ALIGNMENT)
        start = ctypes.addressof(self.memory)
        self.address = start + -start % STRUCT_ALIGNMENT


class _Library:
    """The functions of SIGNATURES as attributes-by-name, and the version."""

    def __init__(self, library: ctypes.CDLL):
        self.functions: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"cusparseLt{name}")
            function.argtypes, function.restype = arguments, _INT
            self.functions[name] = function
        self.error_name = library.cusparseLtGetErrorName
        self.error_name.argtypes, self.error_name.restype = [_INT], ctypes.c_char_p
        self.version = (self._property(0), self._property(1), self._property(2))

    def _property(self, number: int) -> int:
        value = _INT(-1)
        self.call("GetProperty", number, ctypes.byref(value))
        return value.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call `cusparseLt{name}`; a status other than success is a CusparseltError."""
        if status := self.functions[name](*arguments):
            raise CusparseltError(f"cusparseLt{name} returned {(self.error_name(status) or b'?').decode()} ({status})", status)


@functools.cache
def _library() -> _Library | str:
    """The library that torch has loaded, else the one in torch's wheel; or why there is none."""
    if sys.platform != "linux":
        return f"the binding of cuSPARSELt knows Linux only, not {sys.platform}"
    problems = []
    for path, mode in (*[(SONAME, ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)], *[(str(path), ctypes.DEFAULT_MODE) for path in _wheel_files()]):
        try:
            return _Library(ctypes.CDLL(path, mode=mode))
        except OSError as error:
            problems.append(str(error))
        except AttributeError as error:  # a function is missing
            return f"{path} is not the cuSPARSELt that this binding knows: {error}"
    return f"torch has not loaded {SONAME}, and no wheel nvidia-cusparselt-cu* holds it: {'; '.join(problems)}"


def _wheel_files() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia.cusparselt")
    except ModuleNotFoundError:
        return []
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return [path for folder in folders if (path := Path(folder, "lib", SONAME)).exists()]


class _Context:
    """One device's handle, plans and facts.  The lock covers every use of the handle: torch, too, never shares one."""

    def __init__(self, index: int):
        library = _library()
        assert isinstance(library, _Library)
        self.library, self.index, self.device = library, index, torch.device("cuda", index)
        self.capability = torch.cuda.get_device_capability(index)
        self.lock = threading.RLock()
        self.handle = _Opaque()
        self.plans: OrderedDict[_PlanKey, _Plan] = OrderedDict()
        self.facts: dict[torch.dtype, _Facts] = {}
        with torch.cuda.device(index):
            torch.cuda.current_stream(index)  # makes the CUDA context
            library.call("Init", self.handle.address)

    def compress(self, dense: Tensor) -> Tensor:
        """The library's compressed buffer (bytes,) of a contiguous dense weight (out_features, in_features)."""
        out_features, in_features = dense.shape
        size, scratch_size = _SIZE(), _SIZE()
        with torch.cuda.device(self.index), self.lock, ExitStack() as undo:
            matrix = self.sparse_matrix(undo, out_features, in_features, dense.dtype)
            arguments = self.handle.address, matrix.address
            self.library.call("SpMMACompressedSize2", *arguments, ctypes.byref(size), ctypes.byref(scratch_size))
            buffer = torch.empty(size.value, dtype=torch.uint8, device=self.device)
            scratch = torch.empty(max(scratch_size.value, ALIGNMENT), dtype=torch.uint8, device=self.device)
            pointers = dense.data_ptr(), buffer.data_ptr(), scratch.data_ptr(), _stream(self.index)
            self.library.call("SpMMACompress2", *arguments, 1, NO_TRANSPOSE, *pointers)
        return buffer

    def sparse_matrix(self, undo: ExitStack, rows: int, columns: int, dtype: torch.dtype) -> _Opaque:
        """Descriptor of a row-major structured matrix."""
        matrix = _Opaque()
        sizes = rows, columns, columns, ALIGNMENT, CUDA_TYPE[dtype], ORDER_ROW, SPARSITY_50_PERCENT
        self.library.call("StructuredDescriptorInit", self.handle.address, matrix.address, *sizes)
        undo.callback(self.library.call, "MatDescriptorDestroy", matrix.address)
        return matrix

    def dense_matrix(self, undo: ExitStack, rows: int, columns: int, stride: int, dtype: torch.dtype, order: int) -> _Opaque:
        """Descriptor of a dense matrix."""
        matrix = _Opaque()
        sizes = rows, columns, stride, ALIGNMENT, CUDA_TYPE[dtype], order
        self.library.call("DenseDescriptorInit", self.handle.address, matrix.address, *sizes)
        undo.callback(self.library.call, "MatDescriptorDestroy", matrix.address)
        return matrix

    def multiply(
        self, x: Tensor, *, buffer: Tensor, y: Tensor, bias: Tensor | None, algorithm: Algorithm, plan_per_bias: bool, strict: bool = True
    ) -> None:
        """y (M, N) = x (M, K) W^T + bias with a cached plan; all contiguous and aligned.  `strict`: this algorithm or none."""
        pointer = bias.data_ptr() if bias is not None and plan_per_bias else 0
        key = _PlanKey(x.shape[0], y.shape[1], x.shape[1], x.dtype, bias is not None, algorithm, pointer)
        if torch.cuda.current_device() == self.index:
            with self.lock:
                self.plan(key, bias, strict).run(x, buffer, y, bias)
        else:
            with torch.cuda.device(self.index), self.lock:
                self.plan(key, bias, strict).run(x, buffer, y, bias)

    def plan(self, key: _PlanKey, bias: Tensor | None, strict: bool) -> "_Plan":
        """The cached plan, made if need be; the one used longest ago makes room."""
        plan = self.plans.get(key)
        if plan is not None:
            self.plans.move_to_end(key)
            return plan
        try:
            plan = _Plan(self, key, bias)
        except CusparseltError as error:
            if strict or key.algorithm == DEFAULT:
                raise
            warnings.warn(f"{key.algorithm} is refused, the library's default runs: {error}", stacklevel=2)
            plan = _Plan(self, replace(key, algorithm=DEFAULT), bias)
        self.plans[key] = plan
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)[1].close()
        return plan

    def clear(self) -> None:
        """Destroy all plans."""
        with self.lock, torch.cuda.device(self.index):
            torch.cuda.synchronize(self.index)
            while self.plans:
                self.plans.popitem()[1].close()


class _Plan:
    """A multiplication that the library has prepared, with everything that it points to; used under the context's lock."""

    def __init__(self, context: _Context, key: _PlanKey, bias: Tensor | None):
        self.call, self.handle = context.library.call, context.handle.address
        self.functions, self.index, self.device = context.library.functions, context.index, context.device
        self.alpha, self.beta = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.alpha_address, self.beta_address = ctypes.addressof(self.alpha), ctypes.addressof(self.beta)
        self.matmul, self.selection, self.plan = _Opaque(), _Opaque(), _Opaque()
        self.bias_pointer = _POINTER(0)
        rows, out_features, in_features = key.rows, key.out_features, key.in_features
        size, scratch_size = _SIZE(), _SIZE()
        with ExitStack() as undo:
            w = context.sparse_matrix(undo, out_features, in_features, key.dtype)
            x = context.dense_matrix(undo, rows, in_features, in_features, key.dtype, ORDER_ROW)
            y = context.dense_matrix(undo, out_features, rows, out_features, key.dtype, ORDER_COLUMN)
            self.matrices = w, x, y
            operands = NO_TRANSPOSE, TRANSPOSE, w.address, x.address, y.address, y.address, COMPUTE_32F
            self.call("MatmulDescriptorInit", self.handle, self.matmul.address, *operands)
            if bias is not None:
                self.set_bias(bias.data_ptr())
            self.call("MatmulAlgSelectionInit", self.handle, self.selection.address, self.matmul.address, ALG_DEFAULT)
            undo.callback(self.call, "MatmulAlgSelectionDestroy", self.selection.address)
            for name, value in key.algorithm.attributes():
                number = _INT(value)
                self.call("MatmulAlgSetAttribute", self.handle, self.selection.address, name, ctypes.byref(number), ctypes.sizeof(number))
            self.call("MatmulPlanInit", self.handle, self.plan.address, self.matmul.address, self.selection.address)
            undo.callback(self.call, "MatmulPlanDestroy", self.plan.address)
            self.call("MatmulGetWorkspace", self.handle, self.plan.address, ctypes.byref(size))
            self.workspace_bytes = size.value
            self.call("SpMMACompressedSize2", self.handle, w.address, ctypes.byref(size), ctypes.byref(scratch_size))
            self.compressed_bytes = size.value
            self.undo = undo.pop_all()

    def set_bias(self, pointer: int) -> None:
        """Let the epilogue add what lies at a device address."""
        self.bias_pointer = _POINTER(pointer)
        arguments = MATMUL_BIAS_POINTER, ctypes.byref(self.bias_pointer), ctypes.sizeof(self.bias_pointer)
        self.call("MatmulDescSetAttribute", self.handle, self.matmul.address, *arguments)

    def attribute(self, name: int) -> int:
        """An int of the algorithm selection."""
        value = _INT(0)
        self.call("MatmulAlgGetAttribute", self.handle, self.selection.address, name, ctypes.byref(value), ctypes.sizeof(value))
        return value.value

    def run(self, x: Tensor, buffer: Tensor, y: Tensor, bias: Tensor | None, function: str = "Matmul") -> None:
        """Multiply on the current stream.  The workspace is the caching allocator's: safe for other streams and in graphs."""
        if buffer.numel() != self.compressed_bytes or buffer.data_ptr() % ALIGNMENT:
            raise ValueError(f"buffer has {buffer.numel()} bytes, expected {self.compressed_bytes} at an address that is a multiple of 16")
        if bias is not None and bias.data_ptr() != self.bias_pointer.value:
            self.set_bias(bias.data_ptr())
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device) if self.workspace_bytes else None
        stream, y_pointer = _POINTER(_stream(self.index)), y.data_ptr()
        status = self.functions[function](
            *(self.handle, self.plan.address, self.alpha_address, buffer.data_ptr(), x.data_ptr()),
            *(self.beta_address, y_pointer, y_pointer, workspace.data_ptr() if workspace is not None else None, ctypes.byref(stream), 1),
        )
        if status:
            raise CusparseltError(f"cusparseLt{function} returned status {status} for x {tuple(x.shape)}, y {tuple(y.shape)}", status)

    def close(self) -> None:
        """Destroy it."""
        self.undo.close()

    def __enter__(self) -> "_Plan":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_LOCK = threading.RLock()
_CONTEXTS: dict[int, _Context] = {}


def _context(device: torch.device) -> _Context:
    context = _CONTEXTS.get(device.index)
    if context is None or device.type != "cuda":
        if reason := why_not(device):
            raise CusparseltError(reason)
        index = torch.cuda.current_device() if device.index is None else device.index
        with _LOCK:
            context = _CONTEXTS.get(index) or _CONTEXTS.setdefault(index, _Context(index))
    return context


def _stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream() makes an object of it first


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _max_rows(in_features: int, out_features: int) -> int:
    """Rows per call: x and y stay below 2^31 elements."""
    return max((2**31 - 1) // max(in_features, out_features) // DENSE_MULTIPLE, 1) * DENSE_MULTIPLE


def _prefix(buffer: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return buffer[: out_features * in_features].view(dtype).view(out_features, in_features // 2)


def _replay_us(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Microseconds of each replay of a CUDA graph that calls functions one after the other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    graph.replay()
    times_us = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(1000 * start.elapsed_time(end))
    return times_us


def _facts(context: _Context, dtype: torch.dtype) -> _Facts:
    facts = context.facts.get(dtype)
    if facts is None:
        with context.lock:
            facts = context.facts.get(dtype)
            if facts is None:
                if torch.cuda.is_current_stream_capturing():
                    return _Facts("the self-test of cuSPARSELt cannot run inside a CUDA graph: call the layer once before you capture")
                with torch.no_grad(), torch.cuda.device(context.index):
                    try:
                        facts = _self_test(context, dtype)
                    except CusparseltError as error:
                        facts = _Facts(f"the self-test failed: {error}")
                context.facts[dtype] = facts
    return facts


TEST_SHAPES = ((256, 512), (128, 320))  # in_features % 128 is 0 and 64
TEST_ROWS = 64


def _self_test(context: _Context, dtype: torch.dtype) -> _Facts:
    """See `check_layout`."""
    dice = torch.Generator().manual_seed(24)
    for out_features, in_features in TEST_SHAPES:
        name = f"{out_features} x {in_features} {dtype}"
        bitmask = sample_bitmask(out_features, in_features, dice)[0].to(context.device)
        distinct = torch.randn((out_features, in_features // 2), generator=dice).abs().add(0.5).to(context.device, dtype)
        buffer = context.compress(reference.unpack(distinct, bitmask, in_features))
        if buffer.numel() != (expected_bytes := compressed_bytes(out_features, in_features)):
            return _Facts(f"cuSPARSELt's buffer of {name} has {buffer.numel()} bytes, expected {expected_bytes}")
        if not torch.equal(_prefix(buffer, out_features, in_features, dtype), distinct):
            return _Facts(f"cuSPARSELt's buffer of {name} does not begin with the row-major values")
        sample = _Sample.draw(context, out_features, in_features, dtype, dice)
        if not sample.is_right(TEST_ROWS):
            return _Facts(f"cuSPARSELt's product of {name} is wrong")
    bias = sample.bias_mode()
    return _Facts(None, bias, sample.takes_any_rows(bias))


@dataclass(frozen=True)
class _Sample:
    """A weight with groups of 0, 1 and 2 non-zeros, and a product.  Small integers: every order of summing gives the same bits."""

    context: _Context
    weight: CusparseltWeight
    x: Tensor  # (TEST_ROWS, in_features)
    product: Tensor  # (TEST_ROWS, out_features), float64
    biases: tuple[Tensor, Tensor]  # (out_features,)

    @classmethod
    def draw(cls, context: _Context, out_features: int, in_features: int, dtype: torch.dtype, dice: torch.Generator) -> "_Sample":
        def integers(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high + 1, size, generator=dice)

        bitmask, kept = sample_bitmask(out_features, in_features, dice)
        values = integers(1, 2, *kept.shape) * (2 * integers(0, 1, *kept.shape) - 1) * kept
        values, bitmask = values.to(context.device, dtype), bitmask.to(context.device)
        x = integers(-1, 1, TEST_ROWS, in_features).to(context.device, dtype)
        product = x.double() @ reference.unpack(values, bitmask, in_features).double().t()
        first, second = (integers(-8, 8, out_features).to(context.device, dtype) for _ in range(2))
        return cls(context, CusparseltWeight._build(context, values, bitmask, in_features), x, product, (first, second))

    def is_right(self, rows: int, bias: Tensor | None = None, plan_per_bias: bool = False) -> bool:
        """Whether the first rows of y are right, and nothing is written behind them."""
        expected = self.product[:rows] if bias is None else self.product[:rows] + bias.double()
        y = torch.full((rows + TEST_ROWS, self.weight.out_features), float("nan"), dtype=self.x.dtype, device=self.x.device)
        options: dict[str, Any] = {"bias": bias, "algorithm": DEFAULT, "plan_per_bias": plan_per_bias}
        self.context.multiply(self.x[:rows], buffer=self.weight.buffer, y=y[:rows], **options)
        return torch.equal(y[:rows].double(), expected) and bool(y[rows:].isnan().all())

    def bias_mode(self) -> str:
        """How `_Facts` says that the library can add a bias."""
        first, second = self.biases
        try:
            if all(self.is_right(TEST_ROWS, bias) for bias in (first, second, first)):
                return "live"
            return "plan" if all(self.is_right(TEST_ROWS, bias, plan_per_bias=True) for bias in (first, second, first)) else "after"
        except CusparseltError:
            return "after"

    def takes_any_rows(self, bias_mode: str) -> bool:
        """Whether numbers of rows that are no multiple of 8 work as they are."""
        biases = [None] if bias_mode == "after" else [None, self.biases[0]]
        try:
            return all(self.is_right(rows, bias, bias_mode == "plan") for rows in (1, 7, 17, 63) for bias in biases)
        except CusparseltError:
            return False


def sample_bitmask(out_features: int, in_features: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random kept positions, and which of the kept values are non-zeros: groups have 0, 1 or 2 of these, at every position.

    Args:
        out_features: Rows.
        in_features: Columns, a multiple of 8.
        dice: A generator on the CPU.

    Returns:
        bitmask: (out_features, in_features // 8), uint8, two bits per group of four.
        kept: (out_features, in_features // 2), bool, False = a stored zero.
    """
    pairs = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    mask = pairs[torch.randint(0, 6, (out_features, in_features // 4), generator=dice)].flatten(1)  # (out, in)
    kept = torch.rand((out_features, in_features // 2), generator=dice) < 0.75
    return pack_bits(mask), kept

"""Machine code of the kernels: `*.cu` beside this file, built by NVRTC for the exact chip on first use, and kept on disk.

`cuda-core`, NVIDIA's own wheel, compiles without a GPU, a driver or a CUDA toolkit.  Nothing of CUDA is imported before the
first call.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from hf_sparse24.errors import get_logger

if TYPE_CHECKING:
    from cuda.core import Kernel

logger = get_logger(__name__)

SOURCES = Path(__file__).parent
# Changes with the form of an entry on disk: MAGIC, sha256 of the machine code, its length in 8 bytes, the machine code.
FORMAT = 1
MAGIC = b"hf_sparse24 cubin\n"
SUFFIX = ".cubin"
# Dynamic and static shared memory that every kernel may have without asking.
SHARED_BYTES = 48 * 1024
# Chips whose machine code has instructions that their successors lack: only the exact architecture has them.
EXACT = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}

INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)"$', re.MULTILINE)

Defines = Mapping[str, int | str]
NO_DEFINES: Defines = MappingProxyType({})


class KernelCompileError(RuntimeError):
    """A kernel cannot be built or loaded here.  The message is one line; `log` is all that the compiler said, if it was asked."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


# ---- compiling -----------------------------------------------------------------------------------------------------------


def compile_kernel(source: str, arch: str, defines: Defines = NO_DEFINES) -> bytes:
    """The machine code of a source file: from memory, else from disk, else from NVRTC.

    Args:
        source: Name of a file in SOURCES, without `.cu`.
        arch: As `arch_of` gives it, "sm_90a".
        defines: Macros; a bool is 0 or 1.

    Returns:
        The cubin.

    Raises:
        KernelCompileError: The source does not compile, or a wheel is missing; the message names it.
    """
    text = _text(f"{source}.cu")
    macros = [(name, str(value if isinstance(value, str) else int(value))) for name, value in sorted(defines.items())]
    folder, key = cache_folder(), _key(text, arch, macros)
    made = _CUBINS.setdefault((folder, key), _Once())
    return made.get(lambda: _read_or_build(folder / f"{key}{SUFFIX}", lambda: _build(source, text, arch, macros)))


def compile_all(requests: Sequence[tuple[str, str, Defines]]) -> list[bytes]:
    """Compile side by side what is not compiled yet.

    NVRTC lets go of Python's lock and shares none of its own: two kernels of 22.5 s each took 23.5 s in two threads
    (NVRTC 13.0.88, two CPU cores, 2026-11-30).

    Args:
        requests: The arguments of `compile_kernel`.

    Returns:
        The cubins, in that order.

    Raises:
        KernelCompileError: Of the first request that fails, when all are done.
    """
    if not requests:
        return []
    with ThreadPoolExecutor(min(len(requests), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda request: compile_kernel(*request), requests))


@cache
def compiler_version() -> str:
    """NVRTC's version, "13.0.88"; without the patch level, "13.0", where neither wheel nor file name tells it.

    Raises:
        KernelCompileError: A wheel is missing; the message says what to install.
    """
    _require_wheels()
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError as error:
        raise _missing([NVRTC_WHEEL[_cuda_major()] + f"=={_cuda_major()}.*"]) from error
    _, major, minor = nvrtc.nvrtcVersion()
    return _patch_level(Path(library.abs_path or ""), f"{major}.{minor}")


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, "sm_90a" for compute capability (9, 0), "sm_86" for (8, 6)."""
    return EXACT.get(capability, f"sm_{capability[0]}{capability[1]}")


def _text(name: str) -> str:
    """A source file with what it includes, so that the key of a kernel covers all of it."""
    return INCLUDE.sub(lambda include: _text(include["name"]), (SOURCES / name).read_text(encoding="utf-8"))


def _key(text: str, arch: str, macros: list[tuple[str, str]]) -> str:
    flags = [flag.decode() for flag in _options("", arch, macros).as_bytes("nvrtc", "cubin")]
    return hashlib.sha256(json.dumps([FORMAT, text, arch, compiler_version(), flags]).encode()).hexdigest()


def _options(name: str, arch: str, macros: list[tuple[str, str]]) -> Any:
    _require_wheels()
    from cuda.core import ProgramOptions

    return ProgramOptions(name=name, arch=arch, std="c++17", define_macro=macros or None)


def _build(source: str, text: str, arch: str, macros: list[tuple[str, str]]) -> bytes:
    from cuda.core import Program
    from cuda.core._utils.cuda_utils import CUDAError  # its only name

    try:
        # With its first program NVRTC loads another library; two threads that did so at once were seen to fail (13.0.88, 2026-12-01).
        with nullcontext() if _STARTED.is_set() else _FIRST:
            cubin = bytes(Program(text, "c++", _options(f"{source}.cu", arch, macros)).compile("cubin").code)
        _STARTED.set()
        return cubin
    except CUDAError as error:
        log = str(error).strip("\0\n ")
        reason = next((line for line in log.splitlines() if "error" in line), log.partition("\n")[0])
        raise KernelCompileError(f"{source}.cu does not compile for {arch}: {reason}", log) from error


_FIRST, _STARTED = threading.Lock(), threading.Event()


class _Once:
    """Made by the first thread that asks, while others wait.  A compiler's error is kept too: it would be the same again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: bytes | KernelCompileError | None = None

    def get(self, make: Callable[[], bytes]) -> bytes:
        with self.lock:
            if self.made is None:
                try:
                    self.made = make()
                except KernelCompileError as error:
                    self.made = error
        if isinstance(self.made, KernelCompileError):
            raise KernelCompileError(str(self.made), self.made.log) from self.made
        return self.made


# What this process has compiled or read, by folder and key; tens of entries of some ten kilobytes.
_CUBINS: dict[tuple[Path, str], _Once] = {}


# ---- what must be installed ----------------------------------------------------------------------------------------------

CORE_WHEEL = "cuda-core>=1.2,<2"
NVRTC_WHEEL = {"12": "nvidia-cuda-nvrtc-cu12", "13": "nvidia-cuda-nvrtc"}


def _cuda_major() -> str:
    """Of the CUDA that torch was built for, the one whose wheels fit; the newest that `cuda-core` knows if torch has none."""
    major = (torch.version.cuda or "").partition(".")[0]
    return major if major in NVRTC_WHEEL else max(NVRTC_WHEEL)


def _require_wheels() -> None:
    wheels = {"cuda.core": CORE_WHEEL, "cuda.bindings": f"cuda-bindings=={_cuda_major()}.*"}
    missing = [wheel for module, wheel in wheels.items() if not _is_installed(module)]
    if missing:
        raise _missing(missing)
    with _IMPORTING:  # threads that import it at once find it half done (cuda-core 1.2.0, 2026-11-30)
        import cuda.core  # noqa: F401


_IMPORTING = threading.Lock()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent, the namespace `cuda`
        return False


def _missing(wheels: list[str]) -> KernelCompileError:
    command = " ".join(f'"{wheel}"' for wheel in wheels)
    return KernelCompileError(f"kernels are compiled on first use, and what compiles them is missing: pip install {command}")


def _patch_level(library: Path, version: str) -> str:
    """The version of the library at that path, of which `version` is the beginning."""
    of_file = library.resolve().name.partition(".so.")[2]  # a toolkit's: libnvrtc.so.13.0.88
    if of_file.startswith(f"{version}."):
        return of_file
    for wheel in NVRTC_WHEEL.values():
        try:
            found = metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
        ours = [Path(str(found.locate_file(file))) for file in found.files or () if file.name == library.name]
        if library.resolve() in [path.resolve() for path in ours]:
            return found.version
    return version


# ---- the cache on disk ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where machine code is kept: `kernels` in $HF_SPARSE24_CACHE, $XDG_CACHE_HOME/hf_sparse24 or ~/.cache/hf_sparse24."""
    own, shared = os.environ.get("HF_SPARSE24_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else (Path(shared) if shared else Path("~/.cache")) / "hf_sparse24"
    try:
        return root.expanduser() / "kernels"
    except RuntimeError:  # a user without a home: nothing can be kept
        return Path(os.devnull) / "kernels"


def _read_or_build(entry: Path, build: Callable[[], bytes]) -> bytes:
    cubin = _read(entry)
    if cubin is None:
        cubin = build()
        _write(entry, cubin)
    return cubin


def _read(entry: Path) -> bytes | None:
    """The machine code of an entry, or None if there is no entry, or no whole one."""
    try:
        stored = entry.read_bytes()
    except OSError:
        return None
    header, cubin = stored[: len(_header(b""))], stored[len(_header(b"")) :]
    return cubin if header == _header(cubin) else None


def _write(entry: Path, cubin: bytes) -> None:
    """Put an entry in its place in one step, whatever other processes do; where that is not possible, say so once."""
    part = entry.parent / f".{uuid4().hex}.part"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(_header(cubin) + cubin)
            part.replace(entry)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        why = f"hf_sparse24 cannot keep compiled kernels in {entry.parent}: {error.strerror}"
        logger.warning_once(f"{why}; set HF_SPARSE24_CACHE to a folder that can be written")


def _header(cubin: bytes) -> bytes:
    return MAGIC + hashlib.sha256(cubin).digest() + len(cubin).to_bytes(8, "little")


# ---- loading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    kernel: "Kernel"
    shared_bytes: int
    """Dynamic shared memory that a launch may ask for."""


_LOADED: dict[tuple[str, str, int, tuple[tuple[str, int | str], ...]], _Loaded] = {}
_LOADING = threading.Lock()


def load_kernel(source: str, name: str, device_index: int, defines: Defines = NO_DEFINES, shared_bytes: int = 0) -> "Kernel":
    """A kernel that is ready for `cuda.core.launch`, also while a CUDA graph is captured: nothing of it is loaded later.

    The first call for a device compiles and loads, and must not stand inside a capture.

    Args:
        source: Name of a file in SOURCES, without `.cu`.
        name: Of an `extern "C"` function in it.
        device_index: As torch counts devices.
        defines: Macros.
        shared_bytes: Dynamic shared memory of the largest launch; a later call may ask for more.

    Returns:
        The same object for the same source, name, device and macros.

    Raises:
        KernelCompileError: It cannot be built, or the driver refuses it, or the device has less shared memory.
    """
    key = (source, name, device_index, tuple(sorted(defines.items())))
    loaded = _LOADED.get(key)
    if loaded is not None and shared_bytes <= loaded.shared_bytes:
        return loaded.kernel
    cubin = compile_kernel(source, arch_of(torch.cuda.get_device_capability(device_index)), defines)
    with _LOADING:
        loaded = _LOADED.get(key) or _load(cubin, name, device_index)
        if shared_bytes > loaded.shared_bytes:
            _allow_shared_bytes(loaded.kernel, name, device_index, shared_bytes)
            loaded = _Loaded(loaded.kernel, shared_bytes)
        _LOADED[key] = loaded
    return loaded.kernel


def _load(cubin: bytes, name: str, device_index: int) -> _Loaded:
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode
    from cuda.core._utils.cuda_utils import CUDAError

    # torch's context, in this thread too, and afterwards whatever device was current.
    with torch.cuda.device(device_index):
        try:
            Device(device_index).set_current()
            kernel = ObjectCode.from_cubin(cubin, name=name).get_kernel(name)
        except CUDAError as error:
            raise KernelCompileError(f"the driver does not load the kernel {name}: {' '.join(str(error).split())}") from error
        # A kernel is loaded into a context when its function there is asked for; cuFuncLoad, of CUDA 12.4, leaves no doubt.
        function = _checked(driver.cuKernelGetFunction(kernel.handle), name)
        if _checked(driver.cuDriverGetVersion(), name) >= 12040:
            _checked(driver.cuFuncLoad(function), name)
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return _Loaded(kernel, SHARED_BYTES - _checked(driver.cuFuncGetAttribute(static, function), name))


def _allow_shared_bytes(kernel: "Kernel", name: str, device_index: int, shared_bytes: int) -> None:
    from cuda.bindings import driver

    dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = _checked(driver.cuDeviceGet(device_index), name)
    what = f"{name} with {shared_bytes} bytes of shared memory"
    _checked(driver.cuKernelSetAttribute(dynamic, shared_bytes, kernel.handle, device), what)


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """What the driver returns beside its status."""
    status, *values = result
    if status.name != "CUDA_SUCCESS":
        raise KernelCompileError(f"the driver does not load the kernel {what}: {status.name}")
    return values[0] if values else None

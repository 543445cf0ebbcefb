"""`hf-sparse24 doctor`: what is installed, and which paths a packed layer can take on each device here, and why not the others."""

import ctypes
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_sparse24 import __version__
from hf_sparse24.kernels import compile, dispatch
from hf_sparse24.report import show_bytes

NVML = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Component:
    """Something that kernels need: its version, or why there is none."""

    version: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Device:
    """A CUDA device; `paths` says for each dtype and path why it cannot run, None if it can."""

    name: str
    compute_capability: str
    memory_bytes: int
    paths: dict[str, dict[str, str | None]]


@dataclass(frozen=True)
class Cache:
    """The folder of compiled kernels."""

    folder: str
    num_entries: int
    size_bytes: int


@dataclass(frozen=True)
class Report:
    """All that `doctor` knows."""

    versions: dict[str, str]
    """Of Python and the packages."""
    components: dict[str, Component]
    cache: Cache
    devices: dict[str, Device]
    """By torch's names, `cuda:0`."""
    no_device: str | None
    """Why there are no devices."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def examine() -> Report:
    """Look at this machine.  To know whether kernels can be built, one of each is, for each GPU and dtype, and is kept."""
    versions = {
        "hf_sparse24": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    components = {
        "cuda-core": _cuda_core(),
        "NVRTC": _nvrtc(),
        "cuSPARSELt": _cusparselt(),
        "driver": _driver(),
    }
    has_devices = torch.cuda.is_available()
    devices = {f"cuda:{index}": _device(index) for index in range(torch.cuda.device_count() if has_devices else 0)}
    return Report(versions, components, _cache(compile.cache_folder()), devices, None if has_devices else _why_no_device())


def render(report: Report) -> str:
    """The report as text."""
    facts = [f"{name}: {version}" for name, version in report.versions.items()]
    facts += [f"{name}: {component.version or f'none, {component.problem}'}" for name, component in report.components.items()]
    cache = report.cache
    facts.append(f"compiled kernels: {cache.num_entries}, {show_bytes(cache.size_bytes)}, in {cache.folder}")
    if report.no_device:
        facts += ["", f"no CUDA device: {report.no_device}"]
    for place, device in report.devices.items():
        facts += ["", f"{place}: {device.name}, compute capability {device.compute_capability}, {show_bytes(device.memory_bytes)}"]
        for dtype, paths in device.paths.items():
            facts += [f"  {dtype}  {path}: {f'no: {why}' if why else 'usable'}" for path, why in paths.items()]
    return "\n".join(facts)


def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    device = torch.device("cuda", index)
    paths = {str(dtype).removeprefix("torch."): dispatch.usable_paths(device, dtype) for dtype in dispatch.DTYPES}
    return Device(properties.name, f"{properties.major}.{properties.minor}", properties.total_memory, paths)


def _why_no_device() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and finds no device, or no driver that fits"


def _cuda_core() -> Component:
    try:
        return Component(metadata.version("cuda-core"))
    except metadata.PackageNotFoundError:
        return Component(None, f'install it: pip install "{compile.CORE_WHEEL}"')


def _nvrtc() -> Component:
    """The message of its absence has the command that installs all that is missing, cuda-core too."""
    try:
        return Component(compile.compiler_version())
    except compile.KernelCompileError as error:
        return Component(None, str(error))


def _cusparselt() -> Component:
    number = torch.backends.cusparselt.version()
    if not number:
        return Component(None, f"torch {torch.__version__} is a build without it")
    return Component(f"{number // 1000}.{number % 1000 // 100}.{number % 100}")


def _driver() -> Component:
    """NVIDIA's driver, as the library that comes with it tells; torch and the pinned `cuda-bindings` have no function for that."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return Component(None, f"{NVML} is not found")
    version = ctypes.create_string_buffer(96)
    status = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version))
    return Component(None, f"{NVML} answers with error {status}") if status else Component(version.value.decode())


def _cache(folder: Path) -> Cache:
    sizes = [entry.stat().st_size for entry in folder.glob(f"*{compile.SUFFIX}")]
    return Cache(str(folder), len(sizes), sum(sizes))

"""Compiling needs no GPU: NVRTC really runs here, the driver is a fake."""

import contextlib
import enum
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import cuda.bindings
import cuda.core
import cuda.pathfinder
import pytest
import torch
from transformers.utils import logging as transformers_logging

from hf_sparse24.kernels import compile
from hf_sparse24.kernels.compile import (
    KernelCompileError,
    arch_of,
    cache_folder,
    compile_all,
    compile_kernel,
    compiler_version,
    load_kernel,
)
from tests.kernels.machine_code import instructions


@pytest.fixture
def caplog(caplog):
    """Of Transformers' logger, too, below which is ours."""
    transformers_logging.enable_propagation()
    yield caplog
    transformers_logging.disable_propagation()


SCALE = """
#ifndef FACTOR
#define FACTOR 2
#endif
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }
"""


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """A folder of sources, an empty cache, and nothing in memory."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    monkeypatch.setattr(compile, "SOURCES", folder)
    monkeypatch.setenv("HF_SPARSE24_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    compiler_version.cache_clear()
    yield folder
    compiler_version.cache_clear()


def forget(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(compile, "_CUBINS", {})
    monkeypatch.setattr(compile, "_LOADED", {})


@pytest.fixture
def builds(monkeypatch):
    """Grows with every run of NVRTC."""
    made, build = [], compile._build

    def count(*arguments):
        made.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(compile, "_build", count)
    return made


def entries():
    return sorted(cache_folder().iterdir())


# ---- compiling -----------------------------------------------------------------------------------------------------------


def test_compile_gives_machine_code_of_the_kernel():
    assert set(instructions(compile_kernel("scale", "sm_90a"))) == {"scale"}


def test_defines_reach_the_source():
    code = {factor: instructions(compile_kernel("scale", "sm_80", {"FACTOR": factor}))["scale"] for factor in (1, 3, "7.5f")}
    assert any("7.5" in line for line in code["7.5f"])
    assert any(" 3" in line for line in code[3]) and not any("FMUL" in line for line in code[1])


def test_no_fast_math(sources):
    (sources / "divide.cu").write_text('extern "C" __global__ void divide(float* x, float y) { x[0] = x[0] / y; }')
    flags = compile._options("", "sm_90a", []).as_bytes("nvrtc", "cubin")
    assert set(flags) == {b"-arch=sm_90a", b"--std=c++17"}
    # An exact division has a path for denormal numbers, which is a call.
    assert any("CALL" in line for line in instructions(compile_kernel("divide", "sm_90a"))["divide"])


def test_second_compile_is_read_from_memory(builds):
    first = compile_kernel("scale", "sm_90a")
    entries()[0].unlink()
    assert compile_kernel("scale", "sm_90a") is first
    assert len(builds) == 1


def test_new_process_reads_from_disk(builds, monkeypatch):
    first = compile_kernel("scale", "sm_90a")
    forget(monkeypatch)
    assert compile_kernel("scale", "sm_90a") == first
    assert len(builds) == len(entries()) == 1


def test_what_a_source_includes_is_part_of_it(builds, sources):
    (sources / "whole.cu").write_text('#include "part.cuh"\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }\n')
    (sources / "part.cuh").write_text("#define FACTOR 2\n")
    first = compile_kernel("whole", "sm_90a")
    assert compile_kernel("whole", "sm_90a") == first and len(builds) == 1
    (sources / "part.cuh").write_text("#define FACTOR 3\n")
    assert compile_kernel("whole", "sm_90a") != first and len(builds) == 2


def test_another_folder_is_another_cache(builds, monkeypatch, tmp_path):
    compile_kernel("scale", "sm_90a")
    monkeypatch.setenv("HF_SPARSE24_CACHE", str(tmp_path / "other"))
    compile_kernel("scale", "sm_90a")
    assert len(builds) == 2 and len(entries()) == 1


def change_source(monkeypatch):
    (compile.SOURCES / "scale.cu").write_text(SCALE + "// changed\n")


def change_flags(monkeypatch):
    def options(name, arch, macros):
        return cuda.core.ProgramOptions(name=name, arch=arch, std="c++17", define_macro=macros, max_register_count=32)

    monkeypatch.setattr(compile, "_options", options)


CHANGES = {
    "source": (change_source, "sm_90a", {"FACTOR": 3}),
    "arch": (lambda m: None, "sm_80", {"FACTOR": 3}),
    "define's value": (lambda m: None, "sm_90a", {"FACTOR": 4}),
    "define's name": (lambda m: None, "sm_90a", {"OTHER": 3}),
    "defines": (lambda m: None, "sm_90a", {"FACTOR": 3, "OTHER": 3}),
    "compiler": (lambda m: m.setattr(compile, "compiler_version", lambda: "13.0.89"), "sm_90a", {"FACTOR": 3}),
    "flags": (change_flags, "sm_90a", {"FACTOR": 3}),
    "format": (lambda m: m.setattr(compile, "FORMAT", 2), "sm_90a", {"FACTOR": 3}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with(change, builds, monkeypatch):
    compile_kernel("scale", "sm_90a", {"FACTOR": 3})
    make, arch, defines = CHANGES[change]
    make(monkeypatch)
    compile_kernel("scale", arch, defines)
    assert len(builds) == len(entries()) == 2


def test_key_is_the_same_in_any_order_of_defines(builds):
    compile_kernel("scale", "sm_90a", {"FACTOR": 1, "OTHER": 0})
    compile_kernel("scale", "sm_90a", {"OTHER": False, "FACTOR": True})
    assert len(builds) == 1


# ---- damaged, unwritable, shared -----------------------------------------------------------------------------------------

HEADER = len(compile._header(b""))
DAMAGE = {
    "empty": lambda entry: b"",
    "garbage": lambda entry: os.urandom(len(entry)),
    "half a header": lambda entry: entry[: HEADER // 2],
    "only a header": lambda entry: entry[:HEADER],
    "truncated": lambda entry: entry[:-1],
    "longer": lambda entry: entry + b"\0",
    "a changed byte": lambda entry: entry[:-9] + bytes([entry[-9] ^ 1]) + entry[-8:],
    "another magic": lambda entry: entry.replace(b"hf_sparse24", b"hf_sparse25", 1),
    "no header": lambda entry: entry[HEADER:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_a_miss_and_is_replaced(damage, builds, monkeypatch):
    cubin = compile_kernel("scale", "sm_90a")
    [entry] = entries()
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGE[damage](whole))
    forget(monkeypatch)
    assert compile_kernel("scale", "sm_90a") == cubin
    assert len(builds) == 2
    assert entries() == [entry] and entry.read_bytes() == whole


def make_a_file(path, monkeypatch):
    path.write_text("a file where the folder should be")


def make_read_only(path, monkeypatch):
    """Root may write anywhere, so that the mode alone would show nothing."""

    def refuse(self, data):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)


def make_full(path, monkeypatch):
    """A part of the file is there when the disk is full."""
    write = Path.write_bytes

    def write_a_part(self, data):
        write(self, data[:10])
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", write_a_part)


@pytest.mark.parametrize("spoil", [make_a_file, make_read_only, make_full])
def test_unwritable_folder_works_in_memory_and_is_logged_once(spoil, builds, monkeypatch, tmp_path, caplog):
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        spoil(tmp_path / "cache", patch)
        # Two kernels, one message: it names the folder, not the file.
        cubin = compile_kernel("scale", "sm_90a")
        assert compile_kernel("scale", "sm_90a") is cubin
        compile_kernel("scale", "sm_80")
    assert set(instructions(cubin)) == {"scale"} and len(builds) == 2
    messages = [record.getMessage() for record in caplog.records if record.name == compile.logger.name]
    assert len(messages) == 1 and "set HF_SPARSE24_CACHE" in messages[0] and str(tmp_path / "cache") in messages[0]
    assert not (tmp_path / "cache").is_dir() or entries() == []


def test_entry_that_is_a_folder_does_no_harm(builds, monkeypatch):
    cubin = compile_kernel("scale", "sm_90a")
    [entry] = entries()
    entry.unlink()
    entry.mkdir()
    forget(monkeypatch)
    assert compile_kernel("scale", "sm_90a") == cubin
    assert entries() == [entry]


SCRIPT = """
import hashlib, sys, time
from pathlib import Path
from hf_sparse24.kernels import compile
compile.SOURCES = Path(sys.argv[1])
compile.compiler_version()
Path(sys.argv[2]).touch()
while not all(Path(other).exists() for other in sys.argv[2:]):
    time.sleep(0.001)
for factor in range(5):
    print(hashlib.sha256(compile.compile_kernel("scale", "sm_90a", {"FACTOR": factor})).hexdigest())
"""


def test_two_processes_at_once_give_the_same_code(sources, tmp_path, builds):
    ready = [str(tmp_path / "first"), str(tmp_path / "second")]
    commands = [[sys.executable, "-c", SCRIPT, str(sources), *order] for order in (ready, ready[::-1])]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    first, second = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert first == second and len(set(first.split())) == 5
    assert len(entries()) == 5
    assert all(compile._read(entry) for entry in entries())
    compile_all([("scale", "sm_90a", {"FACTOR": factor}) for factor in range(5)])
    assert builds == []


def test_writers_of_the_same_entry_do_not_meet(monkeypatch, tmp_path, caplog):
    entry, replace = tmp_path / "entry.cubin", Path.replace

    def replace_after_another_has_written(part, target):
        monkeypatch.setattr(Path, "replace", replace)
        compile._write(entry, b"another")
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", replace_after_another_has_written)
    compile._write(entry, b"first")
    assert compile._read(entry) == b"first"
    assert caplog.text == "" and list(tmp_path.glob("*.part")) == []


def test_threads_that_ask_for_the_same_share_one_build(builds):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: compile_kernel("scale", "sm_90a"), range(8)))
    assert len(builds) == 1 and all(result is results[0] for result in results)


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"HF_SPARSE24_CACHE": "/own", "XDG_CACHE_HOME": "/shared"}, "/own/kernels"),
        ({"HF_SPARSE24_CACHE": "", "XDG_CACHE_HOME": "/shared"}, "/shared/hf_sparse24/kernels"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/hf_sparse24/kernels"),
        ({"HF_SPARSE24_CACHE": "~/mine", "HOME": "/home/me"}, "/home/me/mine/kernels"),
    ],
    ids=["own", "shared", "home", "tilde"],
)
def test_cache_folder_follows_the_environment(environment, folder, monkeypatch):
    for name in ("HF_SPARSE24_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_user_without_a_home_can_compile(builds, monkeypatch, caplog):
    def has_no_home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", has_no_home)
    compile_kernel("scale", "sm_90a")
    assert "set HF_SPARSE24_CACHE" in caplog.text


# ---- what goes wrong -----------------------------------------------------------------------------------------------------


def test_failed_compile_says_where_and_keeps_the_log(sources, builds):
    (sources / "broken.cu").write_text('extern "C" __global__ void broken(float* x) {\n    x[0] = nonsense;\n    x[1] = 1 +;\n}\n')
    with pytest.raises(KernelCompileError, match=r"^broken\.cu does not compile for sm_90a: broken\.cu\(2\): error:.*nonsense") as caught:
        compile_kernel("broken", "sm_90a")
    assert "\n" not in str(caught.value)
    assert "broken.cu(3): error" in caught.value.log and "2 errors detected" in caught.value.log
    assert not cache_folder().exists()
    # The same again, without the compiler.
    with pytest.raises(KernelCompileError, match="nonsense") as again:
        compile_kernel("broken", "sm_90a")
    assert len(builds) == 1 and again.value.log == caught.value.log


def test_unknown_architecture_is_named():
    with pytest.raises(KernelCompileError, match=r"^scale\.cu does not compile for sm_999: .*invalid value for --gpu-architecture"):
        compile_kernel("scale", "sm_999")


@pytest.mark.parametrize(
    "modules, command",
    [
        (["cuda.core"], 'pip install "cuda-core>=1.2,<2"'),
        (["cuda.bindings"], 'pip install "cuda-bindings==13.*"'),
        (["cuda.core", "cuda.bindings"], 'pip install "cuda-core>=1.2,<2" "cuda-bindings==13.*"'),
    ],
    ids=str,
)
def test_missing_wheel_is_named(modules, command, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KernelCompileError) as caught:
        compile_kernel("scale", "sm_90a")
    assert str(caught.value).endswith(command)
    # Installed meanwhile: it works.
    monkeypatch.undo()
    assert compiler_version()


@pytest.mark.parametrize(
    "built_for, wheel", [(None, "nvidia-cuda-nvrtc==13.*"), ("13.0", "nvidia-cuda-nvrtc==13.*"), ("12.8", "nvidia-cuda-nvrtc-cu12==12.*")]
)
def test_missing_compiler_is_named_as_torch_needs_it(built_for, wheel, monkeypatch):
    def find_nothing(name):
        raise cuda.pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", find_nothing)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(KernelCompileError) as caught:
        compiler_version()
    assert str(caught.value).endswith(f'pip install "{wheel}"')


def test_without_any_cuda_package_the_error_names_them(monkeypatch):
    def has_no_parent(name):
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compile, "find_spec", has_no_parent)
    with pytest.raises(KernelCompileError, match=r'"cuda-core>=1\.2,<2" "cuda-bindings==13\.\*"$'):
        compiler_version()


def test_import_of_the_package_imports_nothing_of_cuda():
    script = """
import sys
import torch, transformers
before = set(sys.modules)
import hf_sparse24, hf_sparse24.kernels.compile, hf_sparse24.doctor
found = [name for name in set(sys.modules) - before if name.partition(".")[0] == "cuda"]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# ---- the compiler's version ----------------------------------------------------------------------------------------------


def test_compiler_version_is_that_of_its_wheel():
    assert compiler_version() == metadata.version("nvidia-cuda-nvrtc")


def test_compiler_version_of_a_toolkit_is_in_its_file_name(tmp_path):
    (tmp_path / "libnvrtc.so.13.0.48").touch()
    (tmp_path / "libnvrtc.so.13").symlink_to("libnvrtc.so.13.0.48")
    assert compile._patch_level(tmp_path / "libnvrtc.so.13", "13.0") == "13.0.48"


def test_compiler_version_is_short_where_nothing_tells_more(tmp_path):
    (tmp_path / "libnvrtc.so.13").touch()
    assert compile._patch_level(tmp_path / "libnvrtc.so.13", "13.0") == "13.0"


@pytest.mark.parametrize(
    "capability, arch",
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103"),
        ((12, 0), "sm_120a"),
    ],
)
def test_arch_is_that_of_the_exact_chip(capability, arch):
    assert arch_of(capability) == arch


# ---- side by side --------------------------------------------------------------------------------------------------------


def test_compile_all_gives_what_compile_kernel_gives(monkeypatch):
    requests = [("scale", "sm_90a", {"FACTOR": 3}), ("scale", "sm_80", {}), ("scale", "sm_90a", {"FACTOR": 3})]
    together = compile_all(requests)
    forget(monkeypatch)
    monkeypatch.setenv("HF_SPARSE24_CACHE", os.devnull)
    assert together == [compile_kernel(*request) for request in requests]


def test_compile_all_runs_side_by_side(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=60)  # broken, unless two wait in it

    def build(source, text, arch, macros):
        both.wait()
        return arch.encode()

    monkeypatch.setattr(compile, "_build", build)
    assert compile_all([("scale", "sm_80", {}), ("scale", "sm_90a", {})]) == [b"sm_80", b"sm_90a"]


def test_nvrtc_leaves_other_threads_running(sources):
    lines = "".join(f"x[{i}] = x[{i} * threadIdx.x] * x[{i + 1}] + {i}.f;\n" for i in range(250))
    (sources / "long.cu").write_text(f'extern "C" __global__ void long_kernel(float* x) {{ {lines} }}')
    running = threading.Thread(target=compile_kernel, args=("long", "sm_90a"))
    running.start()
    turns = 0
    while running.is_alive():
        running.join(0.01)
        turns += 1
    assert turns > 5


def test_compile_all_builds_only_what_is_not_there(builds):
    compile_kernel("scale", "sm_80")
    compile_all([("scale", arch, {}) for arch in ("sm_80", "sm_89", "sm_90a", "sm_89")])
    assert sorted(arch for _, _, arch, _ in builds) == ["sm_80", "sm_89", "sm_90a"]


def test_compile_all_raises_what_fails_and_keeps_the_rest(sources, builds):
    (sources / "broken.cu").write_text("nonsense")
    with pytest.raises(KernelCompileError, match=r"broken\.cu"):
        compile_all([("broken", "sm_90a", {}), ("scale", "sm_90a", {})])
    assert len(entries()) == 1
    compile_kernel("scale", "sm_90a")
    assert len(builds) == 2


def test_compile_all_of_nothing_is_nothing():
    assert compile_all([]) == []


# ---- loading, with a fake driver -----------------------------------------------------------------------------------------


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class FakeDriver:
    """Devices of 100 kB of shared memory; notes what it is asked."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic"
    )

    def __init__(self):
        self.version, self.static, self.calls, self.current = 13000, 0, [], None

    def cuDriverGetVersion(self):
        return Status.CUDA_SUCCESS, self.version

    def cuDeviceGet(self, index):
        return Status.CUDA_SUCCESS, f"device {index}"

    def cuKernelGetFunction(self, kernel):
        assert self.current is not None, "no context"
        self.calls.append(("function", kernel, self.current))
        return Status.CUDA_SUCCESS, f"function of {kernel}"

    def cuFuncLoad(self, function):
        self.calls.append(("load", function))
        return (Status.CUDA_SUCCESS,)

    def cuFuncGetAttribute(self, attribute, function):
        assert attribute == "static"
        return Status.CUDA_SUCCESS, self.static

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.calls.append((attribute, value, kernel, device))
        return (Status.CUDA_ERROR_INVALID_VALUE if value + self.static > 100_000 else Status.CUDA_SUCCESS,)

    def named(self, name):
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()

    class Device:
        def __init__(self, index):
            self.index = index

        def set_current(self):
            fake.current = self.index

    class ObjectCode:
        @staticmethod
        def from_cubin(cubin, name):
            assert cubin.startswith(b"\x7fELF")
            return ObjectCode()

        def get_kernel(self, name):
            if name not in ("scale", "other"):
                from cuda.core._utils.cuda_utils import CUDAError

                raise CUDAError("CUDA_ERROR_NOT_FOUND:\nno such symbol")
            return SimpleNamespace(name=name, handle=f"{name} on {fake.current}")

    @contextlib.contextmanager
    def device(index):
        before = fake.current
        yield
        fake.current = before

    monkeypatch.setattr(cuda.bindings, "driver", fake, raising=False)
    monkeypatch.setattr(cuda.core, "Device", Device)
    monkeypatch.setattr(cuda.core, "ObjectCode", ObjectCode)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {0: (9, 0), 1: (8, 0)}[index])
    return fake


def test_fake_has_only_what_the_real_one_has():
    from cuda.bindings import driver

    functions = [name for name in vars(FakeDriver) if name.startswith("cu") and name != "current"]
    assert len(functions) == 6 and all(hasattr(driver, name) for name in functions)
    assert all(hasattr(driver.CUfunction_attribute, name) for name in vars(FakeDriver.CUfunction_attribute))
    assert all(driver.CUresult[status.name] == status for status in Status)
    found = [cuda.core.Device.set_current, cuda.core.ObjectCode.from_cubin, cuda.core.ObjectCode.get_kernel, cuda.core.Kernel.handle]
    assert all(found)


def test_kernel_is_compiled_for_its_device_and_loaded_at_once(driver, builds):
    kernel = load_kernel("scale", "scale", 1, {"FACTOR": 3})
    assert kernel.name == "scale"
    assert [(source, arch, macros) for source, _, arch, macros in builds] == [("scale", "sm_80", [("FACTOR", "3")])]
    assert driver.calls == [("function", "scale on 1", 1), ("load", "function of scale on 1")]
    assert driver.current is None


def test_kernel_is_loaded_once(driver, builds):
    kernel = load_kernel("scale", "scale", 0, {"FACTOR": 3, "OTHER": 4})
    assert load_kernel("scale", "scale", 0, {"OTHER": 4, "FACTOR": 3}) is kernel
    assert len(driver.named("load")) == len(builds) == 1


@pytest.mark.parametrize(
    "other", [("scale", "other", 0), ("scale", "scale", 1), ("scale", "scale", 0, {"FACTOR": 3}), ("again", "scale", 0)], ids=str
)
def test_kernel_is_another_for_another(other, driver, sources):
    (sources / "again.cu").write_text(SCALE)
    kernel = load_kernel("scale", "scale", 0)
    assert load_kernel(*other) is not kernel
    assert len(driver.named("load")) == 2


@pytest.mark.parametrize(
    "static, shared_bytes, asked", [(0, 0, 0), (0, 48 * 1024, 0), (0, 48 * 1024 + 1, 1), (16, 48 * 1024 - 16, 0), (16, 48 * 1024 - 15, 1)]
)
def test_shared_memory_above_48_kib_is_asked_for(static, shared_bytes, asked, driver):
    driver.static = static
    load_kernel("scale", "scale", 0, {}, shared_bytes)
    assert driver.named("dynamic") == [("dynamic", shared_bytes, "scale on 0", "device 0")] * asked


def test_later_call_may_ask_for_more_shared_memory(driver):
    kernel = load_kernel("scale", "scale", 0, {}, 60_000)
    for shared_bytes in (70_000, 50_000, 70_000, 60_000, 0):
        assert load_kernel("scale", "scale", 0, {}, shared_bytes) is kernel
    assert [call[1] for call in driver.named("dynamic")] == [60_000, 70_000]
    assert len(driver.named("load")) == 1


def test_too_much_shared_memory_is_an_error_that_says_so(driver):
    with pytest.raises(KernelCompileError, match="scale with 200000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        load_kernel("scale", "scale", 0, {}, 200_000)
    load_kernel("scale", "scale", 0, {}, 60_000)


def test_kernel_that_the_driver_refuses_is_an_error(driver):
    with pytest.raises(KernelCompileError, match=r"^the driver does not load the kernel missing: CUDA_ERROR_NOT_FOUND: no such symbol$"):
        load_kernel("scale", "missing", 0)
    load_kernel("scale", "scale", 0)


def test_driver_before_12_4_has_no_function_to_load_with(driver):
    driver.version = 12030
    load_kernel("scale", "scale", 0)
    assert driver.named("function") and not driver.named("load")


def test_threads_load_a_kernel_once(driver, builds, monkeypatch):
    def load_slowly(function):
        time.sleep(0.05)
        return FakeDriver.cuFuncLoad(driver, function)

    monkeypatch.setattr(driver, "cuFuncLoad", load_slowly)
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda _: load_kernel("scale", "scale", 0, {}, 60_000), range(8)))
    assert all(kernel is kernels[0] for kernel in kernels)
    assert len(driver.named("load")) == len(driver.named("dynamic")) == len(builds) == 1


# ---- loading, with a real one --------------------------------------------------------------------------------------------

REVERSE = """
extern "C" __global__ void reverse(float* x) {
    extern __shared__ float held[];
    int last = COUNT - 1;
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) held[last - i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) x[i] = held[i];
}
"""


class TorchStream:
    """The current stream of torch, as cuda-core asks for streams."""

    def __cuda_stream__(self):
        return 0, torch.cuda.current_stream().cuda_stream


@pytest.mark.gpu
def test_loaded_kernel_needs_no_more_loading_inside_a_capture(sources):
    from cuda.bindings import driver

    (sources / "reverse.cu").write_text(REVERSE)
    count = 16000  # 64000 bytes: more than a kernel has unasked, less than any device of compute capability 8.0 has
    x = torch.arange(count, dtype=torch.float32, device="cuda")
    kernel = load_kernel("reverse", "reverse", x.device.index, {"COUNT": count}, 4 * count)
    _, function = driver.cuKernelGetFunction(kernel.handle)
    _, state = driver.cuFuncIsLoaded(function)
    assert state == driver.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        config = cuda.core.LaunchConfig(grid=1, block=256, shmem_size=4 * count)
        cuda.core.launch(TorchStream(), config, kernel, x.data_ptr())
    assert torch.equal(x.cpu(), torch.arange(count, dtype=torch.float32))
    graph.replay()
    assert torch.equal(x.cpu(), torch.arange(count, dtype=torch.float32).flip(0))


@pytest.mark.gpu
def test_loading_leaves_the_current_device(sources):
    devices = range(torch.cuda.device_count())
    before = torch.cuda.current_device()
    kernels = [load_kernel("scale", "scale", index) for index in devices]
    assert torch.cuda.current_device() == before
    for index, kernel in zip(devices, kernels, strict=True):
        with torch.cuda.device(index):
            x = torch.ones(32, device="cuda")
            cuda.core.launch(TorchStream(), cuda.core.LaunchConfig(grid=1, block=32), kernel, x.data_ptr())
            assert torch.equal(x.cpu(), torch.full((32,), 2.0))

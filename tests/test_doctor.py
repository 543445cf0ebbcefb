"""`doctor` tells what is there and what is not, with or without devices."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from hf_sparse24 import __version__, doctor
from hf_sparse24.cli import main
from hf_sparse24.kernels import compile, dispatch

CAPABILITIES = [(9, 0), (7, 5)]


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """No device, and an empty cache."""
    monkeypatch.setenv("HF_SPARSE24_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def devices(monkeypatch):
    """Two devices, the second too old for any sparse path, and what is asked about them."""
    asked = []

    def usable_paths(device, dtype):
        asked.append((device, dtype))
        sparse = None if device.index == 0 else "sparse does not fit"
        return {"sparse": sparse, "library": "library does not fit", "reference": None}

    def properties(index):
        major, minor = CAPABILITIES[index]
        return SimpleNamespace(name=f"GPU {index}", major=major, minor=minor, total_memory=(index + 1) * 10**9)

    monkeypatch.setattr(dispatch, "usable_paths", usable_paths)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return asked


@pytest.fixture
def run(capsys):
    """What the command prints; it must succeed."""

    def run(*flags):
        assert main(["doctor", *flags]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_without_a_device_it_says_so(run):
    text = run()
    assert "\nno CUDA device: torch" in text and "cuda:0" not in text
    for name, version in (("hf_sparse24", __version__), ("torch", torch.__version__), ("NVRTC", compile.compiler_version())):
        assert f"{name}: {version}\n" in text


def test_json_has_the_same_as_the_text(run, devices):
    text, found = run(), json.loads(run("--json"))
    assert set(found) == {"versions", "components", "cache", "devices", "no_device"}
    assert all(f"{name}: {version}" in text for name, version in found["versions"].items())
    assert all((part["version"] or part["problem"]) in text for part in found["components"].values())
    assert found["devices"]["cuda:1"]["paths"]["float16"]["sparse"] == "sparse does not fit"
    assert found["devices"]["cuda:0"]["paths"]["bfloat16"] == {"sparse": None, "library": "library does not fit", "reference": None}
    assert found["no_device"] is None


@pytest.mark.parametrize("built_for, reason", [(None, "is a build without CUDA"), ("13.0", "is built for CUDA 13.0, and finds no device")])
def test_reason_for_no_device_depends_on_the_build(built_for, reason, run, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert reason in json.loads(run("--json"))["no_device"]


def test_every_path_is_shown_for_every_device_and_dtype(run, devices):
    text = run()
    places = [torch.device("cuda", 0), torch.device("cuda", 1)]
    dtypes = (torch.bfloat16, torch.float16)
    assert devices == [(place, dtype) for place in places for dtype in dtypes]
    assert (
        "cuda:0: GPU 0, compute capability 9.0, 1.0 GB\n  bfloat16  sparse: usable\n  bfloat16  library: no: library does not fit\n" in text
    )
    assert "cuda:1: GPU 1, compute capability 7.5, 2.0 GB\n  bfloat16  sparse: no: sparse does not fit\n" in text
    assert "no CUDA device" not in text


def test_missing_compiler_comes_with_the_command(run, monkeypatch):
    def missing():
        raise compile.KernelCompileError('what compiles is missing: pip install "cuda-core>=1.2,<2"')

    monkeypatch.setattr(compile, "compiler_version", missing)
    assert 'NVRTC: none, what compiles is missing: pip install "cuda-core>=1.2,<2"\n' in run()


def test_missing_cuda_core_comes_with_the_command(run, monkeypatch):
    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert 'cuda-core: none, install it: pip install "cuda-core>=1.2,<2"\n' in run()


@pytest.mark.parametrize("number, shown", [(801, "0.8.1"), (502, "0.5.2"), (1203, "1.2.3")])
def test_cusparselt_version_is_readable(number, shown, run, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: number)
    assert f"cuSPARSELt: {shown}\n" in run()


def test_missing_cusparselt_is_explained(run, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: None)
    assert f"cuSPARSELt: none, torch {torch.__version__} is a build without it\n" in run()


class FakeNvml:
    def __init__(self, status):
        self.status = status

    def nvmlInit_v2(self):
        return self.status

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.65.06"
        return 0


@pytest.mark.parametrize("status, shown", [(0, "580.65.06"), (9, f"none, {doctor.NVML} answers with error 9")])
def test_driver_is_asked_for_its_version(status, shown, run, monkeypatch):
    # The module's own name: other libraries are still loaded by ctypes, NVRTC for one.
    monkeypatch.setattr(doctor, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: FakeNvml(status)}))
    assert f"driver: {shown}\n" in run()


def test_cache_is_counted(run, tmp_path):
    folder = tmp_path / "kernels"
    assert f"compiled kernels: 0, 0 B, in {folder}\n" in run()
    folder.mkdir()
    (folder / "a.cubin").write_bytes(bytes(1500))
    (folder / "b.cubin").write_bytes(bytes(500))
    (folder / ".c.part").write_bytes(bytes(7))
    assert f"compiled kernels: 2, 2.0 kB, in {folder}\n" in run()


def test_nothing_is_written(run, tmp_path, devices):
    run()
    assert list(tmp_path.iterdir()) == []

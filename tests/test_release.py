"""What users install: sdist and wheel are built, and the wheel is tried in an environment that has nothing else of this project.

hatchling is needed: it is taken from this environment, or fetched by pip into one of its own; without either the tests are skipped.
The dependencies (torch and the like) are those of this environment, by a .pth file, which knows nothing of an editable install.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_sparse24

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 1_000_000
BUILD = """
import sys
import hatchling.build as backend
print(getattr(backend, f"build_{sys.argv[1]}")(sys.argv[2]))
"""
# Run where the wheel is installed: what it prints is compared with this checkout.
TRY = """
import importlib.metadata, json, sys
from importlib import resources
from pathlib import Path
import hf_sparse24
from hf_sparse24.card import card_for
package = resources.files("hf_sparse24")
card_for(sys.argv[1])
print(json.dumps({
    "at": str(Path(hf_sparse24.__file__).parent),
    "version": importlib.metadata.version("hf-sparse24"),
    "files": sorted(path.relative_to(package).as_posix() for path in Path(str(package)).rglob("*") if path.is_file()),
}))
"""


@dataclass(frozen=True)
class Built:
    """The two archives, and the Python of an environment in which the wheel is."""

    sdist: Path
    wheel: Path
    python: Path


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    # Not PYTHONPATH, which may name this checkout.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = tuple(str(part) for part in command)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def environment(folder: Path) -> Path:
    """The Python of a new environment."""
    run(sys.executable, "-m", "venv", folder)
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Path:
    """A Python with hatchling."""
    if find_spec("hatchling"):
        return Path(sys.executable)
    python = environment(tmp_path_factory.mktemp("builder") / "env")
    needed = re.search(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text())
    got = subprocess.run([python, "-m", "pip", "install", "-q", "--retries", "0", needed[1]], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"hatchling is not here, and pip cannot fetch it: {got.stderr.strip().splitlines()[-1][:200]}")
    return python


@pytest.fixture(scope="module")
def built(builder, tmp_path_factory) -> Built:
    """The sdist of this checkout, the wheel that its contents make, and that wheel, installed."""
    root = tmp_path_factory.mktemp("release")
    sdist = root / run(builder, "-c", BUILD, "sdist", root, cwd=ROOT).stdout.split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "source", filter="data")
    (source,) = (root / "source").iterdir()
    wheel = root / run(builder, "-c", BUILD, "wheel", root, cwd=source).stdout.split()[-1]
    python = environment(root / "env")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Built(sdist, wheel, python)


def package_files() -> set[str]:
    """The files that a wheel must hold."""
    package = ROOT / "hf_sparse24"
    return {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_wheel_holds_every_file_of_the_package_and_is_small(built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name.removeprefix("hf_sparse24/") for name in wheel.namelist() if name.startswith("hf_sparse24/")}
        others = {name.split("/")[0] for name in wheel.namelist() if not name.startswith("hf_sparse24/")}
    assert names == package_files()
    assert {"model_card.md", "py.typed", "kernels/wgmma_sp.cu", "kernels/common.cuh"} <= names
    assert len(others) == 1 and others.pop().endswith(".dist-info")
    assert built.wheel.stat().st_size < MAX_WHEEL_BYTES


def test_sdist_holds_what_the_tests_need(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "docs", "examples", "model_cards"):
        assert {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.[pm][yd]")} <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "benchmarks/results/prune-cpu.json"} <= names


def test_installed_wheel_runs_without_the_checkout(built, golden, tmp_path):
    found = json.loads(run(built.python, "-c", TRY, golden / "sparse-24-bitmask", cwd=tmp_path).stdout.splitlines()[-1])
    assert Path(found["at"]).is_relative_to(built.python.parents[1])
    assert found["version"] == hf_sparse24.__version__
    assert package_files() <= set(found["files"])


def test_installed_command_runs(built, golden, tmp_path):
    program = built.python.parent / "hf-sparse24"
    run(program, "decompress", golden / "sparse-24-bitmask", tmp_path / "dense")
    assert "21 of 21 tensors equal" in run(program, "verify", golden / "sparse-24-bitmask", "--against", tmp_path / "dense").stdout


def test_version_is_stated_in_one_place():
    """`hf_sparse24/__init__.py`, from which hatchling reads it; results of benchmarks say with which they were measured."""
    states = re.compile(rf"(?<![\d.]){re.escape(hf_sparse24.__version__)}(?![\d.])")
    files = [*ROOT.glob("*.*"), *(path for part in ("hf_sparse24", "docs", "examples", "tests") for path in (ROOT / part).rglob("*.*"))]
    texts = [path for path in files if path.suffix in (".py", ".md", ".toml", ".txt", ".cu", ".cuh")]
    assert [path.relative_to(ROOT).as_posix() for path in texts if states.search(path.read_text(encoding="utf-8"))] == [
        "hf_sparse24/__init__.py"
    ]


def test_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == hf_sparse24.__version__.partition(".dev")[0]
    assert (first[2] == "not released") == (".dev" in hf_sparse24.__version__)

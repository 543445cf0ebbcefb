"""Data flows one way: a module imports only what stands to its left."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_sparse24"
# Modules and subpackages, left to right; inside a subpackage any import that closes no circle is fine.
ORDER = [
    *("errors", "table", "chart", "pattern", "quantization", "compressors", "config", "checkpoint", "staging", "journal"),
    *("comparison", "verify", "evidence", "card", "hub"),
    *("kernels", "projection_group", "linear", "quantized_linear", "experts", "merged", "modules", "fusion"),
    *("squared_relu", "activation", "pruning"),
    *("integration", "converted_folder", "conversion", "model_compressor", "completeness", "kernel_report", "report", "__init__"),
    *("page", "demo", "doctor", "bench", "model_bench", "pruning_commands", "publishing_commands", "cli"),
]


def name_of(path: Path) -> str:
    """Dotted, without the package's own name; a package is its folder's name, the whole is `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {resolve(name) for name in names if name.split(".")[0] == PACKAGE.name}
    return found


def resolve(name: str) -> str:
    """`hf_sparse24.config.GUARD` is of the module `config`."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_stands_to_its_left(module):
    place = ORDER.index(module.split(".")[0])
    wrong = {name for name in imports_of(MODULES[module]) if name.split(".")[0] not in {*ORDER[:place], module.split(".")[0]}}
    assert not wrong, f"{module} may import {ORDER[:place]}"


def test_no_imports_run_in_a_circle():
    graph = {module: imports_of(path) - {module} for module, path in MODULES.items()}
    for name in MODULES:  # importing a submodule runs its package's __init__; that one may import its submodules
        graph[name] = {found for found in graph[name] if not name.startswith(f"{found}.")}
    TopologicalSorter(graph).prepare()

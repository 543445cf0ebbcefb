"""The prose is executed: code blocks of README.md and docs/, examples in docstrings, the paths and make targets that are named.

Blocks run one after the other in their file's order, in an empty folder: ```python, and of ```bash the lines that call `hf-sparse24`.
One that cannot be run here stands below a line `<!-- not run: the reason -->`.
"""

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import hf_sparse24
from hf_sparse24 import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [module.name for module in pkgutil.walk_packages(hf_sparse24.__path__, "hf_sparse24.")]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*).*\n(?P<code>(?:.*\n)*?) *```$", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*\Z")
# What makes a path of a name whose first folder is not there.
SUFFIXES = ("/", ".cu", ".json", ".md", ".py", ".toml", ".txt")
# Names of files in a user's folder, not of this repository.
USERS_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}


def blocks(text: str, *languages: str) -> list[re.Match]:
    return [block for block in BLOCK.finditer(text) if block["language"] in languages]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_run(page, tmp_path, monkeypatch):
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks(text, "python", "py", "bash", "sh", "console"):
        if NOT_RUN.search(text[: block.start()]):
            continue
        if block["language"] in ("python", "py"):
            # Empty lines first, so that a traceback shows the page's own line numbers.
            above = "\n" * text.count("\n", 0, block.start("code"))
            exec(compile(above + block["code"], str(page), "exec"), namespace)
            continue
        for line in block["code"].splitlines():
            command, *arguments = shlex.split(line, comments=True) or [""]
            if command == "hf-sparse24":
                assert cli.main(arguments) == 0, line
            else:
                assert command in ("", "make"), f"{line}: name the reason why it is not run"


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_readme_names_only_paths_that_exist():
    top_level = {path.name for path in ROOT.iterdir()}
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", without_blocks(README.read_text()))
    paths = [name for name in named if name.split("/")[0] in top_level or (name.endswith(SUFFIXES) and Path(name).name not in USERS_FILES)]
    missing = [name for name in paths if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files_that_exist(page):
    links = re.findall(r"\]\(([^)#\s]+)", without_blocks(page.read_text()))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def without_blocks(text: str) -> str:
    return BLOCK.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_lines_name_existing_targets(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks(page.read_text(), "bash", "sh", "console") for line in block["code"].splitlines()]
    commands = [line.strip().removeprefix("$ ").partition("#")[0].split() for line in lines]
    asked = {word for command in commands if command[:1] == ["make"] for word in command[1:] if re.fullmatch(r"[\w-]+", word)}
    assert asked <= targets

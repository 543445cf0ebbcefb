"""Every measured number of the pages comes from a result file, by way of benchmarks/tables.py."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("measurements", "activation", "faq", "migration"))]
# A speed-up, a time, a rate: 1.75x, 12.7 us, 4.3 GB/s.
FIGURE = re.compile(r"\d+\.\d+x|\d+x\b(?! )|\b\d+(?:\.\d+)? (?:us|ms|[GMT]B/s|tokens/s|tokens a second)\b")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("tables")


def page_name(page):
    return page.name


def test_pages_hold_what_the_result_files_give(tables):
    for page in tables.PAGES:
        assert tables.fill(page.read_text()) == page.read_text(), f"{page.name} is old: python benchmarks/tables.py writes it anew"


def test_every_table_stands_in_one_place(tables):
    named = [block["name"] for page in tables.PAGES for block in tables.BLOCK.finditer(page.read_text())]
    assert sorted(named) == sorted(tables.TABLES)
    assert sum(page.read_text().count("<!-- measured:") for page in PAGES) == len(named)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_figure_stands_elsewhere(tables, page):
    assert FIGURE.findall(tables.BLOCK.sub("", page.read_text())) == []


def test_a_figure_follows_its_file(tables, monkeypatch, tmp_path):
    for file in tables.RESULTS.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    result = json.loads((tmp_path / "matmul-h200.json").read_text())
    result["means"][0]["ratio"] = 7.7777
    cell = next(cell for cell in result["cells"] if (cell["n"], cell["k"]) == (4096, 4096))
    cell["ratio"] = 0.4321
    (tmp_path / "matmul-h200.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| 7.78x |" in tables.short() and "| 7.78x |" in tables.layers()
    assert f"4096 x 4096 with {cell['m']} rows: 0.43x" in tables.layers_said()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it is 1.5x faster", ["1.5x"]),
        ("2x", ["2x"]),
        ("takes 12.7 us", ["12.7 us"]),
        ("at 4 GB/s", ["4 GB/s"]),
        ("4096 x 4096, 2:4, v0x3", []),
    ],
)
def test_figures_are_recognised(text, found):
    assert FIGURE.findall(text) == found

"""The finished cards: they are what their results make, and every number in them is looked up in a file of results by this test."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import RepoCard

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
MEASURED = json.loads((RESULTS / "recipes-cpu.json").read_text())
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w/]|[.,:]\d)")
# Numbers in sentences that say what was done or what the software needs, not what was measured; and names of products.
IN_WORDS = {
    "minilm-alps": {"512", "40", "300", "3.11", "8.0", "9.0", "1.0000", "600", "1,200"},
    "smollm2-sparsegpt": {"3.11", "8.0", "9.0", "512", "4,096"},
}


@pytest.fixture
def recipes(monkeypatch) -> Any:
    """benchmarks/recipes.py as a module."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "benchmarks" / "recipes.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recipes", module)
    spec.loader.exec_module(module)
    return module


def tables(text: str) -> list[list[list[str]]]:
    """Header and rows of each table, cell by cell, without the line between."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[line.strip().strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in [block[0], *block[2:]]] for block in rows]


def numbers_in(value: Any) -> Iterator[float]:
    """Every number in a result, at any depth."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)
    elif isinstance(value, int | float):
        yield value


def show(value: float) -> set[str]:
    """The ways in which a card may write a number."""
    return {f"{value:,}", f"{value:.4f}", f"{value:,.1f}"}


def facts(name: str) -> dict[str, float]:
    """What a card says that no file states as it is, computed from what the file does state."""
    contents, layers = MEASURED[name]["contents"], MEASURED[name]["prune"]["layers"]
    ((num_packed, stored, dense),) = contents["packed"].values()
    return {
        "num_packed": num_packed,
        "share": stored / dense,
        "share of files": contents["file_bytes"] / contents["dense_bytes"],
        "num_pruned": len(layers),
        "tokens": max(layer["tokens"] for layer in layers),
        "dropped": sum(layer["dropped"] for layer in layers),
        "mean error": sum(layer["relative_error"] for layer in layers) / len(layers),
        "worst error": max(layer["relative_error"] for layer in layers),
    }


def test_there_is_a_card_for_every_recipe_and_no_other(recipes):
    assert {card.stem for card in CARDS} == set(recipes.RECIPES) == set(MEASURED) - {"benchmark"}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_card_is_what_its_results_make(card, recipes):
    assert recipes.card_of(card.stem) == card.read_text(), "run python benchmarks/recipes.py --cards"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_sizes_are_those_of_the_checkpoint(card):
    contents = MEASURED[card.stem]["contents"]
    ((form, (num_packed, stored, dense)),) = contents["packed"].items()
    _, packed, files = tables(card.read_text())[0]
    assert packed == [f"weight matrices packed as `{form}`", f"{num_packed}", f"{stored:,}", f"{dense:,}", f"{stored / dense:.4f}"]
    file_bytes, dense_bytes = contents["file_bytes"], contents["dense_bytes"]
    assert files[1:] == ["1", f"{file_bytes:,}", f"{dense_bytes:,}", f"{file_bytes / dense_bytes:.4f}"]
    # The format's promise, and what is left of it when embeddings are dense: 9/16 of 16 bits, 17/32 of 32, and 16 bytes of shape.
    width = {"BF16": 2, "F32": 4}[contents["layers"][0][2]]
    assert stored == dense * (width / 2 + 1 / 8) / width + 16 * num_packed
    assert sum(n * k * number * width for n, k, _, _, number in contents["layers"]) == dense


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_quality_is_that_of_the_results(card):
    (header, *rows) = tables(card.read_text())[1]
    measured = MEASURED[card.stem]["quality"]
    columns = {"dense": "dense", "before distillation": "one_shot", "this model": "sparse"}
    assert [row[0] for row in rows] == [found["measure"] for found in measured]
    for row, found in zip(rows, measured, strict=True):
        assert row[1] == found["on"]
        for title, cell in zip(header[2:], row[2:], strict=True):
            value = found[columns[title]]
            assert cell == (f"{value:.1f}" if value >= 10 else f"{value:.4f}")


def test_minilm_is_the_row_of_the_benchmark_of_pruning():
    row = next(row for row in json.loads((RESULTS / "prune-cpu.json").read_text())["minilm"]["rows"] if row["method"] == "alps")
    measured = MEASURED["minilm-alps"]
    assert [found["sparse"] for found in measured["quality"]] == [row[key] for key in ("spearman", "cosine", "nearest", "top1", "mrr")]
    assert round(measured["prune"]["relative_error"], 5) == row["layer_error"]


def test_smollm2_is_made_as_the_demo_does_it():
    from hf_sparse24 import demo

    prune = MEASURED["smollm2-sparsegpt"]["prune"]
    assert prune["method"] == demo.METHOD and prune["distillation"]["steps"] == demo.STEPS
    assert {layer["tokens"] for layer in prune["layers"]} == {demo.NUM_WINDOWS * demo.WINDOW}


def test_speeds_are_those_of_layers_that_the_model_has():
    text = (ROOT / "model_cards" / "smollm2-sparsegpt.md").read_text()
    measured = json.loads((RESULTS / "matmul-h200.json").read_text())
    environment = measured["environment"]
    assert f"## Speed on one {environment['device']}" in text
    assert f"(torch {environment['torch']},\n{environment['date'][:10]}, hf-sparse24 at commit {environment['commit'][:7]})" in text
    has = {(n, k): number for n, k, dtype, _, number in MEASURED["smollm2-sparsegpt"]["contents"]["layers"] if dtype == "BF16"}
    header, *rows = tables(text)[2]
    assert len(rows) == len({(cell["n"], cell["k"]) for cell in measured["cells"] if cell["dtype"] == "bfloat16"} & has.keys()) > 0
    for shape, number, *ratios in rows:
        n, k = (int(size.replace(",", "")) for size in shape.split(" x "))
        assert has[n, k] == int(number)
        for m, ratio in zip(header[2:], ratios, strict=True):
            (cell,) = [c for c in measured["cells"] if (c["n"], c["k"], c["m"], c["dtype"]) == (n, k, int(m.replace(",", "")), "bfloat16")]
            assert ratio == f"{cell['ratio']:.2f}x"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_no_other_number_is_in_a_card(card):
    name = card.stem
    text = RepoCard(card.read_text()).text
    # Code, the heading, links, and what other tests look up: the table of speeds, the environment.
    text = re.sub(r"```.*?```|^## Speed.*?(?=^## )|\(Intel.*?commit \w+\)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^# .*|`[^`]*`|\[.*?\]\(.*?\)|2:4", "", text, flags=re.MULTILINE)
    contents, quality, learnt = (MEASURED[name][key] for key in ("contents", "quality", "prune"))
    stated = [*numbers_in(contents["packed"]), *(contents[key] for key in ("num_dense", "num_files", "file_bytes", "dense_bytes"))]
    stated += [*facts(name).values(), *numbers_in(quality)]
    stated += [value for key, value in learnt.get("distillation", {}).items() if key in ("steps", "seconds")]
    allowed = IN_WORDS[name].union(*map(show, stated))
    found = NUMBER.findall(text)
    assert len(found) > 15
    assert [number for number in found if number not in allowed] == []


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_facts_stand_in_their_sentences(card):
    words, known = " ".join(card.read_text().split()), facts(card.stem)
    contents, prune = MEASURED[card.stem]["contents"], MEASURED[card.stem]["prune"]
    worst = max(prune["layers"], key=lambda layer: layer["relative_error"])
    assert f"{known['num_packed']} weight matrices are packed as" in words
    assert f"{contents['num_dense']} further tensors" in words
    assert f"{known['num_pruned']} layers were pruned to 2:4 by `{prune['method']}`" in words
    assert f"Up to {known['tokens']:,} tokens were seen by a layer. {known['dropped']:,} weights became zero." in words
    assert f"is {known['mean error']:.4f} in the mean over layers, and {known['worst error']:.4f} in the worst" in words
    assert f"in the worst of them, `{worst['name']}`." in words
    if learnt := prune.get("distillation"):
        assert f"for {learnt['steps']} steps ({learnt['seconds']:.1f} s)" in words
    ran = MEASURED[card.stem]["environment"]
    assert f"({ran['device']}, torch {ran['torch']}, {ran['date'][:10]}, commit {ran['commit'][:7]})" in words


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_metadata_are_what_the_hub_reads(card, recipes):
    data = RepoCard(card.read_text()).data.to_dict()
    recipe = recipes.RECIPES[card.stem]
    assert data == {
        "library_name": "transformers", "license": "apache-2.0", "language": "en", "base_model": recipe.base_model,
        "base_model_relation": "quantized", "tags": ["sparse24", "2:4"],
    }  # fmt: skip


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_named_files_exist(card):
    named = re.findall(r"`(?:python )?(benchmarks/[\w./-]+)", card.read_text())
    assert len(named) >= 2 and all((ROOT / name).exists() for name in named)

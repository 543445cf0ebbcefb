"""What a card says beyond the files: numbers of pruning, of quality and of speed, each only where it is of this checkpoint."""

import json
from typing import Any

import pytest

from hf_sparse24.card import make_card
from hf_sparse24.evidence import Evidence, pruning_facts, quality_of_eval, read_evidence, show_number, speed_facts
from hf_sparse24.quantization import PRESETS

CONTENTS: dict[str, Any] = {
    "repo_id": "me/x", "config_class": "Sparse24Config", "readable_by": "hf-sparse24", "guard": None, "architecture": "LlamaForCausalLM",
    "packed": {"sparse-24-bitmask": [3, 9, 16]}, "two_four": ["sparse-24-bitmask"], "sparse": ["sparse-24-bitmask"],
    "layers": [[64, 32, "BF16", "sparse-24-bitmask", 2], [64, 64, "F32", "sparse-24-bitmask", 1]], "scheme": None,
    "quant_method": "compressed-tensors", "num_dense": 4, "num_files": 1, "file_bytes": 20, "dense_bytes": 30, "named_base": None,
}  # fmt: skip
ENVIRONMENT = {"device": "A GPU", "torch": "2.11", "date": "2026-12-01T00:00:00", "commit": "0123456789"}


def cell(n: int, k: int, m: int, ratio: float, dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"n": n, "k": k, "m": m, "ratio": ratio, "dtype": dtype, **more}


def measured(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "matmul", "environment": ENVIRONMENT, "cells": list(cells)}


def layer(name: str, error: float, tokens: int = 100) -> dict[str, Any]:
    return {"name": name, "relative_error": error, "tokens": tokens, "dropped": 10}


def pruned(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "alps", "pattern": "2:4", "layers": list(layers), **more}


def words(evidence: Evidence) -> str:
    return " ".join(make_card(CONTENTS, evidence=evidence).text.split())


def test_speeds_are_of_shapes_and_dtypes_that_the_checkpoint_has():
    found = speed_facts(measured(cell(64, 32, 1, 1.5), cell(64, 32, 16, 1.25), cell(64, 64, 1, 2.0), cell(32, 64, 1, 3.0)), CONTENTS, None)
    assert found["rows"] == [1, 16] and found["table"] == [(64, 32, 2, [1.5, 1.25])]
    # 64 x 64 was measured in bfloat16, and is stored in float32.
    assert found["num_missing"] == 1


def test_rows_that_one_shape_lacks_are_a_gap():
    contents = {**CONTENTS, "layers": [[64, 32, "BF16", "x", 2], [32, 64, "BF16", "x", 1]]}
    speeds = measured(cell(64, 32, 1, 1.5), cell(32, 64, 16, 2.5), cell(64, 32, 3, 9.0), cell(64, 32, 64, 1.125) | {"failure": "wrong"})
    del speeds["cells"][3]["ratio"]
    found = speed_facts(speeds, contents, None)
    assert found["rows"] == [1, 16] and found["table"] == [(32, 64, 1, [None, 2.5]), (64, 32, 2, [1.5, None])]
    text = make_card(contents, evidence=Evidence(speeds=[speeds])).text
    assert "| 32 x 64 | 1 | - | 2.50x |" in text and "further shape" not in text


@pytest.mark.parametrize(("preset", "form"), [(None, None), ("fp8", "fp8"), ("int8", "int8"), ("w4a16", "int4-g128")])
def test_speeds_are_of_the_form_in_which_values_are_stored(preset, form):
    cells = [cell(64, 32, 1, ratio, **({"form": name} if name else {})) for name, ratio in ((None, 1), ("fp8", 2), ("int8", 3))]
    cells.append(cell(64, 32, 1, 4, form="int4-g128"))
    found = speed_facts(measured(*cells), CONTENTS, PRESETS[preset] if preset else None)
    assert found["table"] == [(64, 32, 2, [{None: 1, "fp8": 2, "int8": 3, "int4-g128": 4}[form]])]


def test_speeds_of_other_layers_are_refused():
    with pytest.raises(ValueError, match=r"of no layer of this checkpoint \(64 x 32, 64 x 64, not quantised\)"):
        speed_facts(measured(cell(32, 64, 1, 1.5)), CONTENTS, None)


def test_pruning_is_told_in_numbers():
    found = pruning_facts(pruned(layer("a", 0.1), layer("b", 0.4), layer("c", 0.25, tokens=120)), CONTENTS)
    assert (found["error"], found["worst"], found["worst_error"]) == (0.25, "b", 0.4)
    assert (found["tokens"], found["dropped"], found["num_layers"], found["steps"]) == (120, 30, 3, None)


def test_report_of_fewer_layers_than_are_packed_is_refused():
    with pytest.raises(ValueError, match="of 2 layers, but 3 weights are packed"):
        pruning_facts(pruned(layer("a", 0.1), layer("b", 0.4)), CONTENTS)


def test_pruning_without_data_is_told_as_such():
    text = words(Evidence(prune={**pruned(*(layer(name, 0.1, tokens=0) for name in "abc")), "method": "magnitude"}))
    assert "3 layers were pruned to 2:4 by `magnitude`, without data. 30 weights became zero." in text
    assert "`|W - W'|² / |W|²`, is 0.1000" in text and "tokens" not in text and "learnt" not in text


def test_what_was_not_measured_is_said_to_be_so():
    nothing = words(Evidence())
    assert "How it was made" not in nothing and "Quality" not in nothing and "Speed on" not in nothing
    assert "quality was not measured for this card" in nothing and "Speed was not measured" in nothing
    everything = words(
        Evidence(quality=[{"measure": "a", "on": "b", "dense": 1.0, "sparse": 0.5}], speeds=[measured(cell(64, 32, 1, 1.5))])
    )
    assert "was not measured for this card" not in everything and "Speed was not measured" not in everything
    assert "Layers of 1 further shape were not measured." in everything


def test_eval_of_a_causal_model_and_of_an_encoder():
    found = {"windows": 4, "tokens": 2048, "perplexity": 30.0}
    (row,) = quality_of_eval(found)
    assert row == {"measure": "perplexity", "on": "4 windows of held-out text, 2,048 tokens", "dense": None, "sparse": 30.0}
    assert quality_of_eval({**found, "dense_perplexity": 20.0})[0]["dense"] == 20.0
    rows = quality_of_eval({"texts": 9, "spearman": 0.9, "cosine": 0.8, "nearest": 0.7})
    assert [(row["dense"], row["sparse"], row["on"]) for row in rows] == [(1.0, value, "9 texts") for value in (0.9, 0.8, 0.7)]


def test_column_before_distillation_has_a_dash_where_nothing_is_known():
    rows = [
        {"measure": "a", "on": "b", "dense": 1.0, "one_shot": 0.25, "sparse": 0.5},
        {"measure": "c", "on": "d", "dense": None, "sparse": 20},
    ]
    text = make_card(CONTENTS, evidence=Evidence(quality=rows)).text
    assert "| | measured on | dense | before distillation | this model |\n|---|---|---:|---:|---:|\n" in text
    assert "| a | b | 1.0000 | 0.2500 | 0.5000 |\n| c | d | - | - | 20.0 |\n" in text


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0.93471, "0.9347"), (9.99, "9.9900"), (10, "10.0"), (1395.211, "1,395.2"), (-12.25, "-12.2")]
)
def test_numbers_have_as_many_digits_as_say_something(value, shown):
    assert show_number(value) == shown


def test_evidence_is_read_from_the_files_of_the_commands(tmp_path):
    contents = {
        "prune": pruned(layer("a", 0.1)),
        "eval": {"windows": 4, "tokens": 2048, "perplexity": 30.0},
        "speed": measured(cell(64, 32, 1, 1.5)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = read_evidence(tmp_path / "prune", "texts", [tmp_path / "eval"] * 2, [tmp_path / "speed"], ["Small."])
    assert found.prune == contents["prune"] and list(found.speeds) == [contents["speed"]] and len(found.quality) == 2
    assert (found.calibration, found.limits) == ("texts", ("Small.",))

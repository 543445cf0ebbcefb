"""What files of a checkpoint do not say, and its card does: how the weights came to be, and what was measured of them.

It is read from what the commands and benchmarks write, and compared with the checkpoint as far as that can be told.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sparse24.quantization import QuantizationScheme

# Rows of x whose speed a card shows, where they were measured.
SHOWN_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
# What `hf-sparse24 eval` prints of an encoder, in words.
AGREEMENT = {
    "spearman": "rank correlation of all similarities with the dense model's",
    "cosine": "mean cosine with the dense model's embedding",
    "nearest": "share of texts with the same nearest neighbour",
}


@dataclass(frozen=True)
class Evidence:
    """What the files of a checkpoint do not say.  Each part is optional, and leaves its section of the card out.

    `prune` is what `hf-sparse24 prune --json` prints, or a `PruneReport`'s `to_dict()`; `calibration` says on what; `quality` are
    rows of `quality_of_eval`, with `one_shot` where the number before distillation is known; `speeds` are what `benchmarks/matmul.py`
    or `benchmarks/quantized.py` wrote; `limits` are sentences; `source` is where the numbers can be looked up.
    """

    prune: Mapping[str, Any] | None = None
    calibration: str | None = None
    quality: Sequence[Mapping[str, Any]] = ()
    speeds: Sequence[Mapping[str, Any]] = ()
    limits: Sequence[str] = ()
    source: str | None = None


NOTHING = Evidence()


def read_evidence(
    prune: str | Path | None = None,
    calibration: str | None = None,
    evals: Iterable[str | Path] = (),
    speeds: Iterable[str | Path] = (),
    limits: Iterable[str] = (),
) -> Evidence:
    """Evidence from the files that the commands and benchmarks write.

    Args:
        prune: Of `hf-sparse24 prune --report FILE.json`, or what it prints with `--json`.
        calibration: On what the model was pruned, in words.
        evals: What `hf-sparse24 eval --json` prints.
        speeds: Of `benchmarks/matmul.py` or `benchmarks/quantized.py`.
        limits: Sentences.

    Raises:
        ValueError: A file is none of its kind; names it.
    """
    report = None if prune is None else _read(prune, {"method", "pattern", "layers"}, "of hf-sparse24 prune")
    rows = [row for file in evals for row in quality_of_eval(_read(file, set(), "of hf-sparse24 eval --json"), str(file))]
    measured = [_read(file, {"benchmark", "environment", "cells"}, "of benchmarks/matmul.py or benchmarks/quantized.py") for file in speeds]
    return Evidence(prune=report, calibration=calibration, quality=rows, speeds=measured, limits=tuple(limits))


def quality_of_eval(found: Mapping[str, Any], where: str = "eval") -> list[dict[str, Any]]:
    """Rows of a card's table, `measure`, `on`, `dense` and `sparse`, from what `hf-sparse24 eval --json` prints.

    Args:
        found: The result of one run.
        where: For errors.

    Raises:
        ValueError: It is no such result.
    """
    if "perplexity" in found:
        on = f"{found['windows']:,} windows of held-out text, {found['tokens']:,} tokens"
        return [{"measure": "perplexity", "on": on, "dense": found.get("dense_perplexity"), "sparse": found["perplexity"]}]
    if AGREEMENT.keys() <= found.keys():
        on = f"{found['texts']:,} texts"
        return [{"measure": text, "on": on, "dense": 1.0, "sparse": found[name]} for name, text in AGREEMENT.items()]
    raise ValueError(f"{where}: neither a perplexity nor {', '.join(AGREEMENT)}: not what hf-sparse24 eval --json prints")


def _read(file: str | Path, keys: set[str], what: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(found, dict) or not keys <= found.keys():
        raise ValueError(f"{file}: not a file {what}: {', '.join(sorted(keys)) or 'an object'} expected")
    return found


def pruning_facts(report: Mapping[str, Any], contents: Mapping[str, Any]) -> dict[str, Any]:
    """A `PruneReport` in the numbers that a card shows.

    Raises:
        ValueError: It is of fewer layers than the checkpoint has packed weights.
    """
    layers = report["layers"]
    errors = {layer["name"]: layer["relative_error"] for layer in layers}
    if not layers:
        raise ValueError("the report of pruning names no layer")
    num_packed = sum(number for number, *_ in contents["packed"].values())
    if num_packed > len(layers):
        raise ValueError(f"the report of pruning is of {len(layers)} layers, but {num_packed} weights are packed: is it this model's?")
    learnt = report.get("distillation") or {}
    return {
        "method": report["method"],
        "pattern": report["pattern"],
        "num_layers": len(layers),
        "tokens": max(layer["tokens"] for layer in layers),
        "error": sum(errors.values()) / len(errors),
        "worst": max(errors, key=errors.__getitem__),
        "worst_error": max(errors.values()),
        "dropped": sum(layer["dropped"] for layer in layers),
        "steps": learnt.get("steps"),
        "distill_seconds": learnt.get("seconds"),
    }


def speed_facts(measured: Mapping[str, Any], contents: Mapping[str, Any], scheme: QuantizationScheme | None) -> dict[str, Any]:
    """The cells of a benchmark whose shape and form this checkpoint has: by shape, the ratio for each number of rows.

    Raises:
        ValueError: There are none.
    """
    form = _form(scheme)
    layers = Counter[tuple[int, int]]()
    for n, k, _, _, number in contents["layers"]:
        layers[n, k] += number
    dtypes = {"BF16": "bfloat16", "F16": "float16"}
    has = {(n, k, dtypes.get(dtype)) for n, k, dtype, *_ in contents["layers"]}
    ratios: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for cell in measured["cells"]:
        if (cell["n"], cell["k"], cell["dtype"]) in has and cell.get("form") == form and "ratio" in cell:
            ratios[cell["n"], cell["k"]][cell["m"]] = cell["ratio"]
    if not ratios:
        shapes = ", ".join(f"{n} x {k}" for n, k in sorted(layers))
        raise ValueError(f"the speeds that were given are of no layer of this checkpoint ({shapes}, {form or 'not quantised'})")
    rows = [m for m in SHOWN_ROWS if any(m in found for found in ratios.values())]
    table = [(n, k, layers[n, k], [found.get(m) for m in rows]) for (n, k), found in sorted(ratios.items())]
    return {"environment": measured["environment"], "rows": rows, "table": table, "num_missing": len(layers) - len(ratios)}


def _form(scheme: QuantizationScheme | None) -> str | None:
    """What `benchmarks/quantized.py` calls a scheme."""
    if scheme is None:
        return None
    if scheme.num_bits == 4:
        return f"int4-g{scheme.group_size}" if scheme.group_size else "int4-channel"
    return "fp8" if scheme.type == "float" else "int8"


def show_number(value: Any) -> str:
    """A measured number, with as many digits as say something; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.4f}"

"""Write the measured numbers of README.md and docs/measurements.md anew, from the files in benchmarks/results/, and draw the chart.

    python benchmarks/tables.py

What stands between `<!-- measured: NAME -->` and `<!-- end of measured -->` is what the function of that name below returns; a test
holds that it does, and that no other number of these pages claims to be measured.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matmul
import quantized

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md", ROOT / "docs" / "activation.md")
CHART = RESULTS / "matmul-h200.svg"
BLOCK = re.compile(r"(?P<begin><!-- measured: (?P<name>\w+) -->\n).*?(?P<end><!-- end of measured -->)", re.DOTALL)
# What changed since a result was measured, by its commit.
SINCE = {"df198b9": "The choice for 8 to 64 rows was made anew since (tune-h200.json), which the table does not show yet."}
SHORT_ROWS = (1, 16, 64, 256, 1024, 4096)
FORMS = {"fp8": "float8 2:4", "int8": "int8 2:4", "int4-g128": "4 bits 2:4"}
METHODS = {
    "dense": "dense", "magnitude": "magnitude", "ria": "RIA", "wanda": "Wanda", "obs": "OBS by groups", "sparsegpt": "SparseGPT",
    "wanda+cg": "Wanda, refined", "sparsegpt+cg": "SparseGPT, refined", "obs+cg": "OBS, refined", "alps": "ALPS (default)",
    "alps+distillation": "ALPS, then distilled for 5 minutes",
}  # fmt: skip


def main() -> None:
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    CHART.write_text(matmul.draw(read("matmul-h200")))


def fill(text: str) -> str:
    """A page with its measured blocks made anew."""
    return BLOCK.sub(lambda block: f"{block['begin']}{TABLES[block['name']]().strip()}\n{block['end']}", text)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ---- layers ----------------------------------------------------------------------------------------------------------------------


def short() -> str:
    """A few numbers of rows, for the README."""
    speeds = {"bfloat16 2:4": {mean["m"]: mean["ratio"] for mean in read("matmul-h200")["means"]}}
    speeds |= {label: found for form, label in FORMS.items() if (found := _means(form)) and form != "int8"}
    rows = [(label, *(_times(found.get(m)) for m in SHORT_ROWS)) for label, found in speeds.items()]
    return table(("rows of x", *SHORT_ROWS), rows)


def layers() -> str:
    result = read("matmul-h200")
    columns = [mean["m"] for mean in result["means"]]
    speeds = ("speed-up, geometric mean of four shapes", *(_times(mean["ratio"]) for mean in result["means"]))
    targets = ("target", *(_times(mean["target"]) if not mean["met"] else "met" for mean in result["means"]))
    return f"{_made(result)}\n\n{table(('rows of x', *columns), [speeds, targets])}"


def layers_said() -> str:
    """What the table of layers does not show."""
    result = read("matmul-h200")
    cells, host, compile_s = result["cells"], result["host"], result["compile"]
    assert not [cell for cell in cells if "failure" in cell]
    main = [cell for cell in cells if (cell["n"], cell["k"]) in matmul.MAIN]
    rest = [cell for cell in cells if (cell["n"], cell["k"]) not in matmul.MAIN]
    lines = [
        f"Slower than dense: of these four shapes, in bfloat16 and float16, {_slower(main)}; of four shapes that nothing was tuned on "
        f"({_shapes(rest)}) {_slower(rest)}.",
        f"An eager call keeps the host for {_range(record['us'] for record in host)} us (`nn.Linear`: "
        f"{_range(record['dense_us'] for record in host)}).",
        f"The kernels that these four shapes need are compiled in {compile_s['cold']['seconds']:.1f} s once, and read from disk in "
        f"{compile_s['warm']['seconds']:.1f} s afterwards.",
        f"A layer for which every path is ready takes {_range((r['ratio'] for r in result['memory']), 3)} of the dense bytes on the GPU.",
    ]
    lines += [note for commit, note in SINCE.items() if result["environment"]["commit"].startswith(commit)]
    return "\n".join(f"- {line}" for line in lines)


def quantised() -> str:
    result = read("quantized-h200")
    columns = sorted({mean["m"] for mean in result["means"]})
    rows = [(label, *(_times(_means(form).get(m)) for m in columns)) for form, label in FORMS.items()]
    note = f" ({result['environment']['note']})" if "note" in result["environment"] else ""
    return f"{_made(result)}{note}\n\n{table(('rows of x', *columns), rows)}"


def quantised_said() -> str:
    cells = [cell for cell in read("quantized-h200")["cells"] if "ratio" in cell]
    lines = []
    for form, label in FORMS.items():
        own = [cell for cell in cells if cell["form"] == form]
        lines.append(f"{label}, slower than the dense weight in 16 bits: {_slower(own)}.")
    fp8 = [cell for cell in cells if "dense_fp8_rounding_us" in cell]
    behind = [{**cell, "ratio": cell["dense_fp8_rounding_us"] / cell["us"]} for cell in fp8]
    lines.append(
        "Slower than dense float8 (`torch._scaled_mm`, scales for rows on both sides, the same rounding of x before it): "
        f"{_slower(behind)}."
    )
    for form, targets in quantized.TARGETS.items():
        means = _means(form)
        missed = {m: targets[max(rows for rows in targets if rows <= m)] for m in means}
        listed = [f"{_times(means[m])} of {target}x at {m}" for m, target in missed.items() if means[m] < target]
        lines.append(f"Missed targets of {FORMS[form]}: {', '.join(listed) or 'none'}.")
    return "\n".join(f"- {line}" for line in lines)


def _means(form: str) -> dict[int, float]:
    return {mean["m"]: mean["ratio"] for mean in read("quantized-h200")["means"] if mean["form"] == form}


def _slower(cells: list[dict[str, Any]]) -> str:
    """How many cells are below 1, and which."""
    slow = [cell for cell in cells if cell["ratio"] < 1]
    listed = ", ".join(f"{cell['n']} x {cell['k']} with {cell['m']} rows: {_times(cell['ratio'])}" for cell in slow)
    return f"{len(slow)} of {len(cells)} cells ({listed})" if slow else f"none of {len(cells)} cells"


def _shapes(cells: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(f"{cell['n']} x {cell['k']}" for cell in cells))


# ---- models ----------------------------------------------------------------------------------------------------------------------


def generation() -> str:
    result = read("generate-h200")
    labels = {
        "generate": "stock `generate`, compiled, static cache, batch {size}",
        "decode step": "decode step as one CUDA graph, eager model, batch {size}",
        "compiled decode step": "decode step as one CUDA graph, compiled model, batch {size}",
        "prefill": "prefill of {size} tokens",
        "memory of weights": "memory of all weights",
    }
    rows = [
        (
            labels[record["part"]].format(size=record["size"]),
            *(_quantity(record.get(kind), record["unit"]) for kind in ("dense", "kept")),
            _gain(record, "ratio"), _quantity(record.get("fused"), record["unit"]), _gain(record, "fused_ratio"),
        )
        for part in labels for record in result["records"] if record["part"] == part
    ]  # fmt: skip
    missed = [
        f"{labels[record['part']].format(size=record['size'])} ({record['target']})"
        for record in result["records"]
        if record["part"] in labels and record.get("met") is False
    ]
    rest = [f"Missed targets: {'; '.join(missed)}."] if missed else []
    rest += [f"Not measured for lack of time: {'; '.join(result['skipped'])}."] if result["skipped"] else []
    return f"{_made(result)}\n\n{table(('', 'dense', 'packed', '', 'packed and fused', ''), rows)}\n\n{' '.join(rest)}"


def _quantity(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{value:.2f} {unit}"


def _gain(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    return "-" if value is None else f"{value:.2f}" if record["unit"] == "bytes" else _times(value)


# ---- files -----------------------------------------------------------------------------------------------------------------------


def packing() -> str:
    result = read("convert-cpu")
    cells = [cell for cell in result["speeds"] if cell["dtype"] == "bfloat16"]
    shapes = {" x ".join(map(str, cell["shape"])) for cell in cells}
    rows = [
        (f"{cell['job']}, {' x '.join(map(str, cell['shape']))}", cell["gb_per_s"], cell["ratio_to_copy"], _times(cell["ratio_to_peer"]))
        for cell in cells
        if len(shapes) == 1 or cell["shape"] == [4096, 8192]
    ]
    header = ("bfloat16", "GB/s of dense bytes", "of a plain copy", f"against {result['environment']['peer']}")
    return f"{_made(result)}\n\n{table(header, rows)}"


def folders() -> str:
    result = read("convert-cpu")
    jobs = {job["job"]: job for job in result["jobs"]}
    labels = {
        "compress_folder": "`hf-sparse24 compress`",
        "decompress_folder": "`hf-sparse24 decompress`",
        "save packed": "`save_pretrained(..., sparsity_config=...)`",
        "load packed, to dense": "`from_pretrained`, packed to dense",
        "load packed, keep packed": "`from_pretrained`, kept packed",
        "load dense checkpoint (stock)": "`from_pretrained` of the dense checkpoint, which is mapped and not read",
    }
    size, shard = jobs["compress_folder"]["model_mib"], jobs["compress_folder"]["dense_shard_mib"]
    rows = [(label, f"{jobs[job]['time_s']:.2f} s", f"{jobs[job]['peak_mib']:.0f} MiB") for job, label in labels.items()]
    missed = [f"{labels[name]}, {job['target']}" for name, job in jobs.items() if job["met"] is False]
    missed += [f"{cell['job']}, {cell['dtype']}, {cell['target'].replace('_', ' ')}" for cell in result["speeds"] if cell["met"] is False]
    header = (f"a checkpoint of {size:.0f} MiB in shards of {shard:.0f} MiB", "time", "anonymous memory above the start")
    return f"{table(header, rows)}\n\nMissed targets: {'; '.join(missed) or 'none'}."


def big_folder() -> str:
    result = read("convert-big-cpu")
    rows = [
        (f"`hf-sparse24 {job}`", f"{result[job]['time_s']:.1f} s", f"{result[job]['peak_mib']:.0f} MiB")
        for job in ("compress", "decompress")
    ]
    again = f"the same, after a kill at {result['killed']['shards_finished']} shards"
    rows.insert(1, (again, f"{result['resume']['time_s']:.1f} s", f"{result['resume']['peak_mib']:.0f} MiB"))
    same = all(result[job]["same_bytes"] for job in ("resume", "decompress"))
    header = (f"a checkpoint of {result['dense_gb']:.1f} GB in {result['shards']} shards", "time", "anonymous memory above the start")
    made = f"{_made(result)}; one thread, other work on the machine (load {result['environment']['load_at_start']} on two cores)"
    return f"{made}\n\n{table(header, rows)}\n\nThe files of both detours are {'' if same else 'NOT '}the same, byte for byte."


# ---- pruning ---------------------------------------------------------------------------------------------------------------------


def encoder() -> str:
    result = read("prune-cpu")["minilm"]
    columns = ("spearman", "cosine", "nearest", "top1", "mrr")
    rows = [
        (METHODS[row["method"]], f"{row['layer_error']:.4f}" if "layer_error" in row else "-", *(f"{row[name]:.3f}" for name in columns))
        for row in result["rows"]
    ]
    header = ("MiniLM (all 36 layers 2:4)", "layer error", "rank correlation", "cosine", "same neighbour", "WordNet top-1", "MRR")
    return f"{_made(result)}; {result['sentences']} sentences to calibrate on, {result['evaluation']} to compare.\n\n{table(header, rows)}"


def language_model() -> str:
    parts = []
    for file in ("prune-h200", "prune-cpu"):
        for name, result in read(file).items():
            if not name.startswith("smollm2"):
                continue
            rows = [
                (METHODS[row["method"]], f"{row['layer_error']:.4f}" if "layer_error" in row else "-", *_perplexities(row))
                for row in result["rows"]
            ]
            header = (f"SmolLM2-135M, {result['calibration_tokens']} tokens to calibrate on", "layer error", "perplexity", "other text")
            parts.append(f"{_made(result)}; perplexity on {result['evaluation_tokens']} held-out tokens.\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _perplexities(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['perplexity']:.1f}", f"{row['out_of_domain']:.1f}"


# ---- activations -----------------------------------------------------------------------------------------------------------------


def squared_relu() -> str:
    """Both runs of examples/train_squared_relu.py, on each device that has a result."""
    return "\n\n".join(_trained(read(file.stem)) for file in sorted(RESULTS.glob("train-squared-relu-*.json")))


def _trained(result: dict[str, Any]) -> str:
    runs, settings = result["runs"], result["settings"]
    evaluated = list(runs["dense"]["bits_per_byte"])
    header = ("trained", "training, at the end", *(f"held out, {how}" for how in evaluated))
    rows = [
        (name, f"{run['losses'][-1]['loss'] / math.log(2):.3f}", *(f"{run['bits_per_byte'][how]:.3f}" for how in evaluated))
        for name, run in runs.items()
    ]
    batches = f"{settings['steps']} steps of {settings['batch_size']} windows of {settings['window']} bytes"
    said = f"model `{settings['size']}`, {batches}; bits per byte"
    layers = [
        (
            name,
            *(f"{run['layers'][name][what]:.{digits}%}" for run in runs.values() for what, digits in (("zeros", 1), ("dropped_energy", 2))),
        )
        for name in runs["dense"]["layers"]
    ]
    columns = ("block", *(f"{name}: {what}" for name in runs for what in ("zeros", "energy that 2:4 drops")))
    return f"{_made(result)}; {said}.\n\n{table(header, rows)}\n\n{table(columns, layers)}"


# ---- text ------------------------------------------------------------------------------------------------------------------------


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines).replace("|  |", "| |")


def _made(result: dict[str, Any]) -> str:
    """On what, with what, when, from which commit."""
    made = result["environment"]
    return f"{made['device']}, torch {made['torch']}, transformers {made['transformers']}, {made['date'][:10]}, commit {made['commit'][:7]}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _range(values: Iterable[float], digits: int = 0) -> str:
    found = [f"{value:.{digits}f}" for value in sorted(values)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        short,
        layers,
        layers_said,
        quantised,
        quantised_said,
        generation,
        packing,
        folders,
        big_folder,
        encoder,
        language_model,
        squared_relu,
    )
}


if __name__ == "__main__":
    main()

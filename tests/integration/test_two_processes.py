"""Packed layers in two processes on a CPU: tensor parallelism, FSDP2, data parallelism.  What they do is in two_processes.py."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import QuantizationScheme, Sparse24Config, SparseBitmaskConfig
from tests.integration.two_processes import TESTS, UP
from tests.models import FAMILIES, llama, make_2_4

ROOT = Path(__file__).parents[2]
SCHEMES = {
    "w-fp8": "fp8",
    "w-int8": "int8",
    "w-fp8-tensor": QuantizationScheme(format="float-quantized", type="float", num_bits=8, strategy="tensor"),
    "w4a16": "w4a16",
    "w8a16": "w8a16",
    "w4a16-rows": QuantizationScheme(format="marlin-24", num_bits=4, strategy="channel"),
}


def wide(dtype=torch.float16, **sizes):
    """A layer wide enough for groups of 128 columns in two pieces."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2} | sizes
    config = LlamaConfig(vocab_size=96, num_hidden_layers=1, dtype=dtype, **sizes)
    return make_2_4(LlamaForCausalLM._from_config(config, dtype=dtype).eval())


def make_folders(work):
    save = {"sparsity_config": Sparse24Config(), "max_shard_size": "60KB"}
    for name in ("llama", "qwen2", "mixtral"):
        FAMILIES[name].build().save_pretrained(work / name, **save)
    llama().save_pretrained(work / "dense")
    biased = llama(attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    biased.save_pretrained(work / "llama-biases", **save)
    llama(intermediate_size=72).save_pretrained(work / "llama-72", **save)
    llama().save_pretrained(work / "bitmask", sparsity_config=SparseBitmaskConfig(), max_shard_size="60KB")
    for name, scheme in SCHEMES.items():
        model = wide(torch.float16 if name.startswith("w4") or name.startswith("w8") else torch.float32)
        model.save_pretrained(work / name, sparsity_config=Sparse24Config(quantization=scheme), max_shard_size="60KB")
    narrow = wide(num_key_value_heads=1)
    narrow.save_pretrained(work / "w4a16-narrow", sparsity_config=Sparse24Config(quantization="w4a16"))
    llama().save_pretrained(work / "damaged", sparsity_config=Sparse24Config())
    tensors = load_file(work / "damaged" / "model.safetensors")
    tensors[f"{UP}.bitmask"][40, 0] = 0xFF
    save_file(tensors, work / "damaged" / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What went wrong in each test, of both processes."""
    work = tmp_path_factory.mktemp("two")
    make_folders(work)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.two_processes"]
    ranks = [
        subprocess.Popen([*command, str(rank), work, port], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=150)[1].decode()[-3000:] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((work / f"results-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", TESTS)
def test_two_processes(name, results):
    for rank, found in enumerate(results):
        assert found[name] == "", f"process {rank}:\n{found[name]}"

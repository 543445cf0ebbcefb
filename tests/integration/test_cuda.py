"""Packing, unpacking and loading on a CUDA device give the bytes of the CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Linear
from hf_sparse24.compressors import Sparse24Compressor, SparseBitmaskCompressor
from hf_sparse24.kernels import dispatch
from hf_sparse24.pattern import mask_2_4, structure

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def sparse_weight(rows, columns, dtype):
    """About a third of the groups keep fewer than two values, and some zeros are negative."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 20
    keep = mask_2_4(weight) & (torch.rand(rows, columns, generator=generator) < 0.8)
    return torch.where(keep, weight, -torch.zeros(())).to(dtype)


@pytest.mark.parametrize("compressor", [Sparse24Compressor(), SparseBitmaskCompressor()], ids=lambda c: c.format)
@pytest.mark.parametrize("shape", [(1, 4), (65, 132), (256, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_packs_and_unpacks_as_the_cpu_does(compressor, shape, dtype):
    weight = sparse_weight(*shape, dtype)
    expected, found = compressor.compress_weight(weight), compressor.compress_weight(weight.cuda())
    assert found["compressed"].is_cuda
    for part in compressor.parts:
        assert torch.equal(found[part].cpu().view(torch.uint8), expected[part].view(torch.uint8))
    dense = compressor.decompress_weight(found)
    assert dense.is_cuda
    assert torch.equal(dense.cpu().view(torch.uint8), compressor.decompress_weight(expected).view(torch.uint8))


def test_cuda_names_a_bad_group():
    weight = sparse_weight(64, 64, torch.bfloat16)
    weight[5, 8:12] = 1
    with pytest.raises(ValueError, match=r"row 5, columns 8\.\.11"):
        Sparse24Compressor().compress_weight(weight.cuda())


def test_cuda_finds_the_same_structure():
    weight = sparse_weight(64, 64, torch.bfloat16)
    assert structure(weight.cuda()) == structure(weight)
    assert torch.equal(mask_2_4(weight.cuda()).cpu(), mask_2_4(weight))


@pytest.mark.parametrize("kept", [True, False])
def test_model_loads_to_the_device_and_saves_the_same_bytes(golden, tmp_path, kept):
    source = golden / "sparse-24-bitmask"
    options = Sparse24Config(run_compressed=kept)
    on_cpu = AutoModelForCausalLM.from_pretrained(source, quantization_config=options)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=options, device_map="cuda")
    assert {value.device.type for value in model.state_dict().values()} == {"cuda"}
    assert isinstance(model.model.layers[0].self_attn.q_proj, Sparse24Linear) == kept
    for name, value in on_cpu.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value)
    tokens = torch.tensor([[1, 5, 9, 33]])
    torch.testing.assert_close(model(tokens.cuda()).logits.cpu(), on_cpu(tokens).logits, rtol=0.05, atol=0.02)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    assert (tmp_path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_default_keeps_layers_packed_and_the_kernels_run(golden, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(golden / "sparse-24-bitmask", device_map="cuda")
    layers = [module for module in model.modules() if isinstance(module, Sparse24Linear)]
    assert layers
    ran, starter = [], dispatch.starter
    monkeypatch.setattr(dispatch, "starter", lambda config, *args: (ran.append(config.source), starter(config, *args))[1])
    dense = AutoModelForCausalLM.from_pretrained(golden / "sparse-24-bitmask", quantization_config=Sparse24Config(run_compressed=False))
    tokens = torch.tensor([[1, 5, 9, 33]])
    torch.testing.assert_close(model(tokens.cuda()).logits.cpu(), dense(tokens).logits, rtol=0.05, atol=0.02)
    assert len(ran) == len([layer for layer in layers if layer.in_features % 16 == 0])


def test_packed_layer_moves_to_the_device_and_back(golden):
    model = AutoModelForCausalLM.from_pretrained(golden / "sparse-24-bitmask", quantization_config=Sparse24Config(run_compressed=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("cuda").to("cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_moving_a_packed_model_takes_its_packed_bytes_only():
    layers = torch.nn.ModuleList(Sparse24Linear(2048, 2048, bias=False, num_values=2048 * 1024, dtype=torch.bfloat16) for _ in range(8))
    before = torch.cuda.memory_allocated()
    layers.to("cuda")
    dense_bytes = 8 * 2048 * 2048 * 2
    assert torch.cuda.memory_allocated() - before <= 0.63 * dense_bytes

"""The kernel for marlin-24: its arithmetic lane by lane, its machine code, and what it gives on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24.kernels.compile import compile_kernel, load_kernel
from hf_sparse24.kernels.marlin24 import CONFIGS, Marlin24At
from hf_sparse24.kernels.marlin24_reference import unpack_marlin24
from tests.kernels.machine_code import instructions, resources

GOLDEN = Path(__file__).parents[1] / "golden"
LEGAL = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE])


def random_weight(num_bits, n, k, groups):
    """weight_packed, meta, scale_packed."""
    draw = np.random.default_rng(0)
    words = draw.integers(-(2**31), 2**31, (k // 32, num_bits * n // 2), dtype=np.int64).astype(np.int32)
    codes = LEGAL[draw.integers(0, 6, (k // 32, 2 * n, 4))]
    meta = (codes << np.arange(4) * 4).sum(-1).astype(np.uint16).view(np.int16)
    scales = draw.uniform(0.5, 2, (groups, n)).astype(np.float16)
    return torch.from_numpy(words), torch.from_numpy(meta), torch.from_numpy(scales)


@pytest.mark.parametrize("name", ["w4-channel", "w4-g128", "w8-channel", "w8-g128"])
def test_reference_reads_what_the_old_library_wrote(name):
    packed, dense = (load_file(GOLDEN / f"marlin-24-{name}" / f"{file}.safetensors") for file in ("model", "dense_original"))
    layers = [key.removesuffix(".weight_packed") for key in packed if key.endswith(".weight_packed")]
    assert layers
    for layer in layers:
        words, meta, scales = (packed[f"{layer}.{part}"] for part in ("weight_packed", "meta", "scale_packed"))
        k, groups = 32 * len(words), len(scales)
        permuted = "g128" in name and k // 2 > 128
        found = unpack_marlin24(words, meta, scales, int(name[1]), permuted, torch.float32)
        rows = scales.float()
        if permuted:
            rows = rows.view(groups, -1, 2, 4).view(groups, -1, 4, 2).transpose(2, 3).reshape(groups, -1)
        steps = rows.t().repeat_interleave(k // groups, 1)
        # Half a step, and what 127.5 steps, rounded to float16, lose above 127: 0.5552 at most in these files.
        assert ((found - dense[f"{layer}.weight"].float()).abs() <= 0.56 * steps).all(), layer


def lanes_weight(words, meta, scales, num_bits, permuted, bf16):
    """The dense weight as the lanes of `marlin24.cu` see it: registers of four tiles, their indices, their scales."""
    words, meta, stored = words.numpy().view(np.uint32), meta.numpy().view(np.uint32), scales.float().numpy()
    n, k = meta.shape[1], 32 * len(meta)
    dense = np.zeros((n, k), np.float32)

    def number(bits):
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0] if bf16 else np.array([bits], np.uint16).view(np.float16)[0])

    def integer(half):
        if bf16 and num_bits == 8:
            return number(half & 0x7F | 0x4300) + number(0xC380 ^ half & 0x80)
        magic, less = {(4, True): (0x4300, 0xC308), (4, False): (0x6400, 0xE408), (8, False): (0x6400, 0xE480)}[num_bits, bf16]
        return number(half | magic) + number(less)

    low = 0x000F000F if num_bits == 4 else 0x00FF00FF
    for kt in range(k // 32):
        for unit in range(n // 64):
            for j in range(4):
                indices = [int(meta[kt, unit * 64 + 32 * (q // 2) + 4 * g + q % 2 + 2 * (j % 2)]) for g in range(8) for q in range(4)]
                for lane in range(32):
                    g, q = divmod(lane, 4)
                    mine = [int(w) for w in words[kt, unit * 32 * num_bits + lane * num_bits :][:num_bits]]
                    if num_bits == 4:
                        a = [mine[j] >> shift & low for shift in (0, 8, 4, 12)]
                    else:
                        a = [mine[2 * j] & low, mine[2 * j + 1] & low, mine[2 * j] >> 8 & low, mine[2 * j + 1] >> 8 & low]
                    for register, bits in enumerate(a):
                        below, group = register % 2, 4 * (register // 2) + q  # of four columns; each register holds its two
                        row = unit * 64 + 8 * g + j + 4 * below
                        # Selector j / 2: lanes 2 (j / 2) and + 1 of the quad hold 16 columns each, rows g and g + 8.
                        code = indices[4 * g + 2 * (j // 2) + group // 4] >> 16 * below + group % 4 * 4
                        octet = stored[kt // 4 if len(stored) > 1 else 0, unit * 64 + 8 * g :][:8]
                        scale = octet[2 * j + below if permuted else j + 4 * below]
                        for c in range(2):
                            dense[row, kt * 32 + group * 4 + (code >> 2 * c & 3)] = integer(bits >> 16 * c & 0xFFFF) * scale
    return torch.from_numpy(dense)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp16"])
@pytest.mark.parametrize("permuted", [True, False], ids=["permuted", "natural"])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_lanes_see_the_weight_of_the_reference(num_bits, permuted, bf16):
    weight = random_weight(num_bits, 128, 256, 2)
    assert torch.equal(lanes_weight(*weight, num_bits, permuted, bf16), unpack_marlin24(*weight, num_bits, permuted, torch.float32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_machine_code_multiplies_on_sparse_tensor_cores_and_spills_nothing(arch):
    for i, config in enumerate(CONFIGS):
        if config.split > 1 and arch in ("sm_80", "sm_89"):
            continue
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        code = compile_kernel("marlin24", arch, config.defines(dtype, num_bits=4 + i % 2 * 4, grouped=i != 3, scales_permuted=i != 3))
        lines = instructions(code)["marlin24"]
        assert any("HMMA.SP" in line for line in lines)
        # Before sm_90 a jump out of a loop is a CALL to a label.
        assert not [line for line in lines if "CALL" in line and "`(.L_" not in line], config
        assert not [line for line in lines if "LDL" in line or "STL" in line], config
        assert resources(code)["marlin24"].local_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 256, 2), (192, 4096, 32), (192, 4096, 1), (128, 416, 1)], ids=str)  # n, k, groups
def test_product_is_within_rounding_of_the_reference_and_repeats(config, dtype, num_bits, shape):
    n, k, groups = shape
    if config.split > 1 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a cluster needs compute capability 9.0")
    grouped = groups > 1
    weight = random_weight(num_bits, *shape)
    dense = unpack_marlin24(*weight, num_bits, grouped, torch.float32).cuda()
    at = [part.cuda() for part in weight]
    defines = config.defines(dtype, num_bits=num_bits, grouped=grouped, scales_permuted=grouped)
    kernel = load_kernel("marlin24", "marlin24", 0, defines, config.shared_bytes)
    bias = torch.randn(n, device="cuda").to(dtype)
    for m in (1, 7, 8, 9, 16, 17, 33, 64):
        x = (torch.randn(m, k, device="cuda") * 0.1 + 0.05).to(dtype)
        start = config.starter(kernel, Marlin24At.of(*at, bias), m)
        found = [torch.full((m, n), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
        for y in found:
            start(x, y, False)
        bound = 2**-8 * (x.float().abs() @ dense.abs().t() + bias.float().abs())
        assert ((found[0].float() - (x.float() @ dense.t() + bias.float())).abs() <= bound).all(), m
        assert torch.equal(*found), m

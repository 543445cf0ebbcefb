"""The kernel for marlin-24: its arithmetic lane by lane, its machine code, and what it gives on a GPU."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sparse24.kernels import reference
from hf_sparse24.kernels.compile import compile_kernel, load_kernel
from hf_sparse24.kernels.marlin24 import CONFIGS, OTHERS, Marlin24At, config_for, expand_defines, expand_starter, why_not_read
from tests.kernels.machine_code import instructions, resources

GOLDEN = Path(__file__).parents[1] / "golden"
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "tune-marlin24-h200.json"
LEGAL = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE])


ALL = tuple(dict.fromkeys((*(config for configs in CONFIGS.values() for config in configs), *OTHERS)))


def unpack_marlin24(weight_packed, meta, scale_packed, num_bits, permuted, dtype):
    """The dense weight, rounded once, from float32."""
    return reference.dequantize_marlin24(weight_packed, meta, scale_packed.float(), num_bits, permuted).to(dtype)


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


def test_choices_are_nearly_as_fast_as_the_best_that_was_measured():
    times = defaultdict(dict)
    for record in json.loads(RESULT.read_text())["records"]:
        if "us" in record:
            times[tuple(record[name] for name in ("num_bits", "grouped", "n", "k", "m"))][record["config"]] = record["us"]
    losses = [found[repr(config_for(n, m, 132, (9, 0)))] / min(found.values()) for (_, _, n, _, m), found in times.items()]
    assert len(losses) == 80
    assert geometric_mean(losses) < 1.04 and max(losses) < 1.5


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_machine_code_multiplies_on_sparse_tensor_cores_and_spills_nothing(arch):
    # Others than Hopper run OTHERS.  Most registers: bfloat16, and scales for groups.
    for config, num_bits in itertools.product(ALL if arch == "sm_90a" else OTHERS, (4, 8)):
        defines = config.defines(torch.bfloat16, num_bits=num_bits, grouped=True, scales_permuted=True)
        code = compile_kernel("marlin24", arch, defines)
        lines = instructions(code)["marlin24"]
        assert any("HMMA.SP" in line for line in lines)
        # Before sm_90 a jump out of a loop is a CALL to a label.
        assert not [line for line in lines if "CALL" in line and "`(.L_" not in line], config
        assert not [line for line in lines if "LDL" in line or "STL" in line], config
        assert resources(code)["marlin24"].local_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_expansion_spills_nothing_and_moves_16_bytes(num_bits, arch):
    defines = expand_defines(torch.bfloat16, num_bits=num_bits, grouped=True, scales_permuted=True)
    code = compile_kernel("marlin24", arch, defines)
    lines = instructions(code)["marlin24_expand"]
    # For a thread four times its values and one of scales; 16 times values out and twice four masks.
    assert sum("LDG" in line and ".128" in line for line in lines) == num_bits + 1
    assert sum("STG.E.128" in line for line in lines) == 16 + 2
    assert not [line for line in lines if "LDL" in line or "STL" in line or "CALL" in line]
    assert resources(code)["marlin24_expand"].local_bytes == 0


def mask_nibbles(indices):
    """`mask_of` of `marlin24.cu`."""
    each = 0x11111111
    a, b, c, d = (indices >> shift & each for shift in range(4))
    return (~(a | b) & each) | (a & ~b | c & ~d) << 1 | (b & ~a | d & ~c) << 2 | (c & d) << 3


def test_every_index_nibble_becomes_its_mask_in_every_place():
    for place in range(8):
        for code in LEGAL.tolist():
            indices = 0x44444444 & ~(15 << 4 * place) | code << 4 * place
            expected = 0x33333333 & ~(15 << 4 * place) | (1 << (code & 3) | 1 << (code >> 2)) << 4 * place
            assert mask_nibbles(indices) == expected, (place, code)


def expanded_by_lanes(words, meta, scales, num_bits, permuted):
    """values (N, K / 2) in float32, and bitmask (N, K / 8), as the lanes of `marlin24_expand` write them."""
    words, meta, stored = words.numpy().view(np.uint32), meta.numpy().view(np.uint32), scales.float().numpy()
    n, k = meta.shape[1], 32 * len(meta)
    values, bitmask = np.full((n, k // 2), np.nan, np.float32), np.zeros((n, k // 8), np.uint8)
    low, offset = (1 << num_bits) - 1, 1 << num_bits - 1
    for unit in range(n // 64):
        for step in range(-(-k // 128)):
            pieces = min(4, k // 32 - 4 * step)
            shared = np.full((64, 32, 2), np.nan, np.float32)
            for lane in range(32):
                g, q = divmod(lane, 4)
                octet = stored[step if len(stored) > 1 else 0, unit * 64 + 8 * g :][:8]
                for i in range(pieces):
                    kt = 4 * step + i
                    mine = [int(w) for w in words[kt, unit * 32 * num_bits + lane * num_bits :][:num_bits]]
                    for j in range(4):
                        if num_bits == 4:
                            a = [mine[j] >> shift for shift in (0, 8, 4, 12)]
                        else:
                            a = [mine[2 * j], mine[2 * j + 1], mine[2 * j] >> 8, mine[2 * j + 1] >> 8]
                        for r in range(4):
                            scale = octet[2 * j + r % 2 if permuted else j + 4 * (r % 2)]
                            pair = [(a[r] >> shift & low) - offset for shift in (0, 16)]
                            shared[8 * g + j + r % 2 * 4, ((8 * i + r // 2 * 4) ^ 4 * g) + q] = np.array(pair, np.float32) * scale
                    at = unit * 64 + 32 * (q // 2) + 4 * g + 2 * (q % 2)
                    x, y = int(meta[kt, at]), int(meta[kt, at + 1])
                    for below in range(2):
                        mask = mask_nibbles(x >> 16 * below & 0xFFFF | (y >> 16 * below & 0xFFFF) << 16)
                        to = bitmask[unit * 64 + 8 * g + q + 4 * below, step * 16 + 4 * i :][:4]
                        to[:] = np.array([mask], np.uint32).view(np.uint8)
            for row in range(64):
                for v in range(2 * pieces):
                    vector = shared[row].reshape(8, 8)[v ^ row // 8]
                    values[unit * 64 + row, step * 64 + v * 8 :][:8] = vector
    return torch.from_numpy(values), torch.from_numpy(bitmask)


def dense_of(values, bitmask):
    """The dense weight of the 2:4 form."""
    kept = (bitmask[:, :, None].int() >> torch.arange(8, device=bitmask.device, dtype=torch.int32) & 1).view(len(values), -1).bool()
    dense = torch.zeros(kept.shape, dtype=values.dtype, device=values.device)
    return dense.masked_scatter_(kept, values)


@pytest.mark.parametrize("permuted", [True, False], ids=["permuted", "natural"])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("shape", [(128, 256, 2), (64, 416, 1)], ids=str)
def test_lanes_of_the_expansion_write_the_weight_of_the_reference(shape, num_bits, permuted):
    weight = random_weight(num_bits, *shape)
    values, bitmask = expanded_by_lanes(*weight, num_bits, permuted)
    assert torch.equal(dense_of(values, bitmask), unpack_marlin24(*weight, num_bits, permuted, torch.float32))


@pytest.mark.parametrize(
    ("n", "k", "grouped", "capability", "why"),
    [
        (64, 128, True, (9, 0), None),
        (64, 32, False, (8, 0), "split"),
        (96, 128, True, (9, 0), "out_features 96 is no multiple of 64"),
        (64, 96, True, (9, 0), "in_features 96 is no multiple of 128"),
        (64, 48, False, (9, 0), "in_features 48 is no multiple of 32"),
    ],
)
def test_a_configuration_says_why_it_cannot(n, k, grouped, capability, why):
    for config in ALL:
        found = config.why_not(n, k, grouped=grouped, capability=capability)
        if why == "split":
            assert found == (None if config.split == 1 else "compute capability 8.0 has no clusters of blocks, which come with 9.0")
        else:
            assert found == why == why_not_read(n, k, grouped=grouped)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("permuted", [True, False], ids=["permuted", "natural"])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 128, 1), (192, 4096, 32), (128, 416, 1), (64, 32, 1)], ids=str)  # n, k, groups
def test_expansion_is_exactly_the_reference(shape, num_bits, permuted, dtype):
    n, k, groups = shape
    weight = random_weight(num_bits, *shape)
    defines = expand_defines(dtype, num_bits=num_bits, grouped=groups > 1, scales_permuted=permuted)
    at = [part.cuda() for part in weight]
    values = torch.full((n, k // 2), torch.nan, dtype=dtype, device="cuda")
    bitmask = torch.full((n, k // 8), 255, dtype=torch.uint8, device="cuda")
    expand_starter(load_kernel("marlin24", "marlin24_expand", 0, defines), Marlin24At.of(*at, None))(values, bitmask)
    assert torch.equal(dense_of(values, bitmask).cpu(), unpack_marlin24(*weight, num_bits, permuted, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("config", ALL, ids=str)
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_a_graph_of_products_gives_what_single_launches_give(config, early):
    if torch.cuda.get_device_capability() < (9, 0) and (early or config.split > 1):
        pytest.skip("early launches and clusters need compute capability 9.0")
    weight = [part.cuda() for part in random_weight(4, 1024, 1024, 8)]
    defines = config.defines(torch.float16, num_bits=4, grouped=True, scales_permuted=True)
    kernel = load_kernel("marlin24", "marlin24", 0, defines, config.shared_bytes)
    start = config.starter(kernel, Marlin24At.of(*weight, None), 9)
    x = (torch.randn(9, 1024, device="cuda") * 2**-10).half()

    ys = [torch.full_like(x, torch.nan) for _ in range(2)]

    def products():
        start(x, ys[0], False)
        start(ys[0], ys[1], early)  # reads what the one before writes

    products()
    torch.cuda.synchronize()
    expected = [y.clone() for y in ys]
    dense = unpack_marlin24(*(part.cpu() for part in weight), 4, True, torch.float32).cuda()
    for before, after in ((x, ys[0]), (ys[0], ys[1])):
        assert ((after.float() - before.float() @ dense.T).abs() <= 2**-8 * (before.float().abs() @ dense.abs().T)).all()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        products()
    for _ in range(3):
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(ys, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("config", ALL, ids=str)
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
    some = torch.randn(n, device="cuda").to(dtype)
    for m, bias in itertools.product((1, 7, 8, 9, 16, 17, 32, 33, 64), (None, some)):
        x = (torch.randn(m, k, device="cuda") * 0.1 + 0.05).to(dtype)
        start = config.starter(kernel, Marlin24At.of(*at, bias), m)
        found = [torch.full((m, n), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
        for y in found:
            start(x, y, False)
        added = torch.zeros(n, device="cuda") if bias is None else bias.float()
        bound = 2**-8 * (x.float().abs() @ dense.abs().t() + added.abs())
        assert ((found[0].float() - (x.float() @ dense.t() + added)).abs() <= bound).all(), m
        assert torch.equal(*found), m

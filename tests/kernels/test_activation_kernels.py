"""Kernels of squared-ReLU blocks: each compiles to what it promises, and on a GPU gives what the reference gives."""

import pytest
import torch

from hf_sparse24.kernels import activation, activation_plans, ops, plans, reference
from hf_sparse24.kernels.activation import CONFIGS, CONFIGS_8BIT, FP8, SelectColumns, SquaredRelu
from hf_sparse24.kernels.compile import compile_kernel
from tests.kernels import products
from tests.kernels.machine_code import instructions, resources

DTYPES = (torch.bfloat16, torch.float16)
FORMS = [(fp8, gated, keep_two) for fp8 in (False, True) for gated in (False, True) for keep_two in (True, False)]


# ---- without a GPU ---------------------------------------------------------------------------------------------------------


def check_code(source, arch, defines, registers=255, local_bytes=0):
    cubin = compile_kernel(source, arch, defines)
    found = resources(cubin)[source]
    assert found.local_bytes <= local_bytes and found.registers <= registers
    code = instructions(cubin)[source]
    # Two quotients of a row, of numbers out of the ordinary, are found by a function.
    assert not [line for line in code if "CALL" in line and "`(.L_" not in line and "$__internal_" not in line]
    return code


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(("fp8", "gated", "keep_two"), FORMS)
def test_machine_code_of_squared_relu(arch, fp8, gated, keep_two):
    if fp8 and arch == "sm_80":
        pytest.skip("float8 needs compute capability 8.9")
    for packed in (False, True)[: 1 + keep_two]:
        for dtype in DTYPES:
            defines = SquaredRelu.of(14336).defines(dtype, fp8=fp8, gated=gated, keep_two=keep_two, packed=packed)
            # Where two blocks just fit on a multiprocessor, the compiler spills two registers to have them there.
            code = check_code("squared_relu", arch, defines, local_bytes=8 if arch in ("sm_89", "sm_120a") else 0)
            assert any("LDG.E.128" in line for line in code)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(("fp8", "gated", "keep_two"), FORMS)
def test_machine_code_of_select_columns(arch, rows, fp8, gated, keep_two):
    config = SelectColumns.of(4096, rows, 132)
    code = check_code("select_columns", arch, config.defines(torch.bfloat16, fp8=fp8, gated=gated, keep_two=keep_two), registers=128)
    loads = [line for line in code if ("LDG.E.NA.64" if fp8 else "LDG.E.NA.128") in line]
    assert len(loads) >= config.at_once


@pytest.mark.parametrize("config", [*CONFIGS, *CONFIGS_8BIT], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_code_of_the_product(config, dtype):
    code = check_code("wgmma_sp", "sm_90a", config.defines(dtype, FP8 if config.value_bytes == 1 else None), registers=168)
    assert any(("QGMMA.SP." if config.value_bytes == 1 else "HGMMA.SP.") in line for line in code)
    waits = "".join("w" if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line else "p" * ("GMMA" in line) for line in code)
    assert "wp" not in waits


def test_without_a_gpu_every_other_path_has_its_reason():
    choice = activation.choose(4096, 14336, 1, torch.bfloat16, torch.device("cpu"), fp8=False, has_columns=True, gated=False, keep_two=True)
    assert choice.path == "dense" and set(choice.reasons) == {"select_columns", "wgmma_sp"}
    assert all("sparse tensor cores" in reason for reason in choice.reasons.values())


# ---- on a GPU --------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture
def fresh(monkeypatch):
    """No plan of before, and packing from one row on."""
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(activation, "MIN_PACKED_ROWS", {1: 1, 2: 1})
    activation.choose.cache_clear()
    yield
    activation.choose.cache_clear()


def random_u(m, k, dtype, seed=0, special=True):
    """With ties, zeros of both signs and a row of zeros."""
    u = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)
    if special:
        u[:, ::7] = u[:, 1:2]
        u[:, 5::11] = -0.0
        u[m // 2, : k // 2] = 0
        u[-1] = -1
    return u


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 64, 1000, 4096, 14336, 20000])
@pytest.mark.parametrize("gated", [False, True])
def test_squared_relu_is_the_reference_bit_for_bit(dtype, k, gated, fresh):
    u, gate = random_u(5, k, dtype), random_u(5, k, dtype, seed=1) if gated else None
    u[0, 3], u[1, 4] = float("nan"), float("inf")
    if gated:
        gate[0, 6], gate[1, 4] = float("inf"), 2.0
    for keep_two in (False, True):
        found, expected = ops.squared_relu(u, gate, keep_two), reference.squared_relu(u, gate, keep_two)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("k", [8, 64, 1000, 4096, 14336, 20000])
@pytest.mark.parametrize("gated", [False, True])
def test_packed_is_what_the_reference_keeps(fp8, k, gated, fresh):
    m = 5
    u, gate = random_u(m, k, torch.bfloat16), random_u(m, k, torch.bfloat16, seed=1) if gated else None
    start = activation_plans._squared_relu_starter(u, gate, fp8=fp8, keep_two=True, packed=True)
    values = torch.zeros(m, k // 2, dtype=FP8 if fp8 else u.dtype, device="cuda")
    bitmask, scales = torch.zeros(m, k // 8, dtype=torch.uint8, device="cuda"), torch.zeros(m, 1, device="cuda")
    start(u.data_ptr(), gate.data_ptr() if gated else 0, values.data_ptr(), bitmask.data_ptr(), scales.data_ptr())
    bits = (bitmask[..., None] >> torch.arange(8, device="cuda") & 1).bool()
    assert (bits.unflatten(2, (2, 4)).sum(-1) == 2).all()
    expected = reference.squared_relu(u, gate, True)
    if fp8:
        largest = reference.squared_relu(u, gate).float().abs().amax(1, keepdim=True)
        torch.testing.assert_close(scales, torch.where(largest > 0, largest / 448, 1), rtol=1e-6, atol=0)
        expected = (expected.float() * (1 / scales)).clamp(-448, 448).to(FP8).float()
    dense = torch.zeros(m, k, device="cuda").masked_scatter_(bits.view(m, k), values.float())
    assert torch.equal(dense, expected.float())


def weights(n, k, dtype, fp8, seed=3):
    weight = torch.randn(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) / k**0.5
    if not fp8:
        return weight.to(dtype), None, weight.to(dtype)
    scale = weight.abs().amax(1, keepdim=True) / 448
    weight = (weight / scale).to(FP8)
    return weight, scale, weight.float() * scale


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fp8", "gated", "keep_two"), FORMS)
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (264, 1032), (8, 8), (1000, 4096)], ids=str)
def test_few_rows_read_columns(dtype, fp8, gated, keep_two, n, k, fresh):
    weight, scale, dense = weights(n, k, dtype, fp8)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    for m in (1, 2, 3, 4, 7, 8):
        u, gate = random_u(m, k, dtype), random_u(m, k, dtype, seed=1) if gated else None
        choice = activation.choose(n, k, m, dtype, u.device, fp8=fp8, has_columns=True, gated=gated, keep_two=keep_two)
        assert choice.path == "select_columns"
        columns = weight.view(torch.uint8).t().contiguous().view(FP8) if fp8 else weight.t().contiguous()
        y = ops.squared_relu_linear(u, gate, weight, scale, columns, bias, keep_two)
        products.check(y, reference.squared_relu(u, gate, keep_two), dense, bias)
        assert torch.equal(y, ops.squared_relu_linear(u, gate, weight, scale, columns, bias, keep_two))


@gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (576, 1536), (264, 1088), (4096, 4096)], ids=str)
def test_many_rows_multiply_packed(fp8, gated, n, k, fresh):
    weight, scale, dense = weights(n, k, torch.bfloat16, fp8)
    for m in (1, 63, 64, 65, 200, 1000, 4097):
        u, gate = random_u(m, k, torch.bfloat16), random_u(m, k, torch.bfloat16, seed=1) if gated else None
        choice = activation.choose(n, k, m, u.dtype, u.device, fp8=fp8, has_columns=False, gated=gated, keep_two=True)
        assert choice.path == "wgmma_sp"
        h = reference.squared_relu(u, gate, True)
        for bias in (None, torch.randn(n, device="cuda", dtype=torch.bfloat16)):
            y = ops.squared_relu_linear(u.view(1, m, k), gate if gate is None else gate.view(1, m, k), weight, scale, None, bias, True)
            assert y.shape == (1, m, n)
            products.check(y[0], products.rounded(h, FP8) if fp8 else h, dense, bias)


@gpu
@pytest.mark.parametrize("config", [*CONFIGS, *CONFIGS_8BIT], ids=repr)
def test_every_configuration_of_the_product(config, fresh, monkeypatch):
    fp8 = config.value_bytes == 1
    monkeypatch.setattr(activation, "CONFIGS_8BIT" if fp8 else "CONFIGS", (config,))
    n, k, m = 776, 1536, 700
    weight, scale, dense = weights(n, k, torch.bfloat16, fp8)
    u = random_u(m, k, torch.bfloat16)
    y = ops.squared_relu_linear(u, None, weight, scale, None, None, True)
    h = reference.squared_relu(u, None, True)
    products.check(y, products.rounded(h, FP8) if fp8 else h, dense)


@gpu
@pytest.mark.parametrize("keep_two", [False, True])
def test_dense_float8(keep_two, monkeypatch, fresh):
    monkeypatch.setattr(activation, "MIN_PACKED_ROWS", {1: 1 << 40, 2: 1 << 40})
    weight, scale, dense = weights(1024, 2048, torch.bfloat16, True)
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    for m in (1, 100, 300):
        u = random_u(m, 2048, torch.bfloat16)
        h = products.rounded(reference.squared_relu(u, None, keep_two), FP8)
        products.check(ops.squared_relu_linear(u, None, weight, scale, None, bias, keep_two), h, dense, bias, epsilon=2**-7)
        products.check(ops.linear_fp8(u, weight, scale, bias), products.rounded(u, FP8), dense, bias, epsilon=2**-7)


@gpu
def test_in_a_graph_and_compiled(fresh):
    weight, _, dense = weights(1024, 4096, torch.bfloat16, False)
    columns = weight.t().contiguous()
    for m in (1, 2048):
        u = random_u(m, 4096, torch.bfloat16)

        def call(u):
            return ops.squared_relu_linear(u, None, weight, None, columns, None, True)

        call(u)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                y = call(u)
        u.copy_(random_u(m, 4096, torch.bfloat16, seed=9))
        graph.replay()
        products.check(y, reference.squared_relu(u, None, True), dense)
        products.check(torch.compile(call, fullgraph=True)(u), reference.squared_relu(u, None, True), dense)

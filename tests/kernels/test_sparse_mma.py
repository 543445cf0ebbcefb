"""Our kernels: every configuration compiles to what it promises, and on a GPU gives the product."""

import dataclasses

import pytest
import torch

from hf_sparse24.kernels import dispatch
from hf_sparse24.kernels.compile import KernelCompileError, compile_kernel
from hf_sparse24.kernels.configurations import CONFIGS, CONFIGS_8BIT, MEASURED_8BIT, OTHERS, OTHERS_8BIT
from hf_sparse24.kernels.dispatch import DTYPES_8BIT, starter
from hf_sparse24.kernels.sparse_mma import MmaSp, WeightAt, WgmmaSp
from tests.kernels import products
from tests.kernels.machine_code import instructions, resources

CONFIGURATIONS = (*CONFIGS, *OTHERS)
CONFIGURATIONS_8BIT = tuple(dict.fromkeys((*CONFIGS_8BIT, *MEASURED_8BIT.values(), *OTHERS_8BIT)))
ARCHITECTURES = {MmaSp: ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"), WgmmaSp: ("sm_90a",)}
INSTRUCTION = {(WgmmaSp, None): "HGMMA.SP.", (WgmmaSp, torch.float8_e4m3fn): "QGMMA.SP.", (WgmmaSp, torch.int8): "IGMMA.SP."}
BUILDS = [
    (config, arch, dtype, None)
    for config in CONFIGURATIONS
    for arch in ARCHITECTURES[type(config)]
    for dtype in (torch.bfloat16, torch.float16)
]
# Of 8 bits, few for all that is compiled alike: x and the result in bfloat16, and int8 for one configuration of each width.
WIDTHS = {(type(config), config.bn): config for config in CONFIGURATIONS_8BIT}
BUILDS += [(config, "sm_90a", torch.bfloat16, torch.float8_e4m3fn) for config in CONFIGURATIONS_8BIT]
BUILDS += [
    (config, arch, dtype, values)
    for config in WIDTHS.values()
    for arch in ARCHITECTURES[type(config)]
    for dtype in (torch.bfloat16, torch.float16)
    for values in DTYPES_8BIT
    if isinstance(config, MmaSp) or dtype == torch.bfloat16
]
BUILDS = list(dict.fromkeys(BUILDS))
# Of each architecture, a block's.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_120a": 99 * 1024}


def name(config):
    return "-".join(str(value) for value in (config.source, *vars(config).values()))


def build_name(build):
    config, *others = build
    return "-".join((name(config), *(str(other).removeprefix("torch.") for other in others if other is not None)))


# ---- without a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS, ids=build_name)
def test_machine_code_is_what_the_configuration_promises(build):
    config, arch, dtype, values = build
    cubin = compile_kernel(config.source, arch, config.defines(dtype, values))
    code = instructions(cubin)[config.source]
    multiplications = [line for line in code if INSTRUCTION.get((type(config), values), "HMMA.SP.") in line]
    assert multiplications
    if isinstance(config, MmaSp) or values is None:
        # Only sm_90 is run; BF16 is named by the instruction, F16 is its default on some architectures.
        assert all((".BF16" in line) == (dtype == torch.bfloat16) for line in multiplications)
    # No product waits until the one before it has ended: the compiler makes them, with a remark that nobody sees.
    waits = "".join("w" if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line else "p" * ("GMMA" in line) for line in code)
    assert "wp" not in waits
    # Before sm_90 a jump out of a loop is a CALL to a label.
    calls = [line for line in code if "CALL" in line and "`(.L_" not in line]
    assert not calls
    exchanged = isinstance(config, WgmmaSp) and config.value_bytes == 1 and config.window == 256  # two words of the bitmask
    assert not [line for line in code if "LDL" in line or "STL" in line or ("SHFL" in line and not exchanged)]
    assert resources(cubin)[config.source].local_bytes == 0


def test_there_is_a_configuration_for_small_shared_memory():
    for arch, limit in SHARED_BYTES.items():
        for configurations in (CONFIGURATIONS, CONFIGURATIONS_8BIT):
            widths = {config.bn for config in configurations if isinstance(config, MmaSp) and config.shared_bytes + 1024 <= limit}
            assert widths == {8, 16, 32, 64}, arch


@pytest.mark.parametrize("config", CONFIGURATIONS + CONFIGURATIONS_8BIT, ids=name)
def test_configurations_fit_the_chip_they_are_for(config):
    assert (config.shared_bytes + 1024) * config.min_blocks <= SHARED_BYTES["sm_90a"]


def test_wgmma_is_refused_for_other_chips():
    config = next(config for config in CONFIGURATIONS if isinstance(config, WgmmaSp))
    with pytest.raises(KernelCompileError):
        compile_kernel(config.source, "sm_80", config.defines(torch.bfloat16))


def test_indices_may_not_change_under_a_product():
    """A turn ahead at least two: with one, results were wrong."""
    config = dataclasses.replace(next(config for config in CONFIGURATIONS if isinstance(config, WgmmaSp)), ahead=1)
    with pytest.raises(KernelCompileError, match="static assertion"):
        compile_kernel(config.source, "sm_90a", config.defines(torch.bfloat16))


# ---- with a GPU --------------------------------------------------------------------------------------------------------------


def start(config, x, weight, bias, y):
    at = WeightAt.of(weight.compressed, weight.bitmask, bias)
    starter(config, at, len(x), x.dtype)(x, y, False)


def sizes(config):
    """(n, k, m): whole tiles, and tails of every side."""
    k = 1024 if isinstance(config, WgmmaSp) else 1040
    return [(512, 1024, config.bn), (516, k, max(1, config.bn - 3)), (300, k, config.bn + 5 if config.bn >= 64 else 1), (65, 2048, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(config, dtype):
    if torch.cuda.get_device_capability() != (9, 0) and isinstance(config, WgmmaSp):
        pytest.skip("for compute capability 9.0")
    for n, k, m in sizes(config):
        if config.why_not(n, k):
            continue
        weight = products.random_weight(n, k, dtype, deficient=True)
        for bias in (None, torch.randn(n, device="cuda").to(dtype)):
            x = products.random_x(m, k, dtype)
            y = torch.full((m + 1, n), torch.nan, dtype=dtype, device="cuda")
            start(config, x, weight, bias, y[:m])
            products.check(y[:m], x, weight.dense, bias)
            assert y[m].isnan().all()  # nothing is written behind the result


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGURATIONS_8BIT, ids=name)
@pytest.mark.parametrize("values", DTYPES_8BIT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_with_values_of_8_bits(config, values, dtype):
    """x as it is, or rounded as the reference rounds it; scales of each dtype, for each row and for all."""
    if torch.cuda.get_device_capability() != (9, 0) and isinstance(config, WgmmaSp):
        pytest.skip("for compute capability 9.0")
    rounds = isinstance(config, WgmmaSp)
    for number, (n, k, m) in enumerate(
        [(512, 1024, config.bn), (516, 1088, max(1, config.bn - 3)), (300, 1152, 1), (65, 2048, config.bn + 5)]
    ):
        if config.why_not(n, k) or (m > 64 and not rounds):
            continue
        scale_dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        weight = products.random_weight_8bit(n, k, values, scale_dtype, one_scale=number == 2)
        for bias, given in (
            (None, None),
            (torch.randn(n, device="cuda").to(dtype), torch.tensor([0.01], device="cuda", dtype=scale_dtype)),
        ):
            x = products.random_x(m, k, dtype)
            x[0] = 0
            y = torch.full((m + 1, n), torch.nan, dtype=dtype, device="cuda")
            at = WeightAt.of(weight.compressed, weight.bitmask, bias, weight.scale)
            starter(config, at, m, dtype, values, given)(x, y[:m], False)
            expected_x = products.rounded(x, values, given) if rounds else x
            products.check(y[:m], expected_x, weight.dense, bias, epsilon=2**-8 if rounds else None)
            assert y[m].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("values", DTYPES_8BIT, ids=str)
@pytest.mark.parametrize("k", [64, 576, 4096, 14336, 20480])
def test_rows_are_rounded_as_by_pytorch(values, k):
    for dtype in (torch.bfloat16, torch.float16):
        x = products.random_x(33, k, dtype) * torch.logspace(-6, 3, 33, device="cuda")[:, None].to(dtype)
        x[5] = 0
        for given in (None, torch.tensor([0.02], device="cuda")):
            start = dispatch.rounding_starter(x.shape[0], k, dtype, values, 0, given)
            q, scales = torch.empty(33, k, dtype=values, device="cuda"), torch.empty(33, device="cuda")
            start(x.data_ptr(), q.data_ptr(), scales.data_ptr(), False)
            assert torch.equal(q.float() * scales[:, None], products.rounded(x, values, given))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name)
def test_results_are_the_same_every_time(config):
    if torch.cuda.get_device_capability() != (9, 0) and isinstance(config, WgmmaSp):
        pytest.skip("for compute capability 9.0")
    k = 1024 * (4 if config.why_not(512, 4096) is None else 1)
    weight, x = products.random_weight(512, k, torch.bfloat16), products.random_x(config.bn, k, torch.bfloat16)
    results = torch.empty(20, config.bn, 512, dtype=torch.bfloat16, device="cuda")
    for y in results:
        start(config, x, weight, None, y)
    assert (results == results[0]).all()

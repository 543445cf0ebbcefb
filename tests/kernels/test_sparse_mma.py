"""Our kernels: every configuration compiles to what it promises, and on a GPU gives the product."""

import pytest
import torch

from hf_sparse24.kernels.compile import KernelCompileError, compile_kernel
from hf_sparse24.kernels.dispatch import CONFIGS, OTHERS, starter
from hf_sparse24.kernels.sparse_mma import MmaSp, WeightAt, WgmmaSp
from tests.kernels import products
from tests.kernels.machine_code import instructions, resources

CONFIGURATIONS = (*CONFIGS, *OTHERS)
ARCHITECTURES = {MmaSp: ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"), WgmmaSp: ("sm_90a",)}
INSTRUCTION = {MmaSp: "HMMA.SP.", WgmmaSp: "HGMMA.SP."}
BUILDS = [(config, arch) for config in CONFIGURATIONS for arch in ARCHITECTURES[type(config)]]
# Of each architecture, a block's.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_120a": 99 * 1024}


def name(config):
    return "-".join(str(value) for value in (config.source, *vars(config).values()))


# ---- without a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "arch"), BUILDS, ids=[f"{name(config)}-{arch}" for config, arch in BUILDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_machine_code_is_what_the_configuration_promises(config, arch, dtype):
    cubin = compile_kernel(config.source, arch, config.defines(dtype))
    code = instructions(cubin)[config.source]
    multiplications = [line for line in code if INSTRUCTION[type(config)] in line]
    assert multiplications
    # Only sm_90 is run; BF16 is named by the instruction, F16 is its default on some architectures.
    assert all((".BF16" in line) == (dtype == torch.bfloat16) for line in multiplications)
    # Before sm_90 a jump out of a loop is a CALL to a label.
    calls = [line for line in code if "CALL" in line and "`(.L_" not in line]
    assert not calls
    assert not [line for line in code if "LDL" in line or "STL" in line or "SHFL" in line]
    assert resources(cubin)[config.source].local_bytes == 0


def test_there_is_a_configuration_for_small_shared_memory():
    for arch, limit in SHARED_BYTES.items():
        widths = {config.bn for config in CONFIGURATIONS if isinstance(config, MmaSp) and config.shared_bytes + 1024 <= limit}
        assert widths == {8, 16, 32, 64}, arch


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name)
def test_configurations_fit_the_chip_they_are_for(config):
    assert (config.shared_bytes + 1024) * config.min_blocks <= SHARED_BYTES["sm_90a"]


def test_wgmma_is_refused_for_other_chips():
    config = next(config for config in CONFIGURATIONS if isinstance(config, WgmmaSp))
    with pytest.raises(KernelCompileError):
        compile_kernel(config.source, "sm_80", config.defines(torch.bfloat16))


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

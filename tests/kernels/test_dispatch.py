"""Which path runs, and why: without a GPU, on stand-ins for devices."""

import json
import math
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from hf_sparse24 import Sparse24Linear
from hf_sparse24.kernels import cost, dispatch
from hf_sparse24.kernels.configurations import CONFIGS, CONFIGS_8BIT, MEASURED, MEASURED_8BIT, OTHERS, OTHERS_8BIT
from hf_sparse24.kernels.cusparselt import CusparseltWeight
from hf_sparse24.kernels.dispatch import choose
from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp

DEVICE = torch.device("cuda", 0)
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "tune-h200.json"
RESULT_8BIT = RESULT.with_name("tune-8bit-h200.json")
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (12, 0): 99 * 1024}


@pytest.fixture
def device(monkeypatch):
    """A function: compute capability -> nothing; such a device is there from then on."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(dispatch, "block_shared_bytes", lambda index: SHARED_BYTES.get(capability, 48 * 1024))
        monkeypatch.setattr(dispatch, "_why_not_built", lambda path, device, dtype, values: None)
        monkeypatch.setattr(dispatch.cusparselt, "why_not", lambda device=None: None)
        choose.cache_clear()

    yield make
    choose.cache_clear()


@pytest.mark.parametrize("m", [1, 3, 8, 9, 64, 65, 128, 129, 1000, 5000])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (100, 1040), (1536, 576), (128256, 4096), (8, 64)], ids=str)
def test_every_path_but_the_one_that_runs_has_a_reason(device, n, k, m):
    device((9, 0))
    for has_metadata in (True, False):
        choice = choose(n, k, m, torch.bfloat16, DEVICE, has_metadata)
        assert set(choice.reasons) == set(dispatch.PATHS) - {choice.path}
        assert all(choice.reasons.values())
        assert (choice.config is None) == (choice.path in ("cusparselt", "widen", "unpack"))
        if choice.config is not None:
            assert choice.config.source == choice.path
            assert choice.config.why_not(n, k) is None


def test_hopper_runs_our_kernels_at_every_number_of_rows(device):
    device((9, 0))
    for k in (576, 4096, 14336):
        assert {choose(4096, k, m, dtype, DEVICE).path for m in range(1, 3000, 37) for dtype in dispatch.DTYPES} <= {"mma_sp", "wgmma_sp"}


def test_a_kernel_that_fits_is_only_said_to_be_slower(device):
    device((9, 0))
    choice = choose(28672, 4096, 8192, torch.bfloat16, DEVICE, True)
    assert choice.path == "cusparselt"
    assert choice.reasons["wgmma_sp"].startswith("cusparselt is faster")
    assert choice.reasons["mma_sp"] == "8192 rows of x are more than 64"


def test_cusparselt_runs_where_it_is_faster_and_its_metadata_is_there(device):
    device((9, 0))
    assert choose(28672, 4096, 4096, torch.bfloat16, DEVICE, True).path == "cusparselt"
    assert choose(4096, 4096, 64, torch.bfloat16, DEVICE, True).path != "cusparselt"
    assert choose(28672, 4096, 4096, torch.float16, DEVICE, True).path == "wgmma_sp"
    without = choose(28672, 4096, 4096, torch.bfloat16, DEVICE, False)
    assert without.path == "wgmma_sp" and "prepare" in without.reasons["cusparselt"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_chips_have_mma_for_few_rows(device, capability):
    device(capability)
    for m in (1, 8, 9, 17, 33, 64):
        choice = choose(4096, 14336, m, torch.bfloat16, DEVICE)
        assert isinstance(choice.config, MmaSp) and choice.config.bn >= m
        assert choice.config.shared_bytes + 1024 <= SHARED_BYTES[capability]
        assert "(9, 0)" in choice.reasons["wgmma_sp"]
        assert choose(4096, 14336, m, torch.bfloat16, DEVICE, True).path == "mma_sp"
    assert choose(4096, 4096, 65, torch.bfloat16, DEVICE).path == "unpack"
    assert choose(4096, 4096, 65, torch.bfloat16, DEVICE, True).path == "cusparselt"


@pytest.mark.parametrize("values", dispatch.DTYPES_8BIT, ids=str)
def test_values_of_8_bits_take_the_path_that_their_checkpoint_allows(device, values):
    device((9, 0))

    def path(m, quantize_x, n=4096, k=4096):
        return choose(n, k, m, torch.bfloat16, DEVICE, values=values, quantize_x=quantize_x)

    assert path(1, True).path == path(1, False).path == "mma_sp"
    assert {path(m, True).path for m in (64, 1000)} == {"wgmma_sp"}
    assert path(64, False).path == "mma_sp" and "does not ask" in path(64, False).reasons["wgmma_sp"]
    assert path(65, False).path == "widen"
    for choice in (path(1, True), path(1000, True), path(1000, False)):
        assert set(choice.reasons) == set(dispatch.PATHS) - {choice.path} and all(choice.reasons.values())
    assert path(128, True, k=576).path == "wgmma_sp" and path(128, True, k=96).path == "unpack"
    assert path(1, True, k=96).path == "mma_sp" and path(1, True, k=80).path == "widen"
    device((8, 9))
    assert path(16, True).path == "mma_sp" and path(65, True).path == "unpack"


@pytest.mark.parametrize(("num_bits", "grouped"), [(4, True), (8, False)])
def test_marlins_order_is_read_as_stored_for_few_rows(device, monkeypatch, num_bits, grouped):
    monkeypatch.setattr(dispatch, "_why_marlin24_is_not_built", lambda *args: None)
    monkeypatch.setattr(dispatch, "multiprocessors", lambda index: 132)

    def choice(n, k, m, dtype=torch.float16, place=DEVICE):
        found = dispatch.choose_marlin24(n, k, m, dtype, place, num_bits=num_bits, grouped=grouped)
        assert set(found.reasons) == set(dispatch.MARLIN_PATHS) - {found.path} and all(found.reasons.values())
        return found.path, found.config

    device((9, 0))
    for m in (1, 8, 9, 33, 64):
        for n, split in ((4096, 2), (28672, 1)):
            path, config = choice(n, 4096, m)
            assert path == "marlin24" and config.bn >= min(m, 32) and config.split == split
            assert config.why_not(n, 4096, grouped=grouped, capability=(9, 0)) is None
            assert config.shared_bytes + 1024 <= SHARED_BYTES[9, 0]
    assert choice(4096, 4096, 65) == ("widen", None)
    assert choice(4096, 4096, 0)[0] == choice(4096, 4096, 1, torch.float32)[0] == choice(4000, 4096, 1)[0] == "unpack"
    assert choice(4096, 4096, 1, place=torch.device("cpu"))[0] == "unpack"
    assert choice(4096, 160, 1)[0] == ("unpack" if grouped else "marlin24")
    for capability in ((8, 0), (8, 9), (12, 0)):
        device(capability)
        path, config = choice(4096, 4096, 20)
        assert path == "marlin24" and config.split == 1 and config.shared_bytes + 1024 <= SHARED_BYTES[capability]
        assert choice(4096, 4096, 65)[0] == "unpack"


def test_usable_paths_name_every_kernel(device, monkeypatch):
    device((9, 0))
    monkeypatch.setattr(dispatch, "_why_marlin24_is_not_built", lambda *args: None)
    found = dispatch.usable_paths(DEVICE, torch.bfloat16)
    assert set(found) == {"mma_sp", "wgmma_sp", "cusparselt", "unpack", "marlin24"} | {
        f"{kernel} of {values}" for kernel in ("mma_sp", "wgmma_sp") for values in ("float8_e4m3fn", "int8")
    }
    assert not any(found.values())
    device((7, 5))
    assert {path for path, reason in dispatch.usable_paths(DEVICE, torch.bfloat16).items() if not reason} == {"cusparselt", "unpack"}


def test_what_no_kernel_can_do_is_unpacked(device):
    device((9, 0))
    assert "no kernel for" in choose(64, 64, 1, torch.float32, DEVICE).reasons["mma_sp"]
    assert "multiple of 16" in choose(64, 72, 1, torch.bfloat16, DEVICE).reasons["mma_sp"]
    assert choose(64, 64, 0, torch.bfloat16, DEVICE).path == "unpack"
    assert choose(64, 64, 1, torch.bfloat16, torch.device("cpu")).reasons["mma_sp"] == "cpu has no sparse tensor cores"
    device((7, 5))
    assert "below (8, 0)" in choose(64, 64, 1, torch.bfloat16, DEVICE).reasons["mma_sp"]


def measured_times(path):
    """(n, k, m) -> configuration -> microseconds; fields that came later have their defaults."""
    times = defaultdict(dict)
    for record in json.loads(path.read_text())["records"]:
        config = eval(record["config"], {"MmaSp": MmaSp, "WgmmaSp": WgmmaSp})
        times[record["n"], record["k"], record["m"]][config] = record["us"]
    return times


def test_choices_are_nearly_as_fast_as_the_best_that_was_measured(device):
    """On all that tune.py measured: the model, and the table, are those that were fitted to it."""
    device((9, 0))
    times = measured_times(RESULT)
    losses = []
    for (n, k, m), found in times.items():
        chosen = choose(n, k, m, torch.bfloat16, DEVICE).config
        if chosen in found:
            losses.append(found[chosen] / min(found.values()))
    assert len(losses) > 0.9 * len(times)
    assert math.exp(sum(map(math.log, losses)) / len(losses)) < 1.02
    assert max(losses) < 1.2


def test_choices_for_values_of_8_bits_are_nearly_as_fast(device):
    device((9, 0))
    times = measured_times(RESULT_8BIT)
    losses = []
    for (n, k, m), found in times.items():
        chosen = choose(n, k, m, torch.bfloat16, DEVICE, values=torch.float8_e4m3fn, quantize_x=True).config
        if chosen in found:
            losses.append(found[chosen] / min(found.values()))
    assert len(losses) > 0.9 * len(times)
    assert math.exp(sum(map(math.log, losses)) / len(losses)) < 1.02
    assert max(losses) < 1.2


@pytest.mark.parametrize("error", [dispatch.cusparselt.CusparseltError("pads"), torch.OutOfMemoryError("full")], ids=repr)
def test_a_layer_that_cannot_have_metadata_stays_as_it_is(device, monkeypatch, error):
    device((9, 0))
    layer = Sparse24Linear(64, 32, bias=False, num_values=32 * 32, dtype=torch.bfloat16)
    layer.bitmask.data.fill_(0x33)
    values = layer.compressed.data.normal_().clone()
    monkeypatch.setattr(dispatch, "why_not", lambda *args: None)
    monkeypatch.setattr(CusparseltWeight, "from_parts", Mock(side_effect=error))
    assert layer.prepare() == str(error)
    assert layer.metadata is None
    assert torch.equal(layer.to("cpu").compressed, values)


def test_configurations_of_the_table_are_in_use():
    assert set(MEASURED.values()) <= set(CONFIGS)
    assert not set(CONFIGS) & set(OTHERS)
    assert {config.value_bytes for config in (*CONFIGS, *OTHERS, *MEASURED.values())} == {2}
    assert {config.value_bytes for config in (*CONFIGS_8BIT, *OTHERS_8BIT, *MEASURED_8BIT.values())} == {1}


def test_more_work_takes_longer():
    for config in CONFIGS:
        if isinstance(config, WgmmaSp) and config.split == 1:
            assert cost.time_us(config, 8192, 4096, 4096) < cost.time_us(config, 8192, 8192, 4096) < cost.time_us(config, 32768, 8192, 4096)

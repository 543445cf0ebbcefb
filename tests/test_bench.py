"""`hf-sparse24 bench` and what it measures with: on a CPU with a clock of its own, on a GPU for real."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import matmul
from hf_sparse24 import Sparse24Config, bench, model_bench
from hf_sparse24.bench import Cell, Copies, Time, error_of, measure, random_24, random_x, round_x, x_as_seen
from hf_sparse24.cli import main
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.kernels.dispatch import Choice
from hf_sparse24.model_bench import BenchReport, LayerKind, Measured, bench_model, render_bench, verdict
from hf_sparse24.quantized_linear import QuantizedSparse24Linear
from hf_sparse24.report import open_model
from tests.models import FAMILIES, llama

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture
def stopwatch(monkeypatch):
    """No GPU, and a clock: ours takes 2 us, dense 3."""

    def time_them(calls, copies, big):
        return [Time(2.0 + i, 0.01, call(copies - 1)) for i, call in enumerate(calls)]

    monkeypatch.setattr(bench, "time_side_by_side", time_them)
    monkeypatch.setattr(bench, "num_copies", lambda n, k: 2)


@pytest.fixture
def pretended_gpu(stopwatch, monkeypatch):
    """The CPU taken for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended GPU")
    monkeypatch.setattr(model_bench, "why_not_kept", lambda format="": "there is no kernel for it" if format == "sparse-bitmask" else None)
    monkeypatch.setattr(model_bench, "DEVICE", "cpu")
    monkeypatch.setattr(model_bench, "LLAMA_8B", ((64, 32), (32, 64)))
    monkeypatch.setattr(Copies.random.__func__, "__defaults__", ("cpu",))


def cell(m=1, us=2.0, dense_us=3.0, **more):
    return Cell(64, 32, m, "bfloat16", "mma_sp", None, 0.1, 0.1, us, dense_us, 0.01, 0.01, **more)


def report_of(*layers, notes=()):
    environment = {"device": "a GPU", "torch": "2.13", "date": "2026-12-01T00:00:00"}
    measured = tuple(Measured(LayerKind(64, 32, "sparse-24-bitmask", ("a",) * count, count), cells, 9, 16) for count, cells in layers)
    return BenchReport("model", "bfloat16", environment, measured, notes)


# ---- one layer -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_weights_are_2_4_and_packed_as_files_are(dtype):
    dense, compressed, bitmask = random_24(32, 64, dtype, 3, "cpu")
    parts = Sparse24Compressor().compress_weight(dense)
    assert torch.equal(parts["compressed"], compressed) and torch.equal(parts["bitmask"], bitmask)
    assert not torch.equal(random_24(32, 64, dtype, 4, "cpu")[0], dense)


def test_an_error_is_seen_in_every_element():
    dense, x = random_24(16, 32, torch.float16, 0, "cpu")[0], random_x(1030, 32, torch.float16, "cpu")
    y = F.linear(x.float(), dense.float()).half()
    assert error_of(y, x, dense, 2**-10) <= 1
    for row, column in ((0, 0), (1029, 15)):
        wrong = y.clone()
        wrong[row, column] += 0.1
        assert error_of(wrong, x, dense, 2**-10) > 1
        wrong[row, column] = float("nan")
        assert error_of(wrong, x, dense, 2**-10) == 1e9


def test_a_right_layer_is_timed_and_its_ratio_is_dense_over_ours(stopwatch):
    found = measure(Copies.random(64, 32, torch.bfloat16, "cpu"), 5)
    assert (found.us, found.dense_us, found.ratio, found.failure) == (2.0, 3.0, 1.5, None)
    assert found.path == "unpack" and found.to_dict()["ratio"] == 1.5 and "failure" not in found.to_dict()


@pytest.mark.parametrize(("index", "failure"), [(0, "wrong result"), (1, "wrong result in a graph")])
def test_a_wrong_layer_is_not_timed(stopwatch, index, failure):
    copies = Copies.random(64, 32, torch.bfloat16, "cpu")
    copies.layers[index].compressed.data[7] *= 1.5
    found = measure(copies, 5)
    assert (found.us, found.ratio, found.failure) == (None, None, failure)


@pytest.mark.parametrize(("values", "steps"), [(torch.int8, 127), (torch.float8_e4m3fn, 448)])
def test_x_is_rounded_with_a_scale_for_each_row_or_the_one_given(values, steps):
    x = torch.tensor([[1.0, -0.3, 0.0, 0.61], [100.0, 3.0, -7.0, 0.0]])
    seen = round_x(x, values)
    assert torch.allclose(seen.abs().amax(1), x.abs().amax(1)) and not torch.equal(seen, x)
    assert (seen - x).abs().max() <= 100 / 2**4 / 2
    assert torch.equal(round_x(x, values, torch.tensor([1.0 / steps])).amax(1), torch.tensor([1.0, 1.0]))


def test_only_the_path_that_rounds_sees_rounded_x(golden):
    with open_model(golden / "float-quantized-static+sparse-24-bitmask") as opened:
        layer = next(module for module in opened.model.modules() if isinstance(module, QuantizedSparse24Linear))
    assert layer.quantize_x
    layer.input_scale = torch.nn.Parameter(torch.tensor([0.25]), requires_grad=False)
    x = torch.tensor([[0.3, 1.0]], dtype=torch.bfloat16)
    assert x_as_seen(layer, Choice("mma_sp"), x) is x
    assert x_as_seen(layer, Choice("wgmma_sp"), x).tolist() == [[0.3125, 1.0]]


# ---- which layers ----------------------------------------------------------------------------------------------------------


def test_layers_of_a_packed_checkpoint_are_counted_by_size(tmp_path, pretended_gpu):
    llama(torch.bfloat16).save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    report = bench_model(tmp_path, rows=[1, 3])
    assert {(found.kind.n, found.kind.k): found.kind.count for found in report.layers} == {
        (32, 32): 4,
        (16, 32): 4,
        (64, 32): 4,
        (32, 64): 2,
    }
    assert report.dtype == "bfloat16" and report.notes == () and not report.failures
    assert [found.m for found in report.layers[0].cells] == [1, 3]
    weight = 32 * 32
    (square,) = [found for found in report.layers if (found.kind.n, found.kind.k) == (32, 32)]
    assert (square.packed_bytes, square.dense_bytes) == (weight * 9 // 8 + 16, 2 * weight)
    assert {name for found in report.layers for name in found.kind.names} >= {"model.layers.1.mlp.up_proj"}


def test_a_dense_checkpoint_is_measured_as_if_it_was_packed(tmp_path, pretended_gpu):
    llama(torch.float32).save_pretrained(tmp_path)
    report = bench_model(tmp_path, rows=[1])
    assert sum(found.kind.count for found in report.layers) == 14
    assert "measured in bfloat16" in report.notes[0] and "random 2:4 weights" in report.notes[1]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("float-quantized-static+sparse-24-bitmask", "fp8"),
        ("int-quantized+sparse-24-bitmask", "int8"),
        ("marlin-24-w4-g128", "int4-g128"),
        ("marlin-24-w8-channel", "int8-channel"),
    ],
)
def test_quantised_layers_are_measured_as_they_are(golden, pretended_gpu, name, form):
    report = bench_model(golden / name, rows=[2])
    assert report.layers and not report.failures
    # With 128 columns, a scale for a group is one for a row.
    cells = [one for one in report.to_dict()["cells"] if "g128" not in form or one["k"] > 128]
    assert cells and {one["form"] for one in cells} == {form}
    assert any(found.kind.label.endswith(f" {form}") for found in report.layers)
    assert all(found.packed_bytes < found.dense_bytes * 0.6 for found in report.layers)


def test_layers_without_a_kernel_are_left_out_and_said(golden, pretended_gpu):
    with pytest.raises(ValueError, match="no layer stays packed on load, or could be"):
        bench_model(golden / "sparse-bitmask")


def test_experts_are_not_counted(tmp_path, pretended_gpu):
    family = FAMILIES["mixtral"]
    family.build(torch.bfloat16).save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    report = bench_model(tmp_path, rows=[1])
    assert sum(found.kind.count for found in report.layers) == family.num_packed
    assert f"{family.num_packed_experts} weights of experts are left out" in "".join(report.notes)


# ---- what is said ----------------------------------------------------------------------------------------------------------


def test_totals_count_every_layer(pretended_gpu):
    report = report_of((3, (cell(1), cell(16, 5.0, 4.0))), (1, (cell(1, 1.0, 2.0), cell(16))))
    assert model_bench.totals_us(report) == [(1, 7.0, 11.0), (16, 17.0, 15.0)]
    assert report.to_dict()["totals"][1] == {"m": 16, "us": 17.0, "dense_us": 15.0}


def test_gains_and_losses_are_said_plainly():
    lines = verdict(report_of((3, (cell(1), cell(16, 4.0, 3.0), cell(64, 3.01, 3.0))), notes=("weights are random",)))
    assert lines == [
        "1 row of x: the 3 layers take 6 us packed, 9 us dense: 1.50x, 3 us less",
        "16 rows of x: the 3 layers take 12 us packed, 9 us dense: 0.75x, 3 us MORE",
        "64 rows of x: the 3 layers take 9 us packed, 9 us dense: 1.00x, 0 us MORE",
        "slower than dense: 64 x 32 with 16 rows (0.75x by mma_sp); 64 x 32 with 64 rows (1.00x by mma_sp, within the spread)",
        "their weights take 27 B of GPU memory instead of 48 B (0.562)",
        "attention, norms and sampling come on top of the layers' time: a whole model gains less",
        "note: weights are random",
    ]


def test_a_wrong_result_is_shouted_and_left_out_of_the_totals():
    wrong = Cell(64, 32, 1, "bfloat16", "mma_sp", None, 3.0, failure="wrong result")
    report = report_of((2, (wrong, cell(16))))
    text = render_bench(report)
    assert re.search(r"^ +2  64 x 32 +WRONG +1\.50x$", text, re.MULTILINE)
    assert "FAILED: 64 x 32, 1 rows: wrong result" in text and "1 row of x" not in text


def test_the_chart_has_a_line_for_each_kind_of_layer():
    svg = report_of((3, (cell(1), cell(16))), (1, (cell(1), cell(16, 4.0)))).to_svg()
    assert svg.count("<polyline") == 2 and svg.count("<circle") == 4
    assert "1 of 64 x 32, 16 rows: 0.75x" in svg and "a GPU, torch 2.13" in svg
    with pytest.raises(ValueError, match="nothing was timed"):
        report_of().to_svg()


def test_the_chart_of_the_readme_is_drawn_from_its_result():
    result = json.loads((RESULTS / "matmul-h200.json").read_text())
    assert (RESULTS / "matmul-h200.svg").read_text() == matmul.draw(result)


# ---- the command -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("hf-sparse24 bench: no GPU is visible, so that nothing can be measured")


def test_the_command_prints_the_table_and_draws_the_chart(capsys, tmp_path, pretended_gpu):
    assert main(["bench", "--rows", "1", "16", "--chart", str(tmp_path / "chart.svg")]) == 0
    out = capsys.readouterr().out
    assert "a pretended GPU" in out and "1.50x" in out and "no model was given: sizes are those of an 8B Llama" in out
    assert (tmp_path / "chart.svg").read_text().count("<polyline") == 2
    assert main(["bench", "--rows", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["ratio"] for cell in result["cells"]] == [1.5, 1.5] and "form" not in result["cells"][0]


def test_the_command_fails_where_a_result_is_wrong(capsys, monkeypatch, pretended_gpu):
    monkeypatch.setattr(model_bench, "measure", lambda copies, m: Cell(64, 32, m, "bfloat16", "mma_sp", None, 3.0, failure="wrong result"))
    assert main(["bench", "--rows", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_a_gpu_is_measured(tmp_path, quantization):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "num_attention_heads": 8}
    llama(torch.bfloat16, **sizes).save_pretrained(tmp_path, sparsity_config=Sparse24Config(quantization=quantization))
    report = bench_model(tmp_path, rows=[1, 64, 512])
    assert not report.failures, report.failures
    assert sum(found.kind.count for found in report.layers) == 14
    for found in report.layers:
        assert all(0 < one.us < 1e4 and 0 < one.dense_us < 1e4 for one in found.cells)
        assert all(one.path != "unpack" for one in found.cells)
        assert found.packed_bytes <= 0.64 * found.dense_bytes
    assert "<polyline" in report.to_svg() and "of GPU memory instead of" in render_bench(report)


@pytest.mark.gpu
def test_a_graph_walks_over_all_copies():
    copies = Copies.random(512, 1024, torch.bfloat16)
    found = measure(copies, 1)
    assert found.failure is None and found.path in ("mma_sp", "wgmma_sp")
    copies.layers[-1].compressed.data[7] *= 2
    assert measure(copies, 1).failure == "wrong result in a graph"

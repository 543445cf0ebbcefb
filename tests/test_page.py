"""The page of `hf-sparse24 inspect --html`: complete, self-contained, and the same in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config, fuse_projections, prune
from hf_sparse24.cli import main
from hf_sparse24.kernel_report import ROWS, explain_layers
from hf_sparse24.kernels import dispatch
from hf_sparse24.page import MASK_COLUMNS, MASK_ROWS, draw_mask, read_mask, render_page
from hf_sparse24.report import PRUNE_REPORT, inspect_folder
from tests.models import FAMILIES, llama, load_kept, packed_layer, two_of_four

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# What a browser would fetch.
LOADING = {"src", "href", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """The tags, attributes, texts and table rows of a document."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.text, self.hidden = [], [], [], "", 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        self.hidden += tag == "tr" and "hidden" in dict(attributes)

    def handle_data(self, data):
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU that can be asked what it would run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(dispatch, "block_shared_bytes", lambda index: 227 * 1024)
    monkeypatch.setattr(dispatch, "_why_not_built", lambda *args: None)
    monkeypatch.setattr(dispatch, "_why_marlin24_is_not_built", lambda *args: None)
    monkeypatch.setattr(dispatch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(dispatch.cusparselt, "why_not", lambda device=None: None)
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(tmp_path):
    llama(torch.bfloat16).save_pretrained(tmp_path / "model", sparsity_config=Sparse24Config())
    return tmp_path / "model"


def page_of(folder, mask=None):
    return Page(render_page(inspect_folder(folder), mask))


def test_every_weight_has_a_row_with_its_numbers(folder, no_gpu):
    report = inspect_folder(folder)
    rows = {row[0]: row for row in Page(render_page(report)).rows if row}
    assert rows.keys() >= {weight.name for weight in report.weights}
    assert rows["model.layers.1.mlp.up_proj.weight"] == [
        *("model.layers.1.mlp.up_proj.weight", "Linear", "64 x 32", "bfloat16", "sparse-24-bitmask", "2:4", "50.0%", "2.3 kB", "0.5664"),
        "dense",
    ]
    assert rows["model.norm.weight"][4:6] == ["dense", "dense"]


@pytest.mark.parametrize("name", ["sparse-24-bitmask", "float-quantized+sparse-24-bitmask", "marlin-24-w4-g128", "sparse-bitmask", "dense"])
def test_nothing_is_loaded_from_elsewhere(golden, name, no_gpu):
    page = page_of(golden / name)
    assert not [attribute for attribute in page.attributes if attribute[0] in LOADING]
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not re.search(r"@import|url\(|fetch\(|import\(", render_page(inspect_folder(golden / name)))
    assert any(name == "content" and value.startswith("default-src 'none'") for name, value in page.attributes)


def test_without_a_gpu_the_page_says_so_and_names_the_reason(folder, no_gpu):
    text = page_of(folder).text
    assert "No GPU is visible here" in text and "not mma_sp: cpu has no sparse tensor cores" in text


def test_kernels_and_reasons_are_those_of_dispatch(folder, gpu):
    report = inspect_folder(folder)
    assert report.kernels.device == "cuda:0, NVIDIA H200" and report.kernels.dtype == "bfloat16"
    assert {(layer.shape, len(layer.names)) for layer in report.kernels.layers} == {
        ((32, 32), 4),
        ((16, 32), 4),
        ((64, 32), 4),
        ((32, 64), 2),
    }
    for layer in report.kernels.layers:
        n, k = layer.shape
        assert layer.ranges[0].first == ROWS[0] and layer.ranges[-1].last == ROWS[-1]
        for found in layer.ranges:
            for rows in (found.first, found.last):
                assert dispatch.explain(n, k, rows, has_metadata=True).path == found.path
            assert found.reasons == dispatch.explain(n, k, found.first, has_metadata=True).reasons
    page = Page(render_page(report))
    widths = [int(value) for name, value in page.attributes if name == "colspan"]
    assert sum(widths) == len(ROWS) * len(report.kernels.layers)
    assert "On cuda:0, NVIDIA H200" in page.text and "not wgmma_sp: " in page.text


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("float-quantized+sparse-24-bitmask", {"mma_sp", "wgmma_sp"}),
        ("naive-quantized+sparse-24-bitmask", {"mma_sp", "wgmma_sp"}),
        ("marlin-24-w4-g128", {"marlin24", "widen"}),
        ("sparse-bitmask", {"unpack"}),
        ("float-quantized+sparse-bitmask", {"unpack"}),
    ],
)
def test_quantised_layers_have_kernels_of_their_own(golden, gpu, name, paths):
    found = {ranges.path for layer in inspect_folder(golden / name).kernels.layers for ranges in layer.ranges}
    assert found == paths


def test_a_checkpoint_without_packed_layers_has_no_kernels(golden):
    report = inspect_folder(golden / "dense")
    assert report.kernels is None and "Which kernel" not in render_page(report)


def test_a_layer_explains_what_it_would_run_elsewhere(gpu):
    layer = packed_layer(4096, 4096, dtype=torch.bfloat16, bias=False)
    assert layer.explain(1).reasons["mma_sp"] == "cpu has no sparse tensor cores"
    assert layer.explain(8192, device="cuda").path == "cusparselt"
    assert layer.explain(8192, torch.float16, "cuda").path == "wgmma_sp"


def test_a_fused_layer_answers_for_the_product_of_its_group(monkeypatch):
    monkeypatch.setattr(dispatch, "choose", lambda n, k, *_: (n, k))
    model = llama(torch.bfloat16)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    layers = model.model.layers[0].self_attn
    assert [layer.explain(1) for layer in (layers.q_proj, layers.v_proj, layers.o_proj)] == [(32, 32), (16, 32), (32, 32)]
    fuse_projections(model)
    assert [layer.explain(1) for layer in (layers.q_proj, layers.v_proj, layers.o_proj)] == [(64, 32), (64, 32), (32, 32)]


def test_layers_are_told_apart_by_size_and_dtypes(no_gpu):
    layers = {"a": packed_layer(), "b": packed_layer(), "c": packed_layer(dtype=torch.float16), "d": packed_layer(48)}
    assert [kind.names for kind in explain_layers(layers, torch.float16).layers] == [("a", "b"), ("c",), ("d",)]


# ---- pruning ---------------------------------------------------------------------------------------------------------------


def test_the_error_of_pruning_is_shown_if_its_report_lies_beside(folder, no_gpu):
    assert "pruning error" not in page_of(folder).text
    layers = [
        {"name": f"model.layers.{i}.mlp.{kind}", "relative_error": 0.01 * i + 0.1} for i in (0, 1) for kind in ("up_proj", "down_proj")
    ]
    (folder / PRUNE_REPORT).write_text(json.dumps({"layers": layers}))
    page = page_of(folder)
    rows = {row[0]: row for row in page.rows if row}
    assert rows["model.layers.1.mlp.up_proj.weight"][-2] == "0.1100" and rows["model.layers.1.self_attn.q_proj.weight"][-2] == "-"
    assert page.tags.count("polyline") == 2 and "relative error by block" in page.text


def test_the_report_of_another_model_is_noticed(folder):
    layers = [{"name": name, "relative_error": 0.1} for name in ("model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj")]
    (folder / PRUNE_REPORT).write_text(json.dumps({"layers": layers}))
    with pytest.warns(UserWarning, match=r"1 of its 2 layers are not in this checkpoint, such as model\.layers\.7\.mlp\.up_proj"):
        inspect_folder(folder)


def test_errors_find_their_weights_where_names_in_files_differ(tmp_path):
    model = FAMILIES["llava"].build()
    report = prune(model, method="magnitude")
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    (tmp_path / PRUNE_REPORT).write_text(report.to_json())
    shown = [weight for weight in inspect_folder(tmp_path).weights if weight.pruning_error is not None]
    assert len(shown) == len(report.layers) > 0


@pytest.mark.parametrize("content", ['{"layers": [{"name": "a"}]}', "[]", '{"layers": 3}', "{"])
def test_another_file_of_that_name_is_an_error(folder, content):
    (folder / PRUNE_REPORT).write_text(content)
    with pytest.raises(CheckpointError, match=PRUNE_REPORT):
        inspect_folder(folder)


# ---- masks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparse-24-bitmask", "sparse-bitmask", "marlin-24-w4-g128"])
def test_the_mask_is_that_of_the_weight(golden, name):
    layer = "model.layers.0.mlp.down_proj"
    corner = read_mask(golden / name, layer)
    weight = load_kept(golden / name).get_submodule(layer).weight[:MASK_ROWS, :MASK_COLUMNS]
    assert torch.equal(corner.mask, weight != 0) and corner.mask.any() and not corner.mask.all()
    assert read_mask(golden / name, f"{layer}.weight").name == f"{layer}.weight"


def test_a_picture_has_a_square_for_each_weight_that_is_kept():
    mask = two_of_four(torch.randn(8, 16)) != 0
    svg = draw_mask(mask)
    squares = [tuple(map(int, found)) for found in re.findall(r"M(\d+) (\d+)h", svg)]
    # 8 pixels a weight, 4 between groups.
    assert squares == [(column * 8 + column // 4 * 4, row * 8) for row, column in mask.nonzero().tolist()]
    assert 'width="140" height="64"' in svg


def test_a_missing_layer_is_answered_with_names_near_to_it(folder):
    with pytest.raises(ValueError, match=r"no weight layers\.0\.mlp\.up\.weight; near to it are model\.layers\.0\.mlp\.up_proj\.weight"):
        read_mask(folder, "layers.0.mlp.up")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has 1 axes"):
        read_mask(folder, "model.norm")


# ---- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_with_the_mask_asked_for(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["inspect", str(folder), "--html", str(page)]) == 0
    assert "Mask of model.layers.0.mlp.down_proj.weight" in page.read_text()
    assert main(["inspect", str(folder), "--html", str(page), "--mask", "model.layers.1.self_attn.q_proj"]) == 0
    assert "Mask of model.layers.1.self_attn.q_proj.weight" in page.read_text()
    capsys.readouterr()
    assert main(["inspect", str(folder), "--mask", "model.layers.1.self_attn.q_proj"]) == 1
    assert capsys.readouterr().err == "hf-sparse24 inspect: --mask is shown on the page: give --html FILE, too\n"


def test_names_of_a_hostile_checkpoint_are_text(folder, no_gpu):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["<script>alert(1)</script>"]}))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in render_page(inspect_folder(folder))


@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}")
@pytest.mark.parametrize(("fragment", "shown"), [("", 21), ("#q_proj", 2), ("#up_proj%20layers.1", 1), ("#nowhere", 0)])
def test_a_browser_shows_and_filters_the_weights(folder, tmp_path, fragment, shown):
    page = tmp_path / "page.html"
    page.write_text(render_page(inspect_folder(folder), read_mask(folder, "model.layers.0.mlp.up_proj")))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri() + fragment], capture_output=True, text=True, timeout=120, check=True)
    dom = Page(done.stdout)
    assert f'<span id="shown">{shown}</span>' in done.stdout
    assert dom.hidden == 21 - shown

"""What `inspect_folder` says of a folder is what is in the files and what loading does."""

import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparse24 import CheckpointError, Sparse24Config, report
from hf_sparse24.experts import packed_projections
from hf_sparse24.integration import load
from hf_sparse24.report import Sizes, inspect_folder, measure_folder, render_columns, render_table, show_bytes
from tests.models import FAMILIES, llama, load_kept, packed_names

NO_GPU = "no GPU is visible"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same answers on a machine that has one."""
    monkeypatch.setattr(load, "why_not_kept", lambda format: NO_GPU)


def weights_of(folder):
    return {weight.name: weight for weight in inspect_folder(folder).weights}


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def copied(golden, tmp_path):
    """A copy of a golden folder that may be damaged."""
    return shutil.copytree(golden / "sparse-24-bitmask", tmp_path / "copy")


@pytest.mark.parametrize("name", ["sparse-24-bitmask", "sparse-bitmask", "sparse-bitmask-ct0.8.1", "dense"])
def test_every_weight_is_described_as_it_is(golden, name):
    original = load_file(golden / name / "dense_original.safetensors")
    weights = weights_of(golden / name)
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        assert weights[key].shape == tuple(tensor.shape)
        assert weights[key].dtype == "bfloat16"
        assert (weights[key].zeros, weights[key].elements) == (int((tensor == 0).sum()), tensor.numel())
        assert weights[key].dense_bytes == tensor.nbytes


def test_structure_and_format_of_packed_weights(golden):
    weights = weights_of(golden / "sparse-24-bitmask")
    packed = {name for name, weight in weights.items() if weight.format == "sparse-24-bitmask"}
    assert packed == {name for name in weights if "_proj" in name}
    assert {weights[name].structure for name in packed} == {"2:4"}
    assert {weights[name].format for name in weights.keys() - packed} == {"dense"}


def test_sizes_are_those_of_the_files(golden):
    folder = golden / "sparse-24-bitmask"
    sizes, stored = measure_folder(folder), load_file(folder / "model.safetensors")
    original = load_file(folder / "dense_original.safetensors")
    packed_dense = sum(tensor.nbytes for name, tensor in original.items() if "_proj" in name)
    assert sizes.num_weights == 21 and sizes.num_packed == 14
    assert sizes.dense_bytes == sum(tensor.nbytes for tensor in original.values())
    assert sizes.packed_dense_bytes == packed_dense
    assert sizes.packed_stored_bytes == packed_dense * 9 // 16 + 14 * 16
    assert sizes.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
    # dense_original.safetensors lies there as well, and is no part of the checkpoint.
    assert (sizes.num_files, sizes.file_bytes) == (1, (folder / "model.safetensors").stat().st_size)
    assert inspect_folder(folder).sizes == sizes


def test_weights_sum_up_to_the_sizes(golden):
    found = inspect_folder(golden / "sparse-bitmask")
    assert sum(weight.stored_bytes for weight in found.weights) == found.sizes.stored_bytes
    assert sum(weight.dense_bytes for weight in found.weights) == found.sizes.dense_bytes


def test_tensors_are_dropped_before_the_next_is_read(golden, monkeypatch):
    seen, structure = [], report.structure

    def watched(tensor):
        assert not any(reference() is not None for reference in seen)
        seen.append(weakref.ref(tensor))
        return structure(tensor)

    monkeypatch.setattr(report, "structure", watched)
    inspect_folder(golden / "sparse-24-bitmask")
    assert len(seen) == 21


# ---- what loading will do ------------------------------------------------------------------------------------------------


def test_packed_weights_become_dense_where_there_is_no_gpu(golden):
    weight = weights_of(golden / "sparse-24-bitmask")["model.layers.0.mlp.up_proj.weight"]
    assert (weight.on_load.layer, weight.on_load.reason, weight.on_load.keepable) == ("dense", NO_GPU, True)


def test_packed_weights_stay_packed_where_a_kernel_runs(golden, monkeypatch):
    monkeypatch.setattr(load, "why_not_kept", lambda format: None)
    layers = {weight.format: weight.on_load.layer for weight in inspect_folder(golden / "sparse-24-bitmask").weights}
    assert layers == {"dense": "dense", "sparse-24-bitmask": "packed"}


@pytest.mark.parametrize(("stored", "layer"), [(True, "packed"), (False, "dense")])
def test_run_compressed_in_the_file_decides(copied, stored, layer):
    block = json.loads((copied / "config.json").read_text())["quantization_config"]
    edit_config(copied, quantization_config={**block, "run_compressed": stored})
    assert weights_of(copied)["model.layers.0.mlp.up_proj.weight"].on_load.layer == layer


def test_a_folder_whose_config_says_nothing_is_unpacked(copied):
    config = json.loads((copied / "config.json").read_text())
    del config["quantization_config"]
    (copied / "config.json").write_text(json.dumps(config))
    on_load = weights_of(copied)["model.layers.0.mlp.up_proj.weight"].on_load
    assert on_load.layer == "dense" and "config.json does not say" in on_load.reason


@pytest.mark.parametrize("family", ["mixtral", "bert", "llama-tied"])
def test_keepable_weights_are_those_that_loading_keeps(tmp_path, family):
    FAMILIES[family].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    keepable = {name for name, weight in weights_of(tmp_path).items() if weight.on_load.keepable}
    kept = load_kept(tmp_path, FAMILIES[family].model_class)
    assert len(keepable) == FAMILIES[family].num_packed + FAMILIES[family].num_packed_experts
    assert len(packed_names(kept)) == FAMILIES[family].num_packed
    assert sum(len(weights.member_names("")) for weights in packed_projections(kept).values()) == FAMILIES[family].num_packed_experts


def test_experts_of_which_one_is_dense_are_not_keepable_and_say_why(tmp_path):
    first = "model.layers.0.block_sparse_moe.experts.0.w1"
    FAMILIES["mixtral"].build().save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head", first]))
    weights = weights_of(tmp_path)
    of_layer = [weights[f"model.layers.0.block_sparse_moe.experts.{i}.w{j}.weight"] for i in range(4) for j in (1, 2, 3)]
    assert {weight.module for weight in of_layer} == {"MixtralExperts"}
    assert {weight.on_load.reason for weight in of_layer[1:]} == {
        "1 of the 12 weights of these experts are not packed, model.layers.0.mlp.experts.0.w1 for example"
    }
    assert of_layer[0].on_load.reason == "stored dense"
    assert sum(weight.on_load.keepable for weight in weights.values()) == FAMILIES["mixtral"].num_packed + 12


def test_an_unknown_architecture_is_said(copied):
    edit_config(copied, architectures=["NobodysModel"])
    on_load = weights_of(copied)["model.layers.0.mlp.up_proj.weight"].on_load
    assert on_load.layer == "other" and "NobodysModel" in on_load.reason


def test_a_checkpoint_of_another_method_is_left_to_transformers(tmp_path):
    llama().save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert {weight.on_load.layer for weight in inspect_folder(tmp_path).weights} == {"other"}


# ---- text ----------------------------------------------------------------------------------------------------------------


def test_table_joins_layers_that_are_alike(golden):
    lines = render_table(inspect_folder(golden / "sparse-24-bitmask")).splitlines()
    (row,) = [line for line in lines if "up_proj" in line]
    assert row.split() == [
        *("model.layers.0-1.mlp.up_proj.weight", "Linear", "2", "of", "128x64", "bfloat16", "sparse-24-bitmask", "2:4", "50.0%"),
        *("18.5", "kB", "0.5635", "dense"),
    ]
    assert lines[-1] == f"on load here, 14 packed weights become dense layers: {NO_GPU}; run_compressed=True keeps them packed"


def test_table_shows_the_one_layer_that_is_not_sparse(tmp_path):
    model = llama(num_hidden_layers=5)
    torch.nn.init.normal_(model.model.layers[3].mlp.up_proj.weight)
    model.save_pretrained(tmp_path)
    table = render_table(inspect_folder(tmp_path))
    assert "model.layers.0-2,4.mlp.up_proj.weight " in table and "model.layers.3.mlp.up_proj.weight " in table
    # 5 layers of 7, less this one, and lm_head.
    assert "35 weights are 2:4 and stored dense: hf-sparse24 compress packs them" in table


def test_names_whose_numbers_do_not_combine_freely_get_a_star():
    assert report._shared_name(["a.0.b.0", "a.1.b.1"]) == "a.*.b.*"
    assert report._shared_name(["a.0.b.7", "a.1.b.7", "a.0.b.8", "a.1.b.8"]) == "a.0-1.b.7-8"
    assert report._shared_name(["a.b"]) == "a.b"


def test_columns_are_aligned():
    assert render_columns(("name", "bytes"), [("a", "10"), ("long name", "9")], iter(["bytes"])).splitlines() == [
        "name       bytes",
        "---------  -----",
        "a             10",
        "long name      9",
    ]


def test_bytes_are_shown_in_decimal_units():
    assert [show_bytes(size) for size in (0, 999, 1000, 269_060_552, 2 * 10**9)] == ["0 B", "999 B", "1.0 kB", "269.1 MB", "2.0 GB"]


def test_report_is_plain_data(golden):
    found = inspect_folder(golden / "sparse-24-bitmask")
    read = json.loads(json.dumps(found.to_dict()))
    assert Sizes(**read["sizes"]) == found.sizes
    assert len(read["weights"]) == 21


# ---- bad folders ---------------------------------------------------------------------------------------------------------


def test_a_damaged_bitmask_is_named(copied):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bitmask"][3, 2] = 0xFF
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*row 3, byte 2"):
        inspect_folder(copied)


@pytest.mark.parametrize("name", ["./nowhere", "no/where/at/all"])
def test_a_missing_folder_is_called_missing(name):
    with pytest.raises(CheckpointError, match=f"{name}: no such folder"):
        inspect_folder(name)


@pytest.mark.parametrize(
    ("name", "format", "share"),
    [("float-quantized+sparse-24-bitmask", "quantized sparse-24-bitmask", 5 / 16), ("marlin-24-w4-channel", "marlin-24", 3 / 16)],
)
def test_a_quantised_sparse_checkpoint_is_described(golden, name, format, share):
    report = inspect_folder(golden / name)
    packed = [weight for weight in report.weights if weight.format == format]
    assert packed and all(weight.structure in ("2:4", "1:4") and weight.on_load.keepable for weight in packed)
    scales = sum(2 * weight.shape[0] + (16 if "bitmask" in format else 0) for weight in packed)
    assert sum(weight.stored_bytes for weight in packed) - scales == share * sum(weight.dense_bytes for weight in packed)

"""`hf-sparse24 verify`: what is right passes, and each kind of damage is found by the check that is meant for it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparse24 import CheckpointError, Sparse24Config, SparseBitmaskConfig
from hf_sparse24.cli import main
from hf_sparse24.completeness import verify_model_folder
from hf_sparse24.config import GUARD
from hf_sparse24.conversion import compress_folder, convert_folder, decompress_folder
from hf_sparse24.verify import Check, VerifyReport, render_report, verify_folder
from tests.models import llama

LAYER = "model.layers.1.mlp.up_proj"
GOLDEN_FORMATS = [
    *("sparse-24-bitmask", "sparse-bitmask", "sparse-bitmask-ct0.8.1", "pack-quantized+sparse-24-bitmask"),
    *("float-quantized+sparse-24-bitmask", "float-quantized+sparse-bitmask", "float-quantized-static+sparse-24-bitmask"),
    *("int-quantized+sparse-24-bitmask", "naive-quantized+sparse-24-bitmask"),
    *(f"marlin-24-w{bits}-{group}" for bits in (4, 8) for group in ("channel", "g128")),
]
# In these, the old library stored 0 for integers of -128.
LOST_BY_THE_WRITER = {"int-quantized+sparse-24-bitmask", "naive-quantized+sparse-24-bitmask"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A tiny 2:4 Llama: `dense`, and packed in one file, in many, as a bitmask, in 8 bits and in Marlin's order."""
    root = tmp_path_factory.mktemp("folders")
    llama(torch.bfloat16).save_pretrained(root / "dense")
    llama(torch.bfloat16).save_pretrained(root / "dense-many", max_shard_size="20KB")
    compress_folder(root / "dense", root / "one")
    compress_folder(root / "dense-many", root / "many")
    compress_folder(root / "dense", root / "bitmask", SparseBitmaskConfig())
    for form in ("fp8", "int8"):
        compress_folder(root / "dense", root / form, Sparse24Config(quantization=form))
    return root


@pytest.fixture
def copy(folders, golden, tmp_path) -> Callable[[str], Path]:
    """A copy of one of `folders` or of the golden ones, to be damaged."""

    def copy(name: str) -> Path:
        source = folders / name if (folders / name).exists() else golden / name
        return Path(shutil.copytree(source, tmp_path / name.replace("+", "-")))

    return copy


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of the file that holds LAYER, or of the only one."""
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = load_file(file)
        if any(name.startswith(LAYER) for name in tensors) or file.name == "model.safetensors":
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def failed(report: VerifyReport) -> list[str]:
    return [check.name for check in report.checks if check.problems]


def only_problem(report: VerifyReport, check: str) -> str:
    """The one problem of a report, which is that check's."""
    assert failed(report) == [check], report.problems
    (problem,) = report.problems
    return problem


# ---- what is right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "dense-many", "one", "many", "bitmask", "fp8", "int8"])
def test_what_is_written_here_is_right_and_has_no_notes(folders, name):
    report = verify_model_folder(folders / name)
    assert report.is_right and report.notes == []
    assert [check.name for check in report.checks if check.name not in ("guard", "positions")] == [
        *("opening", "index", "files", "sums", "config", "parts", "values", "model"),
    ]


@pytest.mark.parametrize("name", GOLDEN_FORMATS)
def test_what_the_old_library_wrote_is_right_but_has_no_guard(golden, name):
    report = verify_model_folder(golden / name)
    assert report.is_right
    (note,) = report.notes
    assert "no guard" in note and "hf-sparse24 convert" in note


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "sparse-bitmask", "marlin-24", "gptq-marlin-24", "dense"])
def test_converted_folders_are_right_and_guarded(golden, tmp_path, form):
    convert_folder(golden / "marlin-24-w4-g128", tmp_path / "out", form)
    report = verify_model_folder(tmp_path / "out")
    assert report.is_right and report.notes == []


def test_counts_are_those_of_the_files(folders):
    tensors = {name: t for file in (folders / "many").glob("*.safetensors") for name, t in load_file(file).items()}
    num_bytes, num_files = sum(t.nbytes for t in tensors.values()), len(list((folders / "many").glob("*.safetensors")))
    found = {check.name: check.found for check in verify_folder(folders / "many").checks}
    assert found["opening"] == f"{len(tensors)} tensors in {num_files} files"
    assert found["index"] == f"{len(tensors)} names, {num_bytes:,} bytes"
    assert found["parts"] == "14 weights packed as sparse-24-bitmask"
    values = sum(t.nbytes for name, t in tensors.items() if not name.endswith((".bitmask", ".shape")))
    assert found["values"] == f"{values:,} bytes of 21 tensors"


# ---- files -----------------------------------------------------------------------------------------------------------------


def test_truncated_shard(copy):
    folder = copy("many")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard}: not a complete safetensors file" in only_problem(verify_model_folder(folder), "opening")


def test_missing_shard(copy):
    folder = copy("many")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"names {shard.name}, which is missing" in only_problem(verify_model_folder(folder), "opening")


def test_no_folder(tmp_path):
    assert "is not a folder" in only_problem(verify_model_folder(tmp_path / "none"), "opening")


def test_tensor_that_the_index_does_not_name(copy):
    folder = copy("many")
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop(f"{LAYER}.shape"))
    assert f"does not name {LAYER}.shape" in only_problem(verify_model_folder(folder), "index")


def test_total_size_that_is_not_the_sum(copy):
    folder = copy("many")
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    edit_json(folder / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=total - 1))
    assert f"total_size is {total - 1}, but the tensors have {total} bytes" in only_problem(verify_model_folder(folder), "index")


def test_single_file_beside_an_index(copy, folders):
    folder = copy("many")
    shutil.copy(folders / "one" / "model.safetensors", folder)
    assert "model.safetensors is there as well" in only_problem(verify_model_folder(folder), "index")


def test_other_weights_in_the_folder_are_noted(copy):
    folder = copy("one")
    for name in ("model.fp16.safetensors", "pytorch_model.bin", "notes.txt"):
        (folder / name).write_text("other")
    report = verify_model_folder(folder)
    assert report.is_right and [note.split()[0] for note in report.notes] == ["model.fp16.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize("mark", [" ", "*", " ./"])
def test_stated_sums(copy, mark):
    folder = copy("one")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest} {mark}model.safetensors\n")
    assert Check("sums", "SHA-256 of 1 file") in verify_model_folder(folder).checks
    (folder / "SHA256SUMS").write_text(f"{digest} {mark}model.safetensors\n{digest} {mark}config.json\n{digest} {mark}gone.json\n")
    report = verify_model_folder(folder)
    assert failed(report) == ["sums"]
    assert ["config.json: its SHA-256 is " in problem for problem in report.problems] == [True, False]
    assert "gone.json: has a sum, but is missing" in report.problems[1]


@pytest.mark.parametrize("flip", [False, True], ids=["as-it-came", "changed-since"])
def test_blob_of_a_cache_is_compared_with_its_name(copy, tmp_path, flip):
    folder = copy("one")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ flip]))
    weights.unlink()
    weights.symlink_to(blob)
    assert ("sums" in failed(verify_model_folder(folder))) == flip


# ---- config.json -----------------------------------------------------------------------------------------------------------


def test_no_config(copy):
    folder = copy("one")
    (folder / "config.json").unlink()
    assert failed(verify_folder(folder)) == ["config", "parts"]


def test_config_that_is_no_json(copy):
    folder = copy("one")
    (folder / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in only_problem(verify_model_folder(folder), "opening")


def test_config_with_an_unknown_format(copy):
    folder = copy("one")
    edit_json(folder / "config.json", lambda c: c["quantization_config"]["sparsity_config"].update(format="sparse-36"))
    assert "unknown sparse format 'sparse-36'" in only_problem(verify_folder(folder), "config")


def test_config_that_says_nothing_of_packed_weights(copy):
    folder = copy("one")
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    assert "does not say that weights are packed, but 14 weights are packed" in only_problem(verify_folder(folder), "parts")


def test_config_that_says_that_dense_weights_are_packed(copy, folders):
    folder = copy("dense")
    shutil.copy(folders / "one" / "config.json", folder)
    assert "says that weights are packed, but no weight is packed" in only_problem(verify_folder(folder), "parts")


def test_config_that_names_another_format(copy, folders):
    folder = copy("one")
    shutil.copy(folders / "bitmask" / "config.json", folder)
    problem = only_problem(verify_folder(folder), "parts")
    assert "says sparse-bitmask, but model.layers.0.mlp.down_proj.weight and 13 more packed as sparse-24-bitmask" in problem


def test_guard_that_is_gone_is_noted_unless_meant(copy):
    folder = copy("one")
    assert next(check for check in verify_folder(folder).checks if check.name == "guard").notes == ()
    edit_json(folder / "config.json", lambda c: c["quantization_config"].pop("config_groups"))
    report = verify_folder(folder)
    assert report.is_right and "may return random weights" in report.notes[0]
    edit_json(folder / "config.json", lambda c: c["quantization_config"]["sparsity_config"].update(readable_by="compressed-tensors"))
    assert verify_folder(folder).notes == []


def test_guard_with_another_text_is_not_the_guard(copy):
    folder = copy("one")
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(config_groups={GUARD[:-1]: ["Linear"]}))
    assert failed(verify_folder(folder)) == ["config"]


# ---- weights ---------------------------------------------------------------------------------------------------------------


def pop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")


def add(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(2)})


def flip(name: str, index: tuple[int, ...], bits: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{name}"][index] ^= bits

    return change


def put(name: str, index: tuple[int, ...], value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{name}"][index] = value

    return change


def replace_with(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": tensor})


def drop_a_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.compressed"] = tensors[f"{LAYER}.compressed"][:-1].clone()


@pytest.mark.parametrize(
    ("name", "change", "check", "message"),
    [
        ("one", pop("bitmask"), "parts", "up_proj.bitmask is missing"),
        ("one", pop("compressed"), "parts", "up_proj.compressed is missing"),
        ("one", pop("shape"), "parts", "missing part model.layers.1.mlp.up_proj.shape"),
        ("bitmask", pop("row_offsets"), "parts", "up_proj"),
        ("one", add("model.norm.bitmask"), "parts", "model.norm.bitmask is left over"),
        ("one", add(f"{LAYER}.weight"), "parts", "stored both dense and packed"),
        ("one", replace_with("shape", torch.tensor([[64], [36]])), "parts", "but a weight of shape (64, 36) needs"),
        ("one", replace_with("shape", torch.tensor([64, 32, 1])), "parts", "3 sizes"),
        ("one", replace_with("bitmask", torch.zeros(64, 4, dtype=torch.int8)), "parts", "torch.int8"),
        ("one", flip("bitmask", (5, 2), 0b0001_0000), "positions", "row 5"),
        ("bitmask", flip("bitmask", (5, 2), 1), "positions", "values, but"),
        ("bitmask", drop_a_value, "positions", "values, but"),
        ("bitmask", put("row_offsets", (3,), 1), "positions", "row_offsets[3] is 1"),
        ("fp8", put("weight_scale", (7, 0), float("nan")), "positions", "weight_scale holds values that are NaN"),
        ("int8", put("weight_scale", (7, 0), float("inf")), "positions", "weight_scale holds values that are NaN or infinite"),
        ("one", lambda tensors: [tensors.pop(f"{LAYER}.{part}") for part in ("compressed", "bitmask", "shape")], "model", "not in the"),
        ("one", lambda tensors: tensors.pop("model.norm.weight"), "model", "model.norm.weight: not in the checkpoint"),
        ("one", lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), "model", "shape (31,), the model's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_found_by_its_check(copy, name, change, check, message):
    folder = copy(name)
    edit(folder, change)
    problem = only_problem(verify_model_folder(folder), check)
    assert message in problem and (LAYER in problem or "model.norm" in problem) and str(folder) in problem


def test_packed_weight_of_no_module(copy):
    folder = copy("one")
    edit(folder, lambda t: t.update({f"model.extra.{part}": t[f"{LAYER}.{part}"].clone() for part in ("compressed", "bitmask", "shape")}))
    assert "the model has no model.extra.weight" in only_problem(verify_model_folder(folder), "model")


def test_dense_tensor_of_no_module_is_noted(copy):
    folder = copy("one")
    edit(folder, add("model.position_ids"))
    report = verify_model_folder(folder)
    assert report.is_right and report.notes == ["model.position_ids: the model has no model.position_ids, loading leaves it out"]


def test_pad_bit(tmp_path):
    save_file({"w.compressed": torch.ones(2, 6), "w.bitmask": torch.tensor([[0x33, 0x03], [0x33, 0x13]], dtype=torch.uint8),
               "w.shape": torch.tensor([[2], [12]])}, tmp_path / "model.safetensors")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": Sparse24Config().to_dict()}))
    assert "bitmask sets bits beyond column 11" in only_problem(verify_folder(tmp_path), "positions")


def test_every_damaged_weight_is_named(copy):
    folder = copy("one")
    edit(folder, lambda tensors: [tensors[name].fill_(0xFF) for name in tensors if name.endswith("k_proj.bitmask")])
    report = verify_folder(folder)
    assert [problem.split()[3] for problem in report.problems] == [f"model.layers.{i}.self_attn.k_proj.weight:" for i in (0, 1)]


def test_metadata_of_marlin_that_name_no_two_columns(copy):
    folder = copy("marlin-24-w4-g128")
    edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.meta"].fill_(0))
    assert "meta keeps no two columns: row 0" in only_problem(verify_model_folder(folder), "positions")


def test_integers_that_are_not_2_4_though_the_config_says_so(copy):
    folder = copy("pack-quantized+sparse-24-bitmask")
    edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight_packed"].fill_(0x11111111))
    assert "model.layers.0.mlp.up_proj.weight: not 2:4: " in only_problem(verify_model_folder(folder), "positions")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{LAYER}.compressed"])
def test_nan_is_noted(copy, name):
    folder = copy("one")
    edit(folder, lambda tensors: tensors[name][3, 3:6].fill_(float("nan")))
    report = verify_model_folder(folder)
    assert report.is_right and report.notes == [f"{name.replace('compressed', 'weight')}: 3 values are NaN or infinite"]


# ---- against ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "many", "bitmask", "dense-many"])
def test_packed_folders_hold_the_dense_tensors(folders, name):
    report = verify_model_folder(folders / name, folders / "dense")
    assert report.is_right and report.notes == []
    assert (report.comparison.num_tensors, report.comparison.num_equal, report.comparison.num_rounded) == (21, 21, 0)


def test_packed_folders_compare_with_each_other(folders):
    assert verify_folder(folders / "one", folders / "bitmask").comparison.num_equal == 21


@pytest.mark.filterwarnings("ignore:the input_scale")
@pytest.mark.parametrize("name", [name for name in GOLDEN_FORMATS if name not in LOST_BY_THE_WRITER])
def test_what_the_old_library_wrote_is_what_it_was_given(golden, tmp_path, name):
    shutil.copy(golden / name / "dense_original.safetensors", tmp_path / "model.safetensors")
    report = verify_folder(golden / name, tmp_path)
    assert report.is_right
    comparison, packed = report.comparison, 7 if "marlin" in name else 14
    assert comparison.num_rounded == (packed if "quantized" in name or "marlin" in name else 0)
    assert comparison.num_equal + comparison.num_rounded == comparison.num_tensors
    # The golden 2:4 weights were pruned by a product, which made -0.0 of negative ones.
    assert (comparison.num_lost_signs > 0) == (name == "sparse-24-bitmask")
    assert ("zeros of the other sign" in "\n".join(report.notes)) == (name == "sparse-24-bitmask")
    if comparison.num_rounded:
        original, found = load_file(golden / name / "dense_original.safetensors"), dense_of(golden / name, tmp_path / "dense")
        largest = max(float((found[key].float() - original[key].float()).abs().max()) for key in original)
        assert comparison.largest_error.distance == pytest.approx(largest, rel=1e-6)
        assert f"the largest error of a rounded weight is {largest:.3g}" in "\n".join(report.notes)


def dense_of(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    decompress_folder(folder, out)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("name", sorted(LOST_BY_THE_WRITER))
def test_integers_that_the_old_library_lost_are_found(golden, tmp_path, name):
    shutil.copy(golden / name / "dense_original.safetensors", tmp_path / "model.safetensors")
    report = verify_folder(golden / name, tmp_path)
    assert failed(report) == ["against"] and "farther from the other checkpoint than rounding explains" in report.problems[0]
    assert "became 0)" in report.problems[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("compressed", (5, 7), 0.25), f"{LAYER}.weight: 1 of 2048 elements differ, the first in row 5, column 1"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}), "model.norm.weight is F32, expected BF16"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight has shape (31,), expected (32,)"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is not in it"),
        (add("model.more.weight"), "model.more.weight is not in the other checkpoint"),
        (lambda t: t["model.norm.weight"][4:6].fill_(7), "model.norm.weight: 2 of 32 elements differ, the first at 4: 7.0, expected 1.0"),
    ],
    ids=["value", "dtype", "shape", "missing", "superfluous", "one-axis"],
)
def test_difference_is_named(copy, folders, change, message):
    folder = copy("one")
    edit(folder, change)
    assert message in only_problem(verify_folder(folder, folders / "dense"), "against")


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_value_that_rounding_does_not_explain(copy, folders, name):
    folder = copy(name)
    assert verify_folder(folder, folders / "dense").is_right
    stored = load_file(folder / "model.safetensors")[f"{LAYER}.compressed"]
    row, column = (stored[:8].float().abs() == stored[:8].float().abs().median()).nonzero()[0].tolist()
    value = float(stored[row, column])
    edit(folder, put("compressed", (row, column), value + 2 if name == "int8" else value * 1.25))
    problem = only_problem(verify_folder(folder, folders / "dense"), "against")
    assert f"{LAYER}.weight: farther from the other checkpoint than rounding explains, by a factor of" in problem


def test_large_tensors_are_compared_in_pieces(folders, copy, monkeypatch):
    monkeypatch.setattr("hf_sparse24.comparison.CHUNK", 100)
    monkeypatch.setattr("hf_sparse24.verify.CHUNK", 100)
    folder = copy("one")
    edit(folder, put("compressed", (60, 7), float("nan")))
    report = verify_folder(folder, folders / "dense")
    assert "1 of 2048 elements differ, the first in row 60, column 1" in only_problem(report, "against")
    assert report.notes == [f"{LAYER}.weight: 1 values are NaN or infinite"]


def test_damaged_other_side_is_an_error(folders, copy):
    other = copy("dense")
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{other}.*not a complete safetensors file"):
        verify_folder(folders / "one", other)


# ---- the command -----------------------------------------------------------------------------------------------------------


def test_command_exits_with_0_and_prints_a_table(folders, capsys):
    assert main(["verify", str(folders / "many"), "--against", str(folders / "dense")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("check ") and out.endswith(f"{folders / 'many'} is right\n") and "21 of 21 tensors equal" in out


def test_command_exits_with_1_and_names_every_problem(copy, capsys):
    folder = copy("one")
    edit(folder, flip("bitmask", (5, 2), 0b0001_0000))
    assert main(["verify", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "positions  FAILED" in captured.out and f"{folder} is not right: 1 problem" in captured.out
    assert captured.err.splitlines()[-1] == "hf-sparse24 verify: 1 problem, see above"


def test_strict_counts_notes(golden, capsys):
    assert main(["verify", str(golden / "sparse-24-bitmask")]) == 0
    assert main(["verify", str(golden / "sparse-24-bitmask"), "--strict"]) == 1


def test_command_prints_json(golden, folders, capsys):
    assert main(["verify", str(folders / "fp8"), "--against", str(folders / "dense"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_right"] and found["path"] == str(folders / "fp8")
    assert found["comparison"]["num_rounded"] == 14 and 0 < found["comparison"]["largest_error"]["share"] <= 1
    assert {check["name"] for check in found["checks"]} >= {"opening", "positions", "against"}


def test_report_of_a_failure_lists_problems_and_notes():
    checks = (Check("one", "this", ("bad",)), Check("two", "that", notes=("mind",)))
    assert render_report(VerifyReport("here", checks)).splitlines()[-3:] == ["FAILED: bad", "note: mind", "here is not right: 1 problem"]

"""Checkpoint folders packed and unpacked without the model's weights in memory."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_sparse24 import CheckpointError, DenseSparsityConfig, ModelCompressor, Sparse24Config, SparseBitmaskConfig, converted_folder
from hf_sparse24.conversion import compress_folder, decompress_folder
from hf_sparse24.journal import WORK_NAME
from tests.conftest import GOLDEN
from tests.models import FAMILIES, files_of, llama, load_dense, load_kept, logits, packed_names, same_bytes, tensors_of

SHARD = "30KB"
UP_PROJ = "model.layers.1.mlp.up_proj"
OTHER_FILES = {"tokenizer.json": b"{}", "README.md": b"mine", "nested/code.py": b"x = 1\n", "special tokens.txt": b"\x00\xff"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A sharded dense checkpoint with other files beside it."""
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder, max_shard_size=SHARD)
    for name, content in OTHER_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def packed(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "packed"
    before = files_of(dense)
    compress_folder(dense, folder)
    assert files_of(dense) == before
    return folder


@pytest.fixture(scope="module")
def wanted(dense):
    return logits(AutoModelForCausalLM.from_pretrained(dense))


def check_index(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(folder).values())
    held = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == held


# ---- packing -----------------------------------------------------------------------------------------------------------------------


def test_packed_folder_holds_what_a_packed_save_writes(packed, tmp_path):
    llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    converted, saved = tensors_of(packed), tensors_of(tmp_path)
    assert converted.keys() == saved.keys()
    assert all(same_bytes(converted[name], saved[name]) for name in saved)
    assert json.loads((packed / "config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())


def test_packed_folder_opens(packed, wanted):
    for load, num_packed in ((load_dense, 0), (load_kept, 14), (AutoModelForCausalLM.from_pretrained, 0)):
        model, info = load(packed, output_loading_info=True)
        assert not any(info.values()), info
        assert len(packed_names(model)) == num_packed
        assert torch.equal(logits(model), wanted)


def test_shards_stay_apart_and_the_index_is_right(dense, packed):
    assert {file.name for file in packed.glob("*.safetensors")} == {file.name for file in dense.glob("*.safetensors")}
    assert len(list(packed.glob("*.safetensors"))) > 2
    check_index(packed)


def test_single_file_stays_a_single_file(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "packed")
    llama().save_pretrained(tmp_path / "saved", sparsity_config=Sparse24Config())
    assert files_of(tmp_path / "packed") == files_of(tmp_path / "saved")
    decompress_folder(tmp_path / "packed", tmp_path / "again")
    assert files_of(tmp_path / "again")["model.safetensors"] == files_of(tmp_path / "dense")["model.safetensors"]
    with safe_open(tmp_path / "packed" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_other_files_are_carried_over(packed):
    written = files_of(packed)
    assert {name: written.get(name) for name in OTHER_FILES} == OTHER_FILES
    assert "generation_config.json" in written


def test_pickles_and_hidden_caches_are_not_carried_over(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    for name in ("pytorch_model.bin", "model.fp16.safetensors", ".cache/lock", ".git/HEAD"):
        (tmp_path / "dense" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "dense" / name).write_bytes(b"old")
    compress_folder(tmp_path / "dense", tmp_path / "packed")
    assert set(files_of(tmp_path / "packed")) == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("config", "num_packed"),
    [
        (Sparse24Config(ignore=[]), 15),
        (Sparse24Config(targets=["re:.*mlp.*"]), 6),
        (Sparse24Config(targets=[UP_PROJ]), 1),
        (Sparse24Config(ignore=["lm_head", "model.layers.1"]), 7),
        (SparseBitmaskConfig(), 14),
        (Sparse24Config(readable_by="compressed-tensors"), 14),
    ],
    ids=str,
)
def test_config_decides_what_is_packed(dense, wanted, config, num_packed, tmp_path):
    compress_folder(dense, tmp_path / "packed", config)
    tensors = tensors_of(tmp_path / "packed")
    assert sum(name.endswith(".bitmask") for name in tensors) == num_packed
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stored["sparsity_config"]["targets"] == config.targets
    assert stored["sparsity_config"]["ignore"] == config.ignore
    assert ("config_groups" in stored) is (config.readable_by == "hf-sparse24")
    assert torch.equal(logits(load_dense(tmp_path / "packed")), wanted)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert-mlm"])
def test_every_family(name, tmp_path):
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path / "dense")
    family.build().save_pretrained(tmp_path / "saved", sparsity_config=Sparse24Config())
    compress_folder(tmp_path / "dense", tmp_path / "packed")
    packed, saved = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "saved")
    assert packed.keys() == saved.keys()
    assert all(same_bytes(packed[key], saved[key]) for key in saved)
    decompress_folder(tmp_path / "packed", tmp_path / "again")
    assert files_of(tmp_path / "again")["model.safetensors"] == files_of(tmp_path / "dense")["model.safetensors"]
    assert json.loads(files_of(tmp_path / "again")["config.json"]) == json.loads(files_of(tmp_path / "dense")["config.json"])


def test_compressor_converts_folders(dense, packed, tmp_path):
    ModelCompressor(Sparse24Config()).compress_folder(dense, tmp_path / "packed")
    assert files_of(tmp_path / "packed") == files_of(packed)
    ModelCompressor.from_pretrained(packed).decompress_folder(packed, tmp_path / "dense")
    assert tensors_of(tmp_path / "dense").keys() == tensors_of(dense).keys()


def test_dense_folder_of_compressed_tensors_is_packed(tmp_path):
    compress_folder(GOLDEN / "dense", tmp_path / "packed")
    expected = GOLDEN / "sparse-24-bitmask" / "model.safetensors"
    assert (tmp_path / "packed" / "model.safetensors").read_bytes() == expected.read_bytes()


# ---- unpacking ---------------------------------------------------------------------------------------------------------------------


def test_unpacked_folder_is_the_dense_one(dense, packed, tmp_path):
    before = files_of(packed)
    decompress_folder(packed, tmp_path / "again")
    assert files_of(packed) == before
    assert files_of(tmp_path / "again") == files_of(dense)


@pytest.mark.parametrize("name", ["sparse-24-bitmask", "sparse-bitmask", "sparse-bitmask-ct0.8.1"])
def test_golden_folder_is_unpacked(name, tmp_path):
    decompress_folder(GOLDEN / name, tmp_path / "again")
    original = load_file(GOLDEN / name / "dense_original.safetensors")
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensors[key], original[key]) for key in original)
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.fixture
def scattered(packed, tmp_path):
    """A checkpoint in which the parts of every module lie in different shards, and one shard holds only bitmasks."""
    folder = tmp_path / "scattered"
    shutil.copytree(packed, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    shards = [{}, {}, {}, {}]
    for name, tensor in tensors_of(packed).items():
        shards[{"compressed": 0, "bitmask": 1, "shape": 2}.get(name.rpartition(".")[2], 3)][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-00004.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_parts_of_a_module_in_different_shards_open(scattered, wanted):
    for load, num_packed in ((load_dense, 0), (load_kept, 14)):
        model, info = load(scattered, output_loading_info=True)
        assert not any(info.values()), info
        assert len(packed_names(model)) == num_packed
        assert torch.equal(logits(model), wanted)


def test_parts_of_a_module_in_different_shards_are_unpacked(scattered, dense, tmp_path):
    decompress_folder(scattered, tmp_path / "again")
    tensors, original = tensors_of(tmp_path / "again"), tensors_of(dense)
    assert tensors.keys() == original.keys()
    assert all(same_bytes(tensors[name], original[name]) for name in original)
    check_index(tmp_path / "again")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    assert not packed_names(model)


def test_parts_of_a_module_in_different_shards_fill_a_model(scattered, wanted):
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ModelCompressor.from_pretrained(scattered).decompress(scattered, model)
    assert torch.equal(logits(model), wanted)


# ---- errors: nothing is written --------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Apply `change` to the tensors of whichever shard holds what it touches."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if change(tensors):
            save_file(tensors, file, metadata={"format": "pt"})
            return file
    raise AssertionError


@pytest.fixture
def damaged(dense, tmp_path):
    """A dense folder with one group of three non-zeros."""
    folder = shutil.copytree(dense, tmp_path / "damaged")

    def fill(tensors):
        if f"{UP_PROJ}.weight" in tensors:
            tensors[f"{UP_PROJ}.weight"][3, 4:8] = torch.tensor([1.0, 2.0, 3.0, 0.0])
            return True

    rewrite(folder, fill)
    return folder


def test_weight_that_does_not_fit_is_refused_by_name_and_place(damaged, tmp_path):
    with pytest.raises(ValueError, match=rf"1 targeted weights are not 2:4, nothing was .*written.*{UP_PROJ}.*row 3, columns 4\.\.7"):
        compress_folder(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weight_that_does_not_fit_is_skipped_and_listed(damaged, tmp_path):
    with pytest.warns(UserWarning, match=f"1 targeted weights are stored dense: {UP_PROJ}"):
        compress_folder(damaged, tmp_path / "out", Sparse24Config(on_dense="skip"))
    tensors = tensors_of(tmp_path / "out")
    assert torch.equal(tensors[f"{UP_PROJ}.weight"], tensors_of(damaged)[f"{UP_PROJ}.weight"])
    assert sum(name.endswith(".bitmask") for name in tensors) == 13


def test_target_that_matches_nothing_is_refused(dense, tmp_path):
    with pytest.raises(ValueError, match="target 'Conv2d' matches no module"):
        compress_folder(dense, tmp_path / "out", Sparse24Config(targets=["Conv2d"]))
    assert not (tmp_path / "out").exists()


def test_packed_or_quantised_or_dense_source_is_refused(dense, packed, tmp_path):
    with pytest.raises(CheckpointError, match="packed already"):
        compress_folder(packed, tmp_path / "out")
    with pytest.raises(CheckpointError):
        compress_folder(GOLDEN / "pack-quantized+sparse-24-bitmask", tmp_path / "out")
    with pytest.raises(CheckpointError, match="packed already"):
        compress_folder(GOLDEN / "marlin-24-w4-g128", tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no packed weights"):
        decompress_folder(dense, tmp_path / "out")
    with pytest.raises(ValueError, match="dense packs nothing"):
        compress_folder(dense, tmp_path / "out", DenseSparsityConfig())
    assert not (tmp_path / "out").exists()


def test_checkpoint_quantised_by_another_method_is_refused(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "gptq")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(CheckpointError, match="is quantised"):
        compress_folder(folder, tmp_path / "out")


@pytest.mark.parametrize("convert", ["compress", "decompress"])
def test_target_folder_must_be_new(dense, packed, convert, tmp_path):
    source, function = (dense, compress_folder) if convert == "compress" else (packed, decompress_folder)
    before = files_of(source)
    for out in (source, source / "inside"):
        with pytest.raises(ValueError, match="folder of its own"):
            function(source, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"not an? ?empty"):
            function(source, out)
    assert files_of(source) == before
    assert files_of(tmp_path) == {"file": b"mine", "full/file": b"mine"}
    (tmp_path / "empty").mkdir()
    function(source, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_damaged_source_is_named_and_nothing_is_written(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "broken")
    file = next(file for file in sorted(folder.glob("*.safetensors")) if any(name.endswith(".bitmask") for name in load_file(file)))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{file.name}.*not a complete safetensors file"):
        decompress_folder(folder, tmp_path / "out")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=f"{file.name}.*Git LFS pointer"):
        decompress_folder(folder, tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"names {file.name}, which is missing"):
        decompress_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_bitmask_is_found_before_a_folder_is_left_behind(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "broken")

    def set_bits(tensors):
        if f"{UP_PROJ}.bitmask" in tensors:
            tensors[f"{UP_PROJ}.bitmask"][2, 1] |= 0b0111  # three bits at least, whichever two there were
            return True

    file = rewrite(folder, set_bits)
    with pytest.raises(CheckpointError, match=f"{file.name}.*{UP_PROJ}"):
        decompress_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob("**/*.safetensors"))


def test_architecture_that_transformers_does_not_know(dense, packed, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "custom")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architectures": ["MyModel"]}))
    with pytest.raises(ValueError, match=r"no model class.*MyModel.*re:PATTERN"):
        compress_folder(folder, tmp_path / "out")
    compress_folder(folder, tmp_path / "out", Sparse24Config(targets=["re:.*_proj"]))
    out, expected = tensors_of(tmp_path / "out"), tensors_of(packed)
    assert out.keys() == expected.keys()
    assert all(same_bytes(out[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name", ["os.system", "../x", "__class__", "logging", "PreTrainedModel\n", "AutoModel", 7, ["LlamaForCausalLM"]], ids=str
)
def test_hostile_architecture_is_refused(dense, name, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "custom")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architectures": [name]}))
    with pytest.raises(ValueError, match="no model class"):
        compress_folder(folder, tmp_path / "out")


class Interrupted(BaseException):
    """As Ctrl-C."""


def test_interrupted_conversion_leaves_no_checkpoint(dense, monkeypatch, tmp_path):
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Interrupted
        save_file(*args, **kwargs)

    monkeypatch.setattr(converted_folder, "save_file", failing)
    with pytest.raises(Interrupted):
        compress_folder(dense, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK_NAME]
    monkeypatch.undo()
    compress_folder(dense, tmp_path / "out")
    check_index(tmp_path / "out")

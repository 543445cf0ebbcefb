"""Opening checkpoint folders and finding what is packed in them; every error names the file and the tensor."""

import json
import os
import pickle
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sparse24.checkpoint import (
    PackedSlice,
    TensorSlice,
    as_dense,
    checkpoint_files,
    find_packed,
    name_of_part,
    open_checkpoint,
    open_file,
    read_json,
    size_bytes,
    write_json,
)
from hf_sparse24.compressors import Sparse24Compressor, SparseBitmaskCompressor
from hf_sparse24.conversion import decompress_folder
from hf_sparse24.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FORMATS = {"sparse-24-bitmask": Sparse24Compressor(), "sparse-bitmask": SparseBitmaskCompressor()}
each_format = pytest.mark.parametrize("format_name", FORMATS)


def weight_2_4(rows: int = 6, columns: int = 16, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.randint(1, 100, (rows, columns), generator=torch.Generator().manual_seed(seed))
    weight[:, 1::4], weight[:, 2::4] = 0, 0
    return weight.to(dtype)


def parts_of(format_name: str, base: str = "layer", weight: Tensor | None = None) -> dict[str, Tensor]:
    parts = FORMATS[format_name].compress_weight(weight_2_4() if weight is None else weight)
    return {f"{base}.{part}": value for part, value in parts.items()}


def write_checkpoint(folder: Path, *shards: dict[str, Tensor], config: dict | None = None) -> Path:
    """model.safetensors, or shards and their index; and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config or {})
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_index(folder: Path, **changes: str) -> None:
    write_index(folder, read_json(folder / INDEX)["weight_map"] | changes)


def refuses(*expected: object) -> "pytest.RaisesExc":
    """CheckpointError whose message holds all of these texts in this order."""
    return pytest.raises(CheckpointError, match="(?s)" + ".*".join(re.escape(str(text)) for text in expected))


def same_tensor(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


# ---- folders that open -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "sparse-24-bitmask", "sparse-bitmask", "sparse-bitmask-ct0.8.1"])
def test_a_golden_checkpoint_stands_for_the_dense_original(golden, name):
    original = load_file(golden / name / "dense_original.safetensors")
    with open_checkpoint(golden / name) as checkpoint:
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=name != "dense")
        dense = as_dense(checkpoint.tensors, packed)
        assert bool(packed) == (name != "dense")
        assert set(dense) == set(original)
        for tensor_name, value in dense.items():
            # -0.0 + 0.0 is +0.0: zeros that are left out lose their sign.
            assert torch.equal(value[...], original[tensor_name]), tensor_name
            assert list(value.get_shape()) == list(original[tensor_name].shape)


def test_an_open_checkpoint_knows_its_files_tensors_and_config(tmp_path):
    one, two = {"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.ones(1)}
    write_checkpoint(tmp_path, one, two, config={"hello": "there"})
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.config == {"hello": "there"}
        assert {file: sorted(names) for file, names in checkpoint.shards.items()} == {
            "model-00001-of-00002.safetensors": ["a", "b"],
            "model-00002-of-00002.safetensors": ["c"],
        }
        assert checkpoint.is_sharded
        assert torch.equal(checkpoint.tensors["b"][...], torch.zeros(3))
        assert checkpoint.shard_of("c") == "model-00002-of-00002.safetensors"
        assert checkpoint.file_of("c") == str(tmp_path / "model-00002-of-00002.safetensors")
        assert checkpoint.shard_of("unknown") is None
        assert checkpoint.file_of("unknown") == str(tmp_path)


def test_a_single_file_is_not_sharded(tmp_path):
    with open_checkpoint(write_checkpoint(tmp_path, {"a": torch.ones(2)})) as checkpoint:
        assert not checkpoint.is_sharded
        assert list(checkpoint.shards) == ["model.safetensors"]


def test_links_to_files_elsewhere_are_followed(tmp_path):
    # The cache of the Hub: snapshots/REVISION/model.safetensors -> ../../blobs/HASH.
    write_checkpoint(tmp_path / "blobs", parts_of("sparse-24-bitmask"))
    snapshot = tmp_path / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    with open_checkpoint(snapshot) as checkpoint:
        assert list(find_packed(checkpoint.tensors)) == ["layer.weight"]


def test_the_parts_of_a_weight_may_lie_in_different_files(tmp_path):
    parts = parts_of("sparse-bitmask")
    write_checkpoint(tmp_path, *({name: value} for name, value in parts.items()))
    with open_checkpoint(tmp_path) as checkpoint:
        packed = find_packed(checkpoint.tensors, checkpoint.file_of)
        assert torch.equal(packed["layer.weight"][...], weight_2_4())


def test_a_tensor_that_the_index_does_not_name_is_read_all_the_same(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, {"c": torch.ones(1)})
    weight_map = read_json(tmp_path / INDEX)["weight_map"]
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "b"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b", "c"}


# ---- folders that do not open ------------------------------------------------------------------------------------------------


def test_a_path_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "file"):
        with refuses(path, "is not a folder"):
            open_checkpoint(path)


def test_a_folder_without_weights(tmp_path):
    write_json(tmp_path / "config.json", {})
    with refuses(tmp_path, "holds neither model.safetensors nor model.safetensors.index.json") as error:
        open_checkpoint(tmp_path)
    assert "pickle" not in str(error.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_a_folder_with_pickles_only_gets_a_hint_and_no_unpickling(tmp_path, name):
    marker = tmp_path / "marker"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (marker,)

    (tmp_path / name).write_bytes(pickle.dumps(Hostile()))
    write_json(tmp_path / "config.json", {})
    with refuses(tmp_path, name, "is a pickle, which may run code", "safetensors"):
        open_checkpoint(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert marker.exists()


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shard"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS pointer"),
        (b"", "not a complete safetensors file of 0 bytes"),
        (b"\x00", "not a complete safetensors file of 1 bytes"),
        (b"<!DOCTYPE html><html>Not found</html>", "not a complete safetensors file of 37 bytes"),
        (b"GGUF" + bytes(60), "not a complete safetensors file of 64 bytes"),
        (b"PK\x03\x04" + bytes(60), "not a complete safetensors file"),
        (b"\xff" * 8 + b"{}", "not a complete safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "not a complete safetensors file"),
    ],
    ids=["lfs", "empty", "one-byte", "html", "gguf", "zip", "huge-header", "header-is-no-object"],
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path, sharded, content, reason):
    shards = [{"a": torch.ones(2)}, {"b": torch.ones(2)}] if sharded else [{"a": torch.ones(2)}]
    write_checkpoint(tmp_path, *shards)
    file = tmp_path / ("model-00002-of-00002.safetensors" if sharded else "model.safetensors")
    file.write_bytes(content)
    with refuses(file, reason):
        open_checkpoint(tmp_path)


def test_what_a_hostile_header_says_is_not_repeated_in_full(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)})
    header = json.dumps({"a": {"dtype": "x" * 100_000, "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with refuses(tmp_path / "model.safetensors") as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 2000


def test_a_truncated_file_is_named_wherever_it_ends(tmp_path):
    write_checkpoint(tmp_path, parts_of("sparse-24-bitmask"))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with refuses(file, f"not a complete safetensors file of {length} bytes"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shard"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, sharded):
    shards = [{"a": torch.ones(2)}, {"b": torch.ones(2)}] if sharded else [{"a": torch.ones(2)}]
    write_checkpoint(tmp_path, *shards)
    file = tmp_path / ("model-00002-of-00002.safetensors" if sharded else "model.safetensors")
    file.unlink()
    file.mkdir()
    with refuses(file):
        open_checkpoint(tmp_path)


def test_a_dangling_link_is_named(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    with refuses(tmp_path / INDEX, "names model-00002-of-00002.safetensors, which is missing"):
        open_checkpoint(tmp_path)


def test_open_file_names_a_missing_file(tmp_path):
    with refuses(tmp_path / "gone.safetensors", "no such file"):
        open_file(tmp_path / "gone.safetensors")


def test_a_tensor_in_two_files(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, {"c": torch.ones(1), "b": torch.ones(2)})
    first, second = (tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    with refuses(second, "tensor b is also in", first):
        open_checkpoint(tmp_path)


def test_files_that_were_opened_before_the_error_are_closed(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path)
    assert (len(os.listdir("/proc/self/fd")) if before else 0) <= before


# ---- the index ---------------------------------------------------------------------------------------------------------------


def test_an_index_that_puts_a_tensor_into_the_wrong_file(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    edit_index(tmp_path, a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors")
    with refuses(tmp_path / INDEX, "says that a is in model-00002-of-00002.safetensors, which does not hold it"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_which_no_file_holds(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    edit_index(tmp_path, ghost="model-00002-of-00002.safetensors")
    with refuses(tmp_path / INDEX, "ghost", "model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_file(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with refuses(tmp_path / INDEX, "model-00002-of-00002.safetensors", "missing"):
        open_checkpoint(tmp_path)


def test_an_index_that_leaves_out_a_whole_shard(tmp_path):
    # Otherwise a conversion would drop its tensors without a word.
    write_checkpoint(tmp_path, parts_of("sparse-24-bitmask"), {"b": torch.ones(2)}, {"c": torch.ones(2)})
    weight_map = read_json(tmp_path / INDEX)["weight_map"]
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "c"})
    with refuses(tmp_path / INDEX, "model-00003-of-00003.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors", "../../etc/passwd", "/etc/passwd", "ABSOLUTE", "sub/inside.safetensors",
        "./model-00001-of-00002.safetensors", "",
        ".",         "..", "../", "model-00001-of-00002.safetensors/", "\0", "a\0b", "x" * 300, "x" * 300 + ".safetensors",
        "x" * 100_000, "\ud800", "config.json", INDEX,
        "~", "$HOME", "nul\n", "*.safetensors",
    ],
    ids=lambda file: ascii(file)[:24],
)  # fmt: skip
def test_an_index_that_names_what_is_no_weights_file_of_the_folder(tmp_path, file):
    folder = write_checkpoint(tmp_path / "folder", {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (folder / "sub").mkdir()
    # Files that would fit, and no shard in the folder that would be missed.
    for outside in (tmp_path / "outside.safetensors", folder / "sub" / "inside.safetensors"):
        shutil.copy2(folder / "model-00002-of-00002.safetensors", outside)
    (folder / "model-00002-of-00002.safetensors").unlink()
    edit_index(folder, b=str(tmp_path / "outside.safetensors") if file == "ABSOLUTE" else file)
    with refuses(folder) as error:
        open_checkpoint(folder)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "1", '"text"', "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": "model.safetensors"}',
        '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["model.safetensors"]}}', "{'weight_map': {}}",
        '{"weight_map": ' + "1" * 5000 + "}", "[" * 100_000, '{"weight_map": {"a": ' * 500, '{"weight_map": {"a": "b.safetensors"}} x',
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    ],
    ids=lambda content: content[:24] or "empty",
)  # fmt: skip
def test_an_index_that_is_damaged(tmp_path, content):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / INDEX).write_text(content)
    with refuses(tmp_path / INDEX) as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 2000


def test_an_index_without_tensors(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    write_index(tmp_path, {})
    with refuses(tmp_path / INDEX):
        open_checkpoint(tmp_path)


def test_checkpoint_files_are_in_the_order_of_their_names(tmp_path):
    write_checkpoint(tmp_path, *({f"t{n}": torch.ones(1)} for n in range(11)))
    files, weight_map = checkpoint_files(tmp_path)
    assert files == [f"model-{n:05}-of-00011.safetensors" for n in range(1, 12)]
    assert weight_map == {f"t{n}": files[n] for n in range(11)}


# ---- JSON --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[1]", b"null", b'"a"', b"{} {}", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000,
        b'{"a":' * 100_000, b"\x00", b'{"a": "\x01"}',
    ],
    ids=lambda content: ascii(content)[:24],
)  # fmt: skip
def test_read_json_names_a_file_that_is_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with refuses(tmp_path / "config.json") as error:
        read_json(tmp_path / "config.json")
    assert len(str(error.value)) < 1000


def test_read_json_names_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "gone.json", tmp_path):
        with refuses(path):
            read_json(path)


def test_a_damaged_config_is_named(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text("{")
    with refuses(tmp_path / "config.json"):
        open_checkpoint(tmp_path)


def test_write_json_writes_what_transformers_would(tmp_path):
    write_json(tmp_path / "x.json", {"b": 1, "a": {"d": [1, 2], "c": None}})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": {\n    "c": null,\n    "d": [\n      1,\n      2\n    ]\n  },\n  "b": 1\n}\n'
    assert read_json(tmp_path / "x.json") == {"a": {"c": None, "d": [1, 2]}, "b": 1}


# ---- which weights are packed -------------------------------------------------------------------------------------------------


def where(name: str) -> str:
    return f"FILE OF {name}"


@each_format
@pytest.mark.parametrize("base", ["layer", "layer.weight", "model.layers.0.self_attn.q_proj"])
def test_both_spellings_are_the_same_weight(format_name, base):
    parts = parts_of(format_name, base)
    packed = find_packed(parts, where)
    name = base if base.endswith(".weight") else f"{base}.weight"
    assert list(packed) == [name]
    assert packed[name].compressor.format == format_name
    assert packed[name].get_shape() == [6, 16]
    assert packed[name].get_dtype() == "BF16"
    dense = as_dense(parts, packed)
    assert list(dense) == [name]
    assert torch.equal(dense[name][...], weight_2_4())


def test_in_the_old_spelling_every_name_is_that_of_a_parameter():
    weights = {
        "norm.weight": torch.ones(5),
        "layer.bias": torch.tensor([0.0, 1, 0, 2]),
        "layer.weight": weight_2_4(),
        "A_log": torch.ones(3),
    }
    tensors = {}
    for name, weight in weights.items():
        tensors |= parts_of("sparse-bitmask", name, weight)
    packed = find_packed(tensors)
    assert set(packed) == set(weights)
    assert all(torch.equal(packed[name][...], weight) for name, weight in weights.items())


@pytest.mark.parametrize("others", FORMATS)
@pytest.mark.parametrize("renamed", FORMATS)
def test_one_layer_in_the_old_spelling_does_not_rename_the_others(renamed, others):
    # A checkpoint put together from two.
    tensors = parts_of(others, "a") | parts_of(renamed, "b.weight", weight_2_4(seed=1)) | {"norm.weight": torch.ones(4)}
    try:
        dense = as_dense(tensors, find_packed(tensors, where))
    except CheckpointError as error:
        assert "FILE OF" in str(error)
    else:
        assert set(dense) == {"a.weight", "b.weight", "norm.weight"}


@each_format
@pytest.mark.parametrize("shape", [(2, 1), (2,), (1, 2), (1, 1, 2)], ids=str)
def test_every_form_of_the_shape_part_is_read(format_name, shape):
    tensors = parts_of(format_name)
    tensors["layer.shape"] = tensors["layer.shape"].view(shape)
    assert torch.equal(find_packed(tensors)["layer.weight"][...], weight_2_4())


@pytest.mark.parametrize(
    "name", ["layer.shape", "shape", "bitmask", ".bitmask", "compressed", "row_offsets", "layer.bitmasks", "layer.Compressed"]
)
def test_names_that_are_no_parts_are_left_alone(name):
    tensors = {name: torch.ones(2), "layer.weight": torch.ones(2, 2)}
    assert find_packed(tensors, where) == {}
    assert as_dense(tensors, {}) == tensors


def test_a_shape_beside_packed_weights_may_be_anybodys():
    tensors = parts_of("sparse-24-bitmask") | {"image.shape": torch.ones(3)}
    dense = as_dense(tensors, find_packed(tensors, where, declared=True))
    assert set(dense) == {"layer.weight", "image.shape"}


@pytest.mark.parametrize("base", ["layer", "layer.weight"])
@pytest.mark.parametrize(
    ("format_name", "part"),
    [
        (name, part)
        for name, compressor in FORMATS.items()
        for part in compressor.parts
        if (name, part) != ("sparse-bitmask", "row_offsets")
    ],
)
@pytest.mark.parametrize("others", [True, False], ids=["beside-others", "the-only-one"])
def test_a_missing_part_is_named(format_name, part, base, others):
    tensors = parts_of(format_name, base)
    if others:
        tensors |= parts_of(format_name, base.replace("layer", "other"))
    del tensors[f"{base}.{part}"]
    with refuses("FILE OF layer", "layer", part):
        find_packed(tensors, where, declared=True)


@pytest.mark.parametrize("base", ["layer", "layer.weight"])
def test_a_bitmask_weight_without_row_offsets_is_not_read_as_2_4(base):
    tensors = parts_of("sparse-bitmask", base)
    del tensors[f"{base}.row_offsets"]
    with refuses(f"FILE OF {base}", "layer.weight", "compressed"):
        find_packed(tensors, where)


# Part that no other format has -> what is missing first if it is alone.
LACKING = {
    "bitmask": "compressed",
    "compressed": "bitmask",
    "row_offsets": "bitmask",
    "weight_scale": "weight",
    "weight_packed": "weight_scale",
    "scale_packed": "weight_packed",
}


@pytest.mark.parametrize("base", ["stray", "stray.weight"])
@pytest.mark.parametrize(("part", "lacking"), LACKING.items())
def test_a_part_that_is_left_over_is_named(part, lacking, base):
    stray = {f"{base}.{part}": torch.ones(2, dtype=torch.uint8)}
    with refuses(f"FILE OF {base}.{part}", f"{base}.{part} is left over: {base}.{lacking} is missing"):
        find_packed(stray | parts_of("sparse-24-bitmask"), where)
    with refuses(f"FILE OF {base}.{part}", f"{base}.{part} is left over"):
        find_packed(stray, where, declared=True)
    assert find_packed(stray, where) == {}


@pytest.mark.parametrize("base", ["layer", "layer.weight"])
@each_format
def test_a_weight_that_is_stored_dense_and_packed(format_name, base):
    tensors = parts_of(format_name, base) | {"layer.weight": weight_2_4()}
    with refuses("FILE OF layer.weight", "layer.weight is stored both dense and packed"):
        find_packed(tensors, where)


@pytest.mark.parametrize("second", FORMATS)
@each_format
def test_a_weight_that_is_packed_in_both_spellings(format_name, second):
    tensors = parts_of(format_name, "layer") | parts_of(second, "layer.weight", weight_2_4(seed=1))
    with refuses("FILE OF layer", "layer.weight"):
        find_packed(tensors, where)


@pytest.mark.parametrize("part", ["shape", "row_offsets"])
def test_a_part_in_the_other_spelling_beside_a_packed_weight_is_not_dropped(part):
    stray = {f"layer.weight.{part}": torch.tensor([[6], [16]])}
    tensors = parts_of("sparse-24-bitmask", "layer") | stray
    try:
        dense = as_dense(tensors, find_packed(tensors, where))
    except CheckpointError as error:
        assert f"layer.weight.{part}" in str(error)
    else:
        assert f"layer.weight.{part}" in dense


@pytest.mark.parametrize("packed_scale", [False, True], ids=["scale", "packed-scale"])
@pytest.mark.parametrize("base", ["layer", "layer.weight"])
@each_format
def test_a_weight_of_16_bits_with_a_scale(format_name, base, packed_scale):
    # Whether it is to be multiplied is not known; compressed-tensors <= 0.8.1 packed the scales, too.
    scale = parts_of("sparse-bitmask", "layer.weight_scale", torch.ones(6, 1)) if packed_scale else {"layer.weight_scale": torch.ones(6, 1)}
    beside = base == "layer" and not packed_scale
    with refuses("FILE OF layer", "layer.weight", "compressed is torch.bfloat16" if beside else "is quantised and packed"):
        find_packed(parts_of(format_name, base) | scale, where)


@pytest.mark.parametrize(
    "names", [("weight_packed", "meta"), ("meta", "scale_packed"), ("B_24", "B_meta"), ("B_24",), ("B_meta",)], ids="+".join
)
def test_a_missing_part_of_marlin_is_named(names):
    missing = min({"weight_packed", "meta", "scale_packed"} - set(names) if "B" not in names[0] else {"B_24", "B_meta", "s"} - set(names))
    with refuses("FILE OF layer.", "packed weight layer.weight", f"the part {missing} is missing"):
        find_packed({f"layer.{name}": torch.ones(2, 2, dtype=torch.int32) for name in names}, where)


def test_pack_quantised_tensors_are_ours_only_if_the_config_says_so(golden):
    with open_checkpoint(golden / "pack-quantized+sparse-24-bitmask") as checkpoint:
        assert find_packed(checkpoint.tensors, checkpoint.file_of) == {}
        assert len(find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)) == 14


def test_the_order_is_that_of_the_files():
    names = ["z", "a", "m", "b"]
    tensors = {}
    for name in names:
        tensors |= parts_of("sparse-24-bitmask", name)
    assert list(find_packed(tensors)) == [f"{name}.weight" for name in names]


# ---- parts that disagree -------------------------------------------------------------------------------------------------------


def replaced(format_name: str, **changes: Tensor) -> dict[str, Tensor]:
    return parts_of(format_name) | {f"layer.{part}": value for part, value in changes.items()}


WRONG_PARTS = {
    "compressed-rows": ("sparse-24-bitmask", {"compressed": torch.ones(5, 8).bfloat16()}, ("compressed", "(5, 8)", "(6, 16)", "(6, 8)")),
    "compressed-columns": ("sparse-24-bitmask", {"compressed": torch.ones(6, 16).bfloat16()}, ("compressed", "(6, 16)", "(6, 8)")),
    "compressed-flat": ("sparse-24-bitmask", {"compressed": torch.ones(48, dtype=torch.bfloat16)}, ("compressed", "(48,)", "(6, 8)")),
    "compressed-int64": ("sparse-24-bitmask", {"compressed": torch.ones(6, 8, dtype=torch.int64)}, ("compressed", "int64")),
    "compressed-float64": ("sparse-bitmask", {"compressed": torch.ones(48, dtype=torch.float64)}, ("compressed", "float64")),
    "compressed-uint8": ("sparse-bitmask", {"compressed": torch.ones(48, dtype=torch.uint8)}, ("compressed", "uint8")),
    "compressed-uint16": ("sparse-bitmask", {"compressed": torch.ones(48, dtype=torch.uint16)}, ("compressed",)),
    "compressed-complex": ("sparse-bitmask", {"compressed": torch.ones(48, dtype=torch.complex64)}, ("compressed",)),
    "compressed-2d": ("sparse-bitmask", {"compressed": torch.ones(6, 8, dtype=torch.bfloat16)}, ("compressed", "(6, 8)", "(48,)")),
    "bitmask-rows": ("sparse-24-bitmask", {"bitmask": torch.full((7, 2), 0x99, dtype=torch.uint8)}, ("bitmask", "(7, 2)", "(6, 2)")),
    "bitmask-columns": ("sparse-bitmask", {"bitmask": torch.full((6, 3), 0x99, dtype=torch.uint8)}, ("bitmask", "(6, 3)", "(6, 2)")),
    "bitmask-flat": ("sparse-bitmask", {"bitmask": torch.full((12,), 0x99, dtype=torch.uint8)}, ("bitmask", "(12,)", "(6, 2)")),
    "bitmask-int8": ("sparse-24-bitmask", {"bitmask": torch.ones(6, 2, dtype=torch.int8)}, ("bitmask", "int8")),
    "bitmask-bool": ("sparse-24-bitmask", {"bitmask": torch.ones(6, 2, dtype=torch.bool)}, ("bitmask", "bool")),
    "bitmask-uint16": ("sparse-24-bitmask", {"bitmask": torch.ones(6, 2, dtype=torch.uint16)}, ("bitmask",)),
    "offsets-number": ("sparse-bitmask", {"row_offsets": torch.arange(7) * 8}, ("row_offsets", "(7,)", "(6,)")),
    "offsets-int32": ("sparse-bitmask", {"row_offsets": torch.arange(6, dtype=torch.int32) * 8}, ("row_offsets", "int32", "int64")),
    "offsets-superfluous": ("sparse-24-bitmask", {"row_offsets": torch.arange(6) * 8}, ("compressed",)),
    "shape-other": ("sparse-24-bitmask", {"shape": torch.tensor([[16], [6]])}, ("(16, 6)",)),
    "shape-one": ("sparse-24-bitmask", {"shape": torch.tensor([96])}, ("(96,)",)),
    "shape-three": ("sparse-24-bitmask", {"shape": torch.tensor([6, 4, 4])}, ("(6, 4, 4)",)),
    "shape-none": ("sparse-bitmask", {"shape": torch.zeros(0, dtype=torch.int64)}, ("shape",)),
    "shape-scalar": ("sparse-24-bitmask", {"shape": torch.tensor(6)}, ("(6,)",)),
    "shape-negative": ("sparse-24-bitmask", {"shape": torch.tensor([-6, -16])}, ("(-6, -16)",)),
    "shape-huge": ("sparse-bitmask", {"shape": torch.tensor([1 << 62, 1 << 62])}, (str(1 << 62),)),
    "shape-int32": ("sparse-24-bitmask", {"shape": torch.tensor([6, 16], dtype=torch.int32)}, ("shape", "int32", "int64")),
    "shape-float": ("sparse-24-bitmask", {"shape": torch.tensor([6.0, 16.0])}, ("shape", "float32", "int64")),
    "shape-nan": ("sparse-24-bitmask", {"shape": torch.tensor([6.0, float("nan")])}, ("shape", "float32", "int64")),
    "shape-infinite": ("sparse-bitmask", {"shape": torch.tensor([float("inf"), 16.0])}, ("shape", "float32", "int64")),
    "shape-complex": ("sparse-24-bitmask", {"shape": torch.tensor([6 + 1j, 16])}, ("shape",)),
    "shape-bool": ("sparse-24-bitmask", {"shape": torch.tensor([True, True])}, ("shape",)),
    "shape-uint64": ("sparse-24-bitmask", {"shape": torch.tensor([6, 16], dtype=torch.uint64)}, ("shape",)),
    "shape-many-axes": ("sparse-bitmask", {"shape": torch.ones(200, dtype=torch.int64)}, ("shape",)),
}  # fmt: skip


@pytest.mark.parametrize("in_memory", [True, False], ids=["in-memory", "in-a-file"])
@pytest.mark.parametrize("case", WRONG_PARTS)
def test_headers_that_disagree_are_named_before_anything_is_read(tmp_path, case, in_memory):
    format_name, changes, texts = WRONG_PARTS[case]
    tensors = replaced(format_name, **changes)
    if in_memory:
        with refuses("FILE OF layer.bitmask", "packed weight layer.weight", *texts):
            find_packed(tensors, where)
        return
    write_checkpoint(tmp_path, tensors)
    with open_checkpoint(tmp_path) as checkpoint, refuses(tmp_path / "model.safetensors", "packed weight layer.weight", *texts):
        find_packed(checkpoint.tensors, checkpoint.file_of)


WRONG_VALUES = {
    "group-of-three": ("sparse-24-bitmask", "bitmask", (2, 1), 0x9B, ("bitmask", "row 2, byte 1 is 0x9b")),
    "group-of-one": ("sparse-24-bitmask", "bitmask", (0, 0), 0x98, ("bitmask", "row 0, byte 0 is 0x98")),
    "three-and-one": ("sparse-24-bitmask", "bitmask", (5, 1), 0x17, ("bitmask", "row 5, byte 1 is 0x17")),
    "one-more": ("sparse-bitmask", "bitmask", (2, 1), 0x9B, ("bitmask keeps 49 values, but 48 are stored",)),
    "one-less": ("sparse-bitmask", "bitmask", (2, 1), 0x98, ("bitmask keeps 47 values, but 48 are stored",)),
    "offset": ("sparse-bitmask", "row_offsets", (3,), 25, ("row_offsets[3] is 25", "row 3 at 24")),
    "offset-negative": ("sparse-bitmask", "row_offsets", (0,), -1, ("row_offsets[0] is -1", "row 0 at 0")),
    "offset-huge": ("sparse-bitmask", "row_offsets", (5,), (1 << 63) - 1, (f"row_offsets[5] is {(1 << 63) - 1}", "row 5 at 40")),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_values_that_disagree_are_named(case):
    format_name, part, index, value, texts = WRONG_VALUES[case]
    tensors = parts_of(format_name)
    tensors[f"layer.{part}"][index] = value
    packed = find_packed(tensors, where)["layer.weight"]
    for read in (packed.check_values, lambda: packed[...], lambda: packed[:], lambda: packed[0:6]):
        with refuses("FILE OF layer.bitmask", "packed weight layer.weight", *texts):
            read()


def test_bits_moved_to_another_row_are_named():
    # The total stays right, so that only row_offsets can tell.
    tensors = parts_of("sparse-bitmask")
    tensors["layer.bitmask"][1, 0], tensors["layer.bitmask"][2, 0] = 0x98, 0x9B
    with refuses("packed weight layer.weight", "row_offsets[2] is 16", "row 2 at 15"):
        find_packed(tensors, where)["layer.weight"].check_values()


@each_format
def test_padding_bits_are_named(format_name):
    tensors = parts_of(format_name, weight=weight_2_4(6, 12))
    tensors["layer.bitmask"][4, 1] |= 0x80
    packed = find_packed(tensors, where)["layer.weight"]
    for read in (packed.check_values, lambda: packed[...]):
        with refuses("packed weight layer.weight", "beyond column 11"):
            read()


# ---- a packed weight as a slice ---------------------------------------------------------------------------------------------------


@each_format
def test_a_packed_slice_answers_from_its_header(format_name):
    tensors = parts_of(format_name)
    packed = find_packed(tensors)["layer.weight"]
    packed.check_values()
    assert packed.num_values == 48
    assert packed.stored_bytes == sum(value.numel() * value.element_size() for value in tensors.values())
    assert size_bytes(packed) == 6 * 16 * 2
    assert packed.name == "layer.weight"


@each_format
def test_slices_of_a_file_are_those_of_the_dense_tensor(golden, format_name):
    with open_checkpoint(golden / format_name) as checkpoint:
        packed = find_packed(checkpoint.tensors)["model.layers.0.self_attn.k_proj.weight"]
        dense = packed[...]
        assert dense.shape == (32, 64)
        edges = (None, 0, 1, 7, 8, 31, 32, 33, 100, -1, -31, -32, -33, -100)
        for start in edges:
            for stop in edges:
                rows = slice(start, stop)
                assert same_tensor(packed[rows], dense[rows]), rows
                assert same_tensor(packed[rows, 8:40], dense[rows, 8:40]), rows
        for index in (
            5,
            -1,
            (3, 4),
            (slice(None), 5),
            (slice(2, 9), slice(None)),
            (..., slice(1, 3)),
            (slice(0, 9, 2),),
            slice(1, None, 3),
        ):
            assert same_tensor(packed[index], dense[index]), index


def test_a_device_is_where_the_weight_is_unpacked():
    packed = find_packed(parts_of("sparse-24-bitmask"))["layer.weight"]
    packed.device = torch.device("cpu")
    assert torch.equal(packed[1:3], weight_2_4()[1:3])


def test_a_part_may_not_be_missing_from_a_packed_slice():
    parts = {part: TensorSlice(value) for part, value in Sparse24Compressor().compress_weight(weight_2_4()).items() if part != "shape"}
    with refuses("here", "layer.weight", "missing part layer.shape"):
        PackedSlice("layer.weight", parts, "here")


def test_kept_weights_stay_parts_under_the_names_of_a_module():
    tensors = parts_of("sparse-24-bitmask", "a.weight") | parts_of("sparse-24-bitmask", "b.weight") | {"norm.weight": torch.ones(2)}
    dense = as_dense(tensors, find_packed(tensors), keep=["a.weight"])
    assert set(dense) == {"a.compressed", "a.bitmask", "a.shape", "b.weight", "norm.weight"}
    assert not isinstance(dense["a.compressed"], PackedSlice)


def test_names_of_parts():
    assert name_of_part("model.q_proj.weight", "bitmask") == "model.q_proj.bitmask"
    assert name_of_part("A_log", "bitmask") == "A_log.bitmask"


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (1, 4)], ids=str)
@each_format
def test_empty_weights_are_read(tmp_path, format_name, shape):
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, parts_of(format_name, weight=weight))
    with open_checkpoint(tmp_path) as checkpoint:
        packed = find_packed(checkpoint.tensors)["layer.weight"]
        packed.check_values()
        assert packed[...].shape == shape
        assert packed[0:1].shape == weight[0:1].shape


@pytest.mark.parametrize("format_name,shape", [("sparse-24-bitmask", (1 << 36, 0)), ("sparse-bitmask", (0, 1 << 62))], ids=FORMATS)
def test_an_empty_weight_of_a_hostile_size_is_refused_or_read_at_once(tmp_path, format_name, shape):
    # No byte of the file backs these sizes, so nothing may loop over them or allocate for them.
    specs = FORMATS[format_name].part_specs(shape, torch.bfloat16, 0)
    tensors = {f"layer.{part}": torch.zeros(size, dtype=dtype) for part, (dtype, size) in specs.items() if part != "shape"}
    folder = write_checkpoint(tmp_path / "source", tensors | {"layer.shape": torch.tensor(shape)})
    start = time.monotonic()
    try:
        decompress_folder(folder, tmp_path / "out")
    except CheckpointError as error:
        assert str(folder) in str(error) and "layer.weight" in str(error)
    else:
        (weight,) = load_file(tmp_path / "out" / "model.safetensors").values()
        assert tuple(weight.shape) == shape
    assert time.monotonic() - start < 5

"""Mixtral and Qwen3-MoE with packed experts: written expert by expert, kept packed on load, packed while loading, and back."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralForCausalLM, MixtralModel

from hf_sparse24 import CheckpointError, ModelCompressor, Sparse24Config, SparseBitmaskConfig
from hf_sparse24.checkpoint import PackedSlice
from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.conversion import compress_folder, decompress_folder
from hf_sparse24.experts import packed_experts, packed_projections
from tests.models import DENSE, FAMILIES, KEPT, files_of, load_dense, load_kept, logits, packed_names, same_bytes, tensors_of

NAMES = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2")), "qwen3-moe": ("mlp", ("gate_proj", "up_proj", "down_proj"))}
PACK = Sparse24Config(run_compressed=True)


class Saved:
    """One family, saved dense and packed."""

    def __init__(self, name, root):
        self.name, self.family = name, FAMILIES[name]
        self.dense, self.packed = root / "dense", root / "packed"
        self.model = self.family.build()
        self.model.save_pretrained(self.dense)
        self.model.save_pretrained(self.packed, sparsity_config=Sparse24Config())
        block, members = NAMES[name]
        self.experts = [f"model.layers.{i}.{block}.experts.{j}.{member}" for i in range(2) for j in range(4) for member in members]
        self.reference = logits(self.family.model_class.from_pretrained(self.dense))

    def build(self):
        return copy.deepcopy(self.model)

    def load(self, folder=None, config=KEPT, **kwargs):
        return self.family.model_class.from_pretrained(folder or self.packed, quantization_config=config, **kwargs)


@pytest.fixture(scope="module", params=NAMES)
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return Saved("mixtral", tmp_path_factory.mktemp("mixtral"))


def no_complaint(info):
    return not any(info.values())


def count_calls(monkeypatch, owner, name):
    """A list that grows with each call of a method."""
    calls, original = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def parts_equal(found, expected):
    return found.keys() == expected.keys() and all(same_bytes(found[name], value) for name, value in expected.items())


# ---- files -------------------------------------------------------------------------------------------------------------------


def test_experts_are_written_one_by_one_and_packed(saved):
    dense, packed = tensors_of(saved.dense), tensors_of(saved.packed)
    assert {f"{name}.weight" for name in saved.experts} <= dense.keys()
    for name in saved.experts:
        expected = Sparse24Compressor().compress_weight(dense[f"{name}.weight"])
        assert f"{name}.weight" not in packed
        assert all(same_bytes(packed[f"{name}.{part}"], value) for part, value in expected.items()), name
    routers = [name for name in dense if name.endswith(".gate.weight")]
    assert len(routers) == 2 and all(same_bytes(packed[name], dense[name]) for name in routers)


def test_every_way_of_packing_gives_the_same_files(saved, tmp_path):
    compress_folder(saved.dense, tmp_path / "folder")
    ModelCompressor(Sparse24Config()).compress_model(saved.build()).save_pretrained(tmp_path / "in-place")
    saved.load(saved.dense, PACK).save_pretrained(tmp_path / "while-loading")
    saved.load().save_pretrained(tmp_path / "again", sparsity_config=Sparse24Config())
    expected = files_of(saved.packed)
    for way in ("folder", "in-place", "while-loading", "again"):
        assert files_of(tmp_path / way)["model.safetensors"] == expected["model.safetensors"], way
        written = json.loads((tmp_path / way / "config.json").read_text())["quantization_config"]
        stored = json.loads(expected["config.json"])["quantization_config"]
        assert abs(written["sparsity_config"].pop("global_sparsity") - stored["sparsity_config"].pop("global_sparsity")) < 0.01, way
        assert written == stored, way


def test_state_dict_has_the_tensors_of_the_files(saved):
    state = ModelCompressor(Sparse24Config()).compress(saved.build())
    stored = {name.replace(".mlp.", f".{NAMES[saved.name][0]}."): tensor for name, tensor in state.items()}
    assert parts_equal(stored, tensors_of(saved.packed))


def test_auto_finds_experts_and_a_kept_model_is_saved_so_again(saved, tmp_path):
    saved.build().save_pretrained(tmp_path / "auto", sparsity_config="auto")
    experts = {f"{name}.compressed" for name in saved.experts}
    assert experts <= tensors_of(tmp_path / "auto").keys()
    kept = saved.load(tmp_path / "auto")
    assert len(packed_experts(kept)) == 2
    kept.save_pretrained(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "auto")
    kept.save_pretrained(tmp_path / "auto-again", sparsity_config="auto")
    assert parts_equal(tensors_of(tmp_path / "auto-again"), tensors_of(tmp_path / "auto"))
    # What it says was packed selects the same of a dense model.
    block = json.loads((tmp_path / "auto-again" / "config.json").read_text())["quantization_config"]["sparsity_config"]
    config = Sparse24Config(targets=block["targets"], ignore=block["ignore"])
    saved.load(tmp_path / "auto-again", DENSE).save_pretrained(tmp_path / "third", sparsity_config=config)
    assert parts_equal(tensors_of(tmp_path / "third"), tensors_of(tmp_path / "auto"))


@pytest.mark.parametrize(
    ("entry", "num_dense"),
    [
        ("model.layers.0.mlp.experts", 12),
        ("MixtralExperts", 24),
        ("model.layers.1.block_sparse_moe.experts.2.w3", 1),
        ("model.layers.1.mlp.experts.2.w3", 1),
        (r"re:.*\.w2$", 8),
    ],
)
def test_ignored_experts_are_left_alone(mixtral, entry, num_dense, tmp_path):
    config = Sparse24Config(ignore=["lm_head", entry])
    mixtral.build().save_pretrained(tmp_path / "saved", sparsity_config=config)
    tensors = tensors_of(tmp_path / "saved")
    assert sum(f"{name}.weight" in tensors for name in mixtral.experts) == num_dense
    compress_folder(mixtral.dense, tmp_path / "folder", config)
    assert parts_equal(tensors_of(tmp_path / "folder"), tensors)
    for load in (load_dense, load_kept):
        assert torch.equal(logits(load(tmp_path / "saved")), mixtral.reference)


@pytest.mark.parametrize("target", ["MixtralExperts", r"re:.*\.experts\."])
def test_experts_can_be_all_that_is_packed(mixtral, target, tmp_path):
    mixtral.build().save_pretrained(tmp_path, sparsity_config=Sparse24Config(targets=[target]))
    kept = load_kept(tmp_path)
    assert not packed_names(kept) and len(packed_experts(kept)) == 2
    assert torch.equal(logits(kept), mixtral.reference)


def not_2_4(model):
    """With one bad group in the w3 of one expert."""
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 64 + 3, 4:8] = 0.5
    return model


@pytest.mark.parametrize("way", ["save", "while loading", "folder", "in place"])
def test_expert_that_is_not_2_4_is_named_and_nothing_is_written(mixtral, way, tmp_path):
    model = not_2_4(mixtral.build())
    model.save_pretrained(tmp_path / "dense")
    ways = {
        "save": lambda: model.save_pretrained(tmp_path / "out", sparsity_config=Sparse24Config()),
        "while loading": lambda: mixtral.load(tmp_path / "dense", PACK),
        "folder": lambda: compress_folder(tmp_path / "dense", tmp_path / "out"),
        "in place": lambda: ModelCompressor(Sparse24Config()).compress_model(model),
    }
    with pytest.raises(ValueError, match=r"1 targeted weights are not 2:4.*experts.*2\.w3.*row 3, columns 4\.\.7"):
        ways[way]()
    assert not (tmp_path / "out").exists() or files_of(tmp_path / "out") == {}


@pytest.mark.parametrize(("projection", "member"), [("gate_up_proj", "2.w3"), ("down_proj", "2.w2")])
def test_expert_that_is_not_2_4_stays_dense_where_that_is_asked_for(mixtral, projection, member, tmp_path):
    """Also if a projection of its module was packed already: that one becomes dense again."""
    model, skip = mixtral.build(), Sparse24Config(on_dense="skip", run_compressed=True)
    model.model.layers[1].mlp.experts.get_parameter(projection).data[2, -3, 4:8] = 0.5
    model.save_pretrained(tmp_path / "dense")
    reference = logits(load_dense(tmp_path / "dense"))
    with pytest.warns(UserWarning, match=rf"1 targeted weights are stored dense: model\.layers\.1\.mlp\.experts\.{member}"):
        model.save_pretrained(tmp_path / "packed", sparsity_config=skip)
    assert sum(f"{name}.weight" in tensors_of(tmp_path / "packed") for name in mixtral.experts) == 1
    loaded = mixtral.load(tmp_path / "dense", skip)
    for kept in (load_kept(tmp_path / "packed"), loaded):
        assert list(packed_experts(kept)) == ["model.layers.0.mlp.experts"]
        assert torch.equal(logits(kept), reference)
    assert member in loaded.hf_quantizer.left_dense[f"model.layers.1.mlp.experts.{projection}"]
    loaded.save_pretrained(tmp_path / "again")
    assert parts_equal(tensors_of(tmp_path / "again"), {**tensors_of(tmp_path / "again"), **dense_of_layer_1(mixtral, model)})


def dense_of_layer_1(saved, model):
    """The weights of its experts, as files name them."""
    gate_up, down = model.model.layers[1].mlp.experts.parameters()
    names = [name for name in saved.experts if ".layers.1." in name]
    weights = [weight for i in range(4) for weight in (gate_up[i, :64], gate_up[i, 64:], down[i])]
    return {f"{name}.weight": weight.detach() for name, weight in zip(names, weights, strict=True)}


# ---- kept --------------------------------------------------------------------------------------------------------------------


def test_kept_experts_are_never_packed_or_unpacked(saved, monkeypatch, tmp_path):
    calls = count_calls(monkeypatch, PackedSlice, "_unpack")
    calls += count_calls(monkeypatch, Sparse24Compressor, "compress_weight")
    model, info = saved.load(output_loading_info=True)
    assert no_complaint(info), info
    assert len(packed_experts(model)) == 2
    model.save_pretrained(tmp_path)
    assert calls == []
    assert files_of(tmp_path) == files_of(saved.packed)


def test_saving_copies_no_expert(saved):
    """Transformers copies tensors that share a storage, which pieces of a merged one would."""
    model = saved.load()
    held = {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    ranges = [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held.values()]
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    pieces = [tensor for name, tensor in state.items() if ".experts." in name]
    assert len(pieces) == 3 * len(saved.experts)
    assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)
    assert all(any(piece.data_ptr() in addresses for addresses in ranges) for piece in pieces)


def test_kept_model_holds_nothing_dense(saved):
    model, dense = saved.load(dtype=torch.bfloat16), saved.load(config=DENSE, dtype=torch.bfloat16)
    experts = {name: parameter for name, parameter in dense.named_parameters() if ".experts." in name}
    held = [parameter for module in packed_experts(model).values() for parameter in module.parameters()]
    assert 16 * sum(parameter.nbytes for parameter in held) == 9 * sum(parameter.nbytes for parameter in experts.values())
    assert all(parameter.ndim == 1 or name.count(".experts.") == 0 or ".compressed" in name or ".bitmask" in name
               for name, parameter in model.named_parameters())  # fmt: skip
    assert model.num_parameters() == dense.num_parameters()
    assert {parameter.dtype for parameter in held} == {torch.bfloat16, torch.uint8}
    assert not any(parameter.requires_grad for parameter in held)


def test_kept_model_generates_what_the_dense_one_does(saved):
    prompt = torch.tensor([[1, 5, 9], [7, 2, 30]])
    found, expected = (saved.load(config=config).generate(prompt, max_new_tokens=12, do_sample=False) for config in (KEPT, DENSE))
    assert torch.equal(found, expected)


def test_kept_model_compiles_in_one_graph(saved):
    model = saved.load()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), saved.reference, rtol=1e-5, atol=1e-6)


def test_dense_model_comes_back(saved, tmp_path):
    for make in (saved.load, lambda: ModelCompressor(Sparse24Config()).compress_model(saved.build())):
        model = make().dequantize()
        assert not packed_experts(model) and not packed_names(model)
        assert torch.equal(logits(model), saved.reference)
        model.save_pretrained(tmp_path)
        assert files_of(tmp_path)["model.safetensors"] == files_of(saved.dense)["model.safetensors"]
    decompress_folder(saved.packed, tmp_path / "folder")
    assert files_of(tmp_path / "folder")["model.safetensors"] == files_of(saved.dense)["model.safetensors"]


def test_state_dict_of_a_kept_model_fills_another(saved):
    model, other = saved.load(), saved.load()
    for weights in packed_projections(other).values():
        weights.compressed.data.zero_()
    assert not torch.equal(logits(other), saved.reference)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), saved.reference)


def test_copy_of_a_kept_model_computes_the_same(saved):
    assert torch.equal(logits(copy.deepcopy(saved.load())), saved.reference)


def test_part_of_a_model_takes_its_experts(mixtral):
    found = MixtralModel.from_pretrained(mixtral.packed, quantization_config=KEPT)
    assert len(packed_experts(found)) == 2
    expected = MixtralModel.from_pretrained(mixtral.dense)
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(found(ids).last_hidden_state, expected(ids).last_hidden_state)


@pytest.mark.parametrize("offloaded", ["model.layers.1", "model.layers.1.mlp"])
def test_offloaded_experts_compute_and_save_the_same(saved, offloaded, tmp_path):
    rest = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    if offloaded.endswith("mlp"):
        rest += [f"model.layers.1.{name}" for name in ("self_attn", "input_layernorm", "post_attention_layernorm")]
    device_map = {**dict.fromkeys(rest, "cpu"), offloaded: "disk"}
    model = saved.load(device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].mlp.experts.down_proj.compressed.is_meta
    assert torch.equal(logits(model), saved.reference)
    model.save_pretrained(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(saved.packed)


def test_adapters_train_on_kept_experts(saved):
    peft = pytest.importorskip("peft")
    model = saved.load()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted(input_ids=torch.tensor([[1, 5, 9]]), labels=torch.tensor([[1, 5, 9]])).loss.backward()
    grads = [parameter.grad for name, parameter in adapted.named_parameters() if "layers.0" in name and "lora_" in name]
    assert len(grads) == 2 and all(grad.abs().sum() > 0 for grad in grads)


# ---- checkpoints that are not whole ------------------------------------------------------------------------------------------


def rewrite(source, folder, change):
    """A copy of a folder with its tensors changed."""
    folder.mkdir()
    tensors = tensors_of(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


@pytest.mark.parametrize("load", [load_dense, load_kept])
def test_expert_that_is_missing_is_an_error(mixtral, load, tmp_path):
    def change(tensors):
        for part in ("compressed", "bitmask", "shape"):
            del tensors[f"{mixtral.experts[7]}.{part}"]

    with pytest.raises((CheckpointError, RuntimeError)):
        load(rewrite(mixtral.packed, tmp_path / "missing", change))


def test_damaged_expert_is_named(mixtral, tmp_path):
    def change(tensors):
        tensors["model.layers.1.block_sparse_moe.experts.2.w2.bitmask"][5, 0] ^= 1

    with pytest.raises(CheckpointError, match=r"packed layer model\.layers\.1\.mlp\.experts\.down_proj: 2\.w2: .*row 5, byte 0"):
        load_kept(rewrite(mixtral.packed, tmp_path / "damaged", change))


def test_experts_of_another_size_are_an_error(mixtral, tmp_path):
    def change(tensors):
        name = "model.layers.1.block_sparse_moe.experts.2.w2"
        parts = Sparse24Compressor().compress_weight(torch.zeros(32, 32))
        tensors.update({f"{name}.{part}": value for part, value in parts.items()})

    with pytest.raises((CheckpointError, RuntimeError)):
        load_kept(rewrite(mixtral.packed, tmp_path / "sizes", change))


def test_experts_split_over_devices_are_refused(mixtral, monkeypatch):
    monkeypatch.setattr(MixtralForCausalLM, "_tp_size", 2, raising=False)
    with pytest.raises(ValueError, match="packed experts cannot be split over several devices"):
        load_kept(mixtral.packed)


# ---- other formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [Sparse24Config(quantization="fp8"), Sparse24Config(quantization="int8"), SparseBitmaskConfig()],
    ids=["fp8", "int8", "sparse-bitmask"],
)
def test_experts_in_other_formats_are_stored_packed_and_opened_dense(mixtral, config, tmp_path):
    mixtral.build().save_pretrained(tmp_path / "saved", sparsity_config=config)
    stored = tensors_of(tmp_path / "saved")
    assert {f"{name}.compressed" for name in mixtral.experts} <= stored.keys()
    dense, kept = load_dense(tmp_path / "saved"), load_kept(tmp_path / "saved")
    assert not packed_experts(kept)
    reasons = {reason for name, reason in kept.hf_quantizer.left_dense.items() if ".experts." in name}
    assert reasons == {f"experts are not kept in the format {config.compressor.format}"}
    torch.testing.assert_close(logits(kept), logits(dense), rtol=1e-4, atol=1e-5)
    assert torch.linalg.vector_norm(logits(dense) - mixtral.reference) < 0.1 * torch.linalg.vector_norm(mixtral.reference)

"""Squared-ReLU blocks that multiply sparse activations: which are found, what they compute, save, load and learn."""

import copy
import io
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    AutoModel,
    AutoModelForCausalLM,
    BitNetConfig,
    BitNetForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_sparse24 import (
    ActivationSparsityConfig,
    Sparse24Config,
    densify_activations,
    measure_activation_sparsity,
    sparsify_activations,
)
from hf_sparse24.activation import sparse_blocks
from hf_sparse24.kernels import activation, ops, reference
from hf_sparse24.squared_relu import Projections, SquaredReluBlock, copies_of, find_projections
from tests.models import IDS, SIZES, files_of, load_dense, load_kept, logits, make_2_4, packed_names, tensors_of

FP8, DECODE, EXACT = (ActivationSparsityConfig(**fields) for fields in ({"quantization": "fp8"}, {"decode": True}, {"pattern": "exact"}))
BLOCKS = {"model.layers.0.mlp", "model.layers.1.mlp"}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES = {
    "arcee": (ArceeForCausalLM, lambda: ArceeConfig(**SIZES, **SPECIAL, mlp_bias=True), ("up_proj", None, "down_proj")),
    "nemotron": (NemotronForCausalLM, lambda: NemotronConfig(**SIZES, **SPECIAL), ("up_proj", None, "down_proj")),
    "llama-gated": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, **SPECIAL, hidden_act="relu2"),
        ("up_proj", "gate_proj", "down_proj"),
    ),
    "persimmon": (PersimmonForCausalLM, lambda: PersimmonConfig(**SIZES, **SPECIAL), ("dense_h_to_4h", None, "dense_4h_to_h")),
    "nanochat": (NanoChatForCausalLM, lambda: NanoChatConfig(**SIZES, **SPECIAL), ("fc1", None, "fc2")),
}


def build(family="arcee", dtype=torch.float32):
    model_class, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class._from_config(config(), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


@pytest.fixture
def arcee():
    return build()


@pytest.fixture
def compiler():
    """Compiled code of other tests counts against the limit of recompilations."""
    torch._dynamo.reset()


def with_selection_by_hooks(model):
    """The dense model, whose second projections are handed what 2:4 keeps: an oracle that shares no block with the package."""
    family = next(family for family, (model_class, _, _) in FAMILIES.items() if type(model) is model_class)
    for layer in model.model.layers:
        down = layer.mlp.get_submodule(FAMILIES[family][2][2])
        down.register_forward_pre_hook(lambda module, args: (reference.keep_two_of_four(args[0]),))
    return model


# ---- which blocks, and what they compute --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_found_by_what_they_compute(family):
    model = build(family)
    report = sparsify_activations(model)
    assert report.replaced.keys() == BLOCKS and report.left_alone == {}
    assert {block.projections for block in sparse_blocks(model).values()} == {Projections(*FAMILIES[family][2])}
    assert all(set(block.projections) == set(FAMILIES[family][2]) - {None} for block in report.replaced.values())


def test_exact_gives_the_logits_of_the_dense_model(model):
    expected = logits(model)
    sparsify_activations(model, EXACT)
    assert torch.equal(logits(model), expected)
    sparsify_activations(model, replace_config(EXACT, decode=True))
    assert torch.equal(logits(model), expected)


def replace_config(config, **fields):
    return config.model_copy(update=fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_2_4_gives_the_logits_of_a_model_whose_activations_were_selected(family):
    model, oracle = build(family), with_selection_by_hooks(build(family))
    dense = logits(model)
    sparsify_activations(model)
    assert torch.equal(logits(model), logits(oracle)) and not torch.equal(logits(model), dense)


def test_densify_undoes_it(model):
    expected, config = logits(model), model.config.to_dict()
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    sparsify_activations(model, replace_config(FP8, decode=True))
    densify_activations(model)
    assert torch.equal(logits(model), expected) and model.config.to_dict() == config
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


def test_ignore_and_targets_select_blocks(arcee):
    report = sparsify_activations(arcee, ActivationSparsityConfig(ignore=["model.layers.0"]))
    assert set(report.replaced) == {"model.layers.1.mlp"} == set(sparse_blocks(arcee))
    assert report.left_alone == {"model.layers.0.mlp": "targets or ignore leave it out"}
    for targets in (["model.layers.0.mlp"], [r"re:.*layers\.0\.mlp$"]):
        # A second call replaces the first.
        sparsify_activations(arcee, ActivationSparsityConfig(targets=targets))
        assert set(sparse_blocks(arcee)) == {"model.layers.0.mlp"}
    assert sparsify_activations(arcee, ActivationSparsityConfig(targets=["ArceeMLP"])).replaced.keys() == BLOCKS


class Plain(nn.Module):
    """What a user may have written: no activation module, and names of his own."""

    def __init__(self, hidden=8, inner=12):
        super().__init__()
        self.b, self.a = nn.Linear(inner, hidden), nn.Linear(hidden, inner)

    def forward(self, x):
        return self.b(F.relu(self.a(x)) ** 2)


class Gated(Plain):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(8, 12)

    def forward(self, x):
        return self.b(self.a(x) * F.relu(self.c(x)).square())


class Square(Plain):
    """Which layer is the second cannot be told by its shape."""

    def __init__(self):
        super().__init__(8, 8)


class WithDropout(Plain):
    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)) ** 2, 0.5, self.training))


class Relu(Plain):
    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class Residual(Plain):
    def forward(self, x):
        return x + self.b(F.relu(self.a(x)) ** 2)


class Scaled(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        return self.b(F.relu(self.a(x)) ** 2 * self.scale)


class TwoInputs(Plain):
    def forward(self, x, y):
        return self.b(F.relu(self.a(x)) ** 2) + y


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.b(self.norm(F.relu(self.a(x)) ** 2))


class Apart(Plain):
    """Shapes that do not follow each other."""

    def __init__(self):
        super().__init__()
        self.b = nn.Linear(11, 8)


@pytest.mark.parametrize(
    ("block", "expected"),
    [(Plain, Projections("a", None, "b")), (Gated, Projections("a", "c", "b")), (Square, Projections("a", None, "b"))],
)
def test_blocks_that_the_user_names_may_be_written_in_any_way(block, expected):
    torch.manual_seed(0)
    model = nn.Sequential(block(), nn.Linear(8, 8), block())
    x, twin = torch.randn(3, 5, 8), copy.deepcopy(model)
    report = sparsify_activations(model, ActivationSparsityConfig(pattern="exact", targets=[block.__name__]))
    assert set(report.replaced) == {"0", "2"} and model[0].projections == expected
    torch.testing.assert_close(model(x), twin(x), rtol=1e-6, atol=1e-6)
    sparsify_activations(model, ActivationSparsityConfig(targets=["re:[02]$"]))
    u, gate = twin[0].a(x), twin[0].c(x) if block is Gated else None
    h = F.relu(u) ** 2 if gate is None else F.relu(gate) ** 2 * u
    torch.testing.assert_close(model[0](x), twin[0].b(reference.keep_two_of_four(h)))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (WithDropout, "not the squared ReLU of what it multiplied first"),
        (Relu, "not the squared ReLU of what it multiplied first"),
        (Residual, "not a projection of a squared ReLU"),
        (Scaled, "it has more than projections and a squared ReLU: scale"),
        (Normed, "it has more than projections and a squared ReLU: norm"),
        (TwoInputs, "could not be followed: TypeError"),
        (Apart, "shapes of its layers do not follow each other"),
        (nn.Linear, "0 linear layers, expected two"),
    ],
)
def test_what_computes_something_else_is_refused_with_the_reason(block, reason):
    model = nn.Sequential(nn.Linear(8, 8), block(8, 8) if block is nn.Linear else block())
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=f"targets select what cannot multiply sparse activations: 1: .*{reason}"):
        sparsify_activations(model, ActivationSparsityConfig(targets=["1"]))
    assert type(model[1]) is block
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_block_that_cannot_be_served_is_left_alone_beside_one_that_can():
    torch.manual_seed(0)
    bitnet = BitNetForCausalLM(BitNetConfig(**{key: SIZES[key] for key in SIZES if key != "head_dim"}, **SPECIAL)).eval()
    reason = "model.layers.0.mlp: it has more than projections and a squared ReLU: ffn_sub_norm"
    with pytest.raises(ValueError, match=f"no block of BitNetForCausalLM with a squared ReLU can be served: {reason}"):
        sparsify_activations(bitnet)
    model = nn.ModuleList([bitnet, build()])
    report = sparsify_activations(model)
    assert {f"1.{name}" for name in BLOCKS} == set(report.replaced) and {f"0.{name}" for name in BLOCKS} == set(report.left_alone)
    assert "0.model.layers.1.mlp is left alone: it has more than projections" in str(report)


def test_a_model_without_squared_relu_and_a_target_of_nothing_are_errors(arcee):
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, **SPECIAL))
    with pytest.raises(ValueError, match="no block of LlamaForCausalLM with a squared ReLU can be served; name blocks"):
        sparsify_activations(llama)
    with pytest.raises(ValueError, match="no block of LlamaForCausalLM"):
        measure_activation_sparsity(llama, [IDS])
    with pytest.raises(ValueError, match="target 'ArceeMLPs' matches no module"):
        sparsify_activations(arcee, ActivationSparsityConfig(targets=["ArceeMLPs"]))
    assert not sparse_blocks(arcee) and arcee.config.activation_sparsity is None


def test_a_wrapped_forward_is_not_replaced(arcee):
    block = arcee.model.layers[0].mlp
    block.forward = block.forward
    assert find_projections(block).startswith("something is hooked to it")


# ---- copies of the weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_report_counts_the_bytes_of_every_copy(dtype):
    model = build("llama-gated", dtype)
    report = sparsify_activations(model, replace_config(FP8, decode=True))
    block = model.model.layers[0].mlp
    copies = {name: buffer.nbytes for name, buffer in copies_of(block).items()}
    sizes = report.replaced["model.layers.0.mlp"].size_bytes
    assert sizes["weights"] == sum(parameter.nbytes for parameter in block.parameters())
    assert sizes["columns"] == copies.pop("down_proj_columns") == 32 * 64
    assert sizes["float8"] == sum(copies.values()) == 3 * 32 * 64 + 4 * (64 + 64 + 32)
    assert report.size_bytes == {copy: 2 * size for copy, size in sizes.items()}
    assert "gate_proj 64 x 32, up_proj 64 x 32, down_proj 32 x 64" in str(report)
    sizes = sparsify_activations(model, DECODE).replaced["model.layers.0.mlp"].size_bytes
    assert set(copies_of(block)) == {"down_proj_columns"} and sizes["columns"] == block.down_proj_columns.nbytes == 32 * 64 * dtype.itemsize
    assert torch.equal(block.down_proj_columns, block.down_proj.weight.t()) and block.down_proj_columns.is_contiguous()


def test_float8_multiplies_rounded_weights(model):
    """The same logits as a dense model whose weights were rounded, and near those of the one it was."""
    twin, dense = copy.deepcopy(model), logits(model)
    with torch.no_grad():
        for layer in twin.model.layers:
            for linear in (child for child in layer.mlp.children() if isinstance(child, nn.Linear)):
                scale = linear.weight.abs().amax(1, keepdim=True) / 448
                linear.weight.copy_((linear.weight / scale).to(torch.float8_e4m3fn).float() * scale)
    sparsify_activations(model, replace_config(EXACT, quantization="fp8"))
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)
    error = torch.linalg.vector_norm(logits(model) - dense) / torch.linalg.vector_norm(dense)
    assert 0 < error < 0.1


def test_copies_exist_in_evaluation_mode_and_follow_the_weights(arcee):
    sparsify_activations(arcee, replace_config(FP8, decode=True))
    block = arcee.model.layers[0].mlp
    before, result = {name: buffer.clone() for name, buffer in copies_of(block).items()}, logits(arcee)
    assert len(before) == 5
    arcee.train()
    assert copies_of(block) == {}
    with torch.no_grad():
        block.down_proj.weight.mul_(-1)
    arcee.eval()
    assert torch.equal(block.down_proj_columns.float(), -before["down_proj_columns"].float())
    assert torch.equal(block.up_proj_float8.float(), before["up_proj_float8"].float())
    # Without leaving evaluation mode: seen when the block is called.
    with torch.no_grad():
        block.down_proj.weight.mul_(-1)
    assert torch.equal(logits(arcee), result)
    state = {name: -value if "mlp" in name else value for name, value in arcee.state_dict().items()}
    arcee.load_state_dict(state)
    assert torch.equal(block.up_proj_float8.float(), -before["up_proj_float8"].float())


def test_a_cast_makes_copies_anew(arcee):
    sparsify_activations(arcee, replace_config(FP8, decode=True))
    block = arcee.model.layers[0].mlp
    arcee.to(torch.bfloat16)
    assert block.up_proj_float8.dtype == block.down_proj_columns.dtype == torch.float8_e4m3fn
    assert block.up_proj_scale.dtype == torch.float32
    twin = build("arcee").to(torch.bfloat16)
    sparsify_activations(twin, arcee.config.activation_sparsity)
    assert torch.equal(logits(arcee), logits(twin))
    arcee.to("meta")
    assert copies_of(block) == {}


def test_weights_that_learn_are_multiplied_themselves(arcee):
    """A gradient must be that of what was multiplied."""
    dense = logits(arcee)
    sparsify_activations(arcee, replace_config(EXACT, quantization="fp8", decode=True))
    rounded = logits(arcee)
    assert torch.equal(arcee(IDS).logits, dense) and not torch.equal(rounded, dense)
    arcee.requires_grad_(False)
    assert torch.equal(arcee(IDS).logits, rounded)


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, save_and_load], ids=["deepcopy", "save"])
def test_a_copy_of_the_model_is_as_sparse(model, again):
    sparsify_activations(model, replace_config(FP8, decode=True))
    twin = again(model)
    assert set(sparse_blocks(twin)) == BLOCKS and torch.equal(logits(twin), logits(model))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(logits(twin), logits(model))
    densify_activations(twin)
    assert not sparse_blocks(twin) and set(sparse_blocks(model)) == BLOCKS


@pytest.mark.parametrize("family", ["arcee", "llama-gated"])
def test_blocks_compile_without_a_break(family, compiler):
    model = build(family)
    for config in (ActivationSparsityConfig(), replace_config(FP8, decode=True)):
        sparsify_activations(model, config)
        assert torch.equal(logits(torch.compile(model, fullgraph=True, backend="aot_eager")), logits(model))
    found = {}
    model.train()
    for name, run in (("eager", model), ("compiled", torch.compile(model, fullgraph=True, backend="aot_eager"))):
        model.zero_grad()
        run(input_ids=IDS, labels=IDS).loss.backward()
        found[name] = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    for key, gradient in found["eager"].items():
        torch.testing.assert_close(found["compiled"][key], gradient)


def test_autocast_multiplies_in_its_dtype(model):
    oracle = with_selection_by_hooks(copy.deepcopy(model))
    sparsify_activations(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model), logits(oracle))
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    sparsify_activations(model, replace_config(FP8, decode=True))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = logits(model).float(), logits(oracle).float()
    assert 0 < torch.linalg.vector_norm(found - expected) < 0.2 * torch.linalg.vector_norm(expected)


def test_generate_gives_the_tokens_of_the_oracle(model):
    oracle = with_selection_by_hooks(copy.deepcopy(model))
    sparsify_activations(model, DECODE)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), oracle.generate(IDS, **options))


# ---- saved and loaded -----------------------------------------------------------------------------------------------------------


def test_a_save_differs_in_one_key_of_the_config(model, tmp_path):
    model.save_pretrained(tmp_path / "dense")
    names = list(model.state_dict())
    sparsify_activations(model, replace_config(FP8, ignore=["model.layers.0"]))
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path / "sparse")
    dense, sparse = files_of(tmp_path / "dense"), files_of(tmp_path / "sparse")
    config = json.loads(sparse.pop("config.json"))
    assert config.pop("activation_sparsity") == {"pattern": "2:4", "quantization": "fp8", "ignore": ["model.layers.0"]}
    assert config == json.loads(dense.pop("config.json")) and sparse == dense


@pytest.mark.parametrize("config", [ActivationSparsityConfig(), EXACT, replace_config(FP8, decode=True)], ids=["2:4", "exact", "fp8"])
def test_a_reloaded_model_is_as_sparse(model, config, tmp_path):
    sparsify_activations(model, config)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.activation_sparsity == config and set(sparse_blocks(again)) == BLOCKS
    assert torch.equal(logits(again), logits(model))
    assert all(
        len(copies_of(a)) == len(copies_of(b)) for a, b in zip(sparse_blocks(again).values(), sparse_blocks(model).values(), strict=True)
    )


def test_from_pretrained_takes_the_config(arcee, tmp_path):
    dense = logits(arcee)
    arcee.save_pretrained(tmp_path)
    given = ActivationSparsityConfig(ignore=["model.layers.1.mlp"])
    for value in (given, {"ignore": ["model.layers.1.mlp"]}):
        for model_class in (AutoModelForCausalLM, ArceeForCausalLM):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what is ignored is not missed
                model = model_class.from_pretrained(tmp_path, activation_sparsity=value)
            assert set(sparse_blocks(model)) == {"model.layers.0.mlp"} and model.config.activation_sparsity == given
    sparsify_activations(arcee)
    arcee.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, activation_sparsity=None)
    assert torch.equal(logits(model), dense) and model.config.activation_sparsity is None
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, **SPECIAL))
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="no block of LlamaForCausalLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "llama", activation_sparsity=given)


@pytest.mark.parametrize("save_base", [False, True])
def test_names_hold_for_the_model_without_its_head_and_back(save_base, arcee, tmp_path):
    saved = arcee.model if save_base else arcee
    prefix = "" if save_base else "model."
    sparsify_activations(saved, ActivationSparsityConfig(targets=[f"{prefix}layers.0.mlp"]))
    saved.save_pretrained(tmp_path)
    assert set(sparse_blocks(AutoModel.from_pretrained(tmp_path))) == {"layers.0.mlp"}
    with_head = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(sparse_blocks(with_head)) == {"model.layers.0.mlp"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"pattern": "1:4"}, "Input should be '2:4' or 'exact'"),
        ({"patern": "2:4"}, "Extra inputs are not permitted"),
        ("2:4", "activation_sparsity must be an ActivationSparsityConfig or a dict of its fields, got str"),
    ],
)
def test_a_wrong_value_in_config_json_is_an_error(arcee, tmp_path, value, message):
    arcee.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "activation_sparsity": value}))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_without_the_package_the_model_is_the_dense_one(arcee, tmp_path):
    dense = logits(arcee)
    sparsify_activations(arcee)
    arcee.save_pretrained(tmp_path / "sparse")
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM; model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "torch.save(model(torch.tensor([[1, 5, 9, 33, 77, 2, 8]])).logits, sys.argv[2]); model.save_pretrained(sys.argv[3]); "
        "assert 'hf_sparse24' not in sys.modules"
    )
    command = [sys.executable, "-c", script, tmp_path / "sparse", tmp_path / "logits.pt", tmp_path / "again"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), dense)
    # And it does not lose the key.
    assert set(sparse_blocks(AutoModelForCausalLM.from_pretrained(tmp_path / "again"))) == BLOCKS


def test_packed_weights_and_sparse_activations_go_together(model, tmp_path):
    make_2_4(model)
    sparsify_activations(model)
    expected = logits(model)
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["activation_sparsity"] == {"pattern": "2:4"} and "sparsity_config" in config["quantization_config"]
    kept, dense = load_kept(tmp_path), load_dense(tmp_path)
    assert any("mlp" in name for name in packed_names(kept)) and set(sparse_blocks(kept)) == set(sparse_blocks(dense)) == BLOCKS
    assert torch.equal(logits(dense), expected) and torch.equal(logits(kept), expected)
    report = sparsify_activations(kept, ActivationSparsityConfig())
    apart = report.replaced["model.layers.0.mlp"].apart
    assert set(apart.values()) == {"a hf_sparse24.linear.Sparse24Linear, not a torch.nn.Linear"} and len(apart) >= 2
    kept.save_pretrained(tmp_path / "again")
    assert {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in tensors_of(tmp_path / "again").items()} == {
        name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in tensors_of(tmp_path).items()
    }
    with pytest.warns(UserWarning, match="projections are multiplied as they are, neither in float8 nor by columns"):
        sparsify_activations(kept, FP8)
    assert torch.equal(logits(kept), expected)


def test_offloaded_layers_are_called_as_they_are(arcee, tmp_path):
    arcee.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload", activation_sparsity=DECODE
    )
    assert model.model.layers[1].mlp.down_proj.weight.is_meta and set(sparse_blocks(model)) == BLOCKS
    sparsify_activations(arcee)
    assert torch.equal(logits(model), logits(arcee))


# ---- training -----------------------------------------------------------------------------------------------------------------


class StraightThrough(nn.Module):
    """An MLP by plain autograd."""

    def __init__(self, mlp):
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x):
        h = F.relu(self.up_proj(x)).square()
        return self.down_proj(h + (reference.keep_two_of_four(h.detach()) - h).detach())


def train(model, folder, **options):
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(4 * 16).view(4, 16) * 5 % 96]
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no",
        logging_steps=1, seed=1, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=str)
def test_training_with_trainer_is_that_of_plain_autograd(options, tmp_path):
    model, twin = build(), build()
    sparsify_activations(model, replace_config(FP8, decode=True))
    for layer in twin.model.layers:
        layer.mlp = StraightThrough(layer.mlp)
    losses, trainer = train(model, tmp_path, **options)
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(train(twin, tmp_path, **options)[0], rel=1e-4)
    trained, expected = model.state_dict(), twin.state_dict()
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    # Evaluation multiplies the trained weights, rounded.
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(losses[-1], abs=1)
    trainer.save_model(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model.eval()))


def test_a_checkpoint_of_trainer_is_resumed(tmp_path):
    def run(steps, **options):
        model = build()
        sparsify_activations(model)
        rows = [{"input_ids": row, "labels": row} for row in torch.arange(4 * 16).view(4, 16) * 5 % 96]
        arguments = TrainingArguments(
            tmp_path, max_steps=steps, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, lr_scheduler_type="constant", seed=1
        )
        Trainer(model, arguments, train_dataset=rows).train(**options)
        return model

    whole = run(4)
    for folder in tmp_path.glob("checkpoint-4*"):
        folder.rename(tmp_path / "set-aside")
    resumed = run(4, resume_from_checkpoint=tmp_path / "checkpoint-2")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)


# ---- adapters -----------------------------------------------------------------------------------------------------------------


def with_adapter(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def selected_plainly(model):
    """The oracle for adapters: blocks of plain autograd around whatever the projections are."""
    for layer in model.get_base_model().model.layers:
        layer.mlp = StraightThrough(layer.mlp)
    return model


@pytest.mark.parametrize("adapter_first", [False, True], ids=["sparse-first", "adapter-first"])
def test_adapters_see_the_selected_activations(adapter_first):
    oracle, model = selected_plainly(with_adapter(build())), build()
    if adapter_first:
        model = with_adapter(model)
        report = sparsify_activations(model)
        assert all("peft.tuners.lora" in reason for block in report.replaced.values() for reason in block.apart.values())
    else:
        sparsify_activations(model)
        model = with_adapter(model)
    assert torch.equal(logits(model), logits(oracle))
    gradients = []
    for run in (model, oracle):
        run.train()(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in run.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


@pytest.mark.parametrize("config", [DECODE, replace_config(FP8, decode=True)], ids=["decode", "fp8"])
def test_a_merged_adapter_is_in_every_copy(config):
    """PEFT writes to `weight.data`, of which versions say nothing."""
    model = build()
    sparsify_activations(model, config)
    merged = with_adapter(model).merge_and_unload()
    logits(merged)  # the copies are made when they are needed
    expected = with_adapter(build()).merge_and_unload()
    sparsify_activations(expected, config)
    assert torch.equal(logits(merged), logits(expected))
    for block, twin in zip(sparse_blocks(merged).values(), sparse_blocks(expected).values(), strict=True):
        copies = copies_of(twin)
        assert copies and all(torch.equal(buffer.float(), copies[name].float()) for name, buffer in copies_of(block).items())


def test_a_hook_sees_what_is_multiplied(arcee):
    """A calibration that watches the second projection, for example."""
    sparsify_activations(arcee, replace_config(FP8, decode=True))
    seen, down = [], arcee.model.layers[0].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(arcee)
    handle.remove()
    logits(arcee)
    assert len(seen) == 1 and torch.equal(seen[0], reference.keep_two_of_four(seen[0])) and (seen[0] != 0).any()


# ---- what is dropped ------------------------------------------------------------------------------------------------------------


def test_measured_shares_are_those_of_the_activations(model):
    activations = {}
    for name, block in ((name, model.get_submodule(name)) for name in BLOCKS):
        roles = find_projections(block)
        block.get_submodule(roles.down).register_forward_pre_hook(
            lambda module, args, name=name: activations.setdefault(name, []).append(args[0])
        )
    batches = [{"input_ids": IDS}, IDS[:, :3]]
    for batch in batches:
        logits(model, input_ids=batch["input_ids"] if isinstance(batch, dict) else batch)
    expected = {name: torch.cat([h.flatten(0, -2) for h in parts]) for name, parts in activations.items()}
    found = measure_activation_sparsity(model, batches)
    assert found.keys() == BLOCKS
    for name, h in expected.items():
        kept = reference.keep_two_of_four(h)
        assert found[name].zeros == pytest.approx(float((h == 0).float().mean()))
        assert found[name].dropped_energy == pytest.approx(float(1 - kept.square().sum() / h.square().sum()), rel=1e-4)
        assert 0.3 < found[name].zeros < 0.8 and 0 < found[name].dropped_energy < 0.2
    assert not any(module._forward_hooks for module in model.modules())


def test_sparse_and_dense_models_are_measured_alike(arcee):
    dense = measure_activation_sparsity(arcee, [IDS])
    sparsify_activations(arcee, EXACT)
    assert measure_activation_sparsity(arcee, [IDS]) == dense
    named = ActivationSparsityConfig(targets=["Plain"])
    block = nn.Sequential(Plain())
    x = torch.randn(3, 8)
    statistics = measure_activation_sparsity(block, [x], named)
    sparsify_activations(block, named)
    # A sparse block is measured before its own selection, whether it is named or not.
    assert measure_activation_sparsity(block, [x]) == statistics
    with pytest.raises(ValueError, match=r"0 was not called; give at least one batch"):
        measure_activation_sparsity(block, [])


def test_statistics_of_zeros_are_zero():
    block = nn.Sequential(Plain())
    nn.init.zeros_(block[0].a.weight)
    nn.init.constant_(block[0].a.bias, -1.0)
    found = measure_activation_sparsity(block, [torch.randn(3, 8)], ActivationSparsityConfig(targets=["0"]))["0"]
    assert (found.zeros, found.dropped_energy) == (1.0, 0.0)


def test_one_operator_multiplies_a_block(arcee, monkeypatch):
    """So that a kernel that takes its place is used."""
    calls = []
    original = ops.squared_relu_linear
    monkeypatch.setattr(ops, "squared_relu_linear", lambda *args: calls.append(args) or original(*args))
    sparsify_activations(arcee, replace_config(FP8, decode=True))
    logits(arcee)
    assert len(calls) == 2
    _, gate, weight, scale, columns, bias, keep_two = calls[0]
    block = arcee.model.layers[0].mlp
    assert gate is None and weight is block.down_proj_float8 and scale is block.down_proj_scale and columns is block.down_proj_columns
    assert bias is not None and keep_two is True and isinstance(block, SquaredReluBlock)


def test_explain_asks_for_what_the_block_would_multiply(arcee, monkeypatch):
    asked = []
    monkeypatch.setattr(activation, "choose", lambda *args, **kwargs: asked.append((args, kwargs)) or "choice")
    sparsify_activations(arcee, replace_config(FP8, decode=True))
    block = arcee.model.layers[0].mlp
    with torch.no_grad():
        assert block.explain(3, torch.bfloat16) == "choice"
    n, k = block.down_proj.weight.shape
    copies = {"fp8": True, "has_columns": True}
    rest = {"gated": False, "keep_two": True}
    assert asked == [((n, k, 3, torch.bfloat16, torch.device("cpu")), {**copies, **rest})]
    block.explain(3)  # the weight would learn: no copy is multiplied
    assert asked[1] == ((n, k, 3, torch.float32, torch.device("cpu")), {**dict.fromkeys(copies, False), **rest})


def test_explain_names_what_keeps_a_layer_apart(arcee):
    sparsify_activations(arcee)
    block = arcee.model.layers[0].mlp
    choice = block.explain(1)
    assert choice.path == "dense" and choice.reasons["select_columns"] == choice.reasons["wgmma_sp"] == "cpu has no sparse tensor cores"
    block.down_proj.register_forward_hook(lambda *_: None)
    choice = block.explain(1)
    assert choice.path == "module" and set(choice.reasons.values()) == {"something is hooked to it"}

"""`prune` on tiny models: what it measures, what it leaves alone, what it refuses."""

import copy
import json
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_sparse24 import Sparse24Config, prune
from hf_sparse24.pattern import structure
from hf_sparse24.pruning import METHODS, make_batches, pack_windows, stored_masks
from tests.models import FAMILIES, SIZES, llama, load_dense, packed_names

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 8 tokens.*:UserWarning")

WORDS = ["<unk>", "</s>", "<pad>", *(f"w{number}" for number in range(93))]
IDS = torch.randint(0, 96, (6, 40), generator=torch.Generator().manual_seed(1))
CALIBRATED = [name for name in METHODS if name != "magnitude"]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def build(name="llama"):
    """A random model whose weights are dense, and large enough to matter."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.model_class._from_config(family.config()).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
        elif "bias" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def batches_for(name):
    if name in ("vit", "t5"):
        return [FAMILIES[name].inputs] * 2
    return [IDS[:3], IDS[3:]]


def inputs_of(model, batches, names):
    """(tokens, in_features) of what each layer is given, by a way of its own."""
    found = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: found[name].append(args[0].flatten(0, -2)))
        for name in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit", "opt"])
def test_reported_errors_are_those_of_inputs_captured_afterwards(name, method):
    """True sequential: each layer saw exactly what the finished model gives it."""
    model = build(name)
    dense = copy.deepcopy(model)
    report = prune(model, batches_for(name), method, true_sequential=True)
    inputs = inputs_of(model, batches_for(name), [layer.name for layer in report.layers])
    assert len(report.layers) == FAMILIES[name].num_packed
    for layer in report.layers:
        x, before, after = inputs[layer.name], dense.get_submodule(layer.name).weight, model.get_submodule(layer.name).weight
        expected = ((before - after) @ x.T).square().sum() / (before @ x.T).square().sum()
        assert layer.relative_error == pytest.approx(expected.item(), rel=2e-3, abs=1e-7)
        assert layer.tokens == len(x)


def test_without_true_sequential_a_block_is_measured_before_any_of_it_is_pruned():
    model = build()
    dense = copy.deepcopy(model)
    report = prune(model, [IDS], "sparsegpt")
    first = [layer for layer in report.layers if ".layers.0." in layer.name]
    inputs = inputs_of(dense, [IDS], [layer.name for layer in first])
    for layer in first:
        x, before, after = inputs[layer.name], dense.get_submodule(layer.name).weight, model.get_submodule(layer.name).weight
        expected = ((before - after) @ x.T).square().sum() / (before @ x.T).square().sum()
        assert layer.relative_error == pytest.approx(expected.item(), rel=1e-3)


def test_blocks_run_alone_as_in_the_whole_model(monkeypatch):
    """The chain of blocks is a shortcut: without it the result is the same."""
    alone, whole = build(), build()
    prune(alone, [IDS[:3], IDS[3:]], "obs")
    monkeypatch.setattr("hf_sparse24.pruning.blocks._is_chain", lambda calls: False)
    prune(whole, [IDS[:3], IDS[3:]], "obs")
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(weight, whole.state_dict()[name])


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt", "bert", "vit", "mixtral"])
def test_blocks_of_most_models_run_alone(name):
    from hf_sparse24.pruning.blocks import find_units

    model = build(name)
    layers = [n for n, module in model.named_modules() if type(module) is nn.Linear and n != "lm_head"]
    batch = FAMILIES[name].inputs
    units, never_run = find_units(model, layers, batch)
    assert units[0].is_chain and len(units[0].blocks) == 2 and not never_run
    assert sorted(layer for unit in units for block in unit.layers for layer in block) == sorted(layers)


@pytest.mark.parametrize("refine", [None, "cg"])
@pytest.mark.parametrize("method", METHODS)
def test_every_group_keeps_two_and_the_mask_says_which(method, refine):
    model = build().to(torch.bfloat16)
    # Ties: few different weights, as in a model that was stored in four bits.
    for parameter in model.parameters():
        parameter.data = (parameter.data * 4).round() / 4
    report = prune(model, [IDS], method, refine=refine)
    masks = stored_masks(model)
    assert set(masks) == {f"{layer.name}.weight" for layer in report.layers} and len(masks) == 14
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        assert bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())
        assert not weight[~mask].any() and not torch.signbit(weight[~mask]).any()
    assert all("_kept" not in name for name in model.state_dict())


def test_the_same_seed_gives_the_same_weights(tokenizer):
    texts = [" ".join(WORDS[3 + (i * j + i) % 90] for j in range(1, 60)) for i in range(20)]
    results = []
    for seed in (3, 3, 4):
        model = build()
        prune(model, texts, "alps", tokenizer=tokenizer, window=32, num_windows=5, seed=seed)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert any(not torch.equal(results[0][name], results[2][name]) for name in results[0])


def test_padding_is_not_counted():
    """A padded batch of an encoder gives the layers of its rows, run one by one without padding."""
    padded, single = build("bert"), build("bert")
    lengths = [7, 4, 2]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = IDS[row, :length], 1
    report = prune(padded, [{"input_ids": ids, "attention_mask": mask}], "wanda")
    expected = prune(single, [IDS[row : row + 1, :length] for row, length in enumerate(lengths)], "wanda")
    assert report.layers[0].tokens == sum(lengths)
    assert [layer.tokens for layer in report.layers] == [layer.tokens for layer in expected.layers]
    for layer, other in zip(report.layers, expected.layers, strict=True):
        assert layer.relative_error == pytest.approx(other.relative_error, rel=1e-3)


def test_layers_of_one_input_share_one_matrix(monkeypatch):
    from hf_sparse24.pruning import blocks

    added = []
    monkeypatch.setattr(
        blocks.InputSum, "add", lambda self, x: added.append(x) or setattr(self, "tokens", 1) or self.total.add_(torch.eye(len(self.total)))
    )
    prune(build(), [IDS], "wanda")
    assert len(added) == 2 * 4  # q/k/v, o, gate/up, down


def test_conv1d_is_pruned_along_its_inputs():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    dense = copy.deepcopy(model)
    report = prune(model, [IDS], "sparsegpt", targets=["Conv1D"], true_sequential=True)
    assert len(report.layers) == 8
    inputs = inputs_of(model, [IDS], [layer.name for layer in report.layers])
    for layer in report.layers:
        module, before = model.get_submodule(layer.name), dense.get_submodule(layer.name).weight
        assert structure(module.weight.T).kind == "2:4"
        assert module.weight_kept.shape == module.weight.shape and not module.weight[~module.weight_kept].any()
        x = inputs[layer.name]
        expected = (x @ (before - module.weight)).square().sum() / (x @ before).square().sum()
        assert layer.relative_error == pytest.approx(expected.item(), rel=2e-3)


def test_a_method_for_each_kind_of_layer():
    report = prune(build(), [IDS], {"re:.*self_attn": "wanda", "model.layers.1.mlp.down_proj": "obs", "Linear": "magnitude"})
    for layer in report.layers:
        expected = "wanda" if "self_attn" in layer.name else "obs" if layer.name == "model.layers.1.mlp.down_proj" else "magnitude"
        assert layer.method == expected
    with pytest.raises(ValueError, match=r"no method is given for model\.layers\.0\.mlp\.gate_proj"):
        prune(build(), [IDS], {"re:.*self_attn": "wanda"})


@pytest.mark.parametrize("pattern", ["4:8", "6:8", "1:4"])
def test_other_patterns(pattern):
    model = build()
    report = prune(model, [IDS], "alps", pattern=pattern)
    assert {structure(model.get_submodule(layer.name).weight).kind for layer in report.layers} == {pattern}
    assert report.pattern == pattern


def test_unstructured_ratio():
    model = build()
    prune(model, [IDS], "sparsegpt", pattern=0.5)
    mask = model.model.layers[0].mlp.up_proj.weight_kept
    assert bool((mask.sum(1) == 16).all()) and bool((mask.unflatten(1, (-1, 4)).sum(-1) != 2).any())


def test_without_calibration_it_is_magnitude():
    model, dense = build(), build()
    report = prune(model)
    assert report.method == "magnitude" and report.layers[0].tokens == 0
    for layer in report.layers:
        before, after = dense.get_submodule(layer.name).weight, model.get_submodule(layer.name).weight
        assert layer.relative_error == pytest.approx(((before - after).square().sum() / before.square().sum()).item(), rel=1e-4)
        assert layer.dropped == layer.elements // 2


def test_weights_beyond_float32_stay_as_they_are():
    model = build().double()
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data += 1e-12
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    prune(model, [IDS], "wanda")
    for name, mask in stored_masks(model).items():
        assert torch.equal(model.get_parameter(name), expected[name] * mask)
        assert not torch.equal(model.get_parameter(name), before.get_parameter(name) * mask)


def test_pruned_with_a_method_and_saved_comes_back(tmp_path):
    model = build()
    prune(model, [IDS], "alps")
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    loaded = load_dense(tmp_path)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_few_tokens_are_warned_of_and_many_are_not():
    with pytest.warns(UserWarning, match=r"14 layers were fitted to fewer than 8 tokens.*down_proj: 240 tokens for 64 inputs"):
        prune(build(), [IDS], "obs")
    many = torch.randint(0, 96, (16, 40), generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prune(build(), [many], "obs")
        prune(build(), [IDS], "wanda")


def test_layers_that_never_run_are_listed_and_warned_of():
    model = build("llava")
    with pytest.warns(UserWarning, match="layers stay dense: .*no calibration input reached it"):
        report = prune(model, [IDS], "wanda")
    assert len(report.layers) == 14 and any("vision_tower" in name for name in report.left_dense)


class Switch(nn.Module):
    """Experts as modules of their own: a row goes to one of three, and never to the last."""

    def __init__(self, expert):
        super().__init__()
        self.experts = nn.ModuleList([expert, copy.deepcopy(expert), copy.deepcopy(expert)])

    def forward(self, x):
        return torch.cat([self.experts[index % 2](row[None]) for index, row in enumerate(x)])


@pytest.mark.parametrize("true_sequential", [False, True])
def test_layers_that_run_on_some_rows_only_are_pruned_on_those(true_sequential):
    model = build()
    model.model.layers[1].mlp = Switch(model.model.layers[1].mlp)
    with pytest.warns(UserWarning, match="3 layers stay dense"):
        report = prune(model, [IDS], "wanda", true_sequential=true_sequential)
    assert len(report.layers) == 14 + 3
    assert all(".experts.2." in name for name in report.left_dense) and len(report.left_dense) == 3
    tokens = {layer.name: layer.tokens for layer in report.layers if layer.name.endswith("up_proj") and "experts" in layer.name}
    assert list(tokens.values()) == [IDS.numel() // 2] * 2


def test_a_layer_that_is_given_no_rows_stays_dense():
    """As experts are, in code that calls each of them whether or not tokens are routed to it."""

    class WithoutRows(Switch):
        def forward(self, x):
            self.experts[2](x[:0])
            return super().forward(x)

    model = build()
    model.model.layers[1].mlp = WithoutRows(model.model.layers[1].mlp)
    with pytest.warns(UserWarning, match="3 layers stay dense: .*no calibration input reached it"):
        report = prune(model, [IDS], "wanda")
    assert all(".experts.2." in name for name in report.left_dense) and len(report.left_dense) == 3
    assert all(layer.tokens for layer in report.layers)


def test_after_layer_gets_each_layer_before_anything_runs_on_it():
    model, seen = build(), []

    def zero_out(name, module, hessian):
        seen.append((name, hessian.shape))
        module.weight.zero_()

    report = prune(model, [IDS], "wanda", true_sequential=True, after_layer=zero_out)
    assert [name for name, _ in seen] == [layer.name for layer in report.layers]
    assert seen[0][1] == (32, 32)
    # q, k and v were zero by the time o was watched: its inputs were, too.
    assert next(layer for layer in report.layers if layer.name.endswith("0.self_attn.o_proj")).relative_error == 0


# ---- the report ------------------------------------------------------------------------------------------------------------


def test_report_as_text_json_and_picture():
    report = prune(build(), [IDS], "obs", ignore=["lm_head", "re:.*v_proj"])
    text = str(report)
    assert "model.layers.1.mlp.down_proj" in text and "12 layers, 2:4: mean relative error" in text
    loaded = json.loads(report.to_json())
    assert loaded["layers"][0]["name"] == report.layers[0].name and loaded["relative_error"] == report.relative_error
    svg = report.to_svg()
    assert svg.count("<polyline") == 6 and svg.count("<circle") == 12 and ">down_proj</text>" in svg


# ---- calibration -----------------------------------------------------------------------------------------------------------


def test_causal_windows_are_packed(tokenizer):
    texts = ["w0 w1 w2", "w3 w4", "w5 w6 w7 w8"]
    windows = pack_windows(texts, tokenizer, 4, 10)
    assert windows.tolist() == [[3, 4, 5, 1], [6, 7, 1, 8], [9, 10, 11, 1]]
    model = llama()
    for calibration in (texts, [{"text": text} for text in texts]):
        batches = make_batches(calibration, model, tokenizer, window=4, batch_size=2)
        assert [batch["input_ids"].tolist() for batch in batches] == [windows[:2].tolist(), windows[2:].tolist()]
        assert all(set(batch) == {"input_ids"} for batch in batches)


def test_encoders_get_padded_rows(tokenizer):
    (batch,) = make_batches(["w0 w1 w2", "w3"], build("bert"), tokenizer)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_text_file(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("w0 w1\n\nw2 w3\n")
    assert make_batches(file, llama(), tokenizer, window=6)[0]["input_ids"].tolist() == [[3, 4, 1, 5, 6, 1]]
    assert make_batches(str(file), llama(), tokenizer, window=6)[0]["input_ids"].shape == (1, 6)


def test_token_batches_are_taken_as_they_are():
    as_ids = [batch["input_ids"] for batch in make_batches(IDS, llama(), batch_size=4)]
    assert [len(ids) for ids in as_ids] == [4, 2] and torch.equal(torch.cat(as_ids), IDS)
    assert make_batches([[1, 2], [3, 4]], llama())[0]["input_ids"].tolist() == [[1, 2]]
    given = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    assert set(make_batches([given], llama())[0]) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "calibration is empty"),
        ("no/such/file", "'no/such/file' is not a file; give one text as"),
        (["a text"], "need a tokenizer"),
        ([torch.rand(2, 3)], "token ids must be integers"),
    ],
)
def test_bad_calibration(calibration, message):
    with pytest.raises(ValueError, match=message):
        prune(build(), calibration)


# ---- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method must be one of magnitude, wanda, ria, sparsegpt, obs, alps; got 'best'"),
        ({"refine": "sgd"}, "refine must be 'cg' or None"),
        ({"method": "wanda"}, "without calibration there is only method 'magnitude'"),
        ({"refine": "cg"}, "without calibration there is only method 'magnitude'"),
        ({"pattern": "3:5"}, "no targeted layer can be pruned: .*in_features 32 is not a multiple of 5"),
        ({"calibration": IDS, "targets": ["Nothing"]}, "matches no module"),
    ],
)
def test_bad_settings(options, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        prune(model, **options)
    assert not stored_masks(model)


def test_inputs_that_are_not_finite_name_the_layer():
    model = build()
    model.model.layers[1].input_layernorm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj cannot be pruned by alps: its inputs hold NaN"):
        prune(model, [IDS])


def test_a_failing_factorisation_names_the_layer(monkeypatch):
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix, **_: (matrix, torch.tensor(1)))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj cannot be pruned by sparsegpt: .*no positive definite"):
        prune(build(), [IDS], "sparsegpt")


def test_packed_layers_are_left_alone(tmp_path):
    from tests.models import load_kept

    llama().save_pretrained(tmp_path, sparsity_config=Sparse24Config(ignore=["lm_head", "re:.*mlp"]))
    model = load_kept(tmp_path)
    report = prune(model, [IDS], "wanda")
    assert set(report.left_dense.values()) == {"packed already"} and set(report.left_dense) == packed_names(model)
    assert len(report.layers) == 6


def test_the_training_flag_is_put_back():
    model = build().train()
    prune(model, [IDS], "wanda")
    assert model.training
    assert SIZES["hidden_size"] == model.config.hidden_size

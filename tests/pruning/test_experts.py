"""Merged experts in `prune`: what is measured of each, what few tokens do, and that the model is whole again afterwards."""

import pytest
import torch
from torch import nn

from hf_sparse24 import Sparse24Config, prune
from hf_sparse24.experts import packed_experts
from hf_sparse24.merged import find_merged
from hf_sparse24.pattern import find_bad_groups
from hf_sparse24.pruning import METHODS, experts, keep_masks, one_shot, stored_masks
from hf_sparse24.pruning.experts import ApartExperts, ExpertLinear, experts_apart, statistics
from hf_sparse24.pruning.hessian import InputSum
from tests.models import FAMILIES, load_dense, load_kept, logits, same_bytes, two_of_four

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 8 tokens.*:UserWarning")

IDS = torch.randint(0, 96, (6, 40), generator=torch.Generator().manual_seed(1))
NAMES = ["mixtral", "qwen3-moe"]
PROJECTIONS = ("gate_up_proj", "down_proj")


def build(name):
    """A random model whose weights are dense, and large enough to matter."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.model_class._from_config(family.config()).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return model


def expert_modules(model):
    return [layer.mlp.experts for layer in model.model.layers]


def without(model, expert):
    """The router of the first layer never chooses an expert."""
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def elsewhere(hidden_states):
        scores, weights, index = forward(hidden_states)
        return scores, weights, torch.where(index == expert, (expert + 1) % 4, index)

    gate.forward = elsewhere
    return model


@pytest.mark.parametrize("name", NAMES)
def test_apart_and_together_again_nothing_changes(name):
    model = build(name)
    expected, parameters = logits(model), dict(model.named_parameters())
    modules, state = expert_modules(model), {key: value.clone() for key, value in model.state_dict().items()}
    with experts_apart(model):
        assert all(isinstance(module, ApartExperts) for module in expert_modules(model))
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
        apart = {key for key, module in model.named_modules() if isinstance(module, ExpertLinear)}
        assert apart == {key for merged in find_merged(build(name))[0].values() for key, _ in merged.places()} and len(apart) == 24
    assert all(again is module for again, module in zip(expert_modules(model), modules, strict=True))
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert all(same_bytes(value, state[key]) for key, value in model.state_dict().items())


def test_moving_moves_the_merged_weights_of_which_layers_are_views():
    model = build("mixtral")
    with experts_apart(model):
        (apart, _) = expert_modules(model)
        apart.to(torch.float64)
        for projection in PROJECTIONS:
            merged = getattr(apart.dense, projection)
            assert merged.dtype == torch.float64
            for layer, place in apart.layers(projection):
                assert layer.weight.data_ptr() == merged[place].data_ptr()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_every_group_keeps_two_and_the_mask_says_which(name, method):
    model = build(name)
    report = prune(model, [IDS[:3], IDS[3:]], method)
    assert len(report.layers) == 8 + 24 and not report.left_dense
    for module in expert_modules(model):
        for projection in PROJECTIONS:
            weight, mask = getattr(module, projection), module.get_buffer(f"{projection}_kept")
            assert bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())
            assert not weight[~mask].any() and find_bad_groups(weight.flatten(0, 1)) is None
    assert sum("experts" in key for key in stored_masks(model)) == 4


def inputs_of_experts(model, batches):
    """(tokens, in_features) that each expert's first and second projection is given, by a way of its own: the merged weights."""
    found = {}

    def note(name, module, args):
        hidden, index, _ = args
        for expert in index.unique().tolist():
            rows = hidden[(index == expert).any(-1)]
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, -1)
            for projection, x in zip(PROJECTIONS, (rows, module.act_fn(gate) * up), strict=True):
                found.setdefault((name, expert, projection), []).append(x)

    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: note(name, module, args))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {key: torch.cat(rows) for key, rows in found.items()}


@pytest.mark.parametrize("method", ["wanda", "obs", "alps"])
@pytest.mark.parametrize("name", NAMES)
def test_reported_errors_are_those_of_the_tokens_that_were_sent_to_an_expert(name, method, monkeypatch):
    """True sequential: each expert saw exactly what the finished model gives it."""
    monkeypatch.setattr(experts, "FEW", 0)
    batches, model, dense = [IDS[:3], IDS[3:]], build(name), build(name)
    places = {member: (merged, place) for merged in find_merged(dense)[0].values() for member, place in merged.places()}
    report = prune(model, batches, method, true_sequential=True)
    inputs = inputs_of_experts(model, batches)
    layers = [layer for layer in report.layers if ".experts." in layer.name]
    assert len(layers) == 24
    for layer in layers:
        merged, place = places[layer.name]
        x = inputs[merged.experts, place[0], merged.projection]
        before, after = dense.get_parameter(merged.name)[place], model.get_parameter(merged.name)[place]
        expected = ((before - after) @ x.T).square().sum() / (before @ x.T).square().sum()
        assert layer.relative_error == pytest.approx(expected.item(), rel=2e-3, abs=1e-7)
        assert (layer.tokens, layer.fallback, layer.method) == (len(x), None, method)


def test_experts_of_a_layer_are_measured_together(monkeypatch):
    """A block runs as often as for one expert: once to see who reads the same, then for q/k/v, o, the first projections, the second."""
    stages, watch = [], one_shot._Pruner._watch
    monkeypatch.setattr(one_shot._Pruner, "_watch", lambda self, runs, names: stages.append(len(names)) or watch(self, runs, names))
    prune(without(build("mixtral"), 3), [IDS], "wanda", true_sequential=True)
    assert stages == [16, 3, 1, 8, 4] * 2


def sums(num_inputs, *counts):
    generator = torch.Generator().manual_seed(3)
    for count in counts:
        total = InputSum(num_inputs, "cpu")
        total.add(torch.randn(count, num_inputs, generator=generator))
        yield total


def layer_of(is_first):
    return ExpertLinear(torch.zeros(8, 16), "experts", "gate_up_proj", is_first, nn.Linear)


def test_statistics_are_blended_below_two_tokens_an_input():
    enough, few, whole = sums(16, 32, 31, 100)
    found, fallback = statistics(layer_of(True), "alps", True, enough, whole)
    assert torch.equal(found, enough.hessian()) and fallback is None
    found, fallback = statistics(layer_of(True), "alps", True, few, whole)
    torch.testing.assert_close(found, (31 * few.hessian() + 16 * whole.hessian()) / 47)
    assert (fallback.reason, fallback.method) == ("few tokens: 34% of the statistics are of the layer's 100", None)
    found, fallback = statistics(layer_of(True), "alps", True, None, whole)
    torch.testing.assert_close(found, whole.hessian())
    assert fallback.reason.startswith("few tokens: 100% of")


def test_second_projections_with_few_tokens_take_a_method_that_asks_for_less():
    few, whole = sums(16, 31, 100)
    for method, adapts, own, expected in (
        ("alps", True, few, "wanda"),
        ("ria", False, few, None),
        ("magnitude", False, few, None),
        ("ria", False, None, "magnitude"),
    ):
        hessian, fallback = statistics(layer_of(False), method, adapts, own, whole)
        assert (fallback and fallback.method) == expected, method
        assert hessian is None if own is None else torch.equal(hessian, few.hessian())


@pytest.mark.parametrize("true_sequential", [False, True])
@pytest.mark.parametrize("refine", [None, "cg"])
def test_an_expert_that_no_token_reaches_is_pruned_all_the_same(true_sequential, refine):
    model = without(build("mixtral"), 3)
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = prune(model, [IDS[:3], IDS[3:]], "obs", true_sequential=true_sequential, refine=refine)
    assert not report.left_dense and len(report.layers) == 32
    unseen = {layer.name: layer for layer in report.layers if ".layers.0.mlp.experts.3." in layer.name}
    assert {layer.tokens for layer in unseen.values()} == {0} and len(unseen) == 3
    by_magnitude = unseen["model.layers.0.mlp.experts.3.w2"]
    assert (by_magnitude.method, by_magnitude.fallback) == ("magnitude", "no tokens")
    found = model.get_parameter("model.layers.0.mlp.experts.down_proj")[3]
    assert torch.equal(found, two_of_four(dense["model.layers.0.mlp.experts.down_proj"][3]))
    first = unseen["model.layers.0.mlp.experts.3.w1"]
    assert (first.method, first.fallback) == ("obs", "few tokens: 100% of the statistics are of the layer's 240")


def test_without_data_the_largest_stay():
    model, dense = build("qwen3-moe"), build("qwen3-moe")
    report = prune(model)
    assert len(report.layers) == 32
    for module, before in zip(expert_modules(model), expert_modules(dense), strict=True):
        assert all(torch.equal(getattr(module, name), two_of_four(getattr(before, name))) for name in PROJECTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_pruned_experts_are_saved_packed_and_come_back(name, tmp_path):
    model = build(name)
    prune(model, [IDS], "wanda")
    model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
    kept = load_kept(tmp_path)
    assert len(packed_experts(kept)) == 2
    assert torch.equal(logits(kept), logits(load_dense(tmp_path)))
    assert torch.equal(logits(kept), logits(model))


@pytest.mark.parametrize(
    ("options", "num_experts"),
    [
        ({"ignore": ["lm_head", "model.layers.0.mlp.experts"]}, 12),
        ({"ignore": ["lm_head", "MixtralExperts"]}, 0),
        ({"ignore": ["lm_head", "model.layers.1.mlp.experts.2.w3"]}, 23),
        ({"targets": [r"re:.*\.experts\."]}, 24),
        ({"targets": ["MixtralExperts"]}, 24),
    ],
    ids=str,
)
def test_only_selected_experts_are_touched(options, num_experts):
    model, dense = build("mixtral"), build("mixtral")
    report = prune(model, **options)
    pruned = {layer.name for layer in report.layers}
    assert sum(".experts." in name for name in pruned) == num_experts
    for merged in find_merged(dense)[0].values():
        for member, place in merged.places():
            same = torch.equal(model.get_parameter(merged.name)[place], dense.get_parameter(merged.name)[place])
            assert same == (member not in pruned), member
            mask = model.get_submodule(merged.experts)._buffers.get(f"{merged.projection}_kept")
            assert mask is None or bool(mask[place].all()) == same
    routers = [name for name in model.state_dict() if name.endswith(".gate.weight")]
    assert all(torch.equal(model.state_dict()[name], dense.state_dict()[name]) for name in routers) and len(routers) == 2


def test_what_a_callback_does_to_a_layer_is_in_the_merged_weight():
    def change(name, layer, hessian):
        if name.endswith("experts.1.w3"):
            layer.weight.fill_(3)
        if name.endswith("experts.2.w2"):
            layer.weight = nn.Parameter(torch.full_like(layer.weight, 5), requires_grad=False)

    model = build("mixtral")
    prune(model, [IDS], "wanda", after_layer=change)
    for module in expert_modules(model):
        assert bool((module.gate_up_proj[1, 64:] == 3).all()) and bool((module.down_proj[2] == 5).all())


def test_a_model_is_whole_after_an_error():
    model = build("mixtral")

    def fail(name, layer, hessian):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        prune(model, [IDS], "wanda", after_layer=fail)
    assert [type(module).__name__ for module in expert_modules(model)] == ["MixtralExperts"] * 2
    logits(model)


@pytest.mark.parametrize("from_file", [False, True])
def test_training_keeps_the_masks_of_experts(from_file, tmp_path):
    model = build("qwen3-moe")
    prune(model, [IDS], "wanda")
    masks = {name: mask.clone() for name, mask in stored_masks(model).items()}
    if from_file:
        model.save_pretrained(tmp_path, sparsity_config=Sparse24Config())
        model = load_dense(tmp_path)
    before = {name: model.get_parameter(name).detach().clone() for name in masks}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with keep_masks(model):
        for _ in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        assert not weight[~mask].any() and not torch.equal(weight, before[name]), name

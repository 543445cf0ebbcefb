"""A model that is pruned in two runs is the one that is pruned in one."""

import pytest
import torch

from hf_sparse24 import prune
from hf_sparse24.journal import open_journal
from hf_sparse24.pruning import stored_masks
from hf_sparse24.pruning.one_shot import _Pruner
from hf_sparse24.pruning.progress import prune_once
from tests.pruning.test_one_shot import IDS, build

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 8 tokens.*:UserWarning")
OPTIONS = ({"method": "obs"}, {"method": "wanda", "true_sequential": True}, {"method": "wanda", "pattern": 0.5})


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_weights_masks_and_reports_are_those_of_one_run(name, options, monkeypatch, tmp_path):
    data = [{"input_ids": IDS, **({"decoder_input_ids": IDS} if name == "t5" else {})}]
    whole, first, second = build(name), build(name), build(name)
    expected = prune(whole, data, **options)
    original, pruned = _Pruner.prune_layer, []

    def prune_layer(self, layer, *args):
        pruned.append(layer)
        if len(pruned) == len(expected.layers) - 1:
            raise Interrupted
        return original(self, layer, *args)

    monkeypatch.setattr(_Pruner, "prune_layer", prune_layer)
    with pytest.raises(Interrupted), open_journal(tmp_path / "out", options) as journal:
        prune(first, data, **options, journal=journal)
    del pruned[:]
    with open_journal(tmp_path / "out", options) as journal:
        report = prune(second, data, **options, journal=journal)
    assert 0 < len(pruned) < len(expected.layers) - 1
    assert [layer.name for layer in report.layers] == [layer.name for layer in expected.layers]
    assert [layer.relative_error for layer in report.layers] == [layer.relative_error for layer in expected.layers]
    assert report.left_dense == expected.left_dense
    for found, wanted in ((second.state_dict(), whole.state_dict()), (stored_masks(second), stored_masks(whole))):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_layers_that_are_put_back_cannot_be_quantised_on_the_way(tmp_path):
    with open_journal(tmp_path / "out", {}) as journal, pytest.raises(ValueError, match="after_layer cannot be combined with journal"):
        prune(build(), [{"input_ids": IDS}], after_layer=print, journal=journal)


def test_layers_that_no_input_reached_are_listed_by_the_next_run_too(tmp_path):
    first, second = ["another"], []
    with pytest.raises(Interrupted), open_journal(tmp_path / "out", {}) as journal:
        prune_once(journal, "block", {}, lambda: first.append("expert") or [], first)
        raise Interrupted
    with open_journal(tmp_path / "out", {}) as journal:
        assert prune_once(journal, "block", {}, lambda: pytest.fail("is finished"), second) == []
    assert second == ["expert"]

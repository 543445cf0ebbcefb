"""A ratchet: what users can type.  Growing a list here is a visible edit; shrinking one breaks somebody."""

import re

import pytest

import hf_sparse24

PUBLIC_NAMES = {
    "ActivationReport",
    "ActivationSparsityConfig",
    "ActivationStatistics",
    "CheckpointError",
    "DenseSparsityConfig",
    "FusionReport",
    "KeepMasks",
    "ModelCompressor",
    "PruneReport",
    "QuantizationScheme",
    "Sparse24Config",
    "Sparse24Experts",
    "Sparse24Linear",
    "SparseBitmaskConfig",
    "SparseBitmaskLinear",
    "SparsityConfig",
    "__version__",
    "densify_activations",
    "distill",
    "fuse_projections",
    "keep_masks",
    "measure_activation_sparsity",
    "prune",
    "sparsify_activations",
    "unfuse_projections",
}
CONFIG_DEFAULTS = {
    "targets": ["Linear"],
    "ignore": ["lm_head"],
    "on_dense": "raise",
    "quantization": None,
    "readable_by": "hf-sparse24",
    "run_compressed": None,
    "global_sparsity": 0.0,
}
SPARSE24_DEFAULTS = {**CONFIG_DEFAULTS, "fuse_projections": False}
ACTIVATION_DEFAULTS = {"pattern": "2:4", "quantization": None, "decode": False, "targets": None, "ignore": []}
# Subcommand -> its flags, without --help.
COMMAND_LINE: dict[str, set[str]] = {
    "bench": {"--chart", "--json", "--rows"},
    "compress": {"--format", "--ignore", "--json", "--on-dense", "--quantization", "--readable-by", "--targets"},
    "convert": {"--json", "--quantization", "--to"},
    "decompress": {"--json"},
    "demo": {"--json", "--max-new-tokens", "--model", "--out", "--prompt"},
    "doctor": {"--json"},
    "eval": {"--against", "--text", "--device", "--json", "--seed", "--window", "--windows"},
    "inspect": {"--html", "--json", "--mask"},
    "prune": {
        *("--calibration", "--damp", "--distill-minutes", "--ignore", "--method", "--pattern", "--refine", "--report", "--targets"),
        *("--true-sequential", "--device", "--json", "--seed", "--window", "--windows"),
    },
    "push": {
        *("--base-model", "--calibration", "--create-pr", "--dry-run", "--eval", "--json", "--limit", "--message", "--private"),
        *("--prune-report", "--revision", "--speed", "--tags"),
    },
    "verify": {"--against", "--json", "--strict"},
}


def test_public_names_are_the_listed_ones():
    assert set(hf_sparse24.__all__) == PUBLIC_NAMES
    assert all(hasattr(hf_sparse24, name) for name in PUBLIC_NAMES)


@pytest.mark.parametrize("name", ["DenseSparsityConfig", "Sparse24Config", "SparseBitmaskConfig"])
def test_config_fields_and_defaults_are_the_listed_ones(name):
    assert getattr(hf_sparse24, name)().model_dump() == (SPARSE24_DEFAULTS if name == "Sparse24Config" else CONFIG_DEFAULTS)


def test_fields_and_defaults_of_activation_sparsity_are_the_listed_ones():
    assert hf_sparse24.ActivationSparsityConfig().model_dump() == ACTIVATION_DEFAULTS


@pytest.fixture
def read_help(monkeypatch, capsys):
    """What `hf-sparse24 ... --help` prints."""
    from hf_sparse24 import cli

    def read(*command: str) -> str:
        monkeypatch.setattr("sys.argv", ["hf-sparse24", *command, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main()
        return capsys.readouterr().out

    return read


def test_subcommands_are_the_listed_ones(read_help):
    shown = re.search(r"\{([\w,-]+)\}", read_help())
    assert shown and set(shown[1].split(",")) == set(COMMAND_LINE)


@pytest.mark.parametrize("command", COMMAND_LINE)
def test_flags_are_the_listed_ones(command, read_help):
    usage = read_help(command).partition("\n\n")[0]
    assert set(re.findall(r"(?<!\w)--[a-z][\w-]*", usage)) - {"--help"} == COMMAND_LINE[command]

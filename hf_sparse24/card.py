"""Model cards: what a checkpoint's files say of it, and what was measured of it, in words that Markdown and the Hub understand.

A card is made of `contents`, which `describe_folder` reads from headers, file sizes and config.json, and of `Evidence`, which
files cannot tell: how the weights came to be, and what quality and speed were measured.  Nothing else is claimed.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import transformers
import yaml  # type: ignore[import-untyped]
from huggingface_hub import CardData, ModelCard, ModelCardData, RepoCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor

from hf_sparse24.checkpoint import CONFIG_NAME, as_dense, find_packed, open_checkpoint, size_bytes
from hf_sparse24.config import CONFIGS, GUARD, Sparse24Config, parse_config
from hf_sparse24.errors import CheckpointError
from hf_sparse24.evidence import NOTHING, Evidence, pruning_facts, show_number, speed_facts
from hf_sparse24.quantization import QuantizationScheme

CARD_NAME = "README.md"
BEGIN, END = "<!-- hf-sparse24: begin", "<!-- hf-sparse24: end -->"
# No begin within: a mark that lost its partner takes nothing of the user's with it.
SECTION = re.compile(rf"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)
# What `transformers.utils.hub.create_and_tag_model_card` fills the client's template with.
DEFAULT_DESCRIPTION = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been automatically generated."
)
# What a packed model is in the same way as the model that it was made of.
CARRIED_OVER = ("license", "license_name", "license_link", "language", "pipeline_tag")


def card_for(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    base_card: Mapping[str, Any] | None = None,
    existing: str | None = None,
    tags: Iterable[str] | str | None = None,
    evidence: Evidence = NOTHING,
) -> RepoCard:
    """The model card of a compressed checkpoint; needs no network and no token.

    Args:
        folder: A checkpoint with packed weights; only headers and file sizes are read.
        repo_id: The name under which the card says to load it; the folder's if None.
        base_model: Repository of the model that this one was made from.
        base_card: Metadata of its card: licence, language and task are carried over.
        existing: The card that is there.  Its metadata win over ours, the tags of both are kept.  Its text stays, and ours goes
            between two comments, at its end or where they were; Transformers' default text is replaced.
        tags: Further tags.
        evidence: How the weights came to be, and what was measured.

    Returns:
        The card: a `RepoCard`, for `ModelCard` drops parts of a `model-index`.

    Raises:
        CheckpointError: The folder is damaged, or its config.json does not say that weights are packed.
        ValueError: `existing` has metadata that cannot be parsed, or `evidence` is none of this checkpoint.
    """
    folder = Path(folder)
    old = parse_card(existing, "existing") if existing is not None else None
    contents = {**describe_folder(folder), "repo_id": repo_id or folder.resolve().name}
    return make_card(contents, base_model=base_model, base_card=base_card, old=old, tags=tags, evidence=evidence)


def describe_folder(folder: str | Path) -> dict[str, Any]:
    """What the card says of a checkpoint, from headers, file sizes and config.json: plain data, by the names in the template.

    Raises:
        CheckpointError: The folder is damaged, or its config.json does not say that weights are packed.
    """
    folder = Path(folder)
    with open_checkpoint(folder) as checkpoint:
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        if not packed:
            raise CheckpointError(f"{folder}: none of its weights is packed: save it with sparsity_config=, or use `hf upload`")
        sparsity = parse_config(checkpoint.config).sparsity
        if sparsity is None or sparsity.structure is None:
            raise CheckpointError(f"{folder / CONFIG_NAME}: does not say that weights are packed: save them again with sparsity_config=")
        by_format = defaultdict(list)
        for weight in packed.values():
            by_format[weight.compressor.format].append((weight.stored_bytes, size_bytes(weight)))
        compressors = {weight.compressor.format: weight.compressor for weight in packed.values()}
        dense = as_dense(checkpoint.tensors, packed)
        layers = Counter((*w.shape, w.get_dtype(), w.compressor.format) for w in packed.values() if len(w.shape) == 2)
        block = checkpoint.config.get("quantization_config") or {}
        return {
            "named_base": checkpoint.config.get("_name_or_path"),
            "config_class": CONFIGS[sparsity.format].__name__,
            "readable_by": sparsity.readable_by,
            "guard": GUARD if GUARD in (block.get("config_groups") or {}) else None,
            "architecture": next(iter(as_list(checkpoint.config.get("architectures"))), None),
            "packed": {name: [len(sizes), *map(sum, zip(*sizes, strict=True))] for name, sizes in sorted(by_format.items())},
            "two_four": sorted(name for name, compressor in compressors.items() if compressor.config_format == Sparse24Config.format),
            "sparse": sorted({weight.compressor.format for weight in packed.values() if weight.num_values < prod(weight.shape)}),
            "layers": [[*layer, number] for layer, number in sorted(layers.items())],
            "scheme": sparsity.quantization and sparsity.quantization.model_dump(),
            "quant_method": block.get("quant_method"),
            "num_dense": len(dense) - len(packed),
            "num_files": len(checkpoint.shards),
            "file_bytes": sum((folder / file).stat().st_size for file in checkpoint.shards),
            # None is a tensor in memory: files hold slices.
            "dense_bytes": sum(size_bytes(value) for value in dense.values() if not isinstance(value, Tensor)),
        }


def make_card(
    contents: Mapping[str, Any],
    *,
    base_model: str | None = None,
    base_card: Mapping[str, Any] | None = None,
    old: RepoCard | None = None,
    tags: Iterable[str] | str | None = None,
    evidence: Evidence = NOTHING,
) -> RepoCard:
    """A card from what `describe_folder` found; the arguments are `card_for`'s.

    Args:
        contents: Of `describe_folder`, with `repo_id`, and `branch` if it is not the main one.
        base_model: Repository of the model that this one was made from.
        base_card: Metadata of its card.
        old: The card that is there.
        tags: Further tags.
        evidence: How the weights came to be, and what was measured.

    Raises:
        ValueError: `evidence` is none of this checkpoint.
    """
    theirs = _without_local_bases(old.data.to_dict() if old else {})
    ours: dict[str, Any] = {"library_name": "transformers"}
    if base_model and theirs.get("base_model", base_model) in (base_model, [base_model]):
        ours |= {key: base_card[key] for key in CARRIED_OVER if base_card and base_card.get(key)}
        ours |= {"base_model": base_model, "base_model_relation": "quantized"}
    two_four = ["2:4"] if contents["two_four"] else []
    all_tags = dict.fromkeys([*as_list(theirs.get("tags")), "sparse24", *two_four, *as_list(tags)])
    data = {**ours, **theirs, "tags": list(all_tags)}
    scheme = contents["scheme"] and QuantizationScheme(**contents["scheme"])
    new = RepoCard.from_template(
        CardData(**data),
        template_str=resources.files("hf_sparse24").joinpath("model_card.md").read_text(encoding="utf-8"),
        **{**contents, "scheme": scheme},
        auto_class=_auto_class(contents["architecture"]),
        base_models=as_list(theirs.get("base_model") or base_model),
        license=data.get("license_name") or data.get("license"),
        license_is_carried="license" in ours and "license" not in theirs,
        pruned=evidence.prune and pruning_facts(evidence.prune, contents),
        speeds=[speed_facts(measured, contents, scheme) for measured in evidence.speeds],
        evidence=evidence,
        show=show_number,
    )
    if old is None or is_default(old):
        return new
    section = SECTION.findall(new.text)[0]
    text, num_replaced = SECTION.subn(lambda _: section, old.text, count=1)
    old.data, old.text = new.data, text if num_replaced else f"{old.text.rstrip()}\n\n{section}\n"
    return old


# ---- cards that are there ------------------------------------------------------------------------------------------------


def read_card(file: str | Path) -> RepoCard | None:
    """The card in a file, None if there is no file.

    Raises:
        ValueError: Its metadata cannot be parsed.
    """
    file = Path(file)
    # Not read_text: that would change line ends.
    return parse_card(file.read_bytes().decode("utf-8-sig"), str(file)) if file.is_file() else None


def parse_card(text: str, where: str) -> RepoCard:
    """A card from its text.

    Raises:
        ValueError: Its metadata cannot be parsed; names `where`.
    """
    try:
        return RepoCard(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: the metadata of this model card cannot be parsed ({error}): correct or remove it") from None


def is_default(card: RepoCard) -> bool:
    """Whether a card says nothing that the one which Transformers makes by default does not say."""
    default = ModelCard.from_template(ModelCardData(), model_description=DEFAULT_DESCRIPTION)
    return set(card.text.splitlines()) <= {*default.text.splitlines(), ""}


def is_repo_id(name: Any) -> bool:
    """Whether the Hub could have a repository of this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name is not None


def as_list(value: Any) -> list[Any]:
    """One value, several or none, as metadata of cards and configs have them."""
    return [] if value is None else list(value) if isinstance(value, list | tuple | set) else [value]


def _without_local_bases(metadata: dict[str, Any]) -> dict[str, Any]:
    """Card metadata without base models that the Hub would refuse: Trainer writes the path that it was given."""
    bases = as_list(metadata.get("base_model"))
    kept = [name for name in bases if is_repo_id(name)]
    if kept == bases:
        return metadata
    warnings.warn(f"{CARD_NAME}: base_model {metadata['base_model']!r} is not the name of a repository, it is left out", stacklevel=4)
    return {key: kept if key == "base_model" else value for key, value in metadata.items() if key != "base_model" or kept}


def _auto_class(architecture: str | None) -> str:
    """Name of the class in Transformers that opens a model with its head."""
    task = re.fullmatch(r"\w+?(For[A-Z]\w+)", str(architecture))
    candidates = [f"AutoModel{task[1]}", task[0]] if task else []
    return next((name for name in candidates if hasattr(transformers, name)), "AutoModel")

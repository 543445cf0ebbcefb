"""Publishing a checkpoint folder on the Hub, with a model card whose numbers are measured from the files.

A push is one commit, made by `create_commit`: `upload_folder` makes several where hf_xet is installed.  Blobs are sent before
that commit, and the Hub keeps them: a push that was interrupted is repeated, and sends what is missing.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import transformers
import yaml  # type: ignore[import-untyped]
from huggingface_hub import CardData, CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData, RepoCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_sparse24.checkpoint import CONFIG_NAME, as_dense, find_packed, open_checkpoint, size_bytes
from hf_sparse24.config import CONFIGS, GUARD, Sparse24Config, parse_config
from hf_sparse24.errors import CheckpointError
from hf_sparse24.staging import WEIGHT_FILES

CARD_NAME = "README.md"
BEGIN, END = "<!-- hf-sparse24: begin", "<!-- hf-sparse24: end -->"
# No begin within: a mark that lost its partner takes nothing of the user's with it.
SECTION = re.compile(rf"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)
# What `transformers.utils.hub.create_and_tag_model_card` fills the client's template with.
DEFAULT_DESCRIPTION = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been automatically generated."
)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: Iterable[str] | str | None = None,
    base_model: str | None = None,
    files: Iterable[str] | None = None,
) -> CommitInfo:
    """Upload a compressed checkpoint, with a model card, in one commit; the folder itself is not changed.

    Args:
        folder: A checkpoint with packed weights.  Hidden files and folders in it stay behind.
        repo_id: The repository, made if it is missing.  Of its other files only weights of the main set go (model.safetensors,
            its index, its shards): readers would mix them up with, or prefer them to, the new ones.
        commit_message: First line of the commit.
        commit_description: The rest of it.
        private: True makes a new repository private, and refuses one that is public.
        token: Token of the Hub; None takes the one that is logged in.
        revision: A branch, made if it is missing.
        create_pr: Open a pull request instead of committing.
        tags: Further tags of the card.
        base_model: The model this one was made from.  A local path, `repo_id` itself, and what the Hub does not know are left out.
        files: Names within the folder, to upload only those; the card is always written.

    Returns:
        The commit; as a string it is its URL.

    Raises:
        CheckpointError: The folder is damaged, or its config.json does not say that weights are packed; no repository was made.
        ValueError: The existing README.md cannot be parsed, or `private=True` and the repository is public; nothing was uploaded.
    """
    folder = Path(folder)
    contents, card = _inspect(folder), _read_card(folder / CARD_NAME)  # refuse before there is a repository
    names = set(files) if files is not None else {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = {name for name in names if not re.search(r"(^|/)\.", name)} - {CARD_NAME}

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise ValueError(f"private=True, but {repo_id} exists and is public: make it private in its settings, or leave private out")
    branch = None if revision is None or revision.startswith("refs/") else revision
    if branch is not None:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    present = api.list_repo_files(repo_id, revision=revision)
    if CARD_NAME in present and (card is None or _is_default(card)):
        card = _read_card(api.hf_hub_download(repo_id, CARD_NAME, revision=revision))
    base_model = _known_base(api, base_model or contents["config"].get("_name_or_path"), repo_id)
    new_card = _card({**contents, "repo_id": repo_id, "branch": branch}, base_model, card, tags)
    added = [CommitOperationAdd(name, str(folder / name)) for name in sorted(names)]
    stale = [CommitOperationDelete(name) for name in present if _is_weights_file(name) and name not in names]
    return api.create_commit(
        repo_id,
        [*added, CommitOperationAdd(CARD_NAME, new_card.content.encode()), *stale],
        commit_message=commit_message or f"Upload {contents['architecture'] or 'model'}, packed with hf-sparse24",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def card_for(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    existing: str | None = None,
    tags: Iterable[str] | str | None = None,
) -> RepoCard:
    """The model card of a compressed checkpoint; needs no network and no token.

    Args:
        folder: A checkpoint with packed weights; only headers and file sizes are read.
        repo_id: The name under which the card says to load it; the folder's if None.
        base_model: Repository of the model that this one was made from.
        existing: The card that is there.  Its metadata win over ours, the tags of both are kept.  Its text stays, and ours goes
            between two comments, at its end or where they were; Transformers' default text is replaced.
        tags: Further tags.

    Returns:
        The card: a `RepoCard`, for `ModelCard` drops parts of a `model-index`.

    Raises:
        CheckpointError: The folder is damaged, or its config.json does not say that weights are packed.
        ValueError: `existing` has metadata that cannot be parsed.
    """
    folder = Path(folder)
    old = _parse_card(existing, "existing") if existing is not None else None
    return _card({**_inspect(folder), "repo_id": repo_id or folder.resolve().name}, base_model, old, tags)


def _inspect(folder: Path) -> dict[str, Any]:
    """What the card says of a checkpoint, from headers, file sizes and config.json, by the names that the template has for it."""
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
        block = checkpoint.config.get("quantization_config") or {}
        return {
            "config": checkpoint.config,
            "config_class": CONFIGS[sparsity.format].__name__,
            "readable_by": sparsity.readable_by,
            "guard": GUARD if GUARD in (block.get("config_groups") or {}) else None,
            "architecture": next(iter(_as_list(checkpoint.config.get("architectures"))), None),
            "packed": {name: (len(sizes), *map(sum, zip(*sizes, strict=True))) for name, sizes in sorted(by_format.items())},
            "two_four": {name for name, compressor in compressors.items() if compressor.config_format == Sparse24Config.format},
            "sparse": {weight.compressor.format for weight in packed.values() if weight.num_values < prod(weight.shape)},
            "scheme": sparsity.quantization,
            "quant_method": block.get("quant_method"),
            "num_dense": len(as_dense(checkpoint.tensors, packed)) - len(packed),
            "num_files": len(checkpoint.shards),
            "file_bytes": sum((folder / file).stat().st_size for file in checkpoint.shards),
        }


def _card(contents: dict[str, Any], base_model: str | None, old: RepoCard | None, tags: Iterable[str] | str | None) -> RepoCard:
    theirs = _without_local_bases(old.data.to_dict() if old else {})
    ours: dict[str, Any] = {"library_name": "transformers"}
    if base_model and theirs.get("base_model", base_model) in (base_model, [base_model]):
        ours |= {"base_model": base_model, "base_model_relation": "quantized"}
    two_four = ["2:4"] if contents["two_four"] else []
    all_tags = dict.fromkeys([*_as_list(theirs.get("tags")), "sparse24", *two_four, *_as_list(tags)])
    new = RepoCard.from_template(
        CardData(**{**ours, **theirs, "tags": list(all_tags)}),
        template_str=resources.files("hf_sparse24").joinpath("model_card.md").read_text(encoding="utf-8"),
        **contents,
        auto_class=_auto_class(contents["architecture"]),
        base_models=_as_list(theirs.get("base_model") or base_model),
    )
    if old is None or _is_default(old):
        return new
    section = SECTION.findall(new.text)[0]
    text, num_replaced = SECTION.subn(lambda _: section, old.text, count=1)
    old.data, old.text = new.data, text if num_replaced else f"{old.text.rstrip()}\n\n{section}\n"
    return old


def _read_card(file: str | Path) -> RepoCard | None:
    file = Path(file)
    # Not read_text: that would change line ends.
    return _parse_card(file.read_bytes().decode("utf-8-sig"), str(file)) if file.is_file() else None


def _parse_card(text: str, where: str) -> RepoCard:
    try:
        return RepoCard(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: the metadata of this model card cannot be parsed ({error}): correct or remove it") from None


def _is_default(card: RepoCard) -> bool:
    """Whether a card says nothing that the one which Transformers makes by default does not say."""
    default = ModelCard.from_template(ModelCardData(), model_description=DEFAULT_DESCRIPTION)
    return set(card.text.splitlines()) <= {*default.text.splitlines(), ""}


def _without_local_bases(metadata: dict[str, Any]) -> dict[str, Any]:
    """Card metadata without base models that the Hub would refuse: Trainer writes the path that it was given."""
    bases = _as_list(metadata.get("base_model"))
    kept = [name for name in bases if _is_repo_id(name)]
    if kept == bases:
        return metadata
    warnings.warn(f"{CARD_NAME}: base_model {metadata['base_model']!r} is not the name of a repository, it is left out", stacklevel=4)
    return {key: kept if key == "base_model" else value for key, value in metadata.items() if key != "base_model" or kept}


def _known_base(api: HfApi, name: str | None, repo_id: str) -> str | None:
    """The base model, if the card can link to it."""
    if not name or name == repo_id or not _is_repo_id(name) or Path(name).exists():
        return None
    if not api.repo_exists(name):
        warnings.warn(f"the Hub does not know the base model {name}: it is left out of the model card", stacklevel=3)
        return None
    return name


def _is_repo_id(name: Any) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name is not None


def _is_weights_file(name: str) -> bool:
    """Whether a file is one of a repository's main set of weights; `staging` replaces the same ones on disk."""
    match = WEIGHT_FILES.fullmatch(name)
    return match is not None and not (match[1] or match[3])


def _auto_class(architecture: str | None) -> str:
    """Name of the class in Transformers that opens a model with its head."""
    task = re.fullmatch(r"\w+?(For[A-Z]\w+)", str(architecture))
    candidates = [f"AutoModel{task[1]}", task[0]] if task else []
    return next((name for name in candidates if hasattr(transformers, name)), "AutoModel")


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple | set) else [value]

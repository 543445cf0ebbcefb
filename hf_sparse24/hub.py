"""Publishing a checkpoint folder on the Hub: verified, with its model card, in one commit.

The commit is made by `create_commit`: `upload_folder` makes several where hf_xet is installed.  Blobs are sent before it, and the
Hub keeps them: a push that was interrupted is repeated, and sends what is missing.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from hf_sparse24.card import CARD_NAME, describe_folder, is_default, is_repo_id, make_card, read_card
from hf_sparse24.errors import CheckpointError, warn
from hf_sparse24.evidence import NOTHING, Evidence
from hf_sparse24.staging import WEIGHT_FILES
from hf_sparse24.verify import Check, verify_folder


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
    evidence: Evidence = NOTHING,
    is_verified: bool = False,
) -> CommitInfo:
    """Verify a compressed checkpoint and upload it, with a model card, in one commit; the folder itself is not changed.

    A push that broke off is called again: what the Hub has got already is not sent twice, and nothing is visible before the commit.

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
            Its card's licence, language and task are carried over.
        files: Names within the folder, to upload only those; the card is always written.
        evidence: For the card: how the weights came to be, and what was measured.
        is_verified: That `require_right` has been called.

    Returns:
        The commit; as a string it is its URL.

    Raises:
        CheckpointError: The folder does not verify, or its config.json does not say that weights are packed; no repository was made.
        ValueError: The existing README.md cannot be parsed, `evidence` is of another checkpoint, or `private=True` and the repository
            is public; nothing was uploaded.
        ConnectionError: A file could not be sent.
    """
    folder = Path(folder)
    # Refuse before there is a repository.
    contents, card = describe_folder(folder), read_card(folder / CARD_NAME)
    make_card({**contents, "repo_id": repo_id}, evidence=evidence)
    if not is_verified:
        require_right(folder)
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
    if CARD_NAME in present and (card is None or is_default(card)):
        card = read_card(api.hf_hub_download(repo_id, CARD_NAME, revision=revision))
    base_model = _known_base(api, base_model or contents["named_base"], repo_id)
    base_data: Any = api.model_info(base_model).card_data if base_model else None
    new_card = make_card(
        {**contents, "repo_id": repo_id, "branch": branch},
        base_model=base_model,
        base_card=base_data.to_dict() if base_data else None,
        old=card,
        tags=tags,
        evidence=evidence,
    )
    if "license" not in new_card.data:
        warn(f"the model card names no licence, for neither {CARD_NAME} nor a base model's card does: write it into {CARD_NAME}")
    added = [CommitOperationAdd(name, str(folder / name)) for name in sorted(names)]
    stale = [CommitOperationDelete(name) for name in present if _is_weights_file(name) and name not in names]
    try:
        return api.create_commit(
            repo_id,
            [*added, CommitOperationAdd(CARD_NAME, new_card.content.encode()), *stale],
            commit_message=commit_message or f"Upload {contents['architecture'] or 'model'}, packed with hf-sparse24",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    except RuntimeError as error:  # what huggingface_hub raises, for whatever reason a file could not be sent
        raise ConnectionError(f"{error} Push again: the files that did arrive are not sent twice ({error.__cause__})") from error


def require_right(folder: str | Path, further: Callable[[str | Path], Check] | None = None) -> None:
    """Verify a folder; what is worth knowing though it is right becomes a warning.

    Args:
        folder: A checkpoint.
        further: One more check.

    Raises:
        CheckpointError: It does not verify.
    """
    report = verify_folder(folder)
    checks = [*report.checks, *([further(folder)] if further and report.is_right else [])]
    problems = [problem for check in checks for problem in check.problems]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{problems[0]}{more}: what does not verify is not pushed, see hf-sparse24 verify {folder}")
    for note in (note for check in checks for note in check.notes):
        warn(note)


def _known_base(api: HfApi, name: str | None, repo_id: str) -> str | None:
    """The base model, if the card can link to it."""
    if not name or name == repo_id or not is_repo_id(name) or Path(name).exists():
        return None
    if not api.repo_exists(name):
        warn(f"the Hub does not know the base model {name}: it is left out of the model card")
        return None
    return name


def _is_weights_file(name: str) -> bool:
    """Whether a file is one of a repository's main set of weights; `staging` replaces the same ones on disk."""
    match = WEIGHT_FILES.fullmatch(name)
    return match is not None and not (match[1] or match[3])

"""`hf-sparse24 verify` and `hf-sparse24 push`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

# torch and Transformers are imported where they are used.


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare both.

    Args:
        add: Takes name, function and text of a command, and gives its parser.
    """
    verify = add("verify", _verify, "check that the files of a checkpoint are what they promise")
    verify.add_argument("dir", help="checkpoint folder, or repository on the Hub")
    verify.add_argument("--against", metavar="DENSE", help="folder or repository whose tensors it must hold, bit by bit or rounded")
    verify.add_argument("--strict", action="store_true", help="notes, such as one of a missing guard, count as problems")

    push = add("push", _push, "verify a compressed checkpoint and upload it with a model card, in one commit; repeat it if it breaks off")
    push.add_argument("dir", type=Path, help="checkpoint folder; it is not changed")
    push.add_argument("repo", help="repository on the Hub, such as me/model-2of4; made if it is missing")
    push.add_argument("--private", action="store_true", help="make the repository private; one that is public is refused")
    push.add_argument("--revision", help="branch, made if it is missing (default: main)")
    push.add_argument("--message", help="first line of the commit")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.add_argument("--base-model", help="repository of the dense model: its licence, language and task are carried over")
    push.add_argument("--tags", nargs="+", help="further tags of the card")
    push.add_argument("--prune-report", type=Path, help="for the card: what hf-sparse24 prune wrote (--report FILE.json, or --json)")
    push.add_argument("--calibration", help="for the card: on which texts, in words")
    push.add_argument("--eval", type=Path, nargs="+", help="for the card: what hf-sparse24 eval --json printed")
    push.add_argument("--speed", type=Path, nargs="+", help="for the card: files of benchmarks/matmul.py or benchmarks/quantized.py")
    push.add_argument("--limit", nargs="+", help="for the card: sentences that a user should read")
    push.add_argument("--dry-run", action="store_true", help="verify, print the card, and upload nothing; needs no network")


def _verify(arguments: argparse.Namespace) -> int:
    from hf_sparse24.completeness import verify_model_folder
    from hf_sparse24.model_compressor import local_folder
    from hf_sparse24.verify import counted, render_report

    against = None if arguments.against is None else local_folder(arguments.against)
    report = verify_model_folder(local_folder(arguments.dir), against)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else render_report(report))
    number = len(report.problems) + (len(report.notes) if arguments.strict else 0)
    if number:
        print(f"hf-sparse24 verify: {counted(number, 'problem')}, see above", file=sys.stderr)
    return 1 if number else 0


def _push(arguments: argparse.Namespace) -> int:
    from hf_sparse24.card import CARD_NAME, card_for
    from hf_sparse24.completeness import check_model
    from hf_sparse24.evidence import read_evidence
    from hf_sparse24.hub import push_folder, require_right

    evidence = read_evidence(
        arguments.prune_report, arguments.calibration, arguments.eval or (), arguments.speed or (), arguments.limit or ()
    )
    options = {"base_model": arguments.base_model, "tags": arguments.tags, "evidence": evidence}
    require_right(arguments.dir, further=check_model)
    if arguments.dry_run:
        readme = arguments.dir / CARD_NAME
        existing = readme.read_text(encoding="utf-8") if readme.is_file() else None
        card = card_for(arguments.dir, repo_id=arguments.repo, existing=existing, **options).content
        print(json.dumps({"card": card}, indent=2) if arguments.json else card)
        return 0
    commit = push_folder(
        arguments.dir,
        arguments.repo,
        commit_message=arguments.message,
        private=arguments.private or None,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        is_verified=True,
        **options,
    )
    result = {"url": str(commit), "commit": commit.oid, "pull_request": commit.pr_url}
    print(json.dumps(result, indent=2) if arguments.json else commit.pr_url or str(commit))
    return 0

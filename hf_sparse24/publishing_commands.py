"""`hf-sparse24 verify` and `hf-sparse24 push`."""

import argparse
import json
import sys
from collections.abc import Callable

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

"""Whether a checkpoint holds what its architecture needs: `verify` with a model, on the meta device, to compare names and shapes with."""

from dataclasses import replace
from pathlib import Path

from hf_sparse24.checkpoint import as_dense, find_packed, open_checkpoint
from hf_sparse24.conversion import skeleton
from hf_sparse24.errors import CheckpointError
from hf_sparse24.model_compressor import differing_tensors
from hf_sparse24.modules import listed
from hf_sparse24.verify import Check, VerifyReport, verify_folder


def verify_model_folder(folder: str | Path, against: str | Path | None = None) -> VerifyReport:
    """`verify_folder`, and a check that no tensor of the model is missing, unknown or of another shape.

    Args:
        folder: A checkpoint, packed in any format that is read, or dense.
        against: A second checkpoint to compare with.

    Raises:
        CheckpointError: `against` is damaged, or no checkpoint.
    """
    report = verify_folder(folder, against)
    if any(check.name in ("opening", "parts") and check.problems for check in report.checks):
        return report
    return replace(report, checks=(*report.checks, check_model(folder)))


def check_model(folder: str | Path) -> Check:
    """Compare names and shapes of a folder's tensors with those of the model that config.json names; they were verified before.

    Args:
        folder: A checkpoint.
    """
    with open_checkpoint(folder) as checkpoint:
        try:
            model = skeleton(checkpoint)
        except CheckpointError as error:
            return Check("model", "config.json", (str(error),))
        except ValueError as error:
            return Check("model", "none that Transformers knows", notes=(f"not compared with a model: {error}",))
        packed = find_packed(checkpoint.tensors, checkpoint.file_of, declared=True)
        tensors = as_dense(checkpoint.tensors, packed)
        unknown, wrong = differing_tensors(model, tensors)
    # Loading leaves them out, with a report: `position_ids` of older versions, for example.  What is packed must find its place.
    notes = [f"{name}: {reason}, loading leaves it out" for name, reason in unknown.items() if name not in packed]
    wrong |= {name: reason for name, reason in unknown.items() if name in packed}
    problems = (f"{folder}: not the checkpoint of a {type(model).__name__}: {listed(wrong)}",) if wrong else ()
    return Check("model", f"names and shapes of a {type(model).__name__}", problems, tuple(notes))

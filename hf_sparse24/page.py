"""`hf-sparse24 inspect --html`: the report of a folder as one page that needs nothing else, with a picture of a layer's mask."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from markupsafe import Markup
from torch import Tensor

from hf_sparse24 import __version__
from hf_sparse24.chart import draw_lines
from hf_sparse24.checkpoint import as_dense, find_packed, open_checkpoint
from hf_sparse24.config import DenseSparsityConfig, parse_config
from hf_sparse24.kernel_report import ROWS, KernelsReport
from hf_sparse24.model_compressor import local_folder
from hf_sparse24.report import FolderReport, WeightReport, describe_outcomes, show_bytes

# What of a mask is shown, and how large a cell, and the gap after a group of four, are, in pixels.
MASK_ROWS, MASK_COLUMNS, CELL, GAP = 48, 128, 8, 4
COLUMNS = ("weight", "module", "shape", "dtype", "stored as", "structure", "zeros", "bytes", "of dense", "pruning error", "on load")


@dataclass(frozen=True)
class MaskCorner:
    """The upper left corner of a mask."""

    name: str
    shape: tuple[int, ...]
    mask: Tensor
    """(rows, columns), bool, True = not zero."""

    @property
    def rows(self) -> int:
        """That are shown."""
        return self.mask.shape[0]

    @property
    def columns(self) -> int:
        """That are shown."""
        return self.mask.shape[1]


def read_mask(path_or_repo_id: str | Path, layer: str, **hub_kwargs: Any) -> MaskCorner:
    """Read which weights of a layer are not zero.

    Args:
        path_or_repo_id: Folder, or repository on the Hub.
        layer: Module, or weight.
        hub_kwargs: Those of `huggingface_hub.snapshot_download`.

    Raises:
        CheckpointError: The folder is damaged or in a form that cannot be read.
        ValueError: There is no such weight, or it has other than two axes.
    """
    with open_checkpoint(local_folder(path_or_repo_id, **hub_kwargs)) as checkpoint:
        declared = parse_config(checkpoint.config).sparsity is not None
        dense = as_dense(checkpoint.tensors, find_packed(checkpoint.tensors, checkpoint.file_of, declared=declared))
        name = layer if layer in dense else f"{layer}.weight"
        if name not in dense:
            near = difflib.get_close_matches(name, dense, n=3, cutoff=0.4)
            raise ValueError(f"{path_or_repo_id} has no weight {name}" + (f"; near to it are {', '.join(near)}" if near else ""))
        corner = dense[name][:MASK_ROWS]
        if corner.ndim != 2:
            raise ValueError(f"{name} has {corner.ndim} axes, a mask is shown of weights with 2")
        whole = dense[name]
        shape = tuple(whole.shape) if isinstance(whole, Tensor) else tuple(whole.get_shape())
        return MaskCorner(name, shape, corner[:, :MASK_COLUMNS].to(torch.float32) != 0)


def render_page(report: FolderReport, mask: MaskCorner | None = None) -> str:
    """The report as an HTML document without external resources.

    Args:
        report: What `inspect_folder` found.
        mask: To show as a picture.
    """
    sizes, weights = report.sizes, report.weights
    elements = sum(weight.elements for weight in weights)
    has_errors = any(weight.pruning_error is not None for weight in weights)
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["bytes"] = show_bytes
    template = environment.from_string(resources.files("hf_sparse24").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        report={**asdict(report), "kernels": _kernels(report.kernels)},
        version=__version__,
        sizes=sizes,
        stored_share=sizes.stored_bytes / max(1, sizes.dense_bytes),
        packed_share=sizes.packed_stored_bytes / max(1, sizes.packed_dense_bytes),
        zeros_share=sum(weight.zeros for weight in weights) / max(1, elements),
        elements=f"{elements:,}",
        outcomes=describe_outcomes(report),
        all_rows=ROWS,
        error_chart=Markup(_error_chart(weights)) if has_errors else None,
        mask=mask,
        mask_picture=Markup(draw_mask(mask.mask)) if mask else None,
        columns=[name for name in COLUMNS if has_errors or name != "pruning error"],
        rows=[_row(weight, has_errors) for weight in weights],
    )


def default_mask_layer(report: FolderReport) -> str | None:
    """The first weight that is 2:4, a packed one if there is any; None if there is none."""
    found = [weight for weight in report.weights if weight.structure == "2:4" and len(weight.shape) == 2]
    return next((weight.name for weight in found if weight.format != DenseSparsityConfig.format), found[0].name if found else None)


def draw_mask(mask: Tensor) -> str:
    """An SVG of a mask: a square for each weight that is kept, a gap after each group of four.

    Args:
        mask: (rows, columns), bool, True = kept.
    """
    rows, columns = mask.shape
    width, height = columns * CELL + (columns - 1) // 4 * GAP, rows * CELL
    squares = "".join(
        f"M{column * CELL + column // 4 * GAP} {row * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z" for row, column in mask.nonzero().tolist()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="mask"><rect width="{width}" height="{height}" fill="#ffffff"/><path d="{squares}" fill="#0072b2"/></svg>'
    )


def _kernels(kernels: KernelsReport | None) -> dict[str, Any] | None:
    """Plain data, with the number of columns that each range of rows takes."""
    if kernels is None:
        return None
    plain = asdict(kernels)
    for layer in plain["layers"]:
        for found in layer["ranges"]:
            found["width"] = sum(found["first"] <= rows <= found["last"] for rows in ROWS)
    return plain


def _error_chart(weights: tuple[WeightReport, ...]) -> str:
    """The error of each kind of layer (q_proj, up_proj, ...) from the first block to the last."""
    lines: dict[str, list[float]] = {}
    for weight in weights:
        if weight.pruning_error is not None:
            lines.setdefault(weight.name.removesuffix(".weight").rpartition(".")[2], []).append(weight.pruning_error)
    return draw_lines("relative error by block", lines)


def _row(weight: WeightReport, has_errors: bool) -> list[Mapping[str, Any]]:
    def cell(text: str, number: float | None = None, title: str = "") -> dict[str, Any]:
        return {"text": text, "number": number, "title": title}

    zeros = weight.zeros / weight.elements if weight.elements else None
    share = weight.stored_bytes / weight.dense_bytes if weight.dense_bytes else None
    error = weight.pruning_error
    return [
        *(cell(weight.name), cell(weight.module or "?"), cell(" x ".join(map(str, weight.shape)) or "scalar", None)),
        *(cell(weight.dtype), cell(weight.format), cell(weight.structure)),
        cell("-" if zeros is None else f"{zeros:.1%}", -1 if zeros is None else zeros),
        cell(show_bytes(weight.stored_bytes), weight.stored_bytes, f"{weight.stored_bytes} of {weight.dense_bytes} bytes"),
        cell("-" if share is None else f"{share:.4f}", -1 if share is None else share),
        *([cell("-" if error is None else f"{error:.4f}", -1 if error is None else error)] if has_errors else []),
        cell(weight.on_load.layer, None, weight.on_load.reason),
    ]

"""What pruning did: layer by layer, as text, JSON or a picture."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_sparse24.chart import draw_lines
from hf_sparse24.table import render_columns

COLUMNS = ("layer", "method", "tokens", "error", "damping", "seconds", "fall-back")


@dataclass(frozen=True)
class LayerReport:
    """What pruning did to one layer.

    `relative_error` is |(W - W') X|^2 / |W X|^2 over the calibration inputs X of the layer, W' as it is stored; without
    calibration |W - W'|^2 / |W|^2.  `dropped` are the non-zero weights that became 0, `tokens` the rows of X, `damping` what was
    added to the diagonal of X^T X / tokens.
    """

    name: str
    method: str
    dropped: int
    elements: int
    tokens: int
    relative_error: float
    damping: float
    fallback: str | None
    seconds: float


@dataclass
class PruneReport:
    """Every pruned layer, and why others were left alone."""

    method: str
    pattern: str
    layers: list[LayerReport] = field(default_factory=list)
    left_dense: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def dropped(self) -> int:
        """Non-zero weights that were set to zero."""
        return sum(layer.dropped for layer in self.layers)

    @property
    def relative_error(self) -> float:
        """The mean over layers."""
        return sum(layer.relative_error for layer in self.layers) / len(self.layers)

    def __str__(self) -> str:
        rows = [
            (
                *(layer.name, layer.method, str(layer.tokens), f"{layer.relative_error:.4f}", f"{layer.damping:.2e}"),
                *(f"{layer.seconds:.2f}", layer.fallback or ""),
            )
            for layer in self.layers
        ]
        total = f"{len(self.layers)} layers, {self.pattern}: mean relative error {self.relative_error:.4f}, {self.seconds:.1f} s"
        dense = [f"left dense: {name}: {reason}" for name, reason in self.left_dense.items()]
        return "\n".join([render_columns(COLUMNS, rows, {"tokens", "error", "damping", "seconds"}), "", total, *dense])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "dropped": self.dropped, "relative_error": self.relative_error}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_svg(self) -> str:
        """A picture: the error of each kind of layer (q_proj, up_proj, ...) from the first block to the last."""
        lines: dict[str, list[float]] = {}
        for layer in self.layers:
            lines.setdefault(layer.name.rpartition(".")[2], []).append(layer.relative_error)
        return draw_lines(f"relative error by layer, {self.method}, {self.pattern}", lines)

"""What every test may use: the `gpu` marker, tolerances, the golden checkpoints, a Hub, which weights are multiplied."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_sparse24.kernels import reference
from tests.hub_server import hub_server

__all__ = ["hub_server"]

GOLDEN = Path(__file__).parent / "golden"

# For `assert_close(actual.float(), reference, **tolerance[dtype])`, inputs and weights scaled so that results are around one.
# A result in `dtype` may be one unit in the last place away from its float32 reference; float32 sums may be reordered.
TOLERANCE = {dtype: {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps} for dtype in (torch.float16, torch.bfloat16)}
TOLERANCE[torch.float32] = {"rtol": 1e-5, "atol": 1e-5}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of checkpoints that the real old library wrote; see its README.md."""
    return GOLDEN


@pytest.fixture(scope="session")
def tolerance() -> dict[torch.dtype, dict[str, float]]:
    """`rtol` and `atol` by dtype."""
    return TOLERANCE


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the packed weights that were multiplied without a GPU, in order."""
    rows: list[int] = []
    multiply = reference.linear

    def note(x: Tensor, compressed: Tensor, bitmask: Tensor, bias: Tensor | None, in_features: int) -> Tensor:
        rows.append(bitmask.shape[0])
        return multiply(x, compressed, bitmask, bias, in_features)

    monkeypatch.setattr(reference, "linear", note)
    return rows

"""Which path multiplies by a packed weight, and why: the one place that decides."""

from dataclasses import dataclass

import torch

# Kernels for packed weights, each with the compute capability from which it runs.  None in this version: every path unpacks.
KERNELS: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True)
class Choice:
    """The path that runs, and for every other path why it does not."""

    path: str
    reasons: dict[str, str]


def explain(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """Say which path a packed layer takes.

    Args:
        device: Where weight and input are.
        dtype: Of weight and input.

    Returns:
        The path, and the reasons against the others.
    """
    why = why_no_kernel(torch.device(device))
    return Choice("reference", {"sparse": why or f"no kernel for {dtype}"})


def why_no_kernel(device: torch.device) -> str | None:
    """Why a device cannot multiply by packed weights faster than by dense ones, or None if it can."""
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    if not KERNELS:
        return "this version has no sparse kernels: a packed layer saves memory, not time"
    capability = torch.cuda.get_device_capability(device)
    if all(capability < needed for needed in KERNELS.values()):
        return f"compute capability {capability} is below {min(KERNELS.values())}"
    return None


def why_not_kept() -> str | None:
    """Why `run_compressed=None` loads dense here, or None if it keeps layers packed."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return why_no_kernel(torch.device("cuda", torch.cuda.current_device()))

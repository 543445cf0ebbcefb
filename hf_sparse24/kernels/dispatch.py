"""Which path multiplies by a packed weight, and why: the one place that decides."""

from dataclasses import dataclass

import torch

# Compute capability from which kernels for packed weights are planned to run (sparse tensor cores).
MIN_CAPABILITY = (8, 0)


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
    return Choice("reference", {"sparse": why or f"this version has no sparse kernel for {dtype}; the weight is unpacked for every call"})


def why_no_kernel(device: torch.device) -> str | None:
    """Why a device cannot multiply by packed weights faster than by dense ones, or None if it can."""
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no sparse tensor cores, {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is needed"
    return None


def why_not_kept() -> str | None:
    """Why `run_compressed=None` loads dense here, or None if it keeps layers packed."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return why_no_kernel(torch.device("cuda", torch.cuda.current_device()))

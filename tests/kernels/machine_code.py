"""What a cubin holds, as NVIDIA's disassemblers show it; their wheels are in the test extra."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
FUNCTION = re.compile(r"Function ([^\s:]+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Resources:
    """Of a kernel, without dynamic shared memory."""

    registers: int
    """Of a thread."""
    local_bytes: int
    """Of a thread: arrays, spilled registers, call stack."""
    shared_bytes: int
    """Of a block; from compute capability 9.0 on with the 1024 that the system takes, if there is any."""


def instructions(cubin: bytes) -> dict[str, list[str]]:
    """The SASS of each kernel, a line an instruction, without addresses: `HMMA.SP.16832.F32.BF16 R4, R8, R12, R4, R16, 0x0`.

    A function that is called and stands in the kernel's own section is part of it.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _run("nvdisasm", "--print-code", cubin).splitlines():
        if section := SECTION.match(line):
            current = found.setdefault(section[1], [])
        elif instruction := INSTRUCTION.match(line):
            current.append(instruction[1])
    return found


def resources(cubin: bytes) -> dict[str, Resources]:
    """What each kernel needs."""
    rows = FUNCTION.findall(_run("cuobjdump", "--dump-resource-usage", cubin))
    return {name: Resources(int(registers), int(stack) + int(local), int(shared)) for name, registers, stack, shared, local in rows}


def _run(tool: str, option: str, cubin: bytes) -> str:
    path = find_nvidia_binary_utility(tool)
    assert path, f"pip install nvidia-cuda-{tool}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([path, option, file], capture_output=True, text=True, check=True).stdout

"""Device resources of compiled kernels, measured and recorded.

Owns the reading of a compiled binary, the record in this folder, and the comparison. Knows nothing
of the compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("resources.json")
MARGIN = 0.1
"""Growth of registers and shared memory that counts as a regression."""

_NVIDIA = re.compile(r"REG:(\d+) STACK:(\d+)")
_AMD = re.compile(r"\.private_segment_fixed_size: +(\d+).*?\.vgpr_count: +(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one kernel on one target. Its stack holds only spilled registers."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def read_resources(code: Mapping[str, Any], shared_bytes: int) -> Resources:
    """Read registers per thread and the stack of compiled code: a kernel, and its callees."""
    if "amdgcn" in code:
        found = [(each[1], each[0]) for each in _AMD.findall(code["amdgcn"])]
    else:
        found = _NVIDIA.findall(_usage(code["cubin"]))
    assert found, "the compiler's report has another form"
    registers, stacks = zip(*found, strict=True)
    return Resources(max(map(int, registers)), max(map(int, stacks)), shared_bytes)


def _usage(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603


def load_record(path: Path = RECORD) -> dict[str, Resources]:
    """Load the record, by kernel and target; empty without a file."""
    if not path.exists():
        return {}
    return {name: Resources(**each) for name, each in json.loads(path.read_text("utf-8")).items()}


def save_record(resources: Mapping[str, Resources], path: Path = RECORD) -> None:
    """Save one line for each kernel and target, in order, so that a change is one line."""
    lines = (f" {json.dumps(name)}: {json.dumps(asdict(resources[name]))}" for name in resources)
    path.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n", encoding="utf-8")


def regressions(recorded: Mapping[str, Resources], now: Mapping[str, Resources]) -> list[str]:
    """One line for each kernel that takes more than recorded, or is missing on either side."""
    found = [f"{name}: not recorded" for name in sorted(now.keys() - recorded.keys())]
    found += [f"{name}: recorded, but missing" for name in sorted(recorded.keys() - now.keys())]
    for name in sorted(now.keys() & recorded.keys()):
        before, after = recorded[name], now[name]
        if after.spill_bytes > before.spill_bytes:
            found.append(f"{name}: spills {after.spill_bytes} bytes, was {before.spill_bytes}")
        for field in ("registers", "shared_bytes"):
            was, takes = getattr(before, field), getattr(after, field)
            if takes > was * (1 + MARGIN):
                found.append(f"{name}: {field} {takes}, was {was}")
    return found

"""The kernels as C alone: under sanitizers, and for an emulated Arm."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from support.kernel_levels import LEVELS, MODELLED_TILES
from support.tiers import among
from triptych.core.runtime.kernels.native import build as build_module
from triptych.core.runtime.kernels.native.build import LEVELS as FLAGS

SOURCES = Path(build_module.__file__).parent
CHECK = Path(__file__).with_name("kernels_check.c")
COMMON = ("-pthread", "-std=gnu11", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}")
SANITIZED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def compiled(compiler: str, *flags: str, folder: Path) -> Path:
    """A program of all sources. `folder` keeps objects by what the preprocessor leaves of them:
    levels with the same flags have most of them in common."""
    command = [compiler, *COMMON, *flags]
    same = [flag for flag in flags if not flag.startswith("-D")]
    objects = []
    for source in (CHECK, *sorted(SOURCES.glob("*.c"))):
        plain = subprocess.run([*command, "-E", "-P", source], check=True, capture_output=True)
        digest = hashlib.sha256(repr((compiler, same, plain.stdout)).encode()).hexdigest()
        objects.append(folder / f"{digest}.o")
        if not objects[-1].exists():
            subprocess.run([*command, "-c", source, "-o", objects[-1]], check=True)
    program = folder / "check"
    subprocess.run([*command, "-o", program, *objects, "-lm"], check=True)
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


# The shortest vectors, the longest, and tiles. Without optimization, which takes most of the time.
VECTORS = [level for level in LEVELS if level not in ("amx", MODELLED_TILES)]
SHORTEST_AND_LONGEST = sorted({*VECTORS[-1:], *VECTORS[:1]})


@pytest.mark.parametrize("level", among([*SHORTEST_AND_LONGEST, *LEVELS[-1:]], VECTORS[-1:]))
def test_no_byte_beyond_its_own(level: str, folder: Path) -> None:
    flags = ("-DMODEL_TILES",) if level == MODELLED_TILES else FLAGS[level].flags
    subprocess.run([compiled("cc", *SANITIZED, *flags, folder=folder)], check=True)


@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason=f"needs {ARM_COMPILER} and {ARM_EMULATOR}",
)
def test_on_an_emulated_arm(folder: Path) -> None:
    program = compiled(ARM_COMPILER, "-O3", "-static", folder=folder)
    subprocess.run([ARM_EMULATOR, program], check=True)

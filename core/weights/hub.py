"""Fetching a model's files from the Hugging Face hub.

Owns which files are fetched: configs, tokenizer, template and safetensors. Repositories that only
offer pickled weights are refused, and code in a repository is neither fetched nor run.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
UNWANTED = ("*/*", "consolidated*")
"""Other formats of the same weights, in folders of their own or under Mistral's names."""


def download_snapshot(repository: str, options: ModelOptions, layout: Sequence[str] = ()) -> Path:
    """The local snapshot of a hub repository, fetched unless it is there or `--offline` forbids it.

    `layout` are patterns of the files to fetch of a repository that is known to be safe to read
    without safetensors. Raises `WeightsError` when it cannot be had, or else has none of those.
    """
    try:
        return _download(repository, options, layout)
    except GatedRepoError as error:
        raise WeightsError(
            f"{repository} is gated: accept its terms on the hub and log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise WeightsError(
            f"There is no folder and no hub repository (or revision) {repository!r}."
        ) from error
    except (HTTPError, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise WeightsError(
                f"There is no room for {repository}; free some disk space, or set --cache-dir to"
                " a larger disk."
            ) from error
        raise WeightsError(
            f"{repository} is neither a folder nor in the cache, and the hub cannot be reached;"
            f" run `triptych models fetch {repository}` once while online."
        ) from error


def hub_cache_dir(options: ModelOptions) -> Path | None:
    """Where snapshots are kept; `None`: the hub library's own cache, shared with other tools."""
    return Path(options.cache_dir).expanduser() / "hub" if options.cache_dir else None


def _download(repository: str, options: ModelOptions, layout: Sequence[str]) -> Path:
    """The snapshot. Without a network, the hub library falls back to what it fetched earlier."""
    folder = Path(
        snapshot_download(
            repository,
            revision=options.revision or None,
            cache_dir=hub_cache_dir(options),
            local_files_only=options.offline or constants.HF_HUB_OFFLINE,
            allow_patterns=list(layout or PATTERNS),
            ignore_patterns=None if layout else list(UNWANTED),
        )
    )
    if not layout and not any(folder.glob("*.safetensors")):
        raise WeightsError(
            f"{repository} has no safetensors; other weights are an unsafe format, since loading"
            " them can run code."
        )
    return folder

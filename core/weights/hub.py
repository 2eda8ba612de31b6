"""Fetching a model's files from the Hugging Face hub.

Owns which files are fetched: configs, tokenizer, template and safetensors. Repositories that only
offer pickled weights are refused, and code in a repository is neither fetched nor run.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def download_snapshot(repository: str, options: ModelOptions) -> Path:
    """The local snapshot of a hub repository, fetched unless it is there or `--offline` forbids it.

    Raises `WeightsError` when it cannot be had or has no safetensors.
    """
    revision = options.revision or None
    cache = str(Path(options.cache_dir).expanduser() / "hub") if options.cache_dir else None
    offline = options.offline or constants.HF_HUB_OFFLINE
    try:
        if not offline:
            _refuse_unsafe(repository, HfApi().list_repo_files(repository, revision=revision))
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache,
                local_files_only=offline,
                allow_patterns=list(PATTERNS),
            )
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise WeightsError(
            f"{repository} is not in the cache and cannot be fetched now; run"
            f" `triptych models fetch {repository}` once while online."
        ) from error
    except GatedRepoError as error:
        raise WeightsError(
            f"{repository} is gated: accept its terms on the hub and log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise WeightsError(
            f"There is no folder and no hub repository (or revision) {repository!r}."
        ) from error
    except (HfHubHTTPError, httpx.HTTPError) as error:
        raise WeightsError(
            f"The hub could not be reached for {repository}; with the files already here, use"
            " --offline or give the folder."
        ) from error


def _refuse_unsafe(repository: str, files: list[str]) -> None:
    if not any(file.endswith(".safetensors") for file in files):
        raise WeightsError(
            f"{repository} has no safetensors; other weights are an unsafe format, since loading"
            " them can run code."
        )

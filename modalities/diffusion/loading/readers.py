"""Tokenizers, and what prepares text and pictures together, from the files in a part's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.core.errors import WeightsError


def open_reader(kind: Any, folder: Path) -> Any:
    """A tokenizer or processor of a class of transformers. Raises `WeightsError`."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, LookupError, ImportError) as error:
        raise WeightsError(
            f"The files in {folder.name} are not usable as {kind.__name__}:"
            f" {str(error).splitlines()[0]:.120}"
        ) from error

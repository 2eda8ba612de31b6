"""Tokenizers, and what prepares pictures for a text encoder, from the files in a part's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.loading.unfit import brief


def open_reader(kind: Any, folder: Path) -> Any:
    """A tokenizer or processor of a class of transformers. Raises `WeightsError`."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing more precise than this
        raise WeightsError(
            f"The files in {folder.name} are not usable as {kind.__name__}: {brief(error)}."
        ) from error

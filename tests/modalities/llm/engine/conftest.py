"""The tiny model that tests of the loader save."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from support.llm_loader import Save


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    from support.llm_loader import save_llama

    def save_model(**edits: torch.Tensor | None) -> Path:
        return save_llama(tmp_path_factory.mktemp("llama"), edits)

    return save_model

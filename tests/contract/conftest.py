"""The image recipe in samples/, for the tests of its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TRAINING = Path(__file__).parents[2] / "samples" / "training"


@pytest.fixture(scope="module")
def image_recipe() -> Iterator[None]:
    """The recipe's modules can be imported, and are forgotten afterwards."""
    known, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(_TRAINING), str(_TRAINING / "image")]
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(_TRAINING)):
            del sys.modules[name]

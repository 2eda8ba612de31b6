"""The image recipe in samples/, for the tests of its modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.samples import SAMPLES, importing_samples


@pytest.fixture(scope="module")
def image_recipe() -> Iterator[None]:
    """The recipe's modules can be imported, and are forgotten afterwards."""
    training = SAMPLES / "training"
    with importing_samples(training, training / "image"):
        yield

"""What every test may rely on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from triptych.core.kernels.native.library import NativeKernels


@pytest.fixture(autouse=True)
def _no_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come from the test alone, whatever the shell has set."""
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The CPU kernels, built for this processor."""
    from triptych.core.kernels.native.library import NativeKernels

    kernels = NativeKernels.open("native", tmp_path_factory.mktemp("kernels"))
    assert kernels is not None
    return kernels

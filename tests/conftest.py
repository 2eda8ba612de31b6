"""What every test may rely on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from triptych.core.kernels.native import build

if TYPE_CHECKING:
    from triptych.core.kernels.native.library import NativeKernels


@pytest.fixture(autouse=True)
def _no_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come from the test alone, whatever the shell has set."""
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the test is over."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=getattr(build, "supported_levels", lambda: (None,))())
def isa(request: pytest.FixtureRequest) -> str | None:
    """Each level of instructions that this machine has: what asks for it runs once on each."""
    return request.param


@pytest.fixture(scope="session")
def kernels(isa: str | None, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The native kernels of a level."""
    from triptych.core.kernels.native.library import NativeKernels

    folder = tmp_path_factory.mktemp("kernels")
    levels = () if isa is None else (isa,)
    opened = NativeKernels.open("native", folder, *levels)
    assert opened is not None
    return opened

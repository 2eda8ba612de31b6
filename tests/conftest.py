"""What every test may rely on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.kernel_levels import LEVELS, open_kernels

if TYPE_CHECKING:
    from triptych.core.kernels.native.library import NativeKernels

_MAX_CHILDREN = 8


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


@pytest.fixture(scope="session")
def kernels_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NativeKernels]:
    """The native kernels of a level, built once a session."""
    folder = tmp_path_factory.mktemp("kernels")
    return cache(lambda isa: open_kernels(isa, folder))


@pytest.fixture(scope="session", params=LEVELS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each level of instructions that this machine has: what asks for it runs once on each."""
    return request.param


@pytest.fixture(scope="session")
def kernels(isa: str, kernels_of: Callable[[str], NativeKernels]) -> NativeKernels:
    """The native kernels of a level."""
    return kernels_of(isa)


@pytest.fixture(scope="session")
def native(kernels_of: Callable[[str], NativeKernels]) -> NativeKernels:
    """The native kernels that users of this machine get."""
    if not LEVELS:
        pytest.skip("needs a C compiler")
    return kernels_of(LEVELS[0])


@pytest.fixture(autouse=True)
def _few_children(_most_children: list[int]) -> Iterator[None]:
    """Decode children go with what they belong to, once that is collected.

    Those that are in use stay, so there is a collection only after so many more.
    """
    yield
    if _num_children() > _most_children[0]:
        gc.collect()
        _most_children[0] = _num_children() + _MAX_CHILDREN


@pytest.fixture(scope="session")
def _most_children() -> list[int]:
    return [_MAX_CHILDREN]


def _num_children() -> int:
    num_children = 0
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread may end meanwhile
            num_children += len(file.read_text().split())
    return num_children

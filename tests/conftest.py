"""What every test may rely on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.kernel_device import choose_kernels, is_interpreted
from support.kernel_levels import EACH_LEVEL, LEVELS, open_kernels

if TYPE_CHECKING:
    import torch

    from triptych.core.runtime.kernels.native.library import NativeKernels

_MAX_CHILDREN = 8

# With `-n`, processes that compute share the cores: more threads than cores only take turns.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    num_threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))

_LONGEST = ("live", "security", "property", "dryrun", "parity")
_UNTRACED = {"property", "dryrun", "parity", "engine", "kernels"}
"""Folders whose tests go through code of torch, or through the rest over and over: tracing makes
them thrice as long, and shows nothing new."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """A machine with a device may lack pytest-asyncio, of which no test of a device needs more."""
    if not pluginmanager.hasplugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "an option of pytest-asyncio")


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run on a device with `-m gpu`, and only then: else they are interpreted.

    On a device, warnings are no errors: those of its libraries are not ours.
    """
    choose_kernels(on_device=_is_on_device(config))
    if _is_on_device(config):
        config.addinivalue_line("filterwarnings", "default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On a device, files without tests for it are not imported: what they need may be missing."""
    if not _is_on_device(config):
        return None
    is_folder = collection_path.is_dir()
    files = collection_path.rglob("test_*.py") if is_folder else [collection_path]
    return None if any("pytest.mark.gpu" in each.read_text("utf-8") for each in files) else True


def _is_on_device(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "gpu")


@pytest.fixture(autouse=True)
def _where_there_is_a_device(request: pytest.FixtureRequest) -> None:
    if is_interpreted() or request.node.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")


@pytest.fixture
def cuda() -> torch.device:
    """A real device, for tests of what no interpreter has."""
    import torch

    if is_interpreted():
        pytest.skip("runs on a CUDA or ROCm device, with -m gpu")
    return torch.device("cuda", 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders with the longest tests come first, so that processes end together."""
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[:-1] for item in items}
    ranks = {(name,): rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(folders[item][:1], len(ranks)))
    for item in items:
        if _UNTRACED.intersection(folders[item]):
            item.add_marker("no_cover")


def pytest_collection() -> None:
    """No collection of garbage while modules are imported: almost all that they make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What the modules hold stays until the end: no collection of garbage looks at it again.

    It is a million objects, and each app that a test builds brings on a full collection.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What a file leaves behind stays, too: libraries that it imported, models that it cached.

    Tests that collect garbage to see children end would visit millions of objects, each time.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process for each core where the whole suite runs; a part of it begins sooner in one."""
    is_whole = [Path(each).resolve() for each in config.args] == [Path(__file__).parent]
    return len(os.sched_getaffinity(0)) if is_whole else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`, a file's tests run in one process, since they share servers.

    Those of `live/` are one group: each starts a server that computes on all cores. On a device
    tests share nothing, and most of their time is the compiler's.
    """
    from xdist.scheduler import LoadFileScheduling

    class FilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not is_interpreted():
                return nodeid
            return "live" if "/live/" in nodeid else super()._split_scope(nodeid)

    return FilesTogether(config, log)


@pytest.fixture(autouse=True)
def _no_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come from the test alone, whatever the shell has set."""
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRIPTYCH_SERVER", "none")  # one may run on this machine


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the test is over."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels_of() -> Callable[[str], NativeKernels]:
    """The native kernels of a level."""
    return open_kernels


@pytest.fixture(scope="session", params=EACH_LEVEL)
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

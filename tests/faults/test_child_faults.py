"""However a child ends in the middle of its work, the request fares as its cause deserves.

For all that children do (grammars, templates, images, sound): a child that was ended or stopped
from outside costs a moment; one that the input itself ended costs that request a 400.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest

from support import images
from support.audio_signals import wav_bytes
from support.child_processes import workers
from support.text_models import write_text_folder
from support.tiers import among
from triptych.core.errors import RequestError, TriptychError
from triptych.core.grammar.constraint import Constraint
from triptych.core.media import child
from triptych.core.media.audio import decode
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import ClipLimits
from triptych.core.media.child import DecodePool
from triptych.core.media.images import ImageReader
from triptych.modalities.llm.api.grammars import GrammarChecker
from triptych.modalities.llm.api.template import ChatTemplate

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGRTMIN + 2)
BY_INPUT = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
Work = Callable[[], Awaitable[object]]


async def _grammars(folder: Path, ending: AsyncExitStack) -> Work:
    write_text_folder(folder)
    checker = GrammarChecker(folder, 260)
    ending.push_async_callback(checker.close)
    numbers = iter(range(100))  # what was checked once is not checked again
    return lambda: checker.check(Constraint("regex", f"x{{1,{next(numbers) + 2}}}", "guided_regex"))


async def _templates(folder: Path, ending: AsyncExitStack) -> Work:
    template = ChatTemplate("{{ messages }}", model="tiny")
    ending.push_async_callback(template.close)
    return lambda: template.render([{"role": "user", "content": "hi"}])


async def _images(folder: Path, ending: AsyncExitStack) -> Work:
    pool = DecodePool([ImageReader.__module__])
    ending.push_async_callback(pool.close)
    file = images.saved(images.image())
    return lambda: ImageReader(pool).measure(file)


async def _sound(folder: Path, ending: AsyncExitStack) -> Work:
    pool = DecodePool([decode.__name__])
    ending.push_async_callback(pool.close)
    file = wav_bytes(np.zeros((8000, 1)), 8000)
    limits = ClipLimits(max_bytes=10**6, max_seconds=10)
    return lambda: ClipReader(pool).read(file, sample_rate=8000, limits=limits)


PARAMS = {_grammars: "guided_regex", _templates: "messages", _images: None, _sound: None}
"""What the error of each kind of work names; routes name where a file came from."""
OTHERS = tuple(kind for kind in PARAMS if kind is not _templates)
"""They share the pool, which looks at signals: one kind meets them all, the others one each."""


@pytest.fixture
async def work(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Work]:
    """Something that a child does, with one child at rest; all others are none of its."""
    async with AsyncExitStack() as ending:
        do = await request.param(tmp_path, ending)
        others = set(workers())
        await do()
        (resting,) = set(workers()) - others
        yield lambda: _in_a_stopped_child(do, resting)


async def _in_a_stopped_child(do: Work, resting: psutil.Process) -> object:
    """The child, and the work that it has been given and cannot begin."""
    resting.suspend()
    doing = asyncio.ensure_future(do())
    await asyncio.sleep(0.1)
    return resting, doing


@pytest.mark.parametrize(
    ("work", "how"),
    [*product([_templates], FROM_OUTSIDE), *product(OTHERS, [signal.SIGKILL])],
    indirect=["work"],
)
async def test_work_of_a_child_that_was_ended_from_outside_is_done_by_another(work, how):
    stopped, doing = await work()
    stopped.send_signal(how)
    with suppress(psutil.NoSuchProcess):  # a killed one may be gone already
        stopped.resume()
    assert await doing is not None


@pytest.mark.parametrize("work", among(PARAMS, [_images]), indirect=True)
async def test_work_of_a_child_that_stands_still_is_done_by_another(work, monkeypatch):
    monkeypatch.setattr(child, "_MAX_STALLED_CHECKS", 2)
    stopped, doing = await work()
    assert await doing is not None
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("work", "how"),
    [*product([_templates], BY_INPUT), *product(OTHERS, [signal.SIGSEGV])],
    indirect=["work"],
)
async def test_an_input_that_ends_its_child_is_refused(work, how, request):
    stopped, doing = await work()
    stopped.send_signal(how)
    with suppress(psutil.NoSuchProcess):  # a killed one may be gone already
        stopped.resume()
    with pytest.raises(TriptychError) as caught:
        await doing
    assert isinstance(caught.value, RequestError)
    assert caught.value.status == 400
    param = PARAMS[request.node.callspec.params["work"]]
    assert caught.value.param == param
    assert ("file" in caught.value.message) == (param is None)

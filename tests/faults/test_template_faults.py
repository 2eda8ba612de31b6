"""Chat templates that do not end, or take what memory there is: a 400, and everything at rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from support.child_processes import renderers
from support.http import FakeEngine, chat, in_process, make_service
from support.text_models import write_text_folder
from triptych.core.errors import InvalidRequest, TemplateFailed
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, ModelOptions
from triptych.modalities.llm.api import template
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.template import ChatTemplate
from triptych.modalities.llm.api.text import TextModel

SLOW = "slow"
_others: set[int] = set()
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": LOOPS,
    "constant": "{{ 'x' * 10**10 }}",
    "repeated": "{% set x = messages[0].content * 10**10 %}{{ x }}",
    "padded": "{{ '%1000000000d' % messages | length }}",
    "grown": "{% set n = namespace(x='x') %}{% for _ in range(64) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "long": "{% for _ in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "hi"}]


def children() -> list[psutil.Process]:
    """Those of this test."""
    return [child for child in renderers() if child.pid not in _others]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    _others.update(child.pid for child in renderers())
    limits = replace(template.LIMITS, cpu_s=1, memory_bytes=128 * 2**20)
    monkeypatch.setattr(template, "LIMITS", limits)


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE.keys())
async def made(request: pytest.FixtureRequest) -> AsyncIterator[ChatTemplate]:
    """Hostile where a message asks for it."""
    source = "{% if messages[0].content == 'slow' %}" + request.param + "{% endif %}done"
    made = ChatTemplate(source, model="tiny")
    yield made
    await made.close()
    assert children() == []


async def test_a_hostile_template_is_ended_and_the_next_conversation_works(
    made: ChatTemplate,
) -> None:
    for _ in range(2):
        with pytest.raises(TemplateFailed, match="chat template of tiny did not come to an end"):
            await made.render([{"role": "user", "content": SLOW}])
        assert await made.render(MESSAGES) == "done"
    assert sum(child.memory_info().rss for child in children()) < 2**28


async def test_a_loop_of_one_conversation_does_not_hold_up_another() -> None:
    made = ChatTemplate("{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}", model="m")
    slow = asyncio.create_task(made.render([{"role": "user", "content": SLOW}]))
    while not children():  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    assert await made.render(MESSAGES) == ""
    assert not slow.done()
    with pytest.raises(TemplateFailed):
        await slow
    await made.close()


async def test_disconnect_cancels_template_rendering() -> None:
    made = ChatTemplate(LOOPS, model="m")
    work = asyncio.create_task(made.render(MESSAGES))
    while not made._pool._jobs or not children():  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await made.close()
    assert children() == []


async def test_error_raised_by_a_template_is_reported_and_keeps_the_child() -> None:
    made = ChatTemplate("{{ raise_exception('roles must alternate' + 'x' * 9999) }}", model="m")
    pids = set()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="rejects these messages: roles must") as caught:
            await made.render(MESSAGES)
        assert len(caught.value.message) < 500
        pids |= {child.pid for child in children()}
    assert len(pids) == 1
    await made.close()


async def test_a_template_finds_no_file_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ChatTemplate("{% include 'x' %}", model="m")
    with pytest.raises(InvalidRequest, match="no loader"):
        await made.render(MESSAGES)
    await made.close()


async def test_a_long_conversation_is_rendered() -> None:
    made = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", model="m")
    messages = [{"role": "user", "content": "wörd " * 500}] * 1000
    assert await made.render(messages) == "wörd " * 500_000
    await made.close()


@pytest.mark.parametrize("values", [{"x": object()}, {"x": {1, 2}}, {"x": b"bytes"}])
async def test_values_that_are_not_plain_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="plain values"):
        await ChatTemplate("x", model="m").render(MESSAGES, **values)


def make_app(folder: Path, source: str) -> FastAPI:
    engine = FakeEngine()
    service = make_service(folder / "model", engine)
    (folder / "own.jinja").write_text(source)
    own = ModelOptions(chat_template=str(folder / "own.jinja"))
    model = TextModel.open(write_text_folder(folder / "other"), own)
    service.models = {"tiny": model}
    return create_app(Config(), engine, [llm_router(service)])


async def test_requests_get_a_400_with_a_code_and_processors_rest(tmp_path: Path) -> None:
    app = make_app(tmp_path, LOOPS)
    async with in_process(app) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=chat()) for _ in range(3))
        )
        for answer in answers:
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("chat_template_failed", "messages")
        assert (
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        ).is_success
    used_s = [child.cpu_times().user for child in children()]
    await asyncio.sleep(0.3)
    assert [child.cpu_times().user for child in children()] == used_s

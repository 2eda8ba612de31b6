"""The Python object, on the embedded model: what a notebook user does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from triptych import ChatPipeline
from triptych.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest, SetupError
from triptych.core.options.config import Config
from triptych.modalities.host import EngineHost
from triptych.modalities.llm.api.pipeline import ChatAnswer
from triptych.schedulers.local import LocalClient

pytestmark = pytest.mark.embedded
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatPipeline]:
    with ChatPipeline.from_pretrained(progress=False, max_length=1024, max_batch_size=8) as pipe:
        yield pipe


def test_it_answers(chat: ChatPipeline) -> None:
    reply = chat(QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in reply.text
    assert reply.finish_reason == "stop"
    assert str(reply) == reply.text
    assert reply.usage.num_prompt_tokens > 5


def test_stream_and_call_say_the_same(chat: ChatPipeline) -> None:
    pieces = list(chat.stream(QUESTION, temperature=0, max_tokens=16))
    assert len(pieces) > 3
    assert "".join(pieces) == chat(QUESTION, temperature=0, max_tokens=16).text


def test_a_batch_answers_in_order_as_each_alone(chat: ChatPipeline) -> None:
    questions = [QUESTION, "What is 2 + 2?", [{"role": "user", "content": "Say hello."}]]
    batch = chat(questions, temperature=0, max_tokens=12)
    alone = [chat(question, temperature=0, max_tokens=12) for question in questions]
    assert [reply.text for reply in batch] == [reply.text for reply in alone]


def test_samples_differ_and_repeat_with_their_seed(chat: ChatPipeline) -> None:
    def names(seed: int) -> list[str]:
        reply = chat("Invent a name.", n=4, seed=seed, temperature=1.2, max_tokens=10)
        return [sample.text for sample in reply.samples]

    first = names(1)
    assert len(set(first)) > 1
    assert names(1) == first
    assert names(2) != first


def test_leaving_a_stream_early_leaves_the_pipeline_usable(chat: ChatPipeline) -> None:
    for _ in range(12):  # more than there are slots: a leak would block the last ones
        stream = chat.stream("Count to one hundred.", max_tokens=200)
        next(stream)
        stream.close()
    assert chat(QUESTION, temperature=0, max_tokens=4).text


async def test_async_twins_work_on_any_loop(chat: ChatPipeline) -> None:
    one, two = await asyncio.gather(
        chat.acall(QUESTION, temperature=0, max_tokens=8),
        chat.acall(QUESTION, temperature=0, max_tokens=8),
    )
    assert isinstance(one, ChatAnswer)
    assert one == two or one.samples[0].text == two.samples[0].text
    pieces = [piece async for piece in chat.astream(QUESTION, temperature=0, max_tokens=8)]
    assert "".join(pieces) == one.text


def test_map_keeps_order_and_gives_errors_their_place(chat: ChatPipeline) -> None:
    entries = [
        {"prompt": QUESTION, "max_tokens": 3},
        {"messages": []},
        {"max_tokens": 1},
        {"prompt": "Hi", "max_tokens": 2, "temperature": 9},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    ]
    replies = list(chat.map(entries, num_in_flight=2, temperature=0))
    assert [isinstance(reply, InvalidRequest) for reply in replies] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_mistakes_say_what_to_do(chat: ChatPipeline) -> None:
    with pytest.raises(InvalidRequest, match="temprature"):
        chat("hi", temprature=1)
    with pytest.raises(ContextLengthExceeded, match="1024"):
        chat("word " * 2000)
    with pytest.raises(InvalidRequest, match="n=1"):
        list(chat.stream("hi", n=2))
    with pytest.raises(ConfigError, match="page"):
        ChatPipeline.from_pretrained(kv_cache_pagesize=16)


def test_options_of_a_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="port is for `triptych serve`"):
        ChatPipeline.from_pretrained(port=1)


def test_logging_is_the_caller_s() -> None:
    with pytest.raises(ConfigError, match=r"triptych.*setLevel"):
        ChatPipeline.from_pretrained(log_level="debug")


@pytest.mark.parametrize(("level", "name"), [("DEBUG", "debug"), ("WARNING", "warning")])
def test_other_processes_log_at_the_level_of_this_one(
    monkeypatch: pytest.MonkeyPatch, level: str, name: str
) -> None:
    def start(models: object, config: Config) -> None:
        raise SetupError(config.server.log_level)

    monkeypatch.setattr(EngineHost, "start", start)
    monkeypatch.setattr(logging.getLogger("triptych"), "level", getattr(logging, level))
    with pytest.raises(SetupError, match=f"^{name}$"):
        ChatPipeline.from_pretrained(progress=False)


def test_a_model_for_the_first_use_is_loaded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(client: LocalClient, model: str) -> None:
        pytest.fail("loaded before its first use")

    monkeypatch.setattr(LocalClient, "load", load)
    options = {"max_length": 256, "kv_cache_memory_mb": 64, "load": "first-use"}
    with ChatPipeline.from_pretrained(progress=False, **options) as chat:
        assert chat(QUESTION, max_tokens=1).usage.num_output_tokens == 1

"""The Responses API in front of a made-up engine, and the order that its events must have."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from support.http import FakeEngine, make_service
from support.other_apis import DIALECTS, other_api_routers
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.app import create_app
from triptych.core.options.config import (
    Config,
    ModelOptions,
    ScheduleOptions,
    ServerOptions,
    StoreOptions,
)
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.multimodal import images_of
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.conversations import conversations_router
from triptych.modalities.llm.api.responses.routes import responses_router
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.service import LlmService
from triptych.schedulers.admission import Admission


class SeeingEncoder:
    """A prompt encoder that remembers the images of conversations."""

    def __init__(self) -> None:
        self.seen: list[list[bytes]] = []

    async def encode_messages(self, messages: Sequence[Any], **options: Any) -> TokenRequest:
        self.seen.append([bytes(one.file.data) for one in images_of(messages) if one.file])
        return TokenRequest(prompt_ids=(5, 6, 7))


def seeing_service(folder: Path, engine: FakeEngine, encoder: SeeingEncoder) -> LlmService:
    """A service whose one model sees."""
    text = make_service(folder, engine).model("tiny")
    admission = Admission(options=ScheduleOptions())
    return LlmService(engine, [text], admission, encoders={"tiny": encoder})


@contextmanager
def responses_app(
    folder: Path,
    engine: FakeEngine,
    *,
    store: DocumentStore | None = None,
    models: ModelOptions | None = None,
    is_off: bool = False,
    encoder: SeeingEncoder | None = None,
    has_others: bool = False,
    **server: Any,
) -> Iterator[FastAPI]:
    """The app with a store of its own in memory, unless one is given or it is off.

    If it `has_others`, it has the other APIs of text, too.
    """
    if encoder is None:
        service = make_service(folder, engine, models)
    else:
        service = seeing_service(folder, engine, encoder)
    if store is None and not is_off:
        store = DocumentStore.from_options(StoreOptions())
    options = ServerOptions(**server)
    answering = Answering.open(service, store, options)
    routers = [responses_router(answering), conversations_router(answering)]
    if has_others:
        routers += [llm_router(service), *other_api_routers(service, folder)]
    cards = [card_of(model) for model in service.models.values()]
    try:
        yield create_app(Config(server=options), engine, routers, cards, dialects=DIALECTS)
    finally:
        if store is not None:  # on a thread: tests may have a loop of their own
            closing = threading.Thread(target=asyncio.run, args=(store.close(),))
            closing.start()
            closing.join()


def ask_for(given: Any = "hi", /, **fields: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": "tiny", "input": given, **fields}


def call_of(name: str, **arguments: Any) -> str:
    """How the model writes a call."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def check_order(events: Iterable[Mapping[str, Any]]) -> None:
    """Fail unless the events have the order that the public specification gives.

    Numbers count from 0. The answer is created, in progress, and has one end, the last. Items come
    one after another, each added, filled and done; a message or reasoning has one part, which is
    added, grows and is done before its item; deltas add up to what is done. The last item of an
    answer that failed may break off anywhere.
    """
    listed = list(events)
    assert [event["sequence_number"] for event in listed] == list(range(len(listed)))
    names = [event["type"] for event in listed]
    assert names[0] == "response.created"
    first = names.index("response.in_progress")
    assert set(names[1:first]) <= {"response.queued"}
    assert names[-1] in _ENDS
    assert not set(names[:-1]) & set(_ENDS)
    inner = listed[first + 1 : -1]
    index = 0
    while inner and not (names[-1] == "response.failed" and _breaks_off(inner)):
        inner = _check_item(inner, index)
        index += 1
    output = listed[-1]["response"]["output"]
    done = [event["item"] for event in listed if event["type"] == "response.output_item.done"]
    assert output[: len(done)] == done


def _breaks_off(events: list[Mapping[str, Any]]) -> bool:
    return all(event["type"] != "response.output_item.done" for event in events)


def _check_item(events: list[Mapping[str, Any]], index: int) -> list[Mapping[str, Any]]:
    """Check the first item of `events`; what follows it."""
    added, *rest = events
    assert added["type"] == "response.output_item.added"
    item = added["item"]
    assert item["status"] == "in_progress"
    end = next(
        place for place, event in enumerate(rest) if event["type"] == "response.output_item.done"
    )
    inside, done, rest = rest[:end], rest[end], rest[end + 1 :]
    assert {event["output_index"] for event in (added, *inside, done)} == {index}
    assert {event["item_id"] for event in inside} == {item["id"]} == {done["item"]["id"]}
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        text = _check_growth(inside, "response.function_call_arguments", "arguments")
        assert done["item"]["arguments"] == text
        return rest
    part = _PARTS[item["type"]]
    assert item["content"] == []
    opened, *grown, closed = inside
    assert opened["type"] == "response.content_part.added"
    assert opened["part"]["type"] == closed["part"]["type"] == part
    assert opened["part"]["text"] == ""
    assert {event["content_index"] for event in inside} == {0}
    text = _check_growth(grown, f"response.{part}", "text")
    assert closed["type"] == "response.content_part.done"
    assert closed["part"]["text"] == text
    assert done["item"]["content"] == [closed["part"]]
    return rest


def _check_growth(events: list[Mapping[str, Any]], name: str, field: str) -> str:
    *deltas, done = events
    assert {event["type"] for event in deltas} <= {f"{name}.delta"}
    assert done["type"] == f"{name}.done"
    whole = "".join(event["delta"] for event in deltas)
    assert done[field] == whole
    return whole

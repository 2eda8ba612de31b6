"""The `openai` package's Responses API against a live server, unmodified."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from support.http import ANSWER, FakeEngine, live, until
from support.images import image, saved
from support.responses_app import call_of, check_order, responses_app
from support.text_models import byte_tokenizer
from triptych.core.errors import EngineDown, RateLimited
from triptych.core.http.server import HttpServer
from triptych.core.options.config import ModelOptions

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What the sky does.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(autouse=True)
def _fresh(engine: FakeEngine) -> None:
    engine.answer, engine.error, engine.num_good, engine.step_s = ANSWER, None, 0, 0.0
    engine.is_endless = False
    engine.submitted.clear()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("model")
    models = ModelOptions(reasoning_parser="think")
    with (
        responses_app(folder, engine, models=models, api_key=("key", "other")) as app,
        live(app) as server,
    ):
        yield server


def connected(server: HttpServer, key: str = "key") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        http_client=httpx.Client(verify=False, timeout=30),
    )


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with connected(server) as client:
        yield client


def prompt_of(engine: FakeEngine) -> str:
    """The latest prompt."""
    *_, request = engine.submitted.values()
    return byte_tokenizer().decode(list(request.prompt_ids))


def test_create(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="tiny",
        input="hi",
        instructions="Be brief.",
        temperature=0.5,
        metadata={"a": "b"},
        max_output_tokens=100,
    )
    assert reply.output_text == ANSWER
    assert reply.status == "completed"
    assert reply.completed_at is not None
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(ANSWER)
    assert reply.usage.input_tokens_details.cached_tokens == 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.temperature == 0.5
    assert reply.metadata == {"a": "b"}
    assert reply.instructions == "Be brief."
    again = client.responses.retrieve(reply.id)
    assert again == reply


def test_an_answer_that_is_too_long(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output_text == ANSWER[:3]
    assert reply.output[0].status == "incomplete"  # type: ignore[union-attr]


def raw_events(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    """Every event of a stream, each parsed into the type of its name, too."""
    events = []
    for event in client.responses.create(model="tiny", stream=True, **fields):
        document = event.model_dump(mode="json", exclude_unset=True)
        assert type(EVENT.validate_python(document)) is type(event)
        events.append(document)
    return events


def test_stream(client: openai.OpenAI) -> None:
    events = raw_events(client, input="hi")
    check_order(events)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens"] == len(ANSWER)
    kept = client.responses.retrieve(events[-1]["response"]["id"])
    assert kept.output_text == ANSWER


def test_stream_of_reasoning_words_and_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = THOUGHT + "I look." + call_of("weather", city="Rome")
    events = raw_events(client, input="hi", tools=[WEATHER])
    check_order(events)
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    reasoned, said, called = events[-1]["response"]["output"]
    assert reasoned["content"][0]["text"] == "Hm."
    assert said["content"][0]["text"] == "I look."
    assert json.loads(called["arguments"]) == {"city": "Rome"}
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 3


def test_stream_that_is_cut_short(client: openai.OpenAI, engine: FakeEngine) -> None:
    for limit in (1, 4, 30, 50, 70):
        engine.answer = THOUGHT + "I look." + call_of("weather", city="Rome")
        events = raw_events(client, input="hi", tools=[WEATHER], max_output_tokens=limit)
        check_order(events)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][-1]["status"] == "incomplete"


def test_an_empty_answer_is_a_message(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = ""
    events = raw_events(client, input="hi")
    check_order(events)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_the_streaming_helper(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = THOUGHT + call_of("weather", city="Rome") + call_of("weather", city="Oslo")
    with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    assert json.loads(snapshots[-1]) == {"city": "Oslo"}
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.parsed_arguments for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]


class City(BaseModel):
    name: str
    population: int


def test_parse(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = '{"name": "Rome", "population": 3}'
    reply = client.responses.parse(model="tiny", input="hi", text_format=City)
    assert reply.output_parsed == City(name="Rome", population=3)
    (request,) = engine.submitted.values()
    assert request.grammar is not None
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"
    assert reply.text.format.schema_["required"] == ["name", "population"]
    with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == reply.output_parsed


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_round_of_tools(client: openai.OpenAI, engine: FakeEngine, is_kept: bool) -> None:
    engine.answer = THOUGHT + call_of("weather", city="Rome")
    first = client.responses.create(
        model="tiny", input="What about Rome?", tools=[WEATHER], store=is_kept
    )
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    engine.answer = "It is sunny."
    if is_kept:
        second = client.responses.create(
            model="tiny", input=[result], tools=[WEATHER], previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
    else:
        asked = {"role": "user", "content": "What about Rome?"}
        second = client.responses.create(
            model="tiny", input=[asked, *first.output, result], tools=[WEATHER]
        )
    assert second.output_text == "It is sunny."
    prompt = prompt_of(engine)
    places = [prompt.index(part) for part in ("What about Rome?", '"city": "Rome"', "sunny")]
    assert places == sorted(places)


def test_a_forced_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = call_of("weather", city="Rome")
    other = {**WEATHER, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required"}
    for choice in (
        "required",
        {"type": "function", "name": "weather"},
        {**allowed, "tools": [{"type": "function", "name": "weather"}]},
    ):
        reply = client.responses.create(
            model="tiny", input="hi", tools=[WEATHER, other], tool_choice=choice
        )
        assert reply.output[0].type == "function_call"
        *_, request = engine.submitted.values()
        assert request.grammar is not None
        assert ("other" in request.grammar) is (choice == "required")


def test_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="tiny", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = reply.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == list(ANSWER)
    assert len(part.logprobs[0].top_logprobs) == 2
    events = raw_events(client, input="hi", top_logprobs=2)
    check_order(events)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == len(ANSWER)


def test_a_chain_of_answers(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "one"
    first = client.responses.create(model="tiny", input="first", instructions="Shout.")
    engine.answer = "two"
    second = client.responses.create(model="tiny", input="second", previous_response_id=first.id)
    client.responses.create(model="tiny", input="third", previous_response_id=second.id)
    prompt = prompt_of(engine)
    places = [prompt.index(word) for word in ("first", "one", "second", "two", "third")]
    assert places == sorted(places)
    assert "Shout" not in prompt
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="x", previous_response_id=second.id)


def test_a_conversation(client: openai.OpenAI, engine: FakeEngine) -> None:
    system = {"type": "message", "role": "developer", "content": "Be kind."}
    conversation = client.conversations.create(items=[system], metadata={"a": "b"})
    engine.answer = THOUGHT + "one"
    client.responses.create(model="tiny", input="first", conversation=conversation.id)
    engine.answer = "two"
    reply = client.responses.create(
        model="tiny", input="second", conversation={"id": conversation.id}, store=False
    )
    assert reply.conversation is not None
    assert reply.conversation.id == conversation.id
    prompt = prompt_of(engine)
    places = [prompt.index(word) for word in ("Be kind.", "first", "one", "second")]
    assert places == sorted(places)
    items = list(client.conversations.items.list(conversation.id, limit=2, order="asc"))
    assert [item.type for item in items] == [
        *("message", "message", "reasoning", "message", "message", "message"),
    ]
    assert items[-1].content[0].text == "two"  # type: ignore[union-attr]
    one = client.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert one == items[1]
    client.conversations.items.delete(items[1].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    added = client.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "later"}]
    )
    assert added.data[0].content[0].text == "later"  # type: ignore[union-attr]
    latest = client.conversations.items.list(conversation.id).data
    assert len(latest) == 6
    assert latest[0].id == added.data[0].id  # type: ignore[union-attr]
    changed = client.conversations.update(conversation.id, metadata={"c": "d"})
    assert client.conversations.retrieve(conversation.id) == changed
    assert changed.metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    for call in (client.conversations.retrieve, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(conversation.id)


def test_in_the_background(client: openai.OpenAI, engine: FakeEngine) -> None:
    begun = client.responses.create(model="tiny", input="hi", background=True)
    assert begun.status == "queued"
    until(lambda: client.responses.retrieve(begun.id).status == "completed")
    done = client.responses.retrieve(begun.id)
    assert done.output_text == ANSWER
    assert done.background
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(begun.id)
    engine.answer = "two"
    client.responses.create(model="tiny", input="more", previous_response_id=begun.id)
    assert ANSWER in prompt_of(engine)


def test_cancel(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.is_endless, engine.step_s = True, 0.005
    begun = client.responses.create(model="tiny", input="hi", background=True)
    until(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input="x", previous_response_id=begun.id)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(begun.id) == cancelled
    assert cancelled.output_text
    until(lambda: not engine.running)


def test_a_background_stream_is_taken_up_again(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.step_s = 0.005
    seen = []
    with client.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.sequence_number == 8:
                break
    assert seen[0].type == "response.created"
    assert seen[1].type == "response.queued"
    name = seen[0].response.id
    live_rest = list(client.responses.retrieve(name, stream=True, starting_after=8))
    check_order([event.model_dump(exclude_unset=True) for event in (*seen, *live_rest)])
    kept_rest = list(client.responses.retrieve(name, stream=True, starting_after=8))
    assert kept_rest == live_rest
    assert live_rest[-1].response.output_text == ANSWER  # type: ignore[union-attr]


def test_a_background_response_that_fails(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error, engine.num_good = EngineDown("The engine is gone."), 3
    begun = client.responses.create(model="tiny", input="hi", background=True)
    until(lambda: client.responses.retrieve(begun.id).status == "failed")
    failed = client.responses.retrieve(begun.id)
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert failed.error.message == "The engine is gone."
    assert failed.output_text == ANSWER[:3]


def test_deleted_while_it_is_made(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.is_endless, engine.step_s = True, 0.005
    begun = client.responses.create(model="tiny", input="hi", background=True)
    client.responses.delete(begun.id)
    until(lambda: not engine.running)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_input_items(client: openai.OpenAI) -> None:
    url = "data:image/png;base64," + base64.b64encode(saved(image())).decode()
    conversation = client.conversations.create(
        items=[
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": url, "detail": "low"}],
            }
        ]
    )
    listed = client.conversations.items.list(conversation.id)
    assert listed.data[0].content[0].image_url is None  # type: ignore[union-attr]
    listed = client.conversations.items.list(
        conversation.id, include=["message.input_image.image_url"]
    )
    assert listed.data[0].content[0].image_url == url  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="reads text alone"):
        client.responses.create(model="tiny", input="hi", conversation=conversation.id)
    items = [{"role": "user", "content": f"n{n}"} for n in range(5)]
    reply = client.responses.create(model="tiny", input=items)
    found = list(client.responses.input_items.list(reply.id, limit=2))
    assert [item.content[0].text for item in found] == ["n4", "n3", "n2", "n1", "n0"]  # type: ignore[union-attr]


def test_an_item_by_its_id(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "remember me"
    first = client.responses.create(model="tiny", input="hi")
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="tiny", input=[reference, {"role": "user", "content": "now"}])
    prompt = prompt_of(engine)
    assert prompt.index("remember me") < prompt.index("now")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input=[{**reference, "id": "msg_none"}])


def test_counting_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(
        model="tiny", input="hi", instructions="Be brief."
    )
    reply = client.responses.create(model="tiny", input="hi", instructions="Be brief.")
    assert reply.usage is not None
    assert counted.input_tokens == reply.usage.input_tokens


def test_another_key_finds_nothing(client: openai.OpenAI, server: HttpServer) -> None:
    reply = client.responses.create(model="tiny", input="hi")
    conversation = client.conversations.create()
    with connected(server, "other") as stranger:
        for call in (
            lambda: stranger.responses.retrieve(reply.id),
            lambda: stranger.responses.delete(reply.id),
            lambda: stranger.responses.cancel(reply.id),
            lambda: stranger.responses.input_items.list(reply.id),
            lambda: stranger.responses.create(
                model="tiny", input="x", previous_response_id=reply.id
            ),
            lambda: stranger.responses.create(
                model="tiny", input="x", conversation=conversation.id
            ),
            lambda: stranger.responses.create(
                model="tiny", input=[{"type": "item_reference", "id": reply.output[0].id}]
            ),
            lambda: stranger.conversations.retrieve(conversation.id),
            lambda: stranger.conversations.delete(conversation.id),
            lambda: stranger.conversations.items.create(
                conversation.id, items=[{"role": "user", "content": "x"}]
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
    assert client.responses.retrieve(reply.id) == reply


def test_errors(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nothing", input="hi")
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="tiny", input="hi", max_output_tokens=10**6)
    assert "max_output_tokens" in raised.value.message
    engine.error = RateLimited("Too much.", retry_after_s=7.0)
    for is_streamed in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="tiny", input="hi", stream=is_streamed)
    engine.error, engine.num_good = EngineDown("The engine is gone."), 3
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="hi")
    *events, last = client.responses.create(model="tiny", input="hi", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The engine is gone."
    assert last.response.output_text == ANSWER[:3]
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))

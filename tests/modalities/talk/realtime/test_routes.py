"""The realtime route in front of made-up models: sound in and out, refusals, hostile events."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support.accounts import ReportingEngine
from support.http import FakeEngine, live, until
from support.talk import realtime, talk_app
from triptych.core.http.server import HttpServer
from triptych.core.http.tracing import RequestTracing


def sound(seconds: float, value: float = 0.5, rate: int = 24_000) -> str:
    """Base64 of a constant sound."""
    pcm_S = np.full(round(seconds * rate), value * 32767)
    return base64.b64encode(pcm_S.astype("<i2").tobytes()).decode()


async def test_speech_is_answered_with_speech(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server) as client:
            transcription = {"model": "ears", "language": "en"}
            audio = {"input": {"transcription": transcription}, "output": {"voice": "bob"}}
            session = {"type": "realtime", "audio": audio, "max_output_tokens": 50}
            await client.send("session.update", session=session)
            for value in (0.5, 0.5, 0.0):
                await client.send("input_audio_buffer.append", audio=sound(0.2, value))
            events = await client.until("response.done")
    kinds = [event["type"] for event in events]
    assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.created")
    said = "".join(e["delta"] for e in events if e["type"].endswith("audio_transcript.delta"))
    assert said == "Hi."
    heard = [e for e in events if e["type"].endswith("transcription.completed")]
    assert [event["transcript"] for event in heard] == ["Hello there"]
    chunks = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
    assert sum(len(base64.b64decode(chunk)) for chunk in chunks) == 3 * 4800
    assert talk.voice.calls[0].voice == "bob"
    assert talk.ears.calls[0].language == "en"
    assert talk.ears.opened[0].num_heard >= 6400
    assert len({event["event_id"] for event in events}) == len(events)
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 3


async def test_spoken_answers_are_short_unless_the_client_says_otherwise(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    tool = {"type": "function", "name": "look"}
    with live(talk.app) as server:
        async with realtime(server) as client:
            for update, has_instructions, limit in (
                ({}, True, 200),
                ({"tools": [tool]}, True, "inf"),
                ({"tools": [], "output_modalities": ["text"]}, False, "inf"),
                ({"output_modalities": ["audio"], "instructions": ""}, False, 200),
                ({"max_response_output_tokens": 60}, False, 60),  # the name of the beta
            ):
                await client.send("session.update", session={"type": "realtime", **update})
                session = (await client.next())["session"]
                assert bool(session["instructions"]) == has_instructions
                assert session["max_output_tokens"] == limit
                await client.ask("Hi")
                await client.until("response.done")
    limits = [each.sampling.max_tokens for each in talk.chat.submitted.values()]
    assert [min(limit, 201) for limit in limits] == [200, 201, 201, 200, 60]


async def test_a_session_and_each_answer_are_explained_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra [otel]")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(RequestTracing, "to_endpoint", lambda _: RequestTracing(provider))
    talk = talk_app(tmp_path, ReportingEngine(answer="Hi."))
    with live(talk.app) as server:
        async with realtime(server) as client, httpx.AsyncClient(base_url=server.url) as http:
            ids = []
            for text in ("One", "Two"):
                await client.ask(text)
                ids.append((await client.until("response.done"))[-1]["response"]["id"])
            assert client.socket.response is not None
            session_id = client.socket.response.headers["x-request-id"]
            found = {
                each: (await http.get(f"/v1/engine/explain/{each}")).json()
                for each in (session_id, *ids)
            }
    session, *answers = found.values()
    assert [each["route"] for each in answers] == ["/v1/realtime"] * 2
    assert (session["status"], *(each["status"] for each in answers)) == (None, 200, 200)
    jobs = [job["job_id"] for each in answers for job in each["jobs"]]
    assert [job["job_id"] for job in session["jobs"]] == jobs
    assert len(set(jobs)) == 2
    (socket,) = (each for each in spans.get_finished_spans() if each.name == "GET /v1/realtime")
    traced = [each for each in spans.get_finished_spans() if each.name == "answer /v1/realtime"]
    assert [(each.attributes or {})["triptych.request_id"] for each in traced] == ids
    of_jobs = [each for each in spans.get_finished_spans() if each.name.endswith(" tiny")]
    parents = [each.parent and each.parent.span_id for each in (*traced, *of_jobs)]
    assert parents == [each.context.span_id for each in (socket, socket, *traced)]


@pytest.mark.parametrize(("kind", "num_bytes"), [("audio/pcmu", 800), ("audio/pcma", 800)])
async def test_telephone_formats(tmp_path: Path, kind: str, num_bytes: int) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server) as client:
            both = {"format": {"type": kind}}
            audio = {"input": {**both, "turn_detection": None}, "output": both}
            await client.send("session.update", session={"type": "realtime", "audio": audio})
            loud = base64.b64encode(bytes([0x80 if kind == "audio/pcmu" else 0xAA]) * 1600).decode()
            await client.send("input_audio_buffer.append", audio=loud)
            await client.send("input_audio_buffer.commit")
            await client.send("response.create")
            events = await client.until("response.done")
    chunks = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
    data = b"".join(map(base64.b64decode, chunks))
    assert abs(len(data) - 3 * num_bytes) < 60
    assert talk.ears.opened[0].num_heard > 3000


async def test_barge_in_ends_the_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    talk = talk_app(tmp_path, FakeEngine(answer="Hi. ", is_endless=True, step_s=0.01))
    with live(talk.app) as server:
        async with realtime(server) as client:
            await client.ask("Talk.")
            await client.until("response.output_audio.delta")
            await client.send("input_audio_buffer.append", audio=sound(0.1))
            events = await client.until("conversation.item.truncated")
            until(lambda: not talk.chat.running)
        metrics = (await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text
    (heard,) = re.findall(r"triptych_audio_seconds_total\S+ (\S+)", metrics)
    assert float(heard) >= 0.1
    lines = [each.__dict__["fields"] for each in caplog.records if each.getMessage() == "request"]
    (tokens,) = [each["completion_tokens"] for each in lines if each["route"] == "/v1/realtime"]
    assert tokens >= 1
    done = next(event for event in events if event["type"] == "response.done")
    assert done["response"]["status_details"]["reason"] == "turn_detected"
    assert talk.voice.num_open == 0


async def test_a_voice_that_the_model_lacks_is_shown_as_the_one_that_speaks(
    tmp_path: Path,
) -> None:
    with live(talk_app(tmp_path).app) as server:
        async with realtime(server) as client:
            for given, shown in (("bob", "bob"), ("nova", "ada")):
                audio = {"output": {"voice": given}}
                await client.send("session.update", session={"type": "realtime", "audio": audio})
                session = (await client.next())["session"]
                assert session["audio"]["output"]["voice"] == shown


async def test_live_transcription(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server, "?intent=transcription") as client:
            await client.send("input_audio_buffer.append", audio=sound(0.2))
            await client.send("input_audio_buffer.append", audio=sound(0.2, 0.0))
            events = await client.until("conversation.item.input_audio_transcription.completed")
    assert events[-2]["delta"] == events[-1]["transcript"] == "Hello there"
    assert not talk.chat.submitted


async def test_openais_client_talks(tmp_path: Path) -> None:
    talk = talk_app(tmp_path, accept_model_names="openai")
    with live(talk.app) as server:
        connection = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with asyncio.timeout(30), connection.realtime.connect(model="gpt-realtime") as client:
            named: Any = {
                "type": "realtime",
                "model": "gpt-realtime",
            }  # as LiveKit's plugin sends it
            await client.session.update(session={**named, "output_modalities": ["text"]})
            content: Any = [{"type": "input_text", "text": "Hi"}]
            item: Any = {"type": "message", "role": "user", "content": content}
            await client.conversation.item.create(item=item)
            await client.response.create()
            async for event in client:
                if event.type == "response.done":
                    break
        await connection.close()
    assert event.response.status == "completed"
    assert event.response.output is not None
    assert event.response.output[0].to_dict()["content"] == [{"type": "output_text", "text": "Hi."}]


HOSTILE: tuple[tuple[Any, str], ...] = (
    ("{", "not valid JSON"),
    ("[]", "a JSON object"),
    (b"\0\1", "text messages"),
    ({"type": "no.such"}, "no event 'no.such'"),
    ({"type": "input_audio_buffer.append"}, "audio is required"),
    ({"type": "input_audio_buffer.append", "audio": "%%%"}, "not valid base64"),
    ({"type": "input_audio_buffer.append", "audio": "AAA="}, ""),
    ({"type": "input_audio_buffer.commit"}, "at least 100 ms"),
    ({"type": "conversation.item.delete", "item_id": "x"}, "no item"),
    ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "MCP"),
    ({"type": "response.cancel"}, "No response"),
    ({"type": "response.create", "response": {"voice": "x"}}, "Unknown field"),
    ({"type": "response.create", "response": {"audio": {"output": {"voice": "x"}}}}, "voice"),
    ({"type": "session.update", "session": {"type": "realtime", "include": ["x"]}}, "include"),
)


async def test_a_session_outlives_bad_events(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server) as client:
            for number, (given, said) in enumerate(HOSTILE):
                own = {"event_id": f"mine_{number}"}
                message = json.dumps({**given, **own}) if isinstance(given, dict) else given
                await client.socket.send(message)
                if not said:
                    continue
                event = await client.next()
                assert event["type"] == "error", event
                assert said in event["error"]["message"]
                expected = own["event_id"] if isinstance(given, dict) else None
                assert event["error"]["event_id"] == expected
            await client.ask("Are you there?")
            done = (await client.until("response.done"))[-1]
    assert done["response"]["status"] == "completed"


@pytest.mark.parametrize(("truncation", "status"), [("auto", "completed"), ("disabled", "failed")])
async def test_the_oldest_turns_give_way(tmp_path: Path, truncation: str, status: str) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server) as client:
            session = {"type": "realtime", "truncation": truncation, "max_output_tokens": 16}
            await client.send("session.update", session=session)
            content = [{"type": "input_text", "text": "x" * 3000}]
            item = {"type": "message", "role": "user", "content": content}
            await client.send("conversation.item.create", item=item)
            await client.ask("y" * 3000)
            response = (await client.until("response.done"))[-1]["response"]
    assert response["status"] == status
    if status == "failed":
        assert response["status_details"]["error"]["code"] == "context_length_exceeded"


async def test_a_choice_of_no_tool_is_refused(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    with live(talk.app) as server:
        async with realtime(server) as client:
            chosen = {"tool_choice": {"type": "function", "name": "weather"}}
            await client.send("session.update", session={"type": "realtime", **chosen})
            await client.ask("Is it warm?")
            response = (await client.until("response.done"))[-1]["response"]
    assert "tool" in response["status_details"]["error"]["message"]


async def test_a_turn_that_cannot_be_transcribed_fails_alone(tmp_path: Path) -> None:
    talk = talk_app(tmp_path)
    talk.ears.words = "fail"
    with live(talk.app) as server:
        async with realtime(server) as client:
            await client.send("input_audio_buffer.append", audio=sound(0.2))
            await client.send("input_audio_buffer.append", audio=sound(0.2, 0.0))
            failed = "conversation.item.input_audio_transcription.failed"
            assert (await client.until(failed))[-1]["error"]["code"] == "engine_down"
            await client.ask("Go on.")
            assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
    assert all(each.is_closed for each in talk.ears.opened)


async def test_what_a_client_leaves_behind_is_ended(tmp_path: Path) -> None:
    talk = talk_app(tmp_path, FakeEngine(is_endless=True, step_s=0.01))
    with live(talk.app) as server:
        async with realtime(server) as client:
            await client.send("input_audio_buffer.append", audio=sound(0.2))
            await client.ask("Talk.")
            await client.until("response.output_audio.delta")
            client.socket.transport.abort()
        await asyncio.to_thread(until, lambda: not talk.chat.running)
        await asyncio.to_thread(until, lambda: talk.ears.opened[0].is_closed)
    assert talk.voice.num_open == 0


async def refused(server: HttpServer, query: str, **kwargs: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as error:
        async with realtime(server, query, **kwargs):
            pass
    return error.value.response.status_code, json.loads(error.value.response.body)["error"]["code"]


async def test_who_may_not_open_a_session_gets_an_answer_of_http(tmp_path: Path) -> None:
    talk = talk_app(tmp_path, api_key=("a", "b"), max_realtime_sessions_per_key=1)
    a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
    with live(talk.app) as server:
        assert await refused(server, "") == (401, "invalid_api_key")
        for query, answer in (
            ("?model=gpt-realtime", (404, "model_not_found")),
            ("?model=hum", (400, "wrong_model")),
            ("?call_id=1", (400, "invalid_request")),
            ("?intent=other", (400, "invalid_request")),
        ):
            assert await refused(server, query, additional_headers=a) == answer
        async with realtime(server, additional_headers=a):
            assert await refused(server, "", additional_headers=a) == (429, "rate_limit_exceeded")
            async with realtime(server, additional_headers=b):
                pass
        until(lambda: server.num_connections == 0)
        async with realtime(server, additional_headers=a):
            pass


async def test_an_idle_session_ends(tmp_path: Path) -> None:
    talk = talk_app(tmp_path, realtime_idle_timeout_s=0.2)
    with live(talk.app) as server:
        async with realtime(server) as client:
            event = await client.next()
            with pytest.raises(ConnectionClosed):
                await client.next()
    assert (event["type"], event["error"]["code"]) == ("error", "request_timeout")

"""The real thing: `triptych serve` on the embedded model, through the `openai` package."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from support.engine_events import following, next_of
from support.serve_process import Server, eventually

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first start fetches models


@pytest.fixture(scope="module")
def repeatable() -> ModuleType:
    """samples/benchmarks/repeatable.py."""
    path = Path(__file__).parents[2] / "samples" / "benchmarks" / "repeatable.py"
    spec = importlib.util.spec_from_file_location("repeatable", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["repeatable"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gauge(server: Server, name: str) -> float:
    """Of the engine, or of all replicas together."""
    lines = server.client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f'{name}{{model="{MODEL}"')]
    assert found, name
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_other_apis_give_the_same_answers(default_server: Server, client: openai.OpenAI) -> None:
    long = "Paris is a city. " * 40  # of replicas, the one that has read so much is asked again
    question = {"role": "user", "content": long + QUESTION[0]["content"]}
    asked = {"model": MODEL, "messages": [question]}
    ours = client.chat.completions.create(**asked, temperature=0, max_tokens=20)  # type: ignore[call-overload]
    text = ours.choices[0].message.content
    message = default_server.client.post(
        "/v1/messages", json={**asked, "max_tokens": 20, "temperature": 0}
    ).json()
    assert [block["text"] for block in message["content"]] == [text]
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == ours.usage.prompt_tokens
    assert used["cache_read_input_tokens"] > 0, "the same prompt was there before"
    options = {"num_predict": 20, "temperature": 0}
    reply = default_server.client.post("/api/chat", json={**asked, "options": options})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == text
    assert lines[-1]["eval_count"] == ours.usage.completion_tokens
    assert lines[-1]["eval_duration"] > 0
    shown = default_server.client.post("/api/show", json={"model": MODEL}).json()
    assert shown["details"]["parameter_size"] == "134.5M"


def test_a_call_that_is_required_follows_its_schema(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked = {"model": MODEL, "tools": [tool], "tool_choice": choice, "max_tokens": 100}
    question = {"role": "user", "content": "What is the weather in Paris for two days?"}
    for seed in range(4):
        reply = client.chat.completions.create(messages=[question], seed=seed, **asked)
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"city", "days"}
        assert arguments["days"] in (1, 2, 3)
    answered = [question, reply.choices[0].message, _result(call.id)]
    final = client.chat.completions.create(model=MODEL, messages=answered, tools=[tool])
    assert final.choices[0].message.content


def _result(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Sunny, 21 degrees."}


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_three_samples_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def samples(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=seed, temperature=1.5, max_tokens=16
        )
        return [choice.message.content for choice in answer.choices]

    first = samples(5)
    assert len(set(first)) > 1
    assert samples(5) == first
    assert samples(6) != first


async def test_answers_repeat_alone_and_batched(
    default_server: Server, repeatable: ModuleType
) -> None:
    """Texts and log-probabilities, greedy and seeded; what was cached or runs beside is all one."""
    questions = repeatable.questions_of(repeatable.PROMPTS[:4])
    url = f"http://127.0.0.1:{default_server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        repeater = repeatable.Repeater(client, MODEL, 12)
        runs = {
            "alone": await repeater.alone(questions, 2),
            "batched": await repeater.batched(questions, 1),
        }
    assert repeatable.report(runs)


async def test_answers_are_the_same_with_images_speech_and_embeddings(
    default_server: Server, repeatable: ModuleType
) -> None:
    """Other models' steps come between a chat's, and cut its prompt into other chunks."""
    prompts = (repeatable.README, "Tell me of rivers, lakes and seas. " * 40)
    questions = repeatable.questions_of(prompts)
    url = f"http://127.0.0.1:{default_server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        repeater = repeatable.Repeater(client, MODEL, 24)
        alone = await repeater.alone(questions, 1)
        others = asyncio.gather(
            client.images.generate(model="triptych-images", prompt="a red apple", n=2),
            client.audio.speech.create(
                model="triptych-voice", voice="alloy", input="The train leaves at noon. " * 4
            ),
            client.embeddings.create(model="all-minilm-l6-v2", input=["one", "two", "three"]),
        )
        beside = [await repeater.alone(questions, 1)]
        while not others.done():
            beside.append(await repeater.alone(questions, 1))
        await others
    for question, (reply,) in alone.items():
        assert [replies[question] for replies in beside] == [[reply]] * len(beside)


def test_stop_strings_end_the_answer_and_stay_out_of_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32, stop=["Paris", "capital"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "capital" not in answer.choices[0].message.content


def test_log_probabilities_match_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    conversation = [
        {"role": "user", "content": "Remember this list: " + "apple, pear, plum, " * 30}
    ]
    first = client.chat.completions.create(model=MODEL, messages=conversation, max_tokens=4)
    again = [*conversation, {"role": "assistant", "content": first.choices[0].message.content}]
    second = client.chat.completions.create(
        model=MODEL, messages=[*again, {"role": "user", "content": "Which?"}], max_tokens=4
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 64 < cached < second.usage.prompt_tokens


def test_completions_echo_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One two three", echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One two three")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens) == choice.text


def test_mistakes_have_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="absent", messages=QUESTION)
    long = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.chat.completions.create(model=MODEL, messages=long)


async def test_32_streams_half_of_them_dropped(default_server: Server) -> None:
    """Slots and pages come back, however jobs leave; those that stay get their whole answer."""
    url = f"http://127.0.0.1:{default_server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def follow(index: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Count up from {index}, slowly."}],
                max_tokens=24,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if index % 2 and text:
                    await stream.close()
                    return "dropped"
                if chunk.choices[0].finish_reason:
                    return str(chunk.choices[0].finish_reason)
            return "cut off"

        ends = await asyncio.gather(*(follow(index) for index in range(32)))
    assert ends == ["length", "dropped"] * 16
    for name in ("triptych_jobs_running", "triptych_jobs_waiting", "triptych_kv_pages_leased"):
        eventually(lambda name=name: gauge(default_server, name) == 0)


def test_engine_events_report_the_steps_of_an_answer(
    default_server: Server, client: openai.OpenAI
) -> None:
    with following(f"http://127.0.0.1:{default_server.port}") as events:
        assert next_of(events, "started")["device"] == "cpu"
        state = next_of(events, "state")
        (model,) = (each for each in state["models"] if each["model"] == MODEL)
        assert (model["task"], model["state"]) == ("chat", "ready")
        assert model["pages"]["num_pages"] > 0
        held = {owner["owner"]: owner["num_bytes"] for owner in state["memory"]["owners"]}
        assert held[f"{MODEL}/weights"] > 100 * 2**20
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=12, extra_body={"ignore_eos": True}
        )
        steps: list[dict[str, Any]] = []
        rows = {"prefill": 0, "decode": 0}
        while sum(rows.values()) < 12:
            for step in next_of(events, "steps")["steps"]:
                steps.append(step)
                rows[step["kind"]] += step["num_rows"]
    assert rows == {"prefill": 1, "decode": 11}
    for step in steps:
        assert (step["model"], step["task"], step["is_failed"]) == (MODEL, "chat", False)
        assert 0 < step["busy_s"] <= step["length_s"] + 1e-6
    starts = [step["start_s"] for step in steps]
    assert starts == sorted(starts)

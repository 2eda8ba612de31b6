"""Structured output for real: `triptych serve` on the embedded model, by the `openai` package."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from support.serve_process import Server

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Describe a pet: its name, its kind and what it likes."}]

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first start fetches models


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog", "hamster"]
    likes: list[str] = pydantic.Field(max_length=2)
    friend: Pet | None


class Answer(pydantic.BaseModel):
    a_rather_long_name_of_a_field: int = pydantic.Field(ge=0, le=9)
    another_rather_long_name: bool


def test_parse_returns_an_object(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Answer, temperature=1, seed=3, n=3
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Answer)


def test_a_stream_parses_into_an_object(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Answer, temperature=0
    ) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Answer)


def test_a_nested_object_at_temperature_1(client: openai.OpenAI) -> None:
    for seed in range(2):
        completion = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "pet", "schema": Pet.model_json_schema()},
            },
            temperature=1,
            seed=seed,
            max_tokens=120,
        )
        (choice,) = completion.choices
        if choice.finish_reason == "stop":
            Pet.model_validate_json(choice.message.content)


def test_every_form(client: openai.OpenAI) -> None:
    def ask(**form: object) -> str:
        completion = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1, seed=1, max_tokens=60, extra_body=form
        )
        return str(completion.choices[0].message.content)

    assert ask(guided_choice=["cat", "dog"]) in ("cat", "dog")
    assert re.fullmatch(r"\(\d{3}\) \d{4}", ask(guided_regex=r"\([0-9]{3}\) [0-9]{4}"))
    assert ask(structured_outputs={"grammar": 'root ::= ("<" [a-z]+ ">"){2}'}).count("<") == 2
    assert ask(response_format={"type": "json_object"}).startswith("{")


def test_stop_strings_log_probabilities_and_usage(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format={"type": "json_object"},
        stop=[":"],
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert ":" not in choice.message.content
    text = "".join(entry.token for entry in choice.logprobs.content)
    assert text.startswith(choice.message.content)
    schema = Answer.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    whole, scored = (
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, response_format=form, logprobs=scores
        )
        for scores in (False, True)
    )
    assert whole.choices[0].message.content == scored.choices[0].message.content
    assert whole.usage.completion_tokens == scored.usage.completion_tokens
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Answer, max_tokens=5
        )


def test_a_keyword_that_cannot_be_enforced_is_named(client: openai.OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
    }
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as raised:
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form)
    assert raised.value.param == "response_format"


async def test_answers_are_the_same_alone_and_in_a_mixed_batch(default_server: Server) -> None:
    url = f"http://127.0.0.1:{default_server.port}/v1"
    schema = Pet.model_json_schema()
    forms = [
        {"guided_json": schema},
        {},
        {"guided_regex": "[a-z ]+[.!?]"},
        {"guided_json": schema},
        {"response_format": {"type": "json_object"}},
        {},
    ]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(n: int) -> tuple[str, str]:
            completion = await client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=1,
                seed=n,
                max_tokens=48,
                extra_body=forms[n],
            )
            (choice,) = completion.choices
            return str(choice.message.content), str(choice.finish_reason)

        alone = [await ask(n) for n in range(len(forms))]
        together = await asyncio.gather(*map(ask, range(len(forms))))
    assert together == alone
    for n in (0, 3):
        if alone[n][1] == "stop":
            jsonschema.validate(json.loads(alone[n][0]), schema)

"""The engine with several models, on the embedded ones: what a notebook user does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from triptych import ChatPipeline, Engine, PipelineConfig, SamplingParams
from triptych.core.errors import ConfigError, InvalidRequest, UnknownModel, UnsupportedOption

pytestmark = pytest.mark.embedded
CHAT, EMBEDDER, VOICE = "smollm2-135m-instruct", "all-minilm-l6-v2", "triptych-voice"
OPTIONS = {"max_length": 1024, "max_batch_size": 8}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = PipelineConfig(model=["embedded", EMBEDDER, VOICE], load="first-use", **OPTIONS)
    with Engine.from_config(config, progress=False) as engine:
        yield engine


def test_a_model_is_loaded_by_name_and_by_its_first_call(engine: Engine) -> None:
    assert {model.model: model.state for model in engine.models} == dict.fromkeys(
        (CHAT, EMBEDDER, VOICE), "unloaded"
    )
    engine.load(EMBEDDER)
    assert engine.embed("a pet").shape == (1, 384)
    assert engine.chat("Hi", max_tokens=2, temperature=0).text


def test_views_are_pipelines_of_the_first_model_of_their_kind(engine: Engine) -> None:
    assert isinstance(engine.chat, ChatPipeline)
    assert engine.pipeline(CHAT) is engine.chat
    assert [engine.chat.name, engine.embed.name, engine.speak.name] == [CHAT, EMBEDDER, VOICE]


def test_models_work_at_the_same_time(engine: Engine) -> None:
    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(
            engine.speak.acall("Hello there."),
            engine.chat.acall("Count to five.", max_tokens=24, temperature=0),
        )

    speech, answer = asyncio.run(both())
    assert speech.coverage == 1.0
    assert answer.text == engine.chat("Count to five.", max_tokens=24, temperature=0).text


def test_closing_a_view_ends_nothing(engine: Engine) -> None:
    with engine.chat as chat:
        chat("Hi", max_tokens=1)
    assert engine.chat("Hi", max_tokens=1, temperature=0).samples


def test_texts_and_their_ids_are_continued_without_a_template(engine: Engine) -> None:
    text = "The capital of France is"
    ids = engine.chat.encode(text)
    assert engine.chat.decode(ids) == text
    sampling = SamplingParams(temperature=0, max_tokens=5)
    from_text, from_ids = engine.complete([text, ids], sampling=sampling)
    assert from_text.text == from_ids.text
    assert "Paris" in from_text.text
    assert engine.chat.decode(from_text.samples[0].token_ids) == from_text.text
    assert engine.complete(ids, max_tokens=5, temperature=0).text == from_text.text
    assert "<|im_start|>user" in engine.chat.render("Hi")


def test_all_fields_of_sampling_parameters_count(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=12, seed=7)
    first, second = (engine.complete("Names:", sampling=sampling) for _ in range(2))
    other = engine.complete("Names:", sampling=SamplingParams(temperature=1.5, max_tokens=12))
    assert first.text == second.text != other.text
    assert first.usage.num_output_tokens == 12
    other = engine.complete("Names:", sampling=sampling, seed=8)
    assert (
        other.text
        == engine.complete(
            "Names:", sampling=SamplingParams(temperature=1.5, max_tokens=12, seed=8)
        ).text
    )
    assert other.text != first.text


def test_more_prompts_than_the_engine_takes_at_once_are_continued(engine: Engine) -> None:
    answers = engine.complete(["The"] * 300, max_tokens=1, temperature=0, n=2)
    assert len(answers) == 300
    assert {sample.text for answer in answers for sample in answer.samples} == {answers[0].text}


def test_documents_are_scored(engine: Engine) -> None:
    near, far = engine.score("a pet", ["a kitten", "stock prices"])
    assert near > far
    assert engine.score(["a pet", "money"], ["a kitten", "stock prices"])[0] == pytest.approx(near)
    with pytest.raises(InvalidRequest, match="one query"):
        engine.score(["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"return_hidden_states": True}, UnsupportedOption),
        ({"stream": True}, UnsupportedOption),
        ({"wrong": 1}, InvalidRequest),
    ],
)
def test_options_are_refused_by_name(engine: Engine, options: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        engine.chat("Hi", **options)


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, -5], [10**7], [1, "a"], None, b"ids", [["a"]], {"a": 1}]
)
def test_prompts_that_are_none_are_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        engine.complete(prompt)


def test_tools_are_for_conversations(engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(InvalidRequest, match="conversations"):
        engine.complete("Hi", tools=[tool])


def test_missing_kinds_and_names_are_said(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"no model of the kind 'vision'"):
        _ = engine.see
    with pytest.raises(UnknownModel):
        engine.pipeline("none-such")


def test_a_model_is_unloaded_and_comes_back(engine: Engine) -> None:
    engine.load(EMBEDDER)
    engine.unload(EMBEDDER)
    assert engine.embed("again").shape == (1, 384)


@pytest.mark.parametrize(
    "options", [{"port": 1}, {"log_level": "debug"}, {"wrong": 1}, {"voice_dir": "/tmp"}]
)
def test_options_of_a_server_or_of_no_model_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Engine("embedded", **options)

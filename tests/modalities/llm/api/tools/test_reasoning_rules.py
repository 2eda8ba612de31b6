"""A reasoning budget, from the fields of a request to the answer of a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import AddedToken

from support.http import FakeEngine, chat, in_process, refused
from support.text_models import byte_tokenizer, write_text_folder
from triptych import ChatPipeline
from triptych.core.engine_api.tokens import ReasoningRules
from triptych.core.errors import ConfigError, InvalidRequest
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions
from triptych.core.weights.manifest import MANIFEST_NAME
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, resolve
from triptych.modalities.llm.api.anthropic.routes import anthropic_router
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission

PATH = "/v1/chat/completions"
OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
HYBRID = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> and </think> #}"
HARMONY = "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant{# <|channel|>"
HARMONY += "<|message|> #}"
MARKS = {"think": ("<think>", "</think>"), "": ()}
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def open_model(
    folder: Path, template: str, marks: tuple[str, ...], *, is_special: bool = False, **options: Any
) -> TextModel:
    """A model whose tokenizer has a token for each of `marks`, from 259 on."""
    resolved = write_text_folder(folder, vocab_size=259 + len(marks), max_position_embeddings=4096)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=is_special) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextModel.open(resolved, ModelOptions(**options))


async def asked(model: TextModel, engine: FakeEngine, **fields: Any) -> httpx.Response:
    """The answer to a request with these fields."""
    service = LlmService(engine, [model], Admission(options=ScheduleOptions()))
    app = create_app(Config(), engine, [llm_router(service)])
    async with in_process(app) as client:
        return await client.post(PATH, json=chat(max_tokens=1, **fields))


async def submitted(model: TextModel, **fields: Any) -> ReasoningRules | None:
    """The reasoning rules that the engine gets for a request with these fields."""
    engine = FakeEngine()
    reply = await asked(model, engine, **fields)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    return request.reasoning


async def test_the_messages_api_has_a_budget(tmp_path: Path) -> None:
    model, engine = open_model(tmp_path, OPENING, MARKS["think"]), FakeEngine()
    service = LlmService(engine, [model], Admission(options=ScheduleOptions()))
    app = create_app(Config(), engine, [anthropic_router(service)])
    reasoning = {"type": "enabled", "budget_tokens": 1024}
    async with in_process(app) as client:
        body = chat(max_tokens=2048, thinking=reasoning)
        assert (await client.post("/v1/messages", json=body)).status_code == 200
    (request,) = engine.submitted.values()
    assert request.reasoning is not None
    assert request.reasoning.max_tokens == 1024


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({**chat(), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 5},
        {"thinking_token_budget": 5},
        {"thinking_budget_tokens": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"chat_template_kwargs": {"thinking_budget": 5}},
        {"thinking_budget": 5, "thinking_token_budget": 5},
    ],
)
def test_a_budget_has_many_names(fields: dict[str, Any]) -> None:
    body = chat_request(**fields)
    assert body.max_reasoning_tokens == 5
    assert body.template_options()["thinking_budget"] == 5


def test_without_a_budget_templates_get_none() -> None:
    body = chat_request(thinking={"type": "enabled"})
    assert body.max_reasoning_tokens is None
    assert "thinking_budget" not in body.template_options()


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": -2},
        {"thinking_budget": "5"},
        {"thinking_budget": 5, "thinking_token_budget": 6},
        {"thinking_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
        {"chat_template_kwargs": {"thinking_budget": "five"}},
        {"chat_template_kwargs": {"thinking_budget": True}},
    ],
)
def test_what_is_no_budget_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, ValueError)):
        chat_request(**fields)


async def test_the_engine_counts_reasoning_that_the_prompt_opens(tmp_path: Path) -> None:
    model = open_model(tmp_path, OPENING, MARKS["think"])
    newline = model.encode_text("\n")[0]
    rules = await submitted(model, thinking_budget=7)
    assert rules is not None
    assert rules == ReasoningRules(
        opens=(259,),
        closes=(260,),
        ending=(260,),
        max_tokens=7,
        blanks=rules.blanks,
        open_at_start=True,
    )
    assert newline in rules.blanks
    assert await submitted(model) is None
    assert await submitted(model, thinking_budget=-1) is None


async def test_nothing_keeps_reasoning_from_its_end(tmp_path: Path) -> None:
    model = open_model(tmp_path, OPENING, MARKS["think"])
    fields: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": [260]}
    error = refused(await asked(model, FakeEngine(), thinking_budget=7, **fields))
    assert error["param"] == "min_tokens"
    assert await submitted(model, **fields) is None
    fields["stop_token_ids"] = [5]
    assert await submitted(model, thinking_budget=7, **fields) is not None


async def test_a_form_waits_for_the_end_of_reasoning(tmp_path: Path) -> None:
    """Its grammar has no reasoning in it: they may end with a special token."""
    model = open_model(tmp_path, OPENING, MARKS["think"], is_special=True)
    rules = await submitted(model, guided_regex="[0-9]+")
    assert rules is not None
    assert (rules.max_tokens, rules.open_at_start) == (None, True)
    rules = await submitted(model, guided_regex="[0-9]+", thinking_budget=3)
    assert rules is not None
    assert rules.max_tokens == 3


async def test_the_engine_counts_reasoning_that_an_answer_opens(tmp_path: Path) -> None:
    model = open_model(tmp_path, HYBRID, MARKS["think"])
    rules = await submitted(model, thinking_budget=7)
    assert rules is not None
    assert not rules.open_at_start
    special = open_model(tmp_path, HYBRID, MARKS["think"], is_special=True)
    assert await submitted(special, thinking_budget=7) is not None
    assert await submitted(special, thinking_budget=7, guided_regex="a") is None


async def test_reasoning_of_gpt_oss_is_messages(tmp_path: Path) -> None:
    model = open_model(tmp_path, HARMONY, HARMONY_MARKS, is_special=True)
    rules = await submitted(model, thinking_budget=7)
    assert rules is not None
    start, channel, message, end, *others = range(259, 265)
    assert rules.opens == (channel, *model.encode_text("analysis"), message)
    assert set(rules.closes) == {start, end, *others}
    said = (*model.encode_text("assistant"), channel, *model.encode_text("final"), message)
    assert rules.ending == (end, start, *said)
    assert rules.reopen


async def test_the_operator_has_a_default(tmp_path: Path) -> None:
    model = open_model(tmp_path, OPENING, MARKS["think"], reasoning_budget=9)
    for fields, budget in (({}, 9), ({"thinking_budget": 3}, 3)):
        rules = await submitted(model, **fields)
        assert rules is not None
        assert rules.max_tokens == budget
    assert await submitted(model, thinking_budget=-1) is None


async def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    model = open_model(tmp_path, OPENING, ())
    service = LlmService(FakeEngine(), [model], Admission(options=ScheduleOptions()))
    app = create_app(Config(), FakeEngine(), [llm_router(service)])
    async with in_process(app) as client:
        error = refused(await client.post(PATH, json=chat(thinking_budget=5)))
        assert error["param"] == "thinking_budget"
    assert await submitted(model) is None
    with pytest.raises(ConfigError, match="--reasoning-budget"):
        open_model(tmp_path, OPENING, (), reasoning_budget=5)


async def test_models_that_do_not_think_keep_any_budget(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert await submitted(open_model(tmp_path, plain, ()), thinking_budget=5) is None


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatPipeline]:
    """The embedded model, made to think: two of its unused tokens are the marks."""
    folder = tmp_path_factory.mktemp("thinker")
    embedded = resolve(
        EMBEDDED_REFERENCE, name=None, options=ModelOptions(), progress=SilentProgress()
    )
    for file in Path(embedded.folder).iterdir():
        (folder / file.name).symlink_to(file)
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    text, values = tokenizer.read_text("utf-8"), json.loads(config.read_text("utf-8"))
    for file in (tokenizer, config, folder / MANIFEST_NAME):
        file.unlink()
    text = text.replace("<repo_name>", "<think>").replace("<file_sep>", "</think>")
    tokenizer.write_text(text, "utf-8")
    values["chat_template"] += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    config.write_text(json.dumps(values), "utf-8")
    with ChatPipeline.from_pretrained(
        str(folder), progress=False, max_length=512, max_batch_size=4
    ) as made:
        yield made


@pytest.mark.embedded
def test_a_real_model_keeps_its_budget(thinker: ChatPipeline) -> None:
    given = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    answers = [thinker("Name a colour.", thinking_budget=12, **given) for _ in range(2)]
    first, second = ([(each.reasoning, each.text) for each in a.samples] for a in answers)
    assert first == second, "also where the prompt was cached"
    for sample in answers[0].samples:
        assert sample.reasoning
        assert sample.text
        assert 0 < sample.usage.num_reasoning_tokens <= 12
        assert sample.usage.num_output_tokens == 40


@pytest.mark.embedded
@pytest.mark.parametrize("options", [{}, {"top_logprobs": 1}, {"repetition_penalty": 1.1}])
def test_a_form_follows_reasoning_of_a_real_model(
    thinker: ChatPipeline, options: dict[str, Any]
) -> None:
    answer = thinker(
        "How old is Ada?", thinking_budget=6, guided_json=SCHEMA, max_tokens=60, seed=1, **options
    )
    (sample,) = answer.samples
    assert sample.reasoning
    assert sample.finish_reason == "stop"
    jsonschema.validate(json.loads(sample.text), SCHEMA)

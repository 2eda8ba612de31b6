"""From a call to a stream of text, over an engine that follows a script."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from support.text_models import Script, ScriptedClient, write_text_folder
from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.engine_api.reports import ModelStatus
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
)
from triptych.core.grammar.constraint import Constraint
from triptych.core.limits import MAX_PRIORITY
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions
from triptych.modalities.llm.api import service as service_module
from triptych.modalities.llm.api.checks import call_sampling, sampling_params
from triptych.modalities.llm.api.samples import SampleDelta, TextCall
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission


@pytest.fixture
def model(tmp_path: Path) -> TextModel:
    return TextModel.open(write_text_folder(tmp_path), ModelOptions())


def saying(model: TextModel, text: str) -> Script:
    """A script that says `text`, a token a step, and stops."""
    ids = model.encode_text(text)

    def script(request: TokenRequest) -> Sequence[TokenDelta]:
        scored = {i: (TokenLogprob(i, -0.5, ((i, -0.5),)),) for i in (*ids, 2)}
        deltas = [TokenDelta(token_ids=(i,), logprobs=scored[i]) for i in ids]
        end = TokenDelta(
            finish_reason="stop", stop_token_id=2, logprobs=scored[2], num_cached_tokens=3
        )
        return [*deltas, end]

    return script


def service(model: TextModel, client: ScriptedClient, **schedule: int) -> LlmService:
    return LlmService(client, [model], Admission(options=ScheduleOptions(**schedule)))


_SHORT: Mapping[str, object] = MappingProxyType({"max_tokens": 32})
Asked = tuple[TextCall, list[TokenRequest]]


def call(
    text: TextModel,
    *,
    prompts: Sequence[tuple[int, ...]] = (),
    sampling: Mapping[str, object] = _SHORT,
    contents: tuple[PromptContent, ...] = (),
    call_id: str = "c",
    **fields: object,
) -> Asked:
    values = {"model": "tiny", "caller": Caller(call_id=call_id), "sampling": sampling, **fields}
    encoded = [
        TokenRequest(prompt_ids=ids, contents=contents)
        for ids in prompts or (text.encode_text("hi"),)
    ]
    return TextCall(**values), encoded  # type: ignore[arg-type]


async def run(service: LlmService, asked: Asked) -> AsyncGenerator[SampleDelta, None]:
    return service.generate(asked[0], await service.prepare(*asked))


async def collect(service: LlmService, asked: Asked) -> list[SampleDelta]:
    return [delta async for delta in await run(service, asked)]


async def test_text_usage_and_finish(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "héllo"))
    deltas = await collect(service(model, client), call(model))
    assert "".join(delta.text for delta in deltas) == "héllo"
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", 2)
    assert last.num_prompt_tokens == 2
    assert last.num_cached_tokens == 3
    assert last.num_output_tokens == len(model.encode_text("héllo")) + 1


async def test_a_stop_string_ends_the_job_early(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "one two three"))
    deltas = await collect(service(model, client), call(model, stop=(" t", "three")))
    assert "".join(delta.text for delta in deltas) == "one"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " t")
    assert client.cancelled == ["c.0"]


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("skips_special", [False, True])
@pytest.mark.parametrize("stop", [(), ("wo",), ("o t", "two"), ("e two three",), ("nowhere",)])
async def test_all_that_was_sampled_is_scored_where_asked(
    model: TextModel, stop: tuple[str, ...], skips_special: bool, includes_stop: bool
) -> None:
    shows = {
        "stop": stop,
        "skip_special_tokens": skips_special,
        "include_stop_str_in_output": includes_stop,
    }
    shown = {}
    for scores_all in (False, True):
        client = ScriptedClient(saying(model, "one two three"))
        asked = call(model, scores_all=scores_all, **shows)
        deltas = await collect(service(model, client), asked)
        text = "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        shown[scores_all] = b"".join(entry.shown for entry in entries)
        if scores_all:
            sampled = [token for delta in deltas for token in delta.sampled_ids]
            assert [entry.token_id for entry in entries] == sampled
        elif not includes_stop:
            assert "".join(entry.text for entry in entries) == text
    assert shown[True] == shown[False]


async def test_samples_have_their_own_index_and_share_the_seed(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    prompts = (model.encode_text("a"), model.encode_text("b"))
    deltas = await collect(service(model, client), call(model, prompts=prompts, n=3, seed=7))
    assert sorted({delta.index for delta in deltas}) == [0, 1, 2, 3, 4, 5]
    rows = sorted((job, r.sampling.seed, r.sampling.sample_index) for job, r in client.submitted)
    assert [row[1:] for row in rows] == [(7, 0), (7, 1), (7, 2)] * 2


async def test_a_call_without_seed_samples_one(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    for _ in range(2):
        await collect(service(model, client), call(model))
    assert len({request.sampling.seed for _, request in client.submitted}) == 2


async def test_the_operators_seed_serves_calls_without_one(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    admission = Admission(options=ScheduleOptions())
    serving = LlmService(client, [model], admission, default_seed=11)
    await collect(serving, call(model))
    await collect(serving, call(model, seed=0))
    assert [request.sampling.seed for _, request in client.submitted] == [11, 0]


async def test_minus_one_asks_for_a_new_seed_whatever_the_operators(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    serving = LlmService(client, [model], Admission(options=ScheduleOptions()), default_seed=11)
    for _ in range(2):
        await collect(serving, call(model, seed=-1))
    seeds = {request.sampling.seed for _, request in client.submitted}
    assert len(seeds - {-1, 11}) == 2


@pytest.mark.parametrize("is_low_first", [True, False])
def test_a_priority_is_read_as_the_operator_says(model: TextModel, is_low_first: bool) -> None:
    schedule = ScheduleOptions(schedule_low_priority_values_first=is_low_first)
    serving = LlmService.from_config(Config(schedule=schedule), [model], ScriptedClient([]))
    assert serving.urgency(3) == (-3 if is_low_first else 3)
    assert serving.urgency(None) == 0
    assert serving.urgency(None, is_of_batch=True) == -MAX_PRIORITY


async def test_leaving_early_cancels_every_sample(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "a long answer"))
    async with aclosing(await run(service(model, client), call(model, n=4))) as deltas:
        await anext(deltas)
    assert sorted(client.cancelled) == [job for job, _ in sorted(client.submitted)]
    assert client.finished == []


async def test_logprobs_carry_text_and_bytes(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "é"))
    deltas = await collect(service(model, client), call(model))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.data for entry in entries) == "é".encode()
    assert entries[0].top[0].token_id == entries[0].token_id


def echo_of(delta: SampleDelta) -> tuple[str, list[float | None]]:
    """What a sample's text begins with, and its log-probabilities."""
    assert delta.prompt is not None
    assert delta.prompt.echo is not None
    text, tokens = delta.prompt.echo()
    return text, [token.logprob for token in tokens]


async def test_the_first_delta_has_the_echo(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "!?"))
    first, *rest = await collect(service(model, client), call(model, echo=True))
    assert echo_of(first) == ("hi", [])
    assert first.text + "".join(delta.text for delta in rest) == "!?"
    assert not any(delta.has_echo for delta in rest)


async def test_echoed_logprobs_begin_without_one(model: TextModel) -> None:
    ids = model.encode_text("hi")

    def script(request: TokenRequest) -> Sequence[TokenDelta]:
        return [
            TokenDelta(prompt_logprobs=(TokenLogprob(ids[1], -2.0),), finish_reason="length"),
        ]

    scored = {"max_tokens": 32, "prompt_logprobs": True}
    serving = service(model, ScriptedClient(script))
    (delta,) = await collect(serving, call(model, echo=True, sampling=scored))
    assert echo_of(delta) == ("hi", [None, -2.0])


async def test_a_prompt_of_one_token_still_reports_it(model: TextModel) -> None:
    scored = {"max_tokens": 1, "prompt_logprobs": True}
    one = call(model, echo=True, sampling=scored, prompts=(model.encode_text("h"),))
    first, *_ = await collect(service(model, ScriptedClient(saying(model, "i"))), one)
    assert echo_of(first) == ("h", [None])
    assert [(entry.text, entry.logprob) for entry in first.logprobs] == [("i", -0.5)]


async def test_errors_come_before_anything_is_submitted(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    serving = service(model, client)
    bad: list[tuple[type[Exception], dict[str, object]]] = [
        (NotFound, {"model": "other"}),
        (InvalidRequest, {"n": 0}),
        (InvalidRequest, {"seed": 2**70}),
        (InvalidRequest, {"sampling": {"max_tokens": 0}}),
        (InvalidRequest, {"n": 10**6}),
        (InvalidRequest, {"stop": ("",)}),
        (InvalidRequest, {"prompts": ((),)}),
        (InvalidRequest, {"prompts": ((259,),)}),
        (InvalidRequest, {"sampling": {"temperature": float("nan")}}),
        (InvalidRequest, {"sampling": {"logit_bias": ((999, 1.0),)}}),
        (ContextLengthExceeded, {"sampling": {"max_tokens": 255}}),
    ]
    for error, fields in bad:
        with pytest.raises(error):
            await collect(serving, call(model, **fields))
    assert client.submitted == []


async def test_overload_is_refused_and_admission_comes_back(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    serving = service(model, client, max_batch_size=1, max_queue_size=1)
    async with aclosing(await run(serving, call(model))) as running:
        await anext(running)
        with pytest.raises(Overloaded) as caught:
            await collect(serving, call(model, n=2))
        assert caught.value.retry_after_s is not None
    for _ in range(3):
        assert await collect(serving, call(model, n=2))


def test_sampling_params_merge_defaults_and_end_ids(model: TextModel) -> None:
    params = sampling_params(model, given={"temperature": 0.5, "top_p": None, "max_tokens": 3})
    assert (params.temperature, params.top_p, params.stop_token_ids) == (0.5, 1.0, (0, 2))
    ignoring = sampling_params(model, ignore_eos=True, given={"stop_token_ids": (9,)})
    assert ignoring.stop_token_ids == (9,)
    for given in ({"temprature": 1}, {"temperature": "hot"}):
        with pytest.raises(InvalidRequest):
            sampling_params(model, given=given)


async def test_max_tokens_defaults_to_the_room_left(model: TextModel) -> None:
    serving = service(model, ScriptedClient(saying(model, "")))

    def asked(num_prompt_tokens: int, max_tokens: int | None) -> Asked:
        prompt = TokenRequest(prompt_ids=(5,) * num_prompt_tokens)
        return TextCall(model="tiny", sampling={"max_tokens": max_tokens}), [prompt]

    def max_tokens(*given: int | None) -> int:
        return call_sampling(model, *asked(*given)).max_tokens  # type: ignore[arg-type]

    assert max_tokens(56, None) == 200
    assert max_tokens(56, 10) == 10
    assert max_tokens(56, 0) == 0  # refused later, never taken for "all"
    for requested in (201, None):
        with pytest.raises(ContextLengthExceeded):
            await serving.prepare(*asked(256 if requested is None else 56, requested))


@pytest.mark.parametrize(
    ("context_length", "given", "found"),
    [
        (None, 200, 200),
        (100, 30, 30),
        (100, 200, 44),  # lowered to the room
        (100, None, 44),
        (1000, 1000, 200),  # the model's own context is shorter
        (1000, None, 200),
    ],
)
def test_a_calls_context_length_bounds_its_answers(
    model: TextModel, context_length: int | None, given: int | None, found: int
) -> None:
    asked = TextCall(model="tiny", sampling={"max_tokens": given}, context_length=context_length)
    assert call_sampling(model, asked, [TokenRequest(prompt_ids=(5,) * 56)]).max_tokens == found


@pytest.mark.parametrize("given", [1, None])
def test_a_prompt_that_fills_a_calls_context_is_refused(
    model: TextModel, given: int | None
) -> None:
    asked = TextCall(model="tiny", sampling={"max_tokens": given}, context_length=56)
    with pytest.raises(ContextLengthExceeded, match="in a context of 56"):
        call_sampling(model, asked, [TokenRequest(prompt_ids=(5,) * 56)])


async def test_requests_are_prepared_prompt_by_prompt(model: TextModel) -> None:
    serving = service(model, ScriptedClient(saying(model, "")))
    prompts = ((5,) * 20, (6,) * 56, (7,) * 3)
    asked = call(model, prompts=prompts, sampling={}, n=2, seed=9, priority=3, default_tokens=500)
    requests = await serving.prepare(*asked)
    assert [request.prompt_ids for request in requests] == [p for p in prompts for _ in range(2)]
    assert [request.sampling.sample_index for request in requests] == [0, 1] * 3
    assert {request.sampling.seed for request in requests} == {9}
    assert {request.priority for request in requests} == {3}
    assert {request.sampling.max_tokens for request in requests} == {200}, "the longest decides"
    assert {request.reasoning for request in requests} == {None}, "only chat has reasoning"


async def test_one_form_is_for_the_answers_to_every_prompt(model: TextModel) -> None:
    serving = service(model, ScriptedClient(saying(model, "")))
    form = Constraint(kind="regex", text="a+", param="regex")
    plain = await serving.prepare(*call(model, prompts=((5,), (6,))))
    formed = await serving.prepare(*call(model, prompts=((5,), (6,)), form=form))
    assert {request.grammar for request in plain} == {""}
    (grammar,) = {request.grammar for request in formed}
    assert grammar


async def test_images_in_progress_are_bounded(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_HELD_IMAGE_BYTES", 25)
    span = ContentSpan(digest=bytes(32), runs=((0, 1),))
    image = PromptContent(span=span, inputs={"pixel_values": Array("uint8", (10,), bytes(10))})
    serving = service(model, ScriptedClient(saying(model, "hi")))
    seeing: dict[str, Any] = {"contents": (image,)}
    with pytest.raises(PayloadTooLarge, match="so many samples"):
        await collect(serving, call(model, n=3, **seeing))
    async with aclosing(await run(serving, call(model, n=2, **seeing))) as first:
        await anext(first)
        with pytest.raises(Overloaded):
            await collect(serving, call(model, call_id="d", **seeing))
        assert await collect(serving, call(model, call_id="e"))
    assert await collect(serving, call(model, call_id="f", **seeing))


async def test_a_reduced_context_is_the_models(model: TextModel) -> None:
    client = ScriptedClient(saying(model, "x"))
    serving = service(model, client)
    status = ModelStatus(model=model.name, state="ready", reduced_context=20)
    client.models = (status,)
    assert serving.model(model.name).context_length == 20
    with pytest.raises(ContextLengthExceeded, match="takes 20 tokens of context"):
        await collect(serving, call(model, sampling={"max_tokens": 30}))
    client.models = (ModelStatus(model=model.name, state="unloaded"),)
    assert serving.model(model.name).context_length == 20, "it is unknown while it is unloaded"

"""From samples to a transcript: parts, times, prompts, bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from support.asr import (
    FakeAsrEngine,
    asr_service,
    noise,
    timed_tokens,
    whisper_model,
)
from triptych.core.engine_api.caller import Caller
from triptych.core.errors import InvalidRequest, NotFound, Overloaded
from triptych.modalities.asr.api import service as service_module
from triptych.modalities.asr.api.protocol import TranscriptionFields
from triptych.modalities.asr.api.service import (
    AsrService,
    TranscribeCall,
    check_sound,
)
from triptych.modalities.asr.api.transcript import Transcript, gather
from triptych.modalities.asr.languages import language_code
from triptych.modalities.asr.spec import SAMPLE_RATE
from triptych.modalities.asr.wire import TranscribeRequest

CALL = TranscribeCall(model="ears", caller=Caller(call_id="c"), seed=5, prompt="before")


async def transcribe(
    service: AsrService, seconds: float, call: TranscribeCall = CALL
) -> Transcript:
    deltas = [delta async for delta in service.transcribe(call, noise(seconds))]
    progress_s = [delta.heard_s for delta in deltas]
    assert progress_s == sorted(progress_s)
    assert progress_s[-1] == seconds
    return gather(deltas)


class PartwiseEngine(FakeAsrEngine):
    """Leaves the last second of each part to the next, if there is one."""

    async def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> Any:
        seconds = len(request.pcm) / 4 / SAMPLE_RATE
        heard_s = seconds if request.is_last else seconds - 1
        name = f" part{job_id[-1]}"
        self.windows = [
            (heard_s, (timed_tokens(name, 0.5, heard_s, has_times=request.has_word_times),))
        ]
        async for output in super().submit(model, request, job_id=job_id):
            yield output


async def test_long_sound_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PART_S", 5)
    engine = PartwiseEngine([])
    transcript = await transcribe(asr_service(engine), 10.0)
    assert transcript.text == "part0 part1 part2"
    assert [(s.index, s.start_s, s.end_s) for s in transcript.segments] == [
        (0, 0.5, 4.0),
        (1, 4.5, 8.0),
        (2, 8.5, 10.0),
    ]
    requests: list[TranscribeRequest] = list(engine.submitted.values())
    assert [request.is_last for request in requests] == [False, False, True]
    assert [request.seed for request in requests] == [5, 6, 7]
    assert [bytes(request.prompt_ids) for request in requests] == [
        b" before",
        b" before part0",
        b" before part0 part1"[-31:],
    ]
    whole = np.frombuffer(requests[1].pcm, "<f4")
    np.testing.assert_array_equal(whole, noise(10.0)[4 * SAMPLE_RATE :][: len(whole)])


async def test_times_of_words_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PART_S", 5)
    call = TranscribeCall(model="ears", caller=Caller(call_id="c"), has_word_times=True)
    transcript = await transcribe(asr_service(PartwiseEngine([])), 7.0, call)
    first, second = transcript.words
    assert (first.text, second.text) == (" part0", " part1")
    assert 4.5 <= second.start_s < second.end_s <= 7.0


async def test_text_sampled_hot_is_not_carried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PART_S", 5)
    monkeypatch.setattr(service_module, "MAX_PROMPT_TEMPERATURE", -1.0)
    engine = PartwiseEngine([])
    await transcribe(asr_service(engine), 7.0)
    assert [request.prompt_ids for request in engine.submitted.values()][1] == ()


async def test_silence_is_an_empty_text() -> None:
    transcript = await transcribe(asr_service(FakeAsrEngine([(3.0, ())])), 3.0)
    assert (transcript.text, transcript.segments) == ("", ())


async def test_what_is_held_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_HELD_S", 5)
    service = asr_service(FakeAsrEngine([(3.0, ()), (3.0, ())]))
    running = service.transcribe(CALL, noise(3.0))
    await anext(running)
    with pytest.raises(Overloaded):
        await transcribe(service, 3.0)
    await running.aclose()
    await transcribe(service, 3.0)


async def test_calls_are_admitted() -> None:
    service = asr_service(FakeAsrEngine([(3.0, ()), (3.0, ())]), max_queue_size=1, max_batch_size=1)
    first, second = service.transcribe(CALL, noise(3.0)), service.transcribe(CALL, noise(3.0))
    await anext(first)
    await anext(second)
    with pytest.raises(Overloaded):
        await transcribe(service, 3.0)
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("temperature", [-0.1, 1.1, float("nan")])
async def test_a_temperature_out_of_range_reaches_no_engine(temperature: float) -> None:
    engine = PartwiseEngine([])
    call = replace(CALL, temperature=temperature)
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        await transcribe(asr_service(engine), 1.0, call)
    assert not engine.submitted


async def test_an_unknown_model() -> None:
    service = asr_service(FakeAsrEngine([]))
    with pytest.raises(NotFound, match="ears"):
        await anext(service.transcribe(TranscribeCall(model="x"), noise(1.0)))


def test_a_prompt_spells_no_special_token_and_keeps_its_end() -> None:
    model = asr_service(FakeAsrEngine([])).models["ears"]
    assert bytes(model.prompt_ids(" <|en|> ")) == b" <|en|>"[-31:]
    assert bytes(model.prompt_ids("abc " * 30)) == (b" " + b"abc " * 30).strip()[-31:]
    assert model.prompt_ids("  ") == ()


@pytest.mark.parametrize(
    "pcm_S",
    [
        np.zeros(0, np.float32),
        np.ones(1, np.float32),
        np.zeros(SAMPLE_RATE, np.float32),
        np.full(SAMPLE_RATE, 0.5, np.float32),
        0.0001 * noise(1.0),
    ],
)
def test_silence_is_refused(pcm_S: np.ndarray) -> None:
    with pytest.raises(InvalidRequest):
        check_sound(pcm_S)


def test_a_whisper_is_not_silence() -> None:
    check_sound(0.01 * noise(1.0))


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("en-US", "en"), ("EN_gb", "en"), ("zh-Hans-CN", "zh"), ("yue-HK", "yue"), ("pt-BR", "pt"),
        ("haitian creole", "ht"), ("English", "en"), ("en", "en"), ("xx-US", ""), ("-US", ""),
        ("english-US", ""),
    ],
)  # fmt: skip
def test_languages_by_code_locale_or_name(language: str, code: str) -> None:
    assert language_code(language) == code


@pytest.mark.parametrize("is_multilingual", [True, False])
@pytest.mark.parametrize("language", ["auto", " AUTO ", ""])
def test_auto_finds_the_language_out(language: str, is_multilingual: bool) -> None:
    traits = whisper_model(is_multilingual=is_multilingual).traits
    assert traits.check_language("ears", language) == ""


@pytest.mark.parametrize("given", ["word", "word,segment", " word , segment"])
def test_lists_are_taken_by_their_names_without_brackets(given: str) -> None:
    fields = {"model": "m", "timestamp_granularities": given, "include": "logprobs"}
    body = TranscriptionFields.model_validate(fields)
    assert body.granularities == [part.strip() for part in given.split(",")]
    assert body.include == ["logprobs"]
    with pytest.raises(ValidationError, match="not both"):
        TranscriptionFields.model_validate({**fields, "include[]": ["logprobs"]})


async def test_the_same_request_has_the_same_seed_unless_a_new_one_is_asked_for() -> None:
    engine = PartwiseEngine([])
    service = asr_service(engine)
    seeds = []
    for index, seed in enumerate((None, None, 5, -1, -1)):
        call = replace(CALL, seed=seed, caller=Caller(call_id=f"c{index}"))
        await transcribe(service, 2.0, call)
        seeds.append(engine.submitted[f"c{index}.0"].seed)
    assert seeds[:3] == [0, 0, 5]
    assert len({*seeds[3:], -1}) == 3

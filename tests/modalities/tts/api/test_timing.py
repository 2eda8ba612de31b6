"""The times of spoken words: from ids to words, across segments, over HTTP."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import pytest

from support.http import documents, in_process
from support.speech_app import (
    FakeSpeechEngine,
    SpellingFrontEnd,
    make_speech_app,
    make_speech_service,
    num_samples,
    speech,
)
from triptych.core.engine_api.caller import Caller
from triptych.modalities.tts.api.results import SpokenWord
from triptych.modalities.tts.api.service import SpeechCall
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.spoken import Span
from triptych.modalities.tts.api.timing import WordClock, WordIds

TEXT = "Hello there. It costs 12 euro, he said."
STEP_S = 0.05


def times(words: list[SpokenWord]) -> list[tuple[str, float, float]]:
    return [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in words]


@pytest.mark.parametrize("end_s", [0.55, 0.7])
def test_a_word_is_over_with_its_last_id_and_the_last_one_with_the_sound(end_s: float) -> None:
    clock = WordClock("ab, cd")
    clock.begin([WordIds(Span(0, 3), 0, 2), WordIds(Span(4, 6), 4, 6)], 10.0)
    assert times([*clock.take([0.1, 0.2])]) == []  # it waits: the next may have the same source
    assert times([*clock.take([0.3, 0.4, 0.5, 0.6])]) == [("ab,", 10.0, 10.2)]
    assert times([*clock.end(end_s)]) == [("cd", 10.4, 10.0 + end_s)]


def test_words_of_one_source_are_one_word() -> None:
    clock = WordClock("$5 now")
    clock.begin(
        [WordIds(Span(0, 2), 0, 1), WordIds(Span(0, 2), 1, 2), WordIds(Span(3, 6), 2, 3)], 0.0
    )
    assert times([*clock.take([1.0, 2.0, 3.0]), *clock.end(3.0)]) == [
        ("$5", 0.0, 2.0),
        ("now", 2.0, 3.0),
    ]


def test_words_are_heard_before_their_ids_and_share_a_space() -> None:
    """As in `kokoro.KPipeline.join_timestamps`; after a mark, a word has no part of the space."""
    clock = WordClock("ab cd, e", lag_s=0.05)
    first = WordIds(Span(0, 2), 0, 3, shares_space=True)
    clock.begin([first, WordIds(Span(3, 6), 3, 5), WordIds(Span(7, 8), 7, 8)], 10.0)
    found = [*clock.take([0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9]), *clock.end(0.8)]
    assert times(found) == [("ab", 10.0, 10.1), ("cd,", 10.1, 10.35), ("e", 10.55, 10.8)]


def test_words_do_not_overlap_where_the_end_of_a_segment_was_cut() -> None:
    """As the repeats of a loop are, in which ids have ended."""
    clock = WordClock("a b c d")
    words = [WordIds(Span(2 * at, 2 * at + 1), 2 * at, 2 * at + 1) for at in range(3)]
    clock.begin(words, 0.0)
    found = [*clock.take([0.1, 0.3, 0.6]), *clock.end(0.4)]
    clock.begin([WordIds(Span(6, 7), 0, 1)], 0.4)
    found += [*clock.take([0.5]), *clock.end(0.5)]
    assert times(found) == [("a", 0.0, 0.1), ("b", 0.3, 0.6), ("c", 0.6, 0.6), ("d", 0.6, 0.9)]


def test_ids_without_ends_end_with_the_segment() -> None:
    clock = WordClock("a b c")
    words = [WordIds(Span(2 * at, 2 * at + 1), at, at + 1) for at in range(3)]
    clock.begin(words, 0.0)
    found = [*clock.take([0.1]), *clock.end(0.4)]
    assert times(found) == [("a", 0.0, 0.1), ("b", 0.1, 0.4), ("c", 0.4, 0.4)]
    clock.begin(words, 1.0)
    assert [*clock.end(0.4)] == []  # the model knows no times


@pytest.mark.parametrize(
    ("word", "source"),
    [("costs", "costs"), ("twelve", "12"), ("euro", "euro"), ("Hello", "Hello")],
)
def test_a_spoken_word_has_its_source(word: str, source: str) -> None:
    spoken = Normalizer()(TEXT)
    at = spoken.text.index(word)
    assert TEXT[slice(*spoken.source_of(Span(at, at + len(word))))] == source


@pytest.mark.parametrize("speed", [1.0, 2.0])
async def test_a_call_has_the_times_of_all_its_words(speed: float) -> None:
    """A letter takes a step; the second sentence begins after the pause."""
    service = make_speech_service(FakeSpeechEngine(), SpellingFrontEnd(most=20, pause_s=0.1))
    call = SpeechCall(model="hum", text=TEXT, speed=speed, caller=Caller(call_id="c"))
    found = [word async for piece in service.speak(call).pieces for word in piece.words]
    assert " ".join(word.text for word in found) == TEXT
    assert [TEXT[slice(*word.source)] for word in found] == [word.text for word in found]
    assert [word.start_s * speed for word in found[:3]] == pytest.approx([0, 0.25, 0.6])
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(found))


async def answer(path: str, body: dict[str, Any], front: SpellingFrontEnd | None = None) -> Any:
    engine = FakeSpeechEngine()
    app = make_speech_app(engine, make_speech_service(engine, front))
    async with in_process(app) as client:
        return await client.post(path, json=body)


async def test_events_have_the_words() -> None:
    fields = {"stream_format": "sse", "timestamp_granularities": ["word"], "response_format": "pcm"}
    reply = await answer("/v1/audio/speech", speech(TEXT, **fields))
    *deltas, done = documents(reply.text)
    early = [word for delta in deltas for word in delta["words"]]
    assert early == done["words"][: len(early)]
    assert len(early) >= 7
    assert done["words"][0] == {"word": "Hello", "start": 0.0, "end": 0.25}
    assert " ".join(word["word"] for word in done["words"]) == TEXT


async def test_captions_are_those_of_kokoro_fastapi() -> None:
    body = speech(TEXT, response_format="pcm")
    whole = (await answer("/dev/captioned_speech", body | {"stream": False})).json()
    assert whole["audio_format"] == "audio/pcm"
    assert len(base64.b64decode(whole["audio"])) == 2 * num_samples(
        "".join(TEXT.replace("12", "twelve"))
    )
    assert whole["timestamps"][0] == {"word": "Hello", "start_time": 0.0, "end_time": 0.25}
    streamed = (await answer("/dev/captioned_speech", body)).text.splitlines()
    lines = [json.loads(line) for line in streamed]
    assert len(lines) > 3
    assert [word for line in lines for word in line["timestamps"]] == whole["timestamps"]
    plain = await answer("/dev/captioned_speech", body | {"return_timestamps": False})
    assert {json.loads(line)["timestamps"] for line in plain.text.splitlines()} == {None}


@pytest.mark.parametrize(
    ("path", "fields", "front", "said"),
    [
        ("/v1/audio/speech", {"timestamp_granularities": ["word"]}, {}, "needs stream_format sse"),
        ("/v1/audio/speech", {"return_timestamps": True}, {}, "timestamp_granularities"),
        ("/dev/captioned_speech", {}, {"has_word_times": False}, "does not know when it speaks"),
        ("/dev/captioned_speech", {"stream_format": "sse"}, {}, "stream_format"),
    ],
)
async def test_times_that_are_not_to_be_had_are_refused(
    path: str, fields: dict[str, Any], front: dict[str, Any], said: str
) -> None:
    reply = await answer(path, speech(TEXT, **fields), SpellingFrontEnd(**front))
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]

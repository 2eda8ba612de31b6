"""Passes over growing sound: when they begin, and which of them is the last."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from support.hearing import LoudnessNetwork, ScriptedRecognizer, sound
from triptych.core.errors import Overloaded
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.talk.hearing import live
from triptych.modalities.talk.hearing.live import IncrementalTranscriber
from triptych.modalities.talk.ports import HEARING_RATE

PIECE = HEARING_RATE // 50
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def count(seconds: float) -> str:
    """A word for each half second of sound."""
    return " ".join(WORDS[: int(seconds * 2)])


def opened(recognizer: ScriptedRecognizer) -> IncrementalTranscriber:
    call = TranscribeCall(model="ears", prompt="before")
    return IncrementalTranscriber(recognizer.service, call, LoudnessNetwork())


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MIN_REST_S", 0.0)
    monkeypatch.setattr(live, "_now_s", lambda: 0.0)


async def push(transcriber: IncrementalTranscriber, pcm_S: Pcm) -> None:
    """As from a microphone, in no time."""
    for at in range(0, len(pcm_S), PIECE):
        transcriber.push(pcm_S[at : at + PIECE])
        for _ in range(4):  # a pass without a gate ends within a few turns of the loop
            await asyncio.sleep(0)


async def collected(transcriber: IncrementalTranscriber) -> list[str]:
    return [delta async for delta in transcriber.deltas()]


async def test_the_pass_of_the_pause_is_the_last_one() -> None:
    recognizer = ScriptedRecognizer(count)
    transcriber = opened(recognizer)
    reader = asyncio.create_task(collected(transcriber))
    await push(transcriber, sound((False, 0.3), (True, 2.0), (False, 0.5)))
    num_passes = len(recognizer.passes)
    assert await transcriber.finish() == count(recognizer.passes[-1])
    assert len(recognizer.passes) == num_passes
    assert 2.3 + 0.05 < recognizer.passes[-1] < 2.3 + 0.15
    deltas = await reader
    assert len(deltas) > 1
    assert "".join(deltas) == "one two three four"
    assert len(set(recognizer.ids)) == num_passes


async def test_a_pause_cancels_a_pass_without_the_last_words() -> None:
    recognizer = ScriptedRecognizer(count, is_open=False)
    transcriber = opened(recognizer)
    await push(transcriber, sound((True, 1.0)))
    assert len(recognizer.passes) == 1
    await push(transcriber, sound((False, 0.4)))
    assert len(recognizer.passes) == 2
    finish = asyncio.create_task(transcriber.finish())
    await asyncio.sleep(0)
    recognizer.gate.set()
    assert await finish == "one two"
    assert recognizer.ended == recognizer.passes[1:]


async def test_speech_that_goes_on_after_a_pause_is_heard_once_more() -> None:
    recognizer = ScriptedRecognizer(count)
    transcriber = opened(recognizer)
    await push(transcriber, sound((True, 1.0), (False, 0.3), (True, 0.2)))
    num_passes = len(recognizer.passes)
    assert await transcriber.finish() == "one two three"
    assert len(recognizer.passes) == num_passes + 1
    assert recognizer.passes[-1] == pytest.approx(1.5)


async def test_the_whole_text_is_told_in_a_pause_and_taken_back_if_more_is_said() -> None:
    recognizer, told = ScriptedRecognizer(count), list[str]()
    transcriber = opened(recognizer)
    transcriber.on_expected(told.append)
    await push(transcriber, sound((True, 1.0)))
    assert not told
    await push(transcriber, sound((False, 0.3)))
    assert told == ["one two"]
    await push(transcriber, sound((True, 0.4), (False, 0.3)))
    assert told == ["one two", "", "one two three"]
    assert await transcriber.finish() == told[-1]
    assert len(told) == 3


@pytest.mark.parametrize("pcm_S", [sound((False, 2.0)), np.zeros(0, np.float32)])
async def test_silence_is_no_call(pcm_S: Pcm) -> None:
    recognizer = ScriptedRecognizer(count)
    transcriber = opened(recognizer)
    await push(transcriber, pcm_S)
    assert await transcriber.finish() == ""
    assert await collected(transcriber) == []
    assert not recognizer.passes


async def test_a_recording_in_one_piece_is_one_pass() -> None:
    recognizer = ScriptedRecognizer(count)
    transcriber = opened(recognizer)
    transcriber.push(sound((True, 3.0)))
    assert await transcriber.finish() == count(3.0)
    assert recognizer.passes == [3.0]


async def test_long_speech_leaves_settled_segments_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LONG_S", 2)
    recognizer = ScriptedRecognizer(count)
    transcriber = opened(recognizer)
    reader = asyncio.create_task(collected(transcriber))
    await push(transcriber, sound((True, 4.0)))
    assert max(recognizer.passes) < 4.0
    assert recognizer.prompts[-1].startswith("before one two")
    text = await transcriber.finish()
    assert text.startswith("one two")
    assert "  " not in text
    assert text.startswith("".join(await reader))


async def test_a_failed_pass_is_made_again_and_the_last_one_raises() -> None:
    recognizer = ScriptedRecognizer(count)
    recognizer.error = Overloaded("busy")
    transcriber = opened(recognizer)
    await push(transcriber, sound((True, 1.0), (False, 0.3)))
    assert len(recognizer.passes) == 1
    with pytest.raises(Overloaded):
        await transcriber.finish()
    recognizer.error = None
    again = opened(recognizer)
    recognizer.error = Overloaded("busy")
    await push(again, sound((True, 1.0), (False, 0.3)))
    recognizer.error = None
    assert await again.finish() == "one two"


async def test_closing_cancels_the_pass_and_ends_the_deltas() -> None:
    recognizer = ScriptedRecognizer(count, is_open=False)
    transcriber = opened(recognizer)
    await push(transcriber, sound((True, 1.0)))
    await transcriber.close()
    await transcriber.close()
    assert await collected(transcriber) == []
    assert recognizer.ended == []


async def test_closing_ends_a_finish_that_waits() -> None:
    recognizer = ScriptedRecognizer(count, is_open=False)
    transcriber = opened(recognizer)
    await push(transcriber, sound((True, 1.0)))
    finish = asyncio.create_task(transcriber.finish())
    await asyncio.sleep(0)
    await transcriber.close()
    assert await finish == ""

"""What a segment knows of the one before it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from support.speech_world import segment, speech_model
from triptych.core.engine_api.frames import frame_id
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.state import (
    LoopDetector,
    SpokenSegment,
    Stream,
    segment_prompt,
)
from triptych.modalities.tts.wire import SpeechRequest
from triptych.schedulers.tokens.state import SequenceState

CODES = [(1, 2), (3, 4), (5, 6)]
IDS = [frame_id(codes) for codes in CODES]


def stream() -> Stream:
    """Has spoken words 7 and 8 in three frames, after a voice of word 5 and a frame."""
    request = SpeechRequest(segments=(), sampling=SamplingParams())
    job = Job(job_id="j", model="m", request=request, sink=lambda _: None, arrival_s=0.0)
    voice = VoicePrompt(prompt_ids=(5, frame_id((9, 9))), codes=((9, 9),))
    row = SequenceState(
        name="j.0",
        job=job,
        request=TokenRequest(prompt_ids=(7, 8), sampling=SamplingParams()),
        rank=(0, 0),
        arrival_s=0.0,
        max_outputs=9,
        root=b"",
    )
    before = SpokenSegment(
        index=0,
        row=row,
        spec=segment(7, 8),
        loops=LoopDetector(least_tokens=30),
        ids=[*IDS],
        codes=[*CODES],
    )
    return Stream(
        job=job,
        is_paused=False,
        request=request,
        rank=(False, 0),
        playback=Playback(0.0),
        voice=voice,
        segments=deque([before]),
    )


@pytest.mark.parametrize(
    ("num_steps", "room", "context", "frames"),
    [
        (9, 99, [7, 8, *IDS, 44], CODES),
        (2, 99, [*IDS[1:], 44], CODES[1:]),
        (9, 6, [7, 8, *IDS, 44], CODES),
        (9, 5, [*IDS, 44], CODES),
        (9, 2, [IDS[2], 44], CODES[2:]),
        (9, 1, [], []),
        (0, 99, [], []),
    ],
)
def test_its_sound_its_words_where_all_of_it_is_there_and_its_end(
    num_steps: int, room: int, context: list[int], frames: list[tuple[int, ...]]
) -> None:
    model = replace(speech_model(num_context_steps=num_steps), context_end_ids=(44,))
    ids, codes = segment_prompt(model, stream(), segment(3, 4), room)
    assert list(ids) == [5, frame_id((9, 9)), *context, 3, 4]
    assert list(codes) == [(9, 9), *frames]


@pytest.mark.parametrize("num_pushed", [0, 20, 60])
def test_a_segment_that_loops_keeps_its_speech_one_cycle_and_decoded_codes(num_pushed: int) -> None:
    spoken = replace(stream().segments[0], ids=[], codes=[], num_pushed=num_pushed)
    tokens = [*range(100, 112), *(5, 6) * 26]
    ends = [spoken.push_code(token_id, (token_id, 1)) for token_id in tokens]
    assert ends == [False] * 63 + [True], "checked every quarter of its window"
    assert spoken.end == "loop"
    assert spoken.ids == tokens[: max(14, num_pushed)]
    assert spoken.codes == [(token_id, 1) for token_id in spoken.ids]


def test_ids_end_where_the_model_goes_on() -> None:
    """A step that skips an id ends it, too; each end is returned once.

    One of two ends in a step is in the middle of its last half, two are at half of it and its end.
    """
    spoken = replace(stream().segments[0], ids=[], codes=[], ids_per_step=2)
    for place in (0, 0, 1, 3):
        spoken.push_code(5, (5,), place)
    assert spoken.new_ends() == [1.75, 2.5, 3.0]
    spoken.push_code(5, (5,), 4)
    assert spoken.new_ends() == [3.75]
    spoken.push_code(5, (5,))  # of a model without places
    assert spoken.new_ends() == []

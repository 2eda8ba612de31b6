"""Jobs of the speech scheduler, from submission to their last sample."""

import msgspec
import pytest

from support.schedules import schedule_of
from support.speech_world import (
    CLIP,
    ENDLESS,
    HOP,
    SpeechWorld,
    sample,
    segment,
    speech_model,
    speech_request,
)
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    UnsupportedOption,
)
from triptych.core.options.config import ScheduleOptions
from triptych.modalities.tts.plan import AudioPlan, VoicePlan
from triptych.modalities.tts.wire import SpeechRequest


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"steps_per_frame": 7},
        {"delay_steps": 3},
        {"lookahead_frames": 2},
        {"steps_per_frame": 2, "delay_steps": 3, "lookahead_frames": 1},
    ],
)
def test_jobs_sound_as_they_would_alone(shape: dict[str, int], depth: int) -> None:
    world = SpeechWorld(model=speech_model(**shape), depth=depth)
    for n in range(12):
        segments = [segment(n, 2, k, pause_s=0.2 * (k == 1)) for k in range(1 + n % 3)]
        world.submit(f"{n}", speech_request(*segments, voice="ann" * (n % 2), seed=n))
    world.finish_all()


def test_segments_overlap_and_their_deltas_come_in_order() -> None:
    world = SpeechWorld(model=speech_model(frame_s=1.0))
    world.submit("a", speech_request(*(segment(ENDLESS, max_steps=12) for _ in range(3))))
    world.run()
    plans = world.runner.launched
    last_audio = max(i for i, plan in enumerate(plans) if isinstance(plan, AudioPlan))
    assert not any(isinstance(plan, TokenPlan) for plan in plans[last_audio:])
    firsts = [
        index
        for index, plan in enumerate(plans)
        if isinstance(plan, AudioPlan) and plan.rows[0].is_first
    ]
    second = next(
        index
        for index, plan in enumerate(plans)
        if isinstance(plan, TokenPlan) and plan.rows[0].job_id == "a#1"
    )
    assert second < firsts[1], "the next segment is drawn while this one is decoded"
    world.finish_all()


def test_counts_are_those_of_the_whole_job() -> None:
    world = SpeechWorld()
    segments = [segment(1, 2, 3, ENDLESS, max_steps=5), segment(1, 2, 3, ENDLESS, max_steps=7)]
    world.submit("a", speech_request(*segments))
    world.run()
    last = world.deltas("a")[-1]
    assert (last.num_prompt_tokens, last.num_output_tokens) == (8, 12)
    assert last.num_cached_tokens == 0, "the same words, but the last page is computed"
    world.submit("b", speech_request(*segments, voice="ann"))
    world.submit("c", speech_request(*segments, voice="ann"))
    world.run()
    assert world.deltas("c")[-1].num_cached_tokens == 8, "the voice is a cached prefix, twice"


def test_context_of_the_segment_before_is_part_of_the_prompt() -> None:
    model = speech_model(num_context_steps=4)
    world = SpeechWorld(model=model)
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=9), segment(2, 5)))
    world.finish_all()
    prompts = {
        start.num_prompt_tokens
        for plan in world.runner.launched
        if isinstance(plan, TokenPlan)
        for start in plan.starts
    }
    assert prompts == {2, 2 + 4}


def test_a_prompt_too_long_for_context_goes_without_it() -> None:
    world = SpeechWorld(model=speech_model(num_context_steps=1000))
    first, second = segment(1, ENDLESS, max_steps=30), segment(*range(120), max_steps=38)
    world.submit("a", speech_request(first, second))
    world.run()
    assert world.deltas("a")[-1].finish_reason in ("stop", "length")
    assert world.outputs["a"][-1].error is None


def test_context_leaves_room_for_what_prompts_are_limited_to() -> None:
    limited = ScheduleOptions(
        max_batch_size=8, max_batch_input_tokens=32, max_batch_total_tokens=19
    )
    world = SpeechWorld(model=speech_model(num_context_steps=30), schedule=limited)
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=20), segment(2, 5)))
    world.run()
    assert world.outputs["a"][-1].error is None
    assert world.deltas("a")[-1].num_prompt_tokens == 2 + 16, "four whole pages"


def test_no_two_segments_of_a_text_sample_the_same_numbers() -> None:
    world = SpeechWorld()
    for part in range(3):  # a long text comes as several jobs
        request = speech_request(*[segment(n) for n in range(3)])
        sampling = msgspec.structs.replace(request.sampling, sample_index=part)
        world.submit(f"{part}", msgspec.structs.replace(request, sampling=sampling))
    world.finish_all()
    starts = [
        start
        for plan in world.runner.launched
        if isinstance(plan, TokenPlan)
        for start in plan.starts
    ]
    assert len({start.sampling.sample_index for start in starts}) == len(starts) == 9


def test_clips_are_refused_by_a_model_that_cannot_clone() -> None:
    world = SpeechWorld(model=speech_model(can_clone=False))
    refused = world.submit("a", speech_request(segment(1), clip=CLIP))
    assert isinstance(refused, UnsupportedOption)
    world.scheduler.check()


def test_the_voice_of_a_clip_is_read_once() -> None:
    world = SpeechWorld()
    for n in range(3):
        world.submit(f"{n}", speech_request(segment(n), clip=CLIP))
    world.submit("plain", speech_request(segment(7)))
    world.finish_all()
    world.submit("later", speech_request(segment(9), clip=CLIP))
    world.finish_all()
    assert sum(isinstance(plan, VoicePlan) for plan in world.runner.launched) == 1


def test_no_clip_is_read_before_there_is_a_row_for_its_stream() -> None:
    world = SpeechWorld(max_streams=2)
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=60)))
    for n in range(5):
        clip = msgspec.structs.replace(CLIP, digest=f"clip {n}")
        world.submit(f"{n}", speech_request(segment(n, ENDLESS, max_steps=60), clip=clip))
    world.now_s += 10.0  # all are late
    num_read = 0
    while num_read < 5:
        if isinstance(world.book(), VoicePlan):
            num_read += 1
            num_ended = sum(
                outputs[-1:] != [] and outputs[-1].is_final
                for outputs in world.outputs.outputs.values()
            )
            assert num_read <= 1 + num_ended, "one row is free, and each ended job leaves one"
        else:
            world.turn()
    world.finish_all()


def test_unreadable_clip_fails_its_jobs_alone() -> None:
    world = SpeechWorld(depth=1)
    world.submit("a", speech_request(segment(1), clip=CLIP))
    world.fail_next(InvalidRequest("No speech in it."))
    assert isinstance(world.book(), VoicePlan)
    world.submit("b", speech_request(segment(2)))
    world.run()
    error = world.outputs["a"][-1].error
    assert error is not None
    assert error.code == "invalid_request"
    world.check_sound("b")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (speech_request(), InvalidRequest),
        (speech_request(segment(1), voice="nobody"), InvalidRequest),
        (speech_request(segment(*range(200))), ContextLengthExceeded),
        (speech_request(segment(1), segment(*range(200))), ContextLengthExceeded),
    ],
)
def test_what_cannot_be_spoken_is_refused_at_once(
    request_: SpeechRequest, error: type[Exception]
) -> None:
    world = SpeechWorld()
    assert isinstance(world.submit("a", request_), error)
    world.scheduler.check()


def test_a_full_queue_is_refused() -> None:
    schedule = schedule_of(max_batch_size=1, max_queue_size=2)
    world = SpeechWorld(schedule=schedule, max_streams=1)
    refused = [world.submit(f"{n}", speech_request(segment(n))) for n in range(4)]
    assert isinstance(refused[3], Overloaded)
    assert not any(isinstance(answer, Exception) for answer in refused[:3])
    world.finish_all()


def test_silence_follows_a_segment_and_counts_as_sound() -> None:
    world = SpeechWorld()
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=2, pause_s=0.5), segment(3)))
    world.finish_all()
    first = b"".join(delta.pcm for delta in world.deltas("a") if delta.segment == 0)
    num_silent = 4 * round(0.5 * world.model.sample_rate)
    assert first.endswith(bytes(num_silent))
    assert len(first) == 4 * 2 * HOP + num_silent


def test_a_segment_without_a_sound_ends_all_the_same() -> None:
    silent = next(n for n in range(1000) if sample([n], 1)[0] == END_FRAME_ID)
    world = SpeechWorld()
    world.submit("a", speech_request(segment(silent), segment(silent), segment(1)))
    world.finish_all()
    assert [d.segment_finish for d in world.deltas("a")[:2]] == ["stop", "stop"]
    world.submit("b", speech_request(segment(silent)))
    world.finish_all()
    assert world.sound("b") == b""


def begun(world: SpeechWorld) -> list[str]:
    """Jobs in the order in which their sound began."""
    begins = {
        name: job.timings["first_audio_s"]
        for name, job in world.jobs.items()
        if "first_audio_s" in job.timings
    }
    return sorted(begins, key=begins.__getitem__)


@pytest.mark.parametrize("has_clip", [False, True])
def test_codec_rows_are_shared_between_clients(has_clip: bool) -> None:
    world = SpeechWorld(max_streams=2)
    for index in range(6):
        request = speech_request(segment(index, ENDLESS, max_steps=20))
        world.submit(f"loud{index}", request, client="loud")
    while not begun(world):
        world.step()
    request = speech_request(segment(9, ENDLESS, max_steps=6), clip=CLIP if has_clip else None)
    world.submit("light", request, client="light")
    world.finish_all()
    assert begun(world).index("light") <= 3

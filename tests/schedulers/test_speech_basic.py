"""Jobs of the speech scheduler, from submission to their last sample."""

import pytest
from fakes_speech import SpeechWorld, segment, speech_model, speech_request


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

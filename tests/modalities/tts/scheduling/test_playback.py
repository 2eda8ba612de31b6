"""The listener's clock."""

import math

import pytest

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.wire import SpeechRequest


def test_first_audio_is_due_when_promised_and_starts_the_clock() -> None:
    playback = Playback(10.3)
    assert not playback.has_begun
    assert playback.lead_s(10.0) == pytest.approx(0.3)
    playback.give(0.08, 10.1)
    assert playback.has_begun
    assert playback.due_s == pytest.approx(10.18)
    assert playback.num_underruns == 0


def test_a_late_first_audio_is_no_underrun() -> None:
    playback = Playback(10.3)
    playback.give(0.5, 12.0)
    assert (playback.num_underruns, playback.due_s) == (0, 12.5)


def test_audio_in_time_adds_up() -> None:
    playback = Playback(1.0)
    for now_s in (1.0, 1.1, 1.2):
        playback.give(0.2, now_s)
    assert playback.due_s == pytest.approx(1.6)
    assert playback.given_s == pytest.approx(0.6)
    assert playback.num_underruns == 0


def test_a_dry_buffer_is_an_underrun_and_playing_goes_on_from_there() -> None:
    playback = Playback(1.0)
    playback.give(0.2, 1.0)
    assert playback.lead_s(1.5) == pytest.approx(-0.3)
    playback.give(0.2, 1.5)
    assert playback.num_underruns == 1
    assert playback.underrun_s == pytest.approx(0.3)
    assert playback.due_s == pytest.approx(1.7)


def test_a_paused_listener_keeps_the_buffer() -> None:
    playback = Playback(1.0)
    playback.give(1.0, 1.0)
    playback.stop(1.4)
    playback.stop(1.9)
    playback.go_on(50.0)
    assert playback.due_s == pytest.approx(50.6)
    playback.go_on(60.0)
    assert playback.due_s == pytest.approx(50.6), "going on twice changes nothing"


def test_audio_for_a_paused_listener_is_kept() -> None:
    playback = Playback(1.0)
    playback.give(0.2, 1.0)
    playback.stop(1.1)
    playback.give(0.5, 3.0)
    playback.go_on(9.0)
    assert playback.due_s == pytest.approx(9.6)
    assert playback.num_underruns == 0


def test_first_audio_may_come_while_the_listener_has_stopped() -> None:
    playback = Playback(1.0)
    playback.stop(0.2)
    playback.give(0.5, 0.3)
    playback.go_on(9.0)
    assert (playback.has_begun, playback.due_s) == (True, 9.5)


def test_pause_during_an_underrun_adds_no_debt() -> None:
    playback = Playback(1.0)
    playback.give(0.1, 1.0)
    playback.stop(5.0)
    playback.go_on(9.0)
    assert playback.due_s == pytest.approx(9.0)


def test_request_without_listener_has_no_deadline() -> None:
    playback = Playback(math.inf)
    playback.give(0.1, 1.0)
    playback.give(0.1, 99.0)
    playback.stop(100.0)
    playback.go_on(101.0)
    assert playback.has_begun
    assert not playback.is_live
    assert math.isinf(playback.due_s)
    assert (playback.num_underruns, playback.given_s) == (0, pytest.approx(0.2))


@pytest.mark.parametrize(("lead_s", "due_s", "has_begun"), [(0.0, 10.3, False), (4.0, 14.0, True)])
def test_a_request_is_due_as_promised_or_at_the_end_of_earlier_sound(
    lead_s: float, due_s: float, has_begun: bool
) -> None:
    request = SpeechRequest(segments=(), sampling=SamplingParams(), lead_s=lead_s)
    playback = Playback.of(request, arrival_s=10.0, target_s=0.3)
    assert (playback.due_s, playback.has_begun) == (due_s, has_begun)
    playback.give(1.0, 10.1)
    assert playback.due_s == pytest.approx(15.0 if has_begun else 11.1)


def test_file_request_has_no_deadline() -> None:
    request = SpeechRequest(segments=(), sampling=SamplingParams(), is_live=False, lead_s=4.0)
    assert not Playback.of(request, arrival_s=10.0, target_s=0.3).is_live

"""A session whose client holds the answer's sound while speech is suspected."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError

from support.talk_session import USAGE, Talk, kinds, one, spoken, started
from triptych.modalities.talk.ports import (
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
)
from triptych.modalities.talk.realtime.inputs import (
    AnswerEnded,
    AnswerSpeech,
    Listen,
    RestDetector,
    TranscriptEnded,
)


def holding() -> tuple[Talk, str]:
    """A session whose client holds answers, one second into two of sound, and the answer's id."""
    talk = Talk()
    talk.update(audio={"input": {"turn_detection": {"hold_response": True}}})
    answer = talk.ask()
    spoken(talk, answer)
    talk.now_ms = 1000.0
    (event,) = talk.learn(SpeechSuspected(5000))
    assert event == {"type": "input_audio_buffer.speech_suspected", "audio_start_ms": 5000}
    talk.now_ms = 1200.0
    return talk, answer


def test_a_suspicion_that_is_confirmed_cuts_the_answer_where_it_was_held() -> None:
    talk, answer = holding()
    talk.learn(AnswerSpeech(answer, "", b"", 500.0))  # made meanwhile, not heard
    outs = talk.learn(SpeechStarted(4700))
    assert kinds(outs)[:2] == ["input_audio_buffer.speech_started", "BeginTurn"]
    assert one(outs, "conversation.item.truncated")["audio_end_ms"] == 1000
    talk.learn(SpeechStopped(5500))
    answer = started(talk.learn(TranscriptEnded("item_3", "Stop!", 0.5))).response_id
    talk.now_ms = 3000.0
    rest = talk.learn(AnswerSpeech(answer, "Oh.", b"", 500.0), AnswerEnded(answer, False, USAGE))
    assert rest[-1] == RestDetector(500.0), "nothing is held any more"


@pytest.mark.parametrize("is_last", [True, False])
def test_a_suspicion_that_is_dismissed_delays_the_rest_of_the_answer(is_last: bool) -> None:
    """The silence of the user counts from the end of what is played, also if it was all sent."""
    talk, answer = holding()
    outs = talk.learn(AnswerEnded(answer, False, USAGE)) if is_last else []
    talk.now_ms = 1250.0
    (event, *rest) = talk.learn(SpeechDismissed(5250))
    assert event == {"type": "input_audio_buffer.speech_dismissed", "audio_end_ms": 5250}
    assert [*outs[-1:], *rest] == [RestDetector(1000.0)] * 2 * is_last
    talk.now_ms = 1750.0
    assert (
        one(talk.learn(SpeechStarted(5500)), "conversation.item.truncated")["audio_end_ms"] == 1500
    )


@pytest.mark.parametrize("event", ["input_audio_buffer.clear", "session.update"])
def test_a_suspicion_that_is_forgotten_is_dismissed(event: str) -> None:
    talk, _ = holding()
    update = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    outs = talk.say(event, **({"session": update} if event == "session.update" else {}))
    assert kinds(outs).count("input_audio_buffer.speech_dismissed") == 1
    assert kinds(outs).index("DropTurn") > kinds(outs).index("input_audio_buffer.speech_dismissed")


def test_after_an_answer_a_suspicion_leaves_the_clock_of_silence_alone() -> None:
    talk, answer = holding()
    talk.learn(SpeechDismissed(5250), AnswerEnded(answer, False, USAGE))
    talk.now_ms = 9000.0
    outs = talk.learn(SpeechSuspected(9000), SpeechDismissed(9250))
    assert kinds(outs) == [f"input_audio_buffer.speech_{end}" for end in ("suspected", "dismissed")]


def test_clients_that_do_not_hold_see_nothing_of_it() -> None:
    talk = Talk()
    listen = talk.session.open()[-1]
    assert isinstance(listen, Listen)
    assert listen.options is not None
    assert not listen.options.reports_suspicion
    shown = one(talk.update(audio={"input": {"turn_detection": {}}}), "session.updated")["session"]
    assert "hold_response" not in shown["audio"]["input"]["turn_detection"]
    with pytest.raises(RequestValidationError, match="needs interrupt_response"):
        talk.update(
            audio={
                "input": {"turn_detection": {"hold_response": True, "interrupt_response": False}}
            }
        )

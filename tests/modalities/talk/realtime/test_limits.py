"""The limits of a session and of all sessions together, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from support.talk_session import Talk, kinds
from triptych.core.errors import EmptyBuffer, Overloaded, RequestError
from triptych.modalities.talk.ports import IdleTimedOut, SpeechStarted, SpeechStopped
from triptych.modalities.talk.realtime import items
from triptych.modalities.talk.realtime.events import error_fields
from triptych.modalities.talk.realtime.holding import SessionCount


def test_all_sessions_share_a_bound_of_bytes() -> None:
    count = SessionCount(most=2, most_bytes=20_000, message_bytes=1000)
    content = [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 9000}]
    item = {"id": "a", "type": "message", "role": "user", "content": content}
    with count.hold("a") as held, count.hold("b") as others:
        talk, other = Talk(held=held), Talk(held=others)
        talk.say("conversation.item.create", item=item)
        with pytest.raises(Overloaded, match="--max-realtime-bytes"):
            other.say("conversation.item.create", item=item)
        talk.say("conversation.item.delete", item_id="a")
        other.say("conversation.item.create", item=item)
        talk.say("response.create")  # grows by nothing
    with count.hold("a") as held:
        held.resize(17_000)
        with pytest.raises(Overloaded):
            count.check("b")
    count.check("b")


def test_turns_and_answers_count_against_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_ITEMS", 1)
    talk = Talk()
    item = {"type": "message", "role": "user", "content": []}
    talk.say("conversation.item.create", item=item)
    outs = talk.learn(SpeechStarted(0), SpeechStopped(900))
    assert kinds(outs)[-3:] == ["input_audio_buffer.speech_stopped", "error", "DropTurn"]
    assert kinds(talk.learn(IdleTimedOut(900, 1900))) == ["error"]
    with pytest.raises(RequestError, match="at most 1 items"):
        talk.say("response.create")
    monkeypatch.setattr(items, "MAX_ITEMS", 2)
    assert kinds(talk.speak("Hi", 2000)) == ["error"]  # a turn, but no answer


def test_a_commit_before_speech_was_detected_says_what_to_do() -> None:
    talk = Talk()
    talk.session.hear(500.0)
    with pytest.raises(EmptyBuffer, match="set turn_detection to null"):
        talk.say("input_audio_buffer.commit")


@pytest.mark.parametrize("value", [0, 10**12, 1.5, "many"])
def test_a_bad_number_of_tokens_is_named_by_its_field(value: Any) -> None:
    with pytest.raises(RequestValidationError) as error:
        Talk().update(max_output_tokens=value)
    assert error_fields(error.value)["param"] == "max_output_tokens"

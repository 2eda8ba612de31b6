"""The rules of a session: what its events cause, in which order, by a clock that is given."""

from __future__ import annotations

import base64
from typing import Any, cast

import pytest
from fastapi.exceptions import RequestValidationError

from support.talk_session import USAGE, Talk, kinds, one, spoken, started
from triptych.core.errors import InvalidRequest, RequestError, TriptychError
from triptych.modalities.talk.ports import IdleTimedOut, SpeechStarted, SpeechStopped
from triptych.modalities.talk.realtime import items
from triptych.modalities.talk.realtime.inputs import (
    AnswerCall,
    AnswerEnded,
    AnswerFailed,
    AnswerSpeech,
    AnswerText,
    BeginTurn,
    CancelAnswer,
    DropTurn,
    EndTurn,
    Listen,
    PrepareAnswer,
    RestDetector,
    TranscriptEnded,
    TranscriptFailed,
    TranscriptPiece,
    TurnExpected,
)
from triptych.modalities.talk.realtime.session import MAX_TURN_MS, Out
from triptych.modalities.talk.realtime.settings import Dictation


def test_an_answer_in_text_is_told_in_the_documented_order() -> None:
    talk = Talk()
    talk.update(output_modalities=["text"])
    answer = talk.ask()
    outs = talk.learn(
        AnswerText(answer, "Hel"), AnswerText(answer, "lo"), AnswerEnded(answer, False, USAGE)
    )
    assert kinds(outs) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "RestDetector",
    ]
    response = one(outs, "response.done")["response"]
    assert (response["status"], response["usage"]) == ("completed", USAGE)
    assert response["output"][0]["content"] == [{"type": "output_text", "text": "Hello"}]
    assert not talk.session.is_answering


def test_a_spoken_turn_is_answered_once_it_has_its_words() -> None:
    talk = Talk()
    began = talk.learn(SpeechStarted(200))
    assert kinds(began) == ["input_audio_buffer.speech_started", "BeginTurn"]
    stopped = talk.learn(SpeechStopped(1500))
    assert kinds(stopped) == [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "EndTurn",
    ]
    outs = talk.learn(TranscriptPiece("item_1", "What "), TranscriptEnded("item_1", "What?", 1.3))
    assert kinds(outs) == ["response.created", "rate_limits.updated", "StartAnswer"]
    assert started(outs).messages == [{"role": "user", "content": "What?"}]


def test_what_the_turn_would_say_is_answered_ahead() -> None:
    talk = Talk()
    talk.ask("Hi.")
    talk.say("response.cancel")
    talk.learn(SpeechStarted(200))
    (prepared,) = talk.learn(TurnExpected("item_2", "What?"))
    assert isinstance(prepared, PrepareAnswer)
    assert kinds(talk.learn(TurnExpected("item_2", ""))) == ["DropAnswer"]
    talk.learn(SpeechStopped(1500))
    assert not talk.learn(TurnExpected("item_2", "What?")), "the turn is over"
    answer = started(talk.learn(TranscriptEnded("item_2", "What?", 1.3)))
    assert (answer.settings, answer.messages) == (prepared.settings, prepared.messages)
    assert answer.messages[-1] == {"role": "user", "content": "What?"}


@pytest.mark.parametrize("turns", [None, {"type": "server_vad", "create_response": False}])
def test_a_turn_that_is_not_answered_by_itself_is_not_answered_ahead(turns: Any) -> None:
    talk = Talk()
    talk.update(audio={"input": {"turn_detection": turns}})
    talk.learn(SpeechStarted(200))
    assert not talk.learn(TurnExpected("item_1", "What?"))


def test_an_error_of_an_answer_ahead_waits_for_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice that is gone: the recognizer that tells what it expects has no use for the error."""
    talk = Talk()
    talk.learn(SpeechStarted(200))

    def check(settings: object) -> None:
        raise InvalidRequest("There is no such voice.")

    monkeypatch.setattr(talk.session, "_check", check)
    assert not talk.learn(TurnExpected("item_1", "What?"))


def test_nothing_is_answered_ahead_beside_an_answer() -> None:
    talk = Talk()
    talk.update(
        audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}
    )
    talk.ask()
    talk.learn(SpeechStarted(200))
    assert not talk.learn(TurnExpected("item_2", "What?"))


def test_transcripts_are_told_where_they_are_asked_for() -> None:
    talk = Talk()
    talk.update(audio={"input": {"transcription": {"model": "ears"}}})
    talk.learn(SpeechStarted(0), SpeechStopped(900))
    told = talk.learn(TranscriptPiece("item_1", "He"), TranscriptEnded("item_1", "Hey", 0.9))
    head = "conversation.item.input_audio_transcription"
    assert kinds(told)[:2] == [f"{head}.delta", f"{head}.completed"]
    assert one(told, f"{head}.completed")["usage"] == {"type": "duration", "seconds": 0.9}


@pytest.mark.parametrize("news", [TranscriptEnded("item_1", " ", 0.3), None])
def test_a_turn_without_words_is_not_answered(news: TranscriptEnded | None) -> None:
    talk = Talk()
    talk.learn(SpeechStarted(0), SpeechStopped(300))
    failed = TranscriptFailed("item_1", {"type": "server_error", "code": "x", "message": "y"})
    assert "StartAnswer" not in kinds(talk.learn(news or failed))


def test_a_cough_after_a_question_does_not_take_its_answer() -> None:
    talk = Talk()
    talk.learn(SpeechStarted(0), SpeechStopped(900), SpeechStarted(1000))
    assert not talk.learn(TranscriptEnded("item_1", "Why?", 0.9))
    talk.learn(SpeechStopped(1100))
    outs = talk.learn(TranscriptEnded("item_2", "", 0.1))
    assert started(outs).messages == [{"role": "user", "content": "Why?"}]


def test_an_answer_that_the_client_asks_for_is_not_given_twice() -> None:
    talk = Talk()
    talk.learn(SpeechStarted(0), SpeechStopped(900), SpeechStarted(1000))
    talk.learn(TranscriptEnded("item_1", "Why?", 0.9))
    answer = started(talk.say("response.create")).response_id
    talk.learn(AnswerEnded(answer, False, USAGE), SpeechStopped(1100))
    assert not talk.learn(TranscriptEnded("item_2", "", 0.1))


def test_a_question_is_answered_although_what_follows_it_is_cleared() -> None:
    talk = Talk()
    talk.learn(SpeechStarted(0), SpeechStopped(900), SpeechStarted(1000))
    talk.learn(TranscriptEnded("item_1", "Why?", 0.9))
    outs = talk.say("input_audio_buffer.clear")
    assert started(outs).messages == [{"role": "user", "content": "Why?"}]


def test_barge_in_ends_the_answer_and_keeps_what_was_heard() -> None:
    talk = Talk()
    answer = talk.ask()
    sounds = spoken(talk, answer)
    delta = next(out for out in sounds if "audio.delta" in kinds([out])[0])
    assert base64.b64decode(cast("dict[str, Any]", delta)["delta"]) == b"\0" * 24_000
    talk.now_ms = 1500.0
    outs = talk.learn(SpeechStarted(4000))
    assert kinds(outs) == [
        "input_audio_buffer.speech_started",
        "BeginTurn",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "CancelAnswer",
        "conversation.item.truncated",
    ]
    response = one(outs, "response.done")["response"]
    assert response["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert one(outs, "conversation.item.truncated")["audio_end_ms"] == 1500
    assert not spoken(talk, answer), "what is still under way is dropped"
    talk.learn(SpeechStopped(4500))
    heard = started(talk.learn(TranscriptEnded("item_3", "Stop!", 0.5))).messages
    assert heard[1] == {"role": "assistant", "content": "One two three four. Five six "}


def test_an_answer_that_is_still_played_is_cut_and_the_client_knows_better() -> None:
    talk = Talk()
    answer = talk.ask()
    spoken(talk, answer)
    rest = talk.learn(AnswerEnded(answer, False, USAGE))[-1]
    assert rest == RestDetector(2000.0)
    talk.now_ms = 1000.0
    outs = talk.learn(SpeechStarted(0))
    assert kinds(outs)[2:] == ["conversation.item.truncated"]
    cut = {"item_id": "item_2", "content_index": 0}
    outs = talk.say("conversation.item.truncate", **cut, audio_end_ms=2000)
    assert kinds(outs) == ["conversation.item.truncated"]
    (shown,) = talk.say("conversation.item.retrieve", item_id="item_2")
    text = cast("dict[str, Any]", shown)["item"]["content"][0]["transcript"]
    assert text == "One two three four. Five six seven eight."
    with pytest.raises(RequestError, match="2000 ms long"):
        talk.say("conversation.item.truncate", **cut, audio_end_ms=2001)


def test_what_is_said_after_a_truncation_was_not_heard() -> None:
    talk = Talk()
    answer = talk.ask()
    talk.learn(AnswerSpeech(answer, "One two three four. ", b"", 1000.0))
    talk.say("conversation.item.truncate", item_id="item_2", content_index=0, audio_end_ms=500)
    talk.learn(AnswerSpeech(answer, "Five six.", b"", 500.0), AnswerEnded(answer, False, USAGE))
    assert started(talk.say("response.create")).messages[1]["content"] == "One two "


def test_without_interruption_speech_ends_nothing() -> None:
    talk = Talk()
    talk.update(audio={"input": {"turn_detection": {"interrupt_response": False}}})
    spoken(talk, talk.ask())
    assert kinds(talk.learn(SpeechStarted(0))) == ["input_audio_buffer.speech_started", "BeginTurn"]
    talk.learn(SpeechStopped(500))
    outs = talk.learn(TranscriptEnded("item_3", "And?", 0.5))
    assert kinds(outs) == ["error"]


def test_push_to_talk() -> None:
    talk = Talk()
    outs = talk.update(audio={"input": {"turn_detection": None}})
    assert outs[1:] == [DropTurn(), Listen(None)]
    with pytest.raises(RequestError, match="at least 100 ms"):
        talk.say("input_audio_buffer.commit")
    assert talk.session.hear(80.0) == [BeginTurn("item_1", None)]
    assert talk.session.hear(80.0) == []
    assert kinds(talk.say("input_audio_buffer.clear")) == [
        "DropTurn",
        "input_audio_buffer.cleared",
    ]
    talk.session.hear(160.0)
    committed = talk.say("input_audio_buffer.commit")
    assert EndTurn("item_2") in committed
    waiting = talk.say("response.create")
    assert kinds(waiting) == ["response.created", "rate_limits.updated"]
    assert kinds(talk.learn(TranscriptEnded("item_2", "Hi", 0.1))) == ["StartAnswer"]
    talk.session.hear(MAX_TURN_MS)
    with pytest.raises(RequestError, match="commit or clear"):
        talk.session.hear(1.0)


def test_calls_and_their_results() -> None:
    talk = Talk()
    tool = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
    talk.update(tools=[tool], tool_choice={"type": "function", "name": "clock"})
    answer = talk.ask("What time is it?")
    outs = talk.learn(AnswerCall(answer, "clock", "{}"), AnswerEnded(answer, False, USAGE))
    assert kinds(outs) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "RestDetector",
    ]
    call_id = one(outs, "response.function_call_arguments.done")["call_id"]
    item = {"type": "function_call_output", "call_id": call_id, "output": "12:00"}
    talk.say("conversation.item.create", item=item)
    messages = started(talk.say("response.create")).messages
    function = {"name": "clock", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function}]
    assert messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "12:00"},
    ]


def test_one_response_at_a_time_is_part_of_the_conversation() -> None:
    talk = Talk()
    answer = talk.ask()
    with pytest.raises(TriptychError, match="in progress"):
        talk.say("response.create")
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    own = {"conversation": "none", "input": [message], "output_modalities": ["text"]}
    aside = started(talk.say("response.create", response=own))
    assert aside.messages == [{"role": "user", "content": "x"}]
    outs = talk.learn(AnswerText(aside.response_id, "y"))
    assert "conversation.item.added" not in kinds(outs)
    cancelled = talk.say("response.cancel")
    assert cancelled[-2:] == [CancelAnswer(answer), RestDetector(0.0)]
    with pytest.raises(TriptychError, match="No response"):
        talk.say("response.cancel")
    error = {"type": "server_error", "code": "engine_down", "message": "m"}
    failed = one(talk.learn(AnswerFailed(aside.response_id, error)), "response.done")
    assert failed["response"]["status_details"] == {"type": "failed", "error": error}


def test_an_answer_that_was_cut_says_why() -> None:
    talk = Talk()
    answer = talk.ask()
    outs = talk.learn(AnswerEnded(answer, True, USAGE))
    details = one(outs, "response.done")["response"]["status_details"]
    assert details == {"type": "incomplete", "reason": "max_output_tokens"}


def test_silence_after_an_answer_prompts_another() -> None:
    talk = Talk()
    talk.update(audio={"input": {"turn_detection": {"idle_timeout_ms": 5000}}})
    outs = talk.learn(IdleTimedOut(1000, 6000))
    assert kinds(outs)[:3] == [
        "input_audio_buffer.timeout_triggered",
        "BeginTurn",
        "input_audio_buffer.committed",
    ]
    assert "response.created" in kinds(outs)
    talk.update(instructions="Prompt the user.")
    assert not talk.learn(IdleTimedOut(6000, 11000)), "an answer is on its way"


def test_sound_that_waits_for_its_words_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_CHARS", 10)
    talk = Talk()
    part = {"type": "input_audio", "audio": "A" * 8}
    item = {"type": "message", "role": "user", "content": [part]}
    talk.say("conversation.item.create", item=item)
    with pytest.raises(RequestError, match="at most 10 characters"):
        talk.say("conversation.item.create", item=item)
    talk.learn(TranscriptEnded("item_1", "", 0.1))
    talk.say("conversation.item.create", item=item)


def test_items_are_placed_and_removed() -> None:
    talk = Talk()

    def add(item_id: str, after: str | None = None) -> list[Out]:
        content = [{"type": "input_text", "text": item_id}]
        item = {"id": item_id, "type": "message", "role": "user", "content": content}
        return talk.say("conversation.item.create", item=item, previous_item_id=after)

    add("b")
    assert one(add("c", "b"), "conversation.item.added")["previous_item_id"] == "b"
    assert one(add("a", "root"), "conversation.item.done")["previous_item_id"] is None
    talk.say("conversation.item.delete", item_id="b")
    texts = [message["content"] for message in started(talk.say("response.create")).messages]
    assert texts == ["a", "c"]
    for bad in (lambda: add("a"), lambda: add("d", "b")):
        with pytest.raises(RequestError):
            bad()


SILENCE = {"silence_duration_ms": 300}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "noise_reduction"),
    ({"audio": {"input": {"turn_detection": {"type": "other"}}}}, "turn_detection"),
    ({"audio": {"input": {"turn_detection": {"idle_timeout_ms": 60_001}}}}, "idle_timeout_ms"),
    (
        {"audio": {"input": {"turn_detection": {"type": "semantic_vad", **SILENCE}}}},
        "silence_duration_ms",
    ),
    ({"audio": {"output": {"speed": 9}}}, "speed"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp"),
    ({"tracing": "auto"}, "tracing"),
    ({"output_modalities": ["text", "audio"]}, "output_modalities"),
    ({"model": "other"}, "model"),
    ({"voice": "alloy"}, "voice"),
    ({"type": "transcription"}, "transcription"),
)


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    talk = Talk()
    before = talk.session.settings
    with pytest.raises((RequestError, RequestValidationError)) as refused:
        talk.update(**fields)
    assert named in str(refused.value)
    assert talk.session.settings == before


def test_a_response_has_sound_of_its_own_in_one_direction() -> None:
    talk = Talk()
    with pytest.raises(RequestValidationError, match="input"):
        talk.say("response.create", response={"audio": {"input": {"turn_detection": None}}})
    talk.say("conversation.item.create", item=image_item("low"))
    voiced = {"instructions": "Look.", "audio": {"output": {"voice": "bob"}}}
    answer = started(talk.say("response.create", response=voiced))
    assert answer.settings.audio.output.voice == "bob"
    image = {"url": "data:image/png;base64,AAAA", "detail": "low"}
    assert answer.messages[1]["content"] == [{"type": "image_url", "image_url": image}]


def test_an_image_is_a_data_url() -> None:
    item = image_item("low")
    item["content"][0]["image_url"] = "http://127.0.0.1/a.png"
    with pytest.raises(RequestValidationError, match="data URL"):
        Talk().say("conversation.item.create", item=item)


def image_item(detail: str) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": detail}
    return {"type": "message", "role": "user", "content": [part]}


def test_updates_are_merged_and_null_clears() -> None:
    talk = Talk()
    talk.update(audio={"input": {"turn_detection": SILENCE}})
    talk.update(instructions="Be short.", audio={"output": {"voice": "alloy"}})
    vad = {"type": "semantic_vad", "eagerness": "low"}
    outs = talk.update(audio={"input": {"turn_detection": vad, "format": {"type": "audio/pcmu"}}})
    shown = one(outs, "session.updated")["session"]
    assert shown["instructions"] == "Be short."
    assert shown["audio"]["output"]["voice"] == "alloy"
    assert shown["audio"]["input"]["turn_detection"]["eagerness"] == "low"
    (listen,) = [out for out in outs if isinstance(out, Listen)]
    assert listen.options is not None
    assert listen.options.silence_duration_ms == 1200
    cleared = talk.update(audio={"input": {"turn_detection": None}}, tools=[], tracing=None)
    assert one(cleared, "session.updated")["session"]["audio"]["input"]["turn_detection"] is None
    talk.update(max_output_tokens=60, audio={"output": {"speed": 1.2}})
    sound = {"input": {"format": None}, "output": {"speed": None, "voice": None}}
    cleared = talk.update(max_output_tokens=None, instructions=None, audio=sound)
    session = one(cleared, "session.updated")["session"]
    assert (session["max_output_tokens"], session["instructions"]) == ("inf", "")
    assert (session["audio"]["output"]["speed"], session["audio"]["output"]["voice"]) == (1.0, None)
    assert session["audio"]["input"]["format"]["type"] == "audio/pcm"
    assert session["audio"]["input"]["turn_detection"] is None
    with pytest.raises(RequestValidationError):
        talk.update(no_such_field=None)


def test_a_transcription_session_has_transcripts_alone() -> None:
    talk = Talk(Dictation())
    fields = {"type": "transcription", "audio": {"input": {"transcription": {"language": "en"}}}}
    assert kinds(talk.say("session.update", session=fields)) == ["session.updated"]
    outs = talk.speak("Hello.")
    assert kinds(outs) == ["conversation.item.input_audio_transcription.completed"]
    with pytest.raises(RequestError, match="no responses"):
        talk.say("response.create")

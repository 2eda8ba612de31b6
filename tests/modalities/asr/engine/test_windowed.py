"""Recordings of families on transformers' classes: windows, segments, languages, silence."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from support.asr import noise, run, tokenizer, transcribe_request
from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.families.qwen3 import Qwen3Asr
from triptych.modalities.asr.engine.tokens import Written
from triptych.modalities.asr.engine.window_model import Heard, Window, WindowModel
from triptych.modalities.asr.engine.windowed import WindowedRecognizer
from triptych.modalities.asr.wire import TimedTokens, TranscriptToken


@dataclass
class FakeWindowModel(WindowModel):
    """Recognizes the same tokens in every window, and remembers the windows."""

    max_window_s = 3.0
    tokens: Sequence[TranscriptToken] = ()
    windows: list[Window] = field(default_factory=list)

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        self.windows.append(window)
        yield Stage("decode", 1)
        return Heard(tuple(self.tokens), window.language or "de")


def said(text: str, step_s: float = 0.1) -> list[TranscriptToken]:
    return [
        TranscriptToken(byte, n * step_s, (n + 1) * step_s) for n, byte in enumerate(text.encode())
    ]


def segments(model: FakeWindowModel, pcm_S: Any, **fields: Any) -> list[TimedTokens]:
    recognizer = WindowedRecognizer(model, tokenizer())
    deltas = run(recognizer.begin(transcribe_request(pcm_S, **fields), 0))
    return [segment for delta in deltas for segment in delta.segments]


def test_sentences_and_pauses_are_segments() -> None:
    tokens = [*said("Hi. You 3.5"), TranscriptToken(ord("z"), 2.5, 2.6)]
    found = segments(FakeWindowModel(tokens=tokens), noise(3.0))
    spelled = [bytes(token.token_id for token in each.tokens).decode() for each in found]
    assert spelled == ["Hi.", " You 3.5", "z"]
    assert [each.start_s for each in found] == pytest.approx([0.0, 0.3, 2.5])
    assert [each.end_s for each in found] == pytest.approx([0.3, 1.1, 2.6])
    assert all(token.start_s == -1 for each in found for token in each.tokens)


def test_word_times_count_from_the_start_of_the_recording() -> None:
    found = segments(FakeWindowModel(tokens=said("ab")), noise(5.0), has_word_times=True)
    assert len(found) == 2
    starts_s = [token.start_s - each.start_s for each in found for token in each.tokens]
    assert starts_s == pytest.approx([0.0, 0.1, 0.0, 0.1])
    assert found[1].start_s > 2.0


def test_tokens_without_times_have_those_of_their_window() -> None:
    tokens = [TranscriptToken(ord("a")), TranscriptToken(ord("b"))]
    first, second = segments(FakeWindowModel(tokens=tokens), noise(5.0))
    assert (first.start_s, second.end_s) == (0.0, 5.0)
    assert first.end_s == second.start_s


def test_silence_is_not_recognized() -> None:
    pcm_S = np.concatenate([np.zeros(48_000, np.float32), noise(2.0)])
    model = FakeWindowModel(tokens=said("a"))
    found = segments(model, pcm_S)
    assert len(model.windows) == len(found) == 1
    assert found[0].start_s == pytest.approx(3.0, abs=0.2)


def test_a_part_leaves_what_fills_no_window_to_the_next() -> None:
    model = FakeWindowModel(tokens=said("a"))
    recognizer = WindowedRecognizer(model, tokenizer())
    deltas = run(recognizer.begin(transcribe_request(noise(7.0), is_last=False), 0))
    assert 4.0 < deltas[-1].heard_s < 7.0
    assert deltas[-1].finish_reason == "stop"


def test_later_windows_have_the_language_and_the_prompt_of_the_first() -> None:
    model = FakeWindowModel(tokens=said("a"))
    special = tokenizer().token_to_id("<|en|>")
    segments(model, noise(5.0), prompt_ids=(*b"Anna", special, *b"<|en|>"))
    assert [window.language for window in model.windows] == ["", "de"]
    assert {window.prompt for window in model.windows} == {"Anna"}


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ([9, 9, 0, 9, 7, 7], [(9, 0.0, 0.2), (9, 0.3, 0.4), (7, 0.4, 0.6)]),
        ([0, 0], []),
    ],
)
def test_runs_of_one_token_count_once(best: list[int], expected: list[Any]) -> None:
    class Fixed(CtcModel):
        blank_id = 0
        position_s = 0.1

        def __init__(self) -> None: ...
        def logits(self, inputs: Any) -> Any: ...

    found = Fixed()._collapsed([[float(each), -0.5] for each in best])
    assert [(t.token_id, t.start_s, t.end_s) for t in found] == [
        (token_id, pytest.approx(start_s), pytest.approx(end_s))
        for token_id, start_s, end_s in expected
    ]


@pytest.mark.parametrize(
    ("written", "language", "text"),
    [
        (b"language German\x00Ja.", "de", b"Ja."),
        (b"language Filipino\x00Oo.", "tl", b"Oo."),
        (b"Ja.", "", b"Ja."),
    ],
)
def test_qwen_names_the_language_before_the_mark(
    written: bytes, language: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(Qwen3Asr):
        def __init__(self) -> None:
            self.tokenizer = tokenizer()

    monkeypatch.setattr("triptych.modalities.asr.engine.families.qwen3._MARK", "\u0100")  # byte 0
    window = Window(
        pcm_S=noise(1.0),
        language="",
        task="transcribe",
        prompt="",
        temperature=0.0,
        sampler=None,  # type: ignore[arg-type]
    )
    ids = tuple(written)
    found = Named().heard(window, Written(ids, (-0.5,) * len(ids), 0.0, True))
    assert found.language == language
    assert bytes(token.token_id for token in found.tokens) == text

"""docs/http_speech.md lists every field of a speech request, and every event."""

from __future__ import annotations

from pathlib import Path

from triptych.core.media.audio.containers import FORMATS
from triptych.modalities.tts.api.protocol import (
    REFUSED,
    AudioDelta,
    AudioDone,
    AudioUsage,
    SpeechBody,
    TextNormalization,
)
from triptych.modalities.tts.api.routes import COVERAGE_HEADER, SAMPLE_RATE_HEADER

PAGE = (Path(__file__).parents[2] / "docs" / "http_speech.md").read_text(encoding="utf-8")


def test_every_field_is_named() -> None:
    for name in (*SpeechBody.model_fields, *TextNormalization.model_fields, *REFUSED, *FORMATS):
        assert f"`{name}`" in PAGE


def test_what_comes_back_is_named() -> None:
    fields = {**AudioDelta.model_fields, **AudioDone.model_fields, **AudioUsage.model_fields}
    for name in fields.keys() - {"type", "total_tokens"}:
        assert f"`{name}`" in PAGE
    for header in (COVERAGE_HEADER, SAMPLE_RATE_HEADER):
        assert f"`{header.lower()}`" in PAGE.lower()
    for event in ("speech.audio.delta", "speech.audio.done"):
        assert f"`{event}`" in PAGE

"""What docs/voices.md promises is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from triptych.modalities.tts.api.frontend.phoneme import OPENAI_VOICES
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.configs.kokoro import VOCABULARY
from triptych.modalities.tts.sources.kokoro import HUB_ID, NAME

DOC = (Path(__file__).parents[2] / "docs" / "voices.md").read_text(encoding="utf-8")


def test_the_table_of_openais_voices_is_the_codes() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", DOC, re.MULTILINE)) == OPENAI_VOICES


def test_references_are_spelled_as_they_are_read() -> None:
    assert f"--model {NAME}" in DOC
    assert f"`{HUB_ID}`" in DOC


def test_the_example_of_phonemes_is_understood() -> None:
    (example,) = re.findall(r"^\[Kokoro\].*$", DOC, re.MULTILINE)
    spoken = Normalizer()(example)
    assert spoken.text == "Kokoro met Nguyen."
    given = [pronunciation.phonemes for pronunciation in spoken.pronunciations]
    assert len(given) == 2
    assert set("".join(given)) <= set(VOCABULARY)

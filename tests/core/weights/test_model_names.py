"""A model that is not there gets the names that it resembles, or else all of them."""

import pytest

from triptych.core.weights.model_names import advice

KNOWN = ["kokoro-82m", "qwen2.5-coder-0.5b", "triptych-images", "triptych-voice", "whisper-tiny.en"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kokoro", " Did you mean kokoro-82m?"),
        ("kokor-82m", " Did you mean kokoro-82m?"),
        ("Kokoro-82M", " Did you mean kokoro-82m?"),
        ("triptych-image", " Did you mean triptych-images?"),
        ("qwen2.5-coder", " Did you mean qwen2.5-coder-0.5b?"),
        ("qwen2.5-coder:0.5b", " Did you mean qwen2.5-coder-0.5b?"),
        ("whisper", " Did you mean whisper-tiny.en?"),
        ("triptych", " Did you mean triptych-images or triptych-voice?"),
        ("llama3", f" Models with a short name: {', '.join(KNOWN)}."),
        ("org/kokoro", ""),
    ],
)
def test_advice(name: str, expected: str) -> None:
    assert advice(name, KNOWN) == expected


def test_without_known_names_there_is_no_advice() -> None:
    assert advice("kokoro", []) == ""

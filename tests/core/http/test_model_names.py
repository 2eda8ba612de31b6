"""Names of OpenAI's models mean a model of the route's task; `any` takes every name."""

from __future__ import annotations

import pytest

from triptych.core.http.model_names import is_openai, model_meant

THEIRS = {
    "chat": "gpt-4o gpt-4o-mini gpt-4.1-nano gpt-5-mini gpt-3.5-turbo o3 o4-mini chatgpt-4o-latest",
    "embedding": "text-embedding-3-small text-embedding-3-large text-embedding-ada-002",
    "speech": "tts-1 tts-1-hd gpt-4o-mini-tts",
    "transcription": "whisper-1 gpt-4o-transcribe gpt-4o-mini-transcribe",
    "image": "dall-e-2 dall-e-3 gpt-image-1 gpt-image-1-mini",
}
NAMES = [(task, name) for task, names in THEIRS.items() for name in names.split()]


@pytest.mark.parametrize(("task", "name"), NAMES)
def test_a_name_of_openais_belongs_to_one_task(task: str, name: str) -> None:
    assert [each for each in (*THEIRS, "rerank") if is_openai(name, each)] == [task]


@pytest.mark.parametrize("name", ["gpt", "gpt2", "gptq", "claude-3", "o", "tiny", "", "gpt-4o/x"])
def test_other_names_are_not_openais(name: str) -> None:
    assert not any(is_openai(name, task) for task in THEIRS)


@pytest.mark.parametrize(
    ("accepted", "name", "models", "meant"),
    [
        ("served", "gpt-4o", ["a"], None),
        ("openai", "gpt-4o", ["a"], "a"),
        ("openai", "gpt-4o", ["a", "b"], "a"),
        ("openai", "gpt-4o", [], None),
        ("openai", "other", ["a"], None),
        ("openai", "tts-1", ["a"], None),
        ("any", "other", ["a"], "a"),
        ("any", "tts-1", ["a"], "a"),
        ("any", "other", ["a", "b"], None),
        ("any", "gpt-4o", ["a", "b"], "a"),
    ],
)
def test_the_model_that_is_meant(
    accepted: str, name: str, models: list[str], meant: str | None
) -> None:
    assert model_meant(accepted, name, "chat", models) == meant

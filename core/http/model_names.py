"""Names of models that requests may use without their being served under them.

Owns the names of OpenAI's models by task, the choice of the model that such a name means
(`--accept-model-names`), and Ollama's tag. The list of models does not show them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

_OTHER_KINDS = r"(?!.*(?:transcribe|tts|image|audio|realtime))"
_OPENAI: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "chat": re.compile(rf"{_OTHER_KINDS}(?:gpt-\d|chatgpt-|o\d|codex-)[\w.-]*"),
        "embedding": re.compile(r"text-embedding-[\w.-]+"),
        "speech": re.compile(r"tts-1(?:-hd)?|gpt-[\w.]+(?:-mini)?-tts[\w.-]*"),
        "transcription": re.compile(
            r"whisper-1|gpt-[\w.]+(?:-mini)?-transcribe[\w.-]*|gpt-realtime-whisper"
        ),
        "realtime": re.compile(r"gpt-[\w.-]*realtime[\w.-]*|gpt-audio[\w.-]*"),
        "image": re.compile(r"dall-e-\d|gpt-image-[\w.-]+|chatgpt-image-[\w.-]+"),
    }
)
"""OpenAI's models, by task. Later versions follow the same pattern."""

_TAG = ":latest"


def with_tag(name: str) -> str:
    """A model's name with a tag, as Ollama's clients expect it."""
    return name if ":" in name else name + _TAG


def without_tag(name: str, known: Collection[str]) -> str:
    """The served name of a model that a client may call with a tag."""
    return name if name in known else name.removesuffix(_TAG)


def is_openai(name: str, task: str) -> bool:
    """Whether `name` is a model of OpenAI's for `task`."""
    pattern = _OPENAI.get(task)
    return pattern is not None and pattern.fullmatch(name) is not None


def model_meant(accepted: str, name: str, task: str, models: Sequence[str]) -> str | None:
    """Return the one of `models` that `name`, no name of theirs, means for `task`.

    `accepted` is the value of `--accept-model-names`.
    """
    if models and accepted in ("openai", "any") and is_openai(name, task):
        return models[0]
    if accepted == "any" and len(models) == 1:
        return models[0]
    return None

"""What each configured model is for, and which models there are when none is named.

Owns the table of models that come with Triptych. Reads a model's configuration and nothing else,
so that every process can ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from triptych.core.option import Role
from triptych.core.options import Resolved
from triptych.core.relevance import check_relevance
from triptych.core.weights.layout import read_json
from triptych.core.weights.pipeline_index import is_pipeline
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, ResolvedModel, Source, resolve_all
from triptych.modalities.diffusion.source import EMBEDDED_IMAGES
from triptych.modalities.llm.embedding.architecture import is_encoder
from triptych.modalities.llm.embedding.pooling import MODULES
from triptych.modalities.llm.embedding.source import MINILM
from triptych.modalities.tts.frontend import speech_role
from triptych.modalities.tts.recognition.source import WHISPER_TINY
from triptych.modalities.tts.sources import DEFAULT_SPEECH, SPEECH_SOURCES
from triptych.modalities.vlm.role import sees
from triptych.modalities.vlm.slots.source import EMBEDDED_VISION

SOURCES: tuple[Source, ...] = (
    *SPEECH_SOURCES,
    WHISPER_TINY,
    EMBEDDED_IMAGES,
    EMBEDDED_VISION,
    MINILM,
)
"""Models known by a name of their own."""
DEFAULTS = (
    EMBEDDED_REFERENCE,
    DEFAULT_SPEECH,
    WHISPER_TINY.name,
    EMBEDDED_IMAGES.name,
    EMBEDDED_VISION.name,
    MINILM.name,
)
"""What is served when no model is named: one of each kind."""


def resolve_models(resolved: Resolved, progress: Progress) -> tuple[ResolvedModel, ...]:
    """Bring every configured model onto this machine.

    Raises as `resolve_all` does, and `ConfigError` for options that no model here reads.
    """
    options = resolved.config.models
    models = resolve_all(options, progress, sources=SOURCES, defaults=DEFAULTS)
    roles = {role_of(model) for model in models}
    if "chat" in roles:
        roles.add("embedding")  # texts go to chat models on the same route
    check_relevance(resolved, roles)
    return models


def role_of(model: ResolvedModel) -> Role:
    """What `model` does, as its configuration tells."""
    folder = Path(model.folder)
    if is_pipeline(folder):
        return "image"
    config = read_json(folder / "config.json")
    if role := speech_role(config):
        return role
    if sees(config):
        return "vision"
    embeds = is_encoder(config) or (folder / MODULES).is_file()
    return "embedding" if embeds else "chat"


def with_role(models: Iterable[ResolvedModel], role: Role) -> list[ResolvedModel]:
    """The models that do `role`, in their order."""
    return [model for model in models if role_of(model) == role]

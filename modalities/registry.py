"""The list of modalities.

Owns the list, and the lookups over it for the models of a configuration. Loads no modality's API or
engine half.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from triptych.modalities.asr.modality import ASR
from triptych.modalities.diffusion.modality import IMAGES
from triptych.modalities.embedding.modality import EMBEDDING
from triptych.modalities.llm.modality import CHAT
from triptych.modalities.modality import Modality, modality_of
from triptych.modalities.tts.modality import SPEECH
from triptych.modalities.vlm.modality import VISION

if TYPE_CHECKING:
    from triptych.core.options.config import Config, ModelOptions
    from triptych.core.options.declaration import Role
    from triptych.core.options.table import Resolved
    from triptych.core.weights.progress import Progress
    from triptych.core.weights.resolve import ResolvedModel, Source

_log = logging.getLogger(__name__)

MODALITIES: tuple[Modality, ...] = (IMAGES, ASR, SPEECH, VISION, EMBEDDING, CHAT)
"""All modalities, in the order of matching models and of opening."""


def known_sources() -> list[Source]:
    """Return the models with short names."""
    return [source for modality in MODALITIES for source in modality.load_sources()]


def default_models() -> tuple[str, ...]:
    """Return the default models: one of each kind that has one, chat first."""
    return tuple(each.default for each in reversed(MODALITIES) if each.default)


def decoders() -> list[str]:
    """The modules whose functions run in decode children."""
    return list(dict.fromkeys(name for each in MODALITIES for name in each.decoders))


def tasks() -> list[tuple[str, str, str]]:
    """The tasks of all modalities (see `core.http.models.Task`), in the order of pages."""
    return [task for each in reversed(MODALITIES) for task in (each.task, *each.more_tasks)]


def expected_models(options: ModelOptions) -> list[tuple[str, str]]:
    """Return the names of the configured models, and the kinds of those with short names."""
    from triptych.core.bundle.resolve import named_references
    from triptych.core.weights.resolve import EMBEDDED_NAME, EMBEDDED_REFERENCE, place_of

    kinds = {EMBEDDED_REFERENCE: CHAT.kind, EMBEDDED_NAME: CHAT.kind}
    for modality in MODALITIES:
        kinds |= dict.fromkeys((source.name for source in modality.load_sources()), modality.kind)
    named = named_references(options, default_models())
    return [(name, kinds.get(place_of(reference), "")) for reference, name in named]


def kind_of(model: ResolvedModel) -> str:
    """Return the kind of `model` in one word."""
    return modality_of(model, MODALITIES).kind


def role_of(model: ResolvedModel) -> Role:
    """Return the role of `model`, from its configuration."""
    return modality_of(model, MODALITIES).role


def resolve_models(resolved: Resolved, progress: Progress) -> tuple[ResolvedModel, ...]:
    """Fetch every configured model to this machine.

    Raises the errors of `resolve_all`, and `ConfigError` for options that no model reads.
    """
    from triptych.core.bundle.resolve import resolve_all
    from triptych.core.options.relevance import check_relevance

    options = resolved.config.models
    models = resolve_all(options, progress, sources=known_sources(), defaults=default_models())
    check_relevance(resolved, set(_roles(models)))
    return with_draft(models, resolved.config, progress)


def with_draft(
    models: tuple[ResolvedModel, ...], config: Config, progress: Progress
) -> tuple[ResolvedModel, ...]:
    """`models`, some of them with the one that drafts, fetched if there is any."""
    from triptych.core.weights.resolve import resolve

    if not (reference := config.speculation.draft_model_path):
        return models
    found = resolve(
        reference, name=None, options=config.models, progress=progress, sources=known_sources()
    )
    algorithm = config.speculation.speculative_algorithm
    able = [model for model in models if kind_of(model) in ("chat", "vision")]
    drafted = _drafted(able, found, algorithm)
    return tuple(
        structs.replace(model, draft=found.folder, draft_digest=found.digest)
        if model in drafted
        else model
        for model in models
    )


def _drafted(
    models: list[ResolvedModel], draft: ResolvedModel, algorithm: str
) -> list[ResolvedModel]:
    """The models that `draft` fits, of several ones; all if it fits none.

    These are refused in a sentence when they are loaded. A model does not draft for itself.
    """
    from triptych.core.options.speculation import STANDALONE

    if len(models) < 2:
        return models
    folder = Path(draft.folder)
    fits = _has_vocabulary if algorithm == STANDALONE else _reads_states
    drafted = [model for model in models if model.folder != draft.folder and fits(model, folder)]
    if drafted:
        names = ", ".join(model.name for model in drafted)
        _log.info("%s drafts for %s; other models have no drafts", folder.name, names)
    return drafted or models


def _has_vocabulary(model: ResolvedModel, draft: Path) -> bool:
    """Whether each token of a smaller model is the same text in `model`, which takes no images."""
    from triptych.core.text.shared_vocabulary import num_different_tokens

    return kind_of(model) == "chat" and not num_different_tokens(
        Path(model.folder), draft, model.name
    )


def _reads_states(model: ResolvedModel, head: Path) -> bool:
    """Whether hidden states of `model` have the size that a head reads."""
    from triptych.core.weights.layout import read_json

    own, read = (read_json(folder / "config.json") for folder in (Path(model.folder), head))
    inner = read.get("transformer_layer_config") or {}
    size = read.get("target_hidden_size") or {**inner, **read}.get("hidden_size")
    return bool({**own, **(own.get("text_config") or {})}.get("hidden_size") == size)


def _roles(models: tuple[ResolvedModel, ...]) -> Iterator[Role]:
    for model in models:
        modality = modality_of(model, MODALITIES)
        yield from (modality.role, *modality.more_roles)

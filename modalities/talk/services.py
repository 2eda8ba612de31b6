"""The services that a spoken conversation is made of, found in what the modalities have opened.

Owns the lookup. Knows no call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from triptych.modalities.asr.api.service import AsrService
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.modality import ApiPart
from triptych.modalities.service import ModelService
from triptych.modalities.tts.api.service import SpeechService

ServiceT = TypeVar("ServiceT", bound=ModelService[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkServices:
    """Chat, recognition and speech. Each exists without models, and refuses calls then."""

    chat: LlmService
    recognition: AsrService
    speech: SpeechService

    @classmethod
    def of(cls, parts: Iterable[ApiPart]) -> Self:
        """Collect the services of the modalities' `parts`."""
        services = [part.service for part in parts]
        return cls(
            chat=_find(services, LlmService),
            recognition=_find(services, AsrService),
            speech=_find(services, SpeechService),
        )


def _find(services: Iterable[object], kind: type[ServiceT]) -> ServiceT:
    return next(service for service in services if isinstance(service, kind))

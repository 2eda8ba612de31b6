"""`/v1/audio/voices`: the built-in voices, and a caller's own.

Owns the way from a form to the service, and from a record to a card. Keys, limits and errors are
handled by `core.http`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from triptych.core.errors import InvalidRequest, NotFound
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.upload import form_body, read_form
from triptych.core.limits import MAX_NAME_CHARS
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.voices.protocol import (
    VoiceCard,
    VoiceDeleted,
    VoiceForm,
    VoiceList,
)
from triptych.modalities.tts.api.voices.record import VoiceDescription
from triptych.modalities.tts.api.voices.service import VoiceService

_FILE = "audio_sample"
_ROUTE = "/v1/audio/voices"
_VoiceId = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]


def voices_router(service: VoiceService) -> APIRouter:
    """Routes of the voices, served by `service`."""
    router = APIRouter(responses=ERROR_RESPONSES, tags=["speech"])
    _add_collection(router, service)
    _add_one(router, service)
    return router


def _add_collection(router: APIRouter, service: VoiceService) -> None:
    @router.get(_ROUTE)
    async def list_voices(
        request: Request,
        model: Annotated[str | None, Query(max_length=MAX_NAME_CHARS)] = None,
    ) -> VoiceList:
        """List the built-in voices, of all models or of one, and the caller's own."""
        brought = built_in_voices(service.choose(model))
        made = await asyncio.to_thread(service.store.voices_of, _owner(request))
        own = [record for record in made if model in (None, record.about.model)]
        cards = [*brought, *map(VoiceCard.of_caller, own)]
        return VoiceList(data=cards, voices=cards)

    @router.post(_ROUTE, openapi_extra=form_body(VoiceForm, _FILE))
    async def create_voice(request: Request) -> VoiceCard:
        """Create a voice from a recording, for a model that imitates."""
        form = await read_form(request)
        wanted = form.parsed(VoiceForm)
        upload = form.file(_FILE, "file")
        about = VoiceDescription(
            model=service.cloning_model(wanted.model).name,
            **wanted.model_dump(include={"name", "consent", "transcript", "language"}),
        )
        return VoiceCard.of_caller(await service.make(_owner(request), about, upload.data))


def _add_one(router: APIRouter, service: VoiceService) -> None:
    built_in = {card.id: card for card in reversed(built_in_voices(service.choose(None)))}

    @router.get(_ROUTE + "/{voice_id}")
    async def show_voice(voice_id: _VoiceId, request: Request) -> VoiceCard:
        """Get one voice."""
        if voice_id in built_in:
            return built_in[voice_id]
        record = await asyncio.to_thread(service.store.record, voice_id, _owner(request))
        if record is None:
            raise _missing()
        return VoiceCard.of_caller(record)

    @router.delete(_ROUTE + "/{voice_id}")
    async def delete_voice(voice_id: _VoiceId, request: Request) -> VoiceDeleted:
        """Delete one of the caller's voices."""
        if voice_id in built_in:
            raise InvalidRequest("A built-in voice cannot be deleted.", param="voice_id")
        if not await asyncio.to_thread(service.store.delete, voice_id, _owner(request)):
            raise _missing()
        return VoiceDeleted(id=voice_id)


def built_in_voices(fronts: Sequence[FrontEnd]) -> list[VoiceCard]:
    """The cards of the built-in voices."""
    return [VoiceCard.of_model(voice, front.name) for front in fronts for voice in front.voices]


def _owner(request: Request) -> str:
    return Context.of(request).principal.owner


def _missing() -> NotFound:
    return NotFound(f"You have no such voice; GET {_ROUTE} lists yours.", param="voice_id")

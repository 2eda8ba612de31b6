"""`/v1/audio/voices`: the voices there are, and a caller's own.

Owns the way from a form to the service, and from a record to a card. What surrounds every route
is `core.http`'s.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from triptych.core.errors import InvalidRequest, NotFound
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.upload import form_body, read_form
from triptych.core.limits import MAX_NAME_CHARS
from triptych.modalities.tts.api.voices.protocol import (
    VoiceCard,
    VoiceDeleted,
    VoiceForm,
    VoiceList,
)
from triptych.modalities.tts.api.voices.record import VoiceAbout
from triptych.modalities.tts.api.voices.service import VoiceService

_FILE = "audio_sample"
_ROUTE = "/v1/audio/voices"
_VoiceId = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]


def voices_router(service: VoiceService) -> APIRouter:
    """Routes of the voices in front of `service`."""
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
        """The voices of the models, or of one, and those that the caller made."""
        owner = Context.of(request).principal.owner
        brought = brought_by_models(service, model)
        made = await asyncio.to_thread(service.voices_of, owner, model)
        cards = [*brought, *map(VoiceCard.of_caller, made)]
        return VoiceList(data=cards, voices=cards)

    @router.post(_ROUTE, openapi_extra=form_body(VoiceForm, _FILE))
    async def create_voice(request: Request) -> VoiceCard:
        """Make a voice out of a recording, for a model that imitates."""
        form = await read_form(request)
        wanted = form.parsed(VoiceForm)
        upload = form.file(_FILE, "file")
        about = VoiceAbout(
            model=service.cloner(wanted.model).name,
            **wanted.model_dump(include={"name", "consent", "transcript", "language"}),
        )
        owner = Context.of(request).principal.owner
        return VoiceCard.of_caller(await service.make(owner, about, upload.data))


def _add_one(router: APIRouter, service: VoiceService) -> None:
    @router.get(_ROUTE + "/{voice_id}")
    async def show_voice(voice_id: _VoiceId, request: Request) -> VoiceCard:
        """One voice."""
        for card in brought_by_models(service):
            if card.id == voice_id:
                return card
        owner = Context.of(request).principal.owner
        record = await asyncio.to_thread(service.find, voice_id, owner)
        if record is None:
            raise _missing()
        return VoiceCard.of_caller(record)

    @router.delete(_ROUTE + "/{voice_id}")
    async def delete_voice(voice_id: _VoiceId, request: Request) -> VoiceDeleted:
        """Remove a voice that the caller made."""
        if any(card.id == voice_id for card in brought_by_models(service)):
            raise InvalidRequest("A voice that a model brings cannot be deleted.", param="voice_id")
        owner = Context.of(request).principal.owner
        if not await asyncio.to_thread(service.delete, voice_id, owner):
            raise _missing()
        return VoiceDeleted(id=voice_id)


def brought_by_models(service: VoiceService, model: str | None = None) -> list[VoiceCard]:
    """The cards of the voices of one model, or of all."""
    fronts = service.choose(model)
    return [VoiceCard.of_model(voice, front.name) for front in fronts for voice in front.voices]


def _missing() -> NotFound:
    return NotFound(f"You have no such voice; GET {_ROUTE} lists yours.", param="voice_id")

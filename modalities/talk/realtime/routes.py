"""`/v1/realtime`: the WebSocket of spoken conversations and of live transcription.

Owns the composition of a session. The limits of sessions are in `holding`. What a session does is
`session`'s; keys, ids and limits of messages are `core.http`'s.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.core.errors import InvalidRequest, TriptychError, UpgradeRequired
from triptych.core.http.context import Context
from triptych.core.http.websocket import SocketLimits, WebSocket, WebSocketResponse
from triptych.core.options.config import ServerOptions
from triptych.modalities.talk.ports import Hearing, SpokenAnswer
from triptych.modalities.talk.realtime.answering import SessionAnswers
from triptych.modalities.talk.realtime.conductor import Conductor
from triptych.modalities.talk.realtime.events import error_event, error_fields
from triptych.modalities.talk.realtime.holding import SessionCount
from triptych.modalities.talk.realtime.models import SessionModels
from triptych.modalities.talk.realtime.session import Session
from triptych.modalities.talk.services import TalkServices

ROUTE = "/v1/realtime"
SUBPROTOCOL = "realtime"
_QUERIES = frozenset({"model", "intent"})


@dataclass(frozen=True, slots=True)
class SessionParts:
    """The parts that sessions are made of. `open_hearing` blocks, since it may fetch weights."""

    services: TalkServices
    speaker: SpokenAnswer
    open_hearing: Callable[[], Hearing]


def socket_limits(options: ServerOptions) -> SocketLimits:
    """The limits of a session's socket."""
    return SocketLimits(
        message_bytes=options.max_request_bytes,
        stall_s=options.stream_timeout_s,
        idle_s=options.realtime_idle_timeout_s,
    )


def realtime_router(
    parts: SessionParts, options: ServerOptions, count: SessionCount | None = None
) -> APIRouter:
    """Create the route. It is no part of the OpenAPI document, which has no WebSockets.

    `count` is shared with the other routes that hold sessions.
    """
    router = APIRouter()
    count = count or SessionCount.of(options)
    limits = socket_limits(options)

    @router.get(ROUTE, include_in_schema=False)
    async def realtime(request: Request) -> Response:
        """Open a session. A plain request gets the refusal of one."""
        context = Context.of(request)
        count.check(context.principal.key)
        models = _models(request, parts.services)
        hearing = await asyncio.to_thread(parts.open_hearing)
        # Browsers hide why a WebSocket was refused: a plain request learns it, so this comes last.
        if not hasattr(request.state, "upgrade"):
            raise UpgradeRequired(f"{ROUTE} is a WebSocket: open it with ws:// or wss://.")
        draining: asyncio.Event = request.app.state.in_flight.draining
        context.record.model = models.chat or models.recognition

        async def serve(socket: WebSocket) -> None:
            answers = SessionAnswers(
                parts.services.chat,
                parts.speaker,
                models.chat,
                models.speech,
                context,
                replace(request.app.state.socket_answers, route=ROUTE),
            )
            ears = models.ears(hearing, context.caller)
            with count.hold(context.principal.key) as held:
                session = Session(models.settings(), new_id, models.check, held)
                await Conductor(socket, session, answers, ears, new_id).run(draining)

        return WebSocketResponse(serve, limits, _last_words, SUBPROTOCOL)

    return router


def _models(request: Request, services: TalkServices) -> SessionModels:
    """Return the models of a session, from its query. Raises `RequestError`s."""
    query = request.query_params
    if unknown := sorted(query.keys() - _QUERIES):
        raise InvalidRequest(
            f"Unknown parameter: {unknown[0][:80]!a}; there are model and intent.",
            param=unknown[0][:80],
        )
    intent = query.get("intent", "")
    if intent not in ("", "transcription"):
        raise InvalidRequest("intent is transcription, or left out.", param="intent")
    return SessionModels.choose(
        services,
        request.app.state,
        given=query.get("model", ""),
        is_dictation=intent == "transcription",
    )


def new_id(kind: str) -> str:
    """Return a new id, as OpenAI writes them."""
    return f"{kind}_{secrets.token_hex(12)}"


def _last_words(error: TriptychError) -> str:
    event = error_event(error_fields(error))
    return json.dumps({**event, "event_id": new_id("event")})

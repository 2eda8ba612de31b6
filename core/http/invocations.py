"""`/invocations`, to which Amazon SageMaker sends requests of all kinds.

Owns the choice of the route: one that takes the body's main field, and among several the one for
the model's task. Knows no other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from triptych.core.errors import InvalidRequest
from triptych.core.http.body import parse_json, read_body
from triptych.core.http.models import Task
from triptych.core.text.threads import on_text_thread

INVOCATIONS_ROUTE: Final = "/invocations"
_ROUTES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "messages": ("/v1/chat/completions", "/v1/embeddings"),
        "prompt": ("/v1/completions", "/v1/images/generations"),
        "input": ("/v1/embeddings", "/v1/audio/speech"),
        "query": ("/v1/rerank",),
        "queries": ("/v1/score",),
        "text_1": ("/v1/score",),
        "data_1": ("/v1/score",),
    }
)
"""Routes by the main field of a request. The model's task selects one, or without a model the task
of all served models; otherwise the first is used."""


class Invocations:
    """The ASGI app of `/invocations`: passes a request to the route for its body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route one request. Raises `InvalidRequest` for unknown bodies, and errors of reading."""
        request = Request(scope, receive)
        state = request.app.state
        raw = await read_body(request, state.options.max_request_bytes)
        body = await on_text_thread(len(raw), parse_json, raw)
        scope["path"] = route_of(body, state.tasks)
        unread: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await request.app.router(scope, receive_again, send)


def route_of(body: Any, tasks: Mapping[str, Task]) -> str:
    """Return the path of the route for `body`; `tasks` are the models' tasks by model name."""
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    routes = next((_ROUTES[name] for name in _ROUTES if fields.get(name) is not None), ())
    if not routes:
        raise InvalidRequest(
            f"No route takes such a body: send an object with one of {', '.join(_ROUTES)}."
        )
    model = fields.get("model")
    named = tasks.get(model) if isinstance(model, str) else None
    meant = {named.route} if named else {task.route for task in tasks.values() if not model}
    return meant.pop() if len(meant) == 1 and meant <= {*routes} else routes[0]

"""What the router leaves open: HEAD, names with control characters, and which methods a path has.

Owns the step between the layers and the routes, and that `/v1` may be left out, which comes before
all layers. Knows no route by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.errors import MethodNotAllowed, NotFound
from triptych.core.http.errors import error_answer, handle_error

_VERSION = "/v1"


class ShortPaths:
    """ASGI middleware: what is below `/v1` is found without it, too, as other servers have it.

    That holds for paths whose first part no other of the `routes` has. The layers see one path.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        paths = {getattr(route, "path", "") for route in routes}
        short = {path for path in paths if path.startswith(f"{_VERSION}/")}
        whole = {_first_part(path) for path in paths - short}
        self._parts = {_first_part(path.removeprefix(_VERSION)) for path in short} - whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, to the whole path."""
        if scope["type"] == "http" and _first_part(scope["path"]) in self._parts:
            raw_path = _VERSION.encode() + scope.get("raw_path", scope["path"].encode())
            scope = {**scope, "path": _VERSION + scope["path"], "raw_path": raw_path}
        await self._app(scope, receive, send)


def _first_part(path: str) -> str:
    """What is between the first two slashes; nothing where the path does not begin with one."""
    return path.partition("/")[2].partition("/")[0]


class Paths:
    """ASGI middleware: HEAD is answered as GET without its body, wherever there is GET.

    A path with a control character leads nowhere: to the router's patterns a line's end would be
    the path's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to its route."""
        if scope["type"] == "http" and not scope["path"].isprintable():
            error = NotFound("There is no such route here.")
            await error_answer(error, scope)(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "HEAD":
            await self._head(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        asked = {**scope, "method": "GET"}
        scope["state"]["is_head"] = True  # a stream would never end for one who does not read it
        await self._app(asked, receive, send_head)
        if "route" in asked:  # the layers around log and count by it
            scope["route"] = asked["route"]


async def handle_http_error(request: Request, error: Exception) -> Response:
    """FastAPI's exception handler for what the router raises: a 405 names all methods there are."""
    response = await handle_error(request, error)
    if response.status_code == MethodNotAllowed.status:
        methods = _methods(request.scope, request.app.state.routes)
        response.headers["allow"] = ", ".join(methods)
    return response


def _methods(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """The methods that the request's path has, over all of `routes`."""
    methods: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)

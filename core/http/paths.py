"""Path handling that the router lacks: HEAD, control characters, 405 with methods, short paths.

Owns the middleware between the other layers and the routes, and the outermost ones, which remove
the prefix of a proxy and make `/v1` optional. Knows no route by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.errors import MethodNotAllowed, NotFound
from triptych.core.http.errors import error_answer, handle_error

_VERSION = "/v1"


class ShortPaths:
    """ASGI middleware: paths below `/v1` also work without it, as in other servers.

    This holds for paths whose first part no other route has. All later layers see the full path.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        paths = {getattr(route, "path", "") for route in routes}
        short = {path for path in paths if path.startswith(f"{_VERSION}/")}
        whole = {_first_part(path) for path in paths - short}
        self._parts = {_first_part(path.removeprefix(_VERSION)) for path in short} - whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the full path."""
        if scope["type"] == "http" and _first_part(scope["path"]) in self._parts:
            raw_path = _VERSION.encode() + scope.get("raw_path", scope["path"].encode())
            scope = {**scope, "path": _VERSION + scope["path"], "raw_path": raw_path}
        await self._app(scope, receive, send)


class RootPath:
    """ASGI middleware: paths below `root`, as a proxy publishes them, also work without it.

    `root` itself is redirected to `root/`: the page's links are relative, and need the slash.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the path below `root`."""
        if scope["type"] == "http" and scope["path"] == self._root:
            await RedirectResponse(f"{self._root}/")(scope, receive, send)
            return
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            raw_path = scope.get("raw_path", scope["path"].encode())
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self._root),
                "raw_path": raw_path.removeprefix(self._root.encode()),
            }
        await self._app(scope, receive, send)


def _first_part(path: str) -> str:
    """Return the part between the first two slashes; empty if the path begins with no slash."""
    return path.partition("/")[2].partition("/")[0]


class Paths:
    """ASGI middleware: HEAD is answered as GET without a body.

    A path with a control character gets 404: the router's patterns would take a line break for the
    end of the path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to its route."""
        if scope["type"] == "http" and not scope["path"].isprintable():
            error = NotFound("There is no such route.")
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

        as_get = {**scope, "method": "GET"}
        scope["state"]["is_head"] = True  # streams are skipped: they might never end
        await self._app(as_get, receive, send_head)
        if "route" in as_get:  # for logs and metrics of the outer layers
            scope["route"] = as_get["route"]


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Handle the router's errors for FastAPI; a 405 lists the path's methods."""
    response = await handle_error(request, error)
    if response.status_code == MethodNotAllowed.status:
        methods = _methods(request.scope, request.app.state.routes)
        response.headers["allow"] = ", ".join(methods)
    return response


def _methods(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Return the methods of all `routes` that match the request's path."""
    methods: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)

"""What a route may know of the request it answers, besides the body.

Owns nothing: gathers what the layers around the routes left in the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from triptych.core.engine_api.caller import Caller, Principal
from triptych.core.http.auth import OWN_PRINCIPAL
from triptych.core.http.metrics import HttpMetrics
from triptych.core.options.config import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """`call_id` is unique; `request_id` is what the caller knows the request by.

    The engine may take `limit_s` for it: a batch has a window for all of its lines.
    """

    request_id: str
    call_id: str
    principal: Principal
    arrived_s: float
    limit_s: float | None
    connection: str
    options: ServerOptions
    metrics: HttpMetrics

    @classmethod
    def of(cls, request: Request) -> Context:
        """The context of `request`."""
        options: ServerOptions = request.app.state.options
        return cls(
            request_id=request.state.request_id,
            call_id=request.state.call_id,
            principal=request.state.principal,
            arrived_s=request.state.arrived_s,
            limit_s=None if OWN_PRINCIPAL in request.scope else options.request_timeout_s,
            connection=":".join(map(str, request.client or ())),
            options=options,
            metrics=request.app.state.metrics,
        )

    @property
    def caller(self) -> Caller:
        """The sender, as services know it."""
        return Caller(
            call_id=self.call_id,
            principal=self.principal,
            deadline_s=self.limit_s,
            connection=self.connection,
        )

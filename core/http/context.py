"""The context of a request: caller, ids, times, options and metrics.

Owns nothing: collects values that the middlewares stored in the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from triptych.core.engine_api.caller import AccessRecord, Caller, Principal
from triptych.core.http.access import log_ids
from triptych.core.http.auth import OWN_PRINCIPAL
from triptych.core.http.metrics import HttpMetrics
from triptych.core.options.config import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context of a request. `call_id` is unique, `request_id` may be the client's own.

    `limit_s` is the engine's time limit. Requests that the server sends to itself for a batch file
    have none: the batch has its completion window.
    """

    request_id: str
    call_id: str
    principal: Principal
    arrived_s: float
    limit_s: float | None
    connection: str
    record: AccessRecord
    options: ServerOptions
    metrics: HttpMetrics

    @classmethod
    def of(cls, request: Request) -> Context:
        """Collect the context of `request`."""
        options: ServerOptions = request.app.state.options
        return cls(
            request_id=request.state.request_id,
            call_id=request.state.call_id,
            principal=request.state.principal,
            arrived_s=request.state.arrived_s,
            limit_s=None if OWN_PRINCIPAL in request.scope else options.request_timeout_s,
            connection=":".join(map(str, request.client or ())),
            record=request.state.record,
            options=options,
            metrics=request.app.state.metrics,
        )

    @property
    def is_of_batch(self) -> bool:
        """Whether it is a line of a batch file, whose answer no client awaits."""
        return self.limit_s is None

    @property
    def log_ids(self) -> dict[str, str]:
        """The ids of the request, as fields of its log lines."""
        return log_ids(self.request_id, self.call_id)

    @property
    def caller(self) -> Caller:
        """The sender, as services know it."""
        return Caller(
            call_id=self.call_id,
            principal=self.principal,
            deadline_s=self.limit_s,
            connection=self.connection,
            record=self.record,
        )

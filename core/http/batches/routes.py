"""The routes `/v1/batches`, compatible with OpenAI's.

Owns the fields of a batch and the format of responses.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field, StringConstraints

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.batches.lines import Endpoint
from triptych.core.http.batches.record import BatchRecord, Status
from triptych.core.http.batches.runner import BatchRunner
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import Metadata, Name, NullIsAbsent, Strict
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.store.documents import Page

_ROUTE = "/v1/batches"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BatchId = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]


class FileExpiry(Strict):
    """The expiry of a batch's files."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=limits.MIN_FILE_LIFETIME_S, le=limits.MAX_FILE_LIFETIME_S)


class BatchRequest(NullIsAbsent):
    """A request to create a batch."""

    input_file_id: Name
    endpoint: Endpoint
    completion_window: Annotated[
        str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}[smhd]$", max_length=7)
    ] = Field(description="Time limit: a number and s, m, h or d. OpenAI accepts only 24h.")
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = None

    @property
    def window_s(self) -> int:
        """The window in seconds. Raises `InvalidRequest` if it is too long."""
        number, unit = re.findall(r"[0-9]+|[a-z]", self.completion_window)
        window_s = int(number) * _UNITS_S[unit]
        if window_s > limits.MAX_BATCH_WINDOW_S:
            raise InvalidRequest(
                f"completion_window is at most {limits.MAX_BATCH_WINDOW_S // _UNITS_S['d']}d.",
                param="completion_window",
            )
        return window_s


class BatchFaultReply(BaseModel):
    """The reason why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaultList(BaseModel):
    """All reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchFaultReply]


class LineCounts(BaseModel):
    """Numbers of lines: total, answered, and with errors."""

    total: int
    completed: int
    failed: int


class BatchReply(BaseModel):
    """A batch and its progress."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchFaultList | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> Self:
        """Build the response for `record`."""
        times: dict[str, Any] = {f"{name}_at": int(at) for name, at in record.times.items()}
        faults = [
            BatchFaultReply(code=each.code, message=each.message, line=each.line)
            for each in record.faults
        ]
        counts = LineCounts(
            total=record.num_lines, completed=record.num_good, failed=record.num_bad
        )
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            errors=BatchFaultList(data=faults) if faults else None,
            input_file_id=record.input_file_id,
            completion_window=record.completion_window,
            status=record.status,
            output_file_id=record.output_file_id,
            error_file_id=record.error_file_id,
            expires_at=int(record.ends_s),
            request_counts=counts,
            metadata=record.metadata,
            **times,
        )


class BatchList(BaseModel):
    """A page of a caller's batches, the latest first."""

    object: Literal["list"] = "list"
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batches_router(runner: BatchRunner) -> APIRouter:
    """Create the routes of batches."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["batches"])

    @router.post(_ROUTE)
    async def create_batch(body: BatchRequest, request: Request) -> BatchReply:
        """Answer the requests in a file, in the background."""
        expiry = body.output_expires_after
        kept_s = limits.MAX_FILE_LIFETIME_S if expiry is None else expiry.seconds
        fields = body.model_dump(exclude={"output_expires_after"})
        principal = Context.of(request).principal
        return BatchReply.of(
            await runner.create(principal, fields, window_s=body.window_s, kept_s=kept_s)
        )

    @router.get(_ROUTE)
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=limits.MAX_BATCHES_LISTED)] = 20,
        after: Annotated[str, Query(max_length=MAX_NAME_CHARS)] = "",
    ) -> BatchList:
        """List the caller's batches."""
        page = Page(limit=limit + 1, after=after, is_descending=True)
        found = await runner.listed(Context.of(request).principal.owner, page)
        data = [BatchReply.of(record) for record in found[:limit]]
        return BatchList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )

    @router.get(_ROUTE + "/{batch_id}")
    async def show_batch(batch_id: _BatchId, request: Request) -> BatchReply:
        """Show one batch."""
        return BatchReply.of(await runner.get(Context.of(request).principal.owner, batch_id))

    @router.post(_ROUTE + "/{batch_id}/cancel")
    async def cancel_batch(batch_id: _BatchId, request: Request) -> BatchReply:
        """Cancel a batch; the results so far are kept."""
        return BatchReply.of(await runner.cancel(Context.of(request).principal, batch_id))

    return router

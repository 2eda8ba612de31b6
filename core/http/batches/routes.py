"""`/v1/batches` as OpenAI's clients use it.

Owns the fields of a batch, and the shape of the answers.
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
    """When the files of a batch are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=limits.MIN_FILE_LIFETIME_S, le=limits.MAX_FILE_LIFETIME_S)


class BatchRequest(NullIsAbsent):
    """A batch to be begun."""

    input_file_id: Name
    endpoint: Endpoint
    completion_window: Annotated[
        str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}[smhd]$", max_length=7)
    ] = Field(description="When to give up: a number and s, m, h or d. OpenAI has 24h alone.")
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = None

    @property
    def window_s(self) -> int:
        """The window in seconds. Raises `InvalidRequest` for one that is too long."""
        number, unit = re.findall(r"[0-9]+|[a-z]", self.completion_window)
        window_s = int(number) * _UNITS_S[unit]
        if window_s > limits.MAX_BATCH_WINDOW_S:
            raise InvalidRequest(
                f"A batch takes at most {limits.MAX_BATCH_WINDOW_S // _UNITS_S['d']}d.",
                param="completion_window",
            )
        return window_s


class BatchFaultReply(BaseModel):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaultList(BaseModel):
    """All reasons why."""

    object: Literal["list"] = "list"
    data: list[BatchFaultReply]


class LineCounts(BaseModel):
    """Lines of a batch: in all, answered, and those with errors."""

    total: int
    completed: int
    failed: int


class BatchReply(BaseModel):
    """A batch."""

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
        """What is shown of `record`."""
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
    """A part of a caller's batches, the last first."""

    object: Literal["list"] = "list"
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batches_router(runner: BatchRunner) -> APIRouter:
    """The routes of callers' batches."""
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
        """The caller's batches."""
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
        """One batch."""
        return BatchReply.of(await runner.get(Context.of(request).principal.owner, batch_id))

    @router.post(_ROUTE + "/{batch_id}/cancel")
    async def cancel_batch(batch_id: _BatchId, request: Request) -> BatchReply:
        """End a batch before its time; what was answered is kept."""
        return BatchReply.of(await runner.cancel(Context.of(request).principal, batch_id))

    return router

"""Creates, runs, finds and cancels the batches of all callers.

Owns the running batches and their owners, and resumes batches after a restart of the server. The
work within a batch is in `work`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fastapi import FastAPI

from triptych.core.engine_api.caller import Principal
from triptych.core.errors import InvalidRequest, NotFound, Unavailable
from triptych.core.http.batches import record as records
from triptych.core.http.batches.dispatch import post
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.batches.record import BatchFault, BatchRecord
from triptych.core.http.batches.work import Ask, BatchWork
from triptych.core.http.files.user_files import UserFiles
from triptych.core.limits import MAX_FILE_LIFETIME_S
from triptych.core.store.documents import DocumentTable, Key, Page

_log = logging.getLogger(__name__)
STORE_PAUSE_S: Final = 5.0


class BatchRunner:
    """Runs batches with files of `user_files`, through the gate of the app that answers them."""

    def __init__(self, user_files: UserFiles) -> None:
        self._user_files = user_files
        self._app: FastAPI | None = None
        self._gate: LineGate | None = None
        self._works: dict[Key, BatchWork] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, app: FastAPI) -> None:
        """Set the `app` that answers the lines."""
        self._app = app
        self._gate = app.state.gate

    async def start(self) -> None:
        """Resume the batches of an earlier run of the server, once the store is available."""
        assert self._app is not None, "no app to answer"
        if not self._user_files.is_there:
            return
        try:
            await self._resume()
        except Unavailable as error:
            _log.warning("batches wait for the store: %s", error.message)
            self._keep(asyncio.create_task(self._resume_later()))

    async def _resume_later(self) -> None:
        while True:
            await asyncio.sleep(STORE_PAUSE_S)
            with contextlib.suppress(Unavailable):
                await self._resume()
                return

    async def _resume(self) -> None:
        assert self._app is not None
        for key, record in await self._user_files.store.call(records.active):
            if key in self._works:
                continue
            principal = self._app.state.keyring.principal_of(key.owner)
            if principal is None:
                fault = BatchFault("key_removed", "Its API key is no longer accepted.")
                await self._work(key, record).fail(fault)
            else:
                self._begin(key, record, principal)

    async def create(
        self, principal: Principal, fields: Mapping[str, Any], *, window_s: float, kept_s: float
    ) -> BatchRecord:
        """Create a batch with these fields of a record. Raises `RequestError`s."""
        file = await self._user_files.get(principal.owner, fields["input_file_id"])
        if file.about.purpose != "batch":
            raise InvalidRequest(
                f"The file has the purpose {file.about.purpose}: upload it with purpose batch.",
                param="input_file_id",
            )
        now_s = time.time()
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            ends_s=now_s + window_s,
            files_expire_s=now_s + kept_s,
            times={"created": now_s},
            **fields,
        )
        key = Key(records.KIND, record.id, principal.owner)
        expires_s = now_s + window_s + MAX_FILE_LIFETIME_S
        await self._user_files.store.call(records.create, key, record, expires_s)
        self._begin(key, record, principal)
        return record

    async def get(self, owner: str, batch_id: str) -> BatchRecord:
        """Return the batch. Raises `NotFound`."""
        key = Key(records.KIND, batch_id, owner)
        if key in self._works:
            return self._works[key].record
        found = await self._user_files.store.call(DocumentTable.get, key)
        if found is None:
            raise NotFound(
                f"You have no batch {batch_id[:80]!a}; GET /v1/batches lists yours.",
                param="batch_id",
            )
        return records.decode(found)

    async def listed(self, owner: str, page: Page) -> list[BatchRecord]:
        """Return a page of an owner's batches. Raises `InvalidRequest`."""
        found = await self._user_files.store.call(
            DocumentTable.list_page, owner, records.KIND, page
        )
        return [records.decode(document) for document in found]

    async def cancel(self, principal: Principal, batch_id: str) -> BatchRecord:
        """Cancel a batch. Raises `NotFound`, `InvalidRequest` if it has ended."""
        owner = principal.owner
        record = await self.get(owner, batch_id)
        key = Key(records.KIND, batch_id, owner)
        if record.is_over:
            raise InvalidRequest(f"The batch is already {record.status}.", param="batch_id")
        if key not in self._works:  # nothing runs it: it only needs to be ended
            self._begin(key, record, principal)
        work = self._works[key]
        await work.cancel()
        return work.record

    @property
    def num_running(self) -> int:
        """How many batches are running."""
        return len(self._works)

    async def close(self) -> None:
        """Stop; active batches resume when a server starts with the same store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _work(self, key: Key, record: BatchRecord) -> BatchWork:
        assert self._app is not None
        max_bytes = self._app.state.options.max_request_bytes
        return BatchWork(self._user_files, key, record, max_line_bytes=max_bytes)

    def _begin(self, key: Key, record: BatchRecord, principal: Principal) -> None:
        work = self._works[key] = self._work(key, record)
        task = asyncio.create_task(self._run(work, principal))
        # A task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._works.pop(key))
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: BatchWork, principal: Principal) -> None:
        assert self._app is not None
        ask = partial(post, self._app, work.record.endpoint, principal=principal)
        while True:
            try:
                await self._run_once(work, ask)
                return
            except Unavailable as error:  # the store may recover
                _log.warning("a batch waits for the store: %s", error.message)
                await asyncio.sleep(STORE_PAUSE_S)

    async def _run_once(self, work: BatchWork, ask: Ask) -> None:
        assert self._gate is not None
        try:
            await work.run(ask, self._gate)
        except Unavailable:
            raise
        except Exception:  # nothing awaits this task: batch and log must record the error
            _log.exception("a batch failed")
            await work.fail(BatchFault("internal_error", "The batch failed; see the server's log."))

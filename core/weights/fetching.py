"""Fetching a model in a child process, with progress as it goes.

Owns the messages between both and the life of the child: an installer or a hub client that hangs,
or a conversion that takes memory, is ended with it. `triptych.fetch_process` does the work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ErrorInfo, InternalError, from_info
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import Action

PROGRAM = (sys.executable, "-P", "-m", "triptych.fetch_process")


class FetchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The model to fetch. It may hold a token: it is sent over a pipe."""

    reference: str
    name: str
    options: ModelOptions


class FetchProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a task is; `total_bytes` is 0 where the length is unknown."""

    action: Action
    num_bytes: int
    total_bytes: int


class FetchedModel(msgspec.Struct, frozen=True, tag=True):
    """The model is here."""

    model: ResolvedModel


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be had."""

    error: ErrorInfo


FetchNote = FetchProgress | FetchedModel | FetchFailed
Fetch = Callable[[FetchOrder], AsyncGenerator[FetchProgress | ResolvedModel, None]]
"""Yields the progress, and the model last. Raises the errors of `core.weights.resolve.resolve`."""


async def fetch(
    order: FetchOrder, program: tuple[str, ...] = PROGRAM
) -> AsyncGenerator[FetchProgress | ResolvedModel, None]:
    """Fetch a model (see `Fetch`). Closing the generator ends the child.

    The next call goes on with files of the hub that are partly here.
    """
    child = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        await child.stdin.drain()
        decoder = msgspec.json.Decoder(FetchNote)
        while line := await child.stdout.readline():
            note = decoder.decode(line)
            if isinstance(note, FetchFailed):
                raise from_info(note.error)
            yield note.model if isinstance(note, FetchedModel) else note
            if isinstance(note, FetchedModel):
                return
        raise InternalError(f"Fetching {order.name} ended early; the server's log says why.")
    finally:
        with suppress(ProcessLookupError):  # its installers, too
            os.killpg(child.pid, signal.SIGKILL)
        child.stdin.close()
        await asyncio.shield(child.wait())

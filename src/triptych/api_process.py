"""The API process: `python -m triptych.api_process`, started by the supervisor.

Owns the process around the HTTP app: configuration from the control line, the inherited listening
socket, its heartbeat, the drain. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from triptych.compose import ChildSetup, build_app, build_codec
from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.model_changes import KeepModel, ModelChange, Sleep
from triptych.core.process import logs
from triptych.core.process.collector import pause_collector, resume_collector
from triptych.core.process.heap import return_large_blocks
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import Beat, ControlLine, Phase, Ready, StartFacts, run_child
from triptych.core.transport.remote import RemoteClient
from triptych.core.weights.resolve import ResolvedModel

BEAT_S = 1.0
WARM_CHECK_S = 0.5
STALL_BUDGET_S = 30.0
"""An event loop without a turn for this long is stuck, even on a busy machine."""

_log = logging.getLogger("triptych.api_process")


def main() -> None:
    """Run the API process until it is stopped."""
    pause_collector()
    line = ControlLine.open()
    setup = decode_json(line.read_config(), ChildSetup)
    logs.configure(setup.config.server, has_color=setup.has_color)
    return_large_blocks()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the supervisor logs the rest
    run_child(line, lambda: asyncio.run(_run(line, setup)), _log)


async def _run(line: ControlLine, setup: ChildSetup) -> None:
    beating = asyncio.create_task(_beat(line))
    from triptych.core.http.server import HttpServer, serve

    loop = asyncio.get_running_loop()
    client = RemoteClient(
        Path(setup.folder), build_codec(), stream_timeout_s=setup.config.server.stream_timeout_s
    )
    client.keep(setup.changes)
    app = build_app(setup.kept_config, (*setup.kept_models, *setup.added), client)
    if app.state.kept_requests is not None:
        client.on_crash = app.state.kept_requests.dump
    client.on_kept = partial(_note_changes, line)
    app.state.runtime_models.on_change = partial(_note_models, line, setup.models)
    await app.state.start()

    def on_started(server: HttpServer) -> None:
        line.on_drain(lambda: asyncio.run_coroutine_threadsafe(server.drain(), loop))
        resume_collector()
        line.send(Phase("listen", server.url))
        line.send(Ready())

    warming = asyncio.create_task(_warm(client, app.state.warm))
    listener = socket.socket(fileno=setup.listener_fd)
    await serve(app, setup.config, on_started=on_started, listener=listener)
    warming.cancel()
    await app.state.close()
    await client.close()
    beating.cancel()


def _note_models(
    line: ControlLine, first: Sequence[ResolvedModel], models: Sequence[ResolvedModel]
) -> None:
    """Tell the supervisor the changes since the `first` models, for later starts of children."""
    added = [model for model in models if model not in first]
    kept = {model.name for model in models if model in first}
    removed = [model.name for model in first if model.name not in kept]
    line.send(StartFacts({"added": added, "removed": removed}, is_shared=True))


def _note_changes(line: ControlLine, changes: Sequence[ModelChange]) -> None:
    """Tell the supervisor the times of idle models, and the sleep, for later starts."""
    times = {each.model: each.idle_s for each in changes if isinstance(each, KeepModel)}
    facts = {
        "idle_times": {name: s if math.isfinite(s) else None for name, s in times.items()},
        "is_asleep": any(isinstance(each, Sleep) for each in changes),
    }
    line.send(StartFacts(facts, is_shared=True))


async def _warm(client: EngineClient, warm: Callable[[], None]) -> None:
    """Call `warm` once the engine is ready, so as not to slow down its start."""
    while True:
        if client.status().is_ready:
            return warm()
        await asyncio.sleep(WARM_CHECK_S)


async def _beat(line: ControlLine) -> None:
    while True:
        line.send(Beat(STALL_BUDGET_S))
        await asyncio.sleep(BEAT_S)


if __name__ == "__main__":
    main()

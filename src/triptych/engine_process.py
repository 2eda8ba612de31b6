"""The engine process: `python -m triptych.engine_process`, started by the supervisor.

Owns the process around an engine: configuration from the control line (a socket pair shared with
the supervisor), status messages on it, the engine's own socket, exit codes. Imports no web
framework.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from triptych.compose import ChildSetup, build_codec, build_engine
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.errors import ModelTooLarge
from triptych.core.ledger import Ledger, mib
from triptych.core.options.config import Config
from triptych.core.process import logs
from triptych.core.process.collector import pause_collector, resume_collector
from triptych.core.process.lookups import listen_to_lookups
from triptych.core.process.metrics import held_bytes
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import (
    Beat,
    ControlLine,
    ModelNote,
    Phase,
    Ready,
    StartFacts,
    run_child,
)
from triptych.core.transport.engine_server import EngineServer
from triptych.core.weights.manifest import verify_in_background
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.engine import EngineCore

BuildEngine = Callable[[Config, Sequence[ResolvedModel]], EngineCore]
_log = logging.getLogger("triptych.engine_process")


def main(build: BuildEngine = build_engine) -> None:
    """Run the engine process. Never returns: a hung device must not keep the process alive."""
    pause_collector()
    line = ControlLine.open()
    setup = decode_json(line.read_config(), ChildSetup)
    logs.configure(setup.config.server, has_color=setup.has_color)
    with listen_to_lookups(line.send):
        run_child(line, lambda: _run(line, setup, build), _log)


def _run(line: ControlLine, setup: ChildSetup, build: BuildEngine) -> None:
    if setup.config.models.load == "startup":
        verify_in_background(Path(model.folder) for model in setup.kept_models)
    engine = build(setup.config, setup.kept_models)
    keep_budget(line, engine.ledger, setup.device_budget_bytes)
    line.send(Phase("engine", engine.device))
    server = EngineServer(engine, Path(setup.folder), build_codec())
    report = StartReport(line, engine.warm)

    def on_beat(beat: Heartbeat) -> None:
        server.send_beat(beat)
        report.take(beat)

    engine.leave_start_to(on_beat)
    line.on_drain(engine.drain)
    try:
        engine.run()
    except BaseException:
        server.close(is_drained=False)
        raise
    server.close(is_drained=True)


def keep_budget(line: ControlLine, ledger: Ledger, first_bytes: int) -> None:
    """Report the memory budget on the first start; on a restart, keep the first: `first_bytes`."""
    if not first_bytes:
        line.send(StartFacts({"device_budget_bytes": ledger.capacity_bytes}))
        return
    ledger.resume(first_bytes)
    _log.info(
        "memory for models: %s, %s at the first start",
        mib(ledger.capacity_bytes),
        mib(first_bytes),
    )


class StartReport:
    """Turns heartbeats into messages to the supervisor, and calls `warm` once models are ready."""

    def __init__(self, line: ControlLine, warm: Callable[[], None]) -> None:
        self._line = line
        self._warm = warm
        self._noted: dict[str, ModelNote] = {}
        self._is_ready = False

    def take(self, beat: Heartbeat) -> None:
        """Report the beat, each change of a model's state, and when all models are ready."""
        self._line.send(Beat(beat.stall_budget_s))
        if self._is_ready or beat.phase == "stop":  # a failed start never becomes ready
            return
        for status in beat.models:
            self._report(
                ModelNote(
                    structs.replace(status, progress=round(status.progress, 1), idle_s=0.0),
                    _memory(beat, status),
                )
            )
        served = [status for status in beat.models if not _is_too_large(status)]
        if served and all(status.state in ("ready", "unloaded") for status in served):
            self._is_ready = True
            resume_collector()
            self._line.send(Ready())
            self._warm()

    def _report(self, note: ModelNote) -> None:
        """Send a model's state and memory if they have changed."""
        model, before = note.status.model, self._noted.get(note.status.model)
        if before == note:
            return
        self._noted[model] = note
        self._line.send(note)
        was_ready = before is not None and before.status.state == "ready"
        if note.status.state == "ready" and not was_ready:
            self._line.send(Phase("load", model))


def _memory(beat: Heartbeat, status: ModelStatus) -> int:
    """The device memory of a model, once it is loaded."""
    return held_bytes(status.model, beat.gauges) if status.state == "ready" else 0


def _is_too_large(status: ModelStatus) -> bool:
    """Whether a model is refused for its size while others are served."""
    return status.error is not None and status.error.code == ModelTooLarge.code


if __name__ == "__main__":
    main()

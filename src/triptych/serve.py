"""`triptych serve`: the supervisor of an API process and an engine process.

Owns the order of the start: options, port, socket folder, models, then both children at once.
Imports neither torch nor a web framework, so it starts fast and survives crashes of both.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from triptych.compose import ChildSetup, build_codec, with_models
from triptych.core.client.records import recorded
from triptych.core.errors import DamagedWeights
from triptych.core.http.listener import bind, url_of
from triptych.core.http.tls import tls_context
from triptych.core.options.declaration import ENVIRONMENT_PREFIX
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.options.server import without_keys
from triptych.core.options.service_links import service_links
from triptych.core.options.table import (
    Resolved,
    add_model_operands,
    add_options,
    resolve_with_sources,
)
from triptych.core.options.tier_plan import TierPlan
from triptych.core.process import logs
from triptych.core.process.lazy import load
from triptych.core.process.logs import fields
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.transport.control import FromChild, ModelNote, Phase, Ready, StartFacts
from triptych.core.transport.endpoint import connect_dealer, private_folder, send_if_connected
from triptych.core.transport.messages import EngineGone
from triptych.core.transport.remote import SUPERVISOR
from triptych.core.transport.supervisor import ChildSpec, Policy, Supervisor
from triptych.core.weights.manifest import skip_weight_files
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.registry import expected_models, kind_of, resolve_models
from triptych.replicas.plan import ReplicaPlan
from triptych.startup.child_lines import ChildLines
from triptych.startup.show import Startup, has_table
from triptych.startup.table import Address

ENGINE = "engine"
API = "api"
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the models and all options."""
    add_model_operands(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises `SetupError` in one actionable line."""
    resolved = resolve_with_sources(args)
    PipelinePlan.of(resolved.config)
    TierPlan.of(resolved.config)
    plan = ReplicaPlan.of(resolved.config)
    if plan.needs_ray:
        launch: Callable[[Resolved, ReplicaPlan], int] = load("triptych.replicas.launch:launch")
        return launch(resolved, plan)
    return serve(resolved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Command lines of the children; tests replace the engine by a small one."""

    engine: tuple[str, ...] = (sys.executable, "-P", "-m", "triptych.engine_process")
    api: tuple[str, ...] = (sys.executable, "-P", "-m", "triptych.api_process")


def serve(resolved: Resolved, programs: Programs = Programs()) -> int:
    """Start and supervise the processes for `resolved`; returns the exit code."""
    options = resolved.config.server
    logs.configure(options)
    for variable in service_links(os.environ):
        _log.debug("%s is ignored: Kubernetes sets it for a Service", variable)
    signal.signal(signal.SIGTERM, _exit)  # until the supervisor takes over: nothing to drain yet
    tls_context(options)  # raises for files that the API process could not use
    with ExitStack() as stack:
        listener = None if options.headless else stack.enter_context(bind(options))
        if listener is not None:
            stack.enter_context(recorded(url_of(listener, options)))
        startup = stack.enter_context(Startup(options))
        role = ENGINE if options.headless else API
        folder = stack.enter_context(private_folder(options.zmq_endpoint_base, role=role))
        # Models that are loaded later are verified now: later they could not be recreated.
        reads_weights = resolved.config.models.load != "startup"
        try:
            models = _resolve(resolved, startup, reads_weights=reads_weights)
            return _supervise(models, resolved, programs, startup, listener, folder)
        except DamagedWeights as error:
            _log.warning("damaged weights are recreated", extra=fields(reason=error.message))
            models = _resolve(resolved, startup, reads_weights=True)
            return _supervise(models, resolved, programs, startup, listener, folder)


def _supervise(
    models: tuple[ResolvedModel, ...],
    resolved: Resolved,
    programs: Programs,
    startup: Startup,
    listener: socket.socket | None,
    folder: Path,
) -> int:
    """Run the children until stopped. Raises the error of a child that cannot start."""
    config = with_models(resolved.config, models)
    setup = ChildSetup(
        config=config,
        models=models,
        folder=str(folder),
        listener_fd=listener.fileno() if listener else -1,
        has_color=logs.can_color(sys.stderr),
    )
    url = url_of(listener, config.server) if listener else ""
    address = Address.of(config.server, url)
    lines = ChildLines() if has_table(config.server) else None
    with (
        closing(lines) if lines else nullcontext(),
        closing(_Watcher(startup, folder, listener, address)) as watcher,
    ):
        specs = _specs(setup, programs, lines.fd if lines else None)
        watcher.expect(spec.name for spec in specs)
        policy = Policy(drain_timeout_s=config.server.drain_timeout_s)
        return asyncio.run(Supervisor(specs, policy, watcher).run())


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _resolve(
    resolved: Resolved, startup: Startup, *, reads_weights: bool = False
) -> tuple[ResolvedModel, ...]:
    """Fetch the models. Unless it `reads_weights`, the engine must verify them."""
    started_s = time.monotonic()
    startup.expect(expected_models(resolved.config.models))
    progress = startup.progress()
    reading = nullcontext() if reads_weights else skip_weight_files()
    try:
        with listen_to_lookups(startup.take), reading:
            models = resolve_models(resolved, progress)
    finally:
        progress.stop()
    startup.state.set_kinds((model.name, kind_of(model)) for model in models)
    startup.phase("resolve", time.monotonic() - started_s)
    return models


def _specs(setup: ChildSetup, programs: Programs, stderr: int | None = None) -> list[ChildSpec]:
    """Return the children in the order of draining: the API finishes while the engine runs."""
    options = setup.config.server
    # A child gets its options from `setup`; an environment variable may hold a key.
    env = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    child, specs = partial(ChildSpec, env=env, stderr=stderr), []
    if not options.headless:
        models = setup.config.models
        if options.pull_from != "hub":  # then the API fetches nothing with a token
            models = replace(models, hf_token="")
        front = msgspec.structs.replace(setup, config=replace(setup.config, models=models))
        config, fds = msgspec.json.encode(front), (setup.listener_fd,)
        specs.append(child(name=API, argv=programs.api, config=config, pass_fds=fds))
    if not options.external_engine:
        server = without_keys(options)  # the engine needs none
        bare = msgspec.structs.replace(setup, config=replace(setup.config, server=server))
        config = msgspec.json.encode(bare)
        specs.append(child(name=ENGINE, argv=programs.engine, config=config))
    return specs


class _Watcher:
    """Shows the progress of the start, and reports crashes of the engine to the API process."""

    def __init__(
        self, startup: Startup, folder: Path, listener: socket.socket | None, address: Address
    ) -> None:
        self._startup = startup
        self._listener = listener
        self._address = address
        self._codec = build_codec()
        self._dealer = connect_dealer(folder, SUPERVISOR)
        self._waiting: set[str] = set()
        self._since_s: dict[str, float] = {}

    def expect(self, children: Iterable[str]) -> None:
        """Set the children that the server waits for."""
        self._waiting.update(children)
        self._since_s = dict.fromkeys(self._waiting, time.monotonic())

    def on_note(self, child: str, note: FromChild) -> None:
        """Show a phase, and readiness once all children are ready."""
        if isinstance(note, Phase):
            now_s = time.monotonic()
            self._startup.phase(note.name, now_s - self._since_s[child], note.note)
            self._since_s[child] = now_s
            if note.name == ENGINE:
                self._startup.state.device = note.note
        elif isinstance(note, ModelNote):
            self._startup.on_model(note.status, note.memory_bytes)
        elif isinstance(note, StartFacts) and child == ENGINE:
            self._startup.state.budget_bytes = note.fields["device_budget_bytes"]
        elif isinstance(note, Lookup):
            self._startup.take(note)
        elif isinstance(note, Ready) and child in self._waiting:
            self._waiting.discard(child)
            if not self._waiting:
                self._startup.ready(self._address)

    def on_gone(self, child: str, reason: str, restart_in_s: float | None) -> None:
        """Log the loss of a child, and report that of the engine to the API process."""
        after = "" if restart_in_s is None else f"; restarting it in {restart_in_s:g} s"
        _log.error("the %s process %s%s", child, reason, after)
        self._waiting.add(child)
        self._since_s[child] = time.monotonic() + (restart_in_s or 0.0)
        self._startup.restart()
        if child == ENGINE:
            gone = EngineGone(reason=reason, at_ns=time.monotonic_ns(), restart_in_s=restart_in_s)
            send_if_connected(self._dealer, self._codec.encode(gone))

    def on_drain(self) -> None:
        """Close this process's listener; the port closes after the API's last response."""
        _log.info("shutting down: finishing requests in flight")
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        """Close the socket to the engine and the API."""
        self._dealer.close(linger=0)

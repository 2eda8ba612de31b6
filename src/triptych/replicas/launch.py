"""`triptych serve --replicas`: starts or joins a Ray cluster, deploys, and waits until stopped.

Owns the order of start and shutdown. On an existing cluster, the command deploys or upgrades the
application, replica by replica, and exits; its own cluster ends with it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from types import FrameType
from typing import Any, NoReturn

from triptych.core.bulk.cluster import import_ray, join
from triptych.core.client.records import recorded
from triptych.core.errors import SetupError
from triptych.core.options.config import Config, ServerOptions
from triptych.core.options.table import Resolved
from triptych.core.process import logs
from triptych.modalities.registry import expected_models, kind_of, resolve_models
from triptych.replicas.plan import ReplicaPlan
from triptych.startup.show import Startup
from triptych.startup.table import Address

APPLICATION = "triptych"
_GOODBYE_S = 5.0  # after the drain timeout, for final errors
_SIGNAL_POLL_S = 0.2
_OBJECT_STORE_BYTES = 256 * 2**20  # requests and outputs are small messages
_log = logging.getLogger(__name__)


def launch(resolved: Resolved, plan: ReplicaPlan) -> int:
    """Serve `plan`; returns the exit code. Raises `SetupError` in one actionable line."""
    ray = import_ray()
    options = resolved.config.server
    logs.configure(options)
    startup = Startup(options)
    with startup:
        _resolve(resolved, startup)
    _join(plan, resolved, startup)
    try:
        _on_signals(_exit)  # Ray has set its own; there is nothing to drain yet
        _deploy(resolved, plan, startup)
        if plan.address:
            return 0
        with recorded(_url(options)):
            _stay()
        _log.info("shutting down: finishing requests in flight")
        _drain(options.drain_timeout_s)
        _end()
    finally:
        ray.shutdown()
    return 0


def _on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _stay() -> None:
    """Wait for a signal; the next one ends the process at once."""
    stopped = threading.Event()
    _on_signals(lambda *given: _exit(*given) if stopped.is_set() else stopped.set())
    while not stopped.wait(_SIGNAL_POLL_S):  # a signal taken by Ray's threads does not wake this
        pass


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _resolve(resolved: Resolved, startup: Startup) -> None:
    """Resolve the models, so that missing ones are reported before the deployment."""
    started_s = time.monotonic()
    startup.expect(expected_models(resolved.config.models))
    progress = startup.progress()
    try:
        models = resolve_models(resolved, progress)
    finally:
        progress.stop()
    startup.state.set_kinds((model.name, kind_of(model)) for model in models)
    startup.phase("resolve", time.monotonic() - started_s)


def _join(plan: ReplicaPlan, resolved: Resolved, startup: Startup) -> None:
    """Connect to the cluster of `plan`, or start one with room for all replicas."""
    started_s = time.monotonic()
    own = {} if plan.address else _own_cluster(plan, resolved.config)
    join(plan.address, resolved.config.server, **own)
    address = import_ray().get_runtime_context().gcs_address
    startup.phase("ray", time.monotonic() - started_s, f"cluster {address}")


def _own_cluster(plan: ReplicaPlan, config: Config) -> dict[str, Any]:
    """Return the options of a cluster on this machine, with a core per thread of all replicas."""
    options = plan.engine_config(config).device
    num_threads = plan.most * options.threads * options.num_devices
    return {
        "num_cpus": max(os.cpu_count() or 1, num_threads),
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }


def _deploy(resolved: Resolved, plan: ReplicaPlan, startup: Startup) -> None:
    import ray
    from ray import serve

    from triptych.replicas.application import application

    options = resolved.config.server
    started_s = time.monotonic()
    if not plan.address:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        plan.check_room(resolved.config.device, num_gpus)
    try:
        with suppress(TimeoutError):  # busy machine: `run` also waits for the proxy, and longer
            serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(application(resolved.config, plan), name=APPLICATION)
    except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise SetupError(f"The replicas did not start: {error}") from error
    startup.phase("deploy", time.monotonic() - started_s, _count(plan))
    startup.ready(Address.of(options, _url(options)))


def _drain(timeout_s: float) -> None:
    """Drain the ingress before the engines, since its requests may need further jobs."""
    from ray import serve

    try:
        serve.get_app_handle(APPLICATION).drain.remote().result(timeout_s=timeout_s + _GOODBYE_S)
    except Exception as error:  # shutdown goes on after any error
        _log.warning("the ingress did not drain: %s", type(error).__name__)


def _end() -> None:
    """End the application and the cluster.

    Ray prints to standard output that its calls to the actors that it ends fail and are retried.
    """
    import ray
    from ray import serve

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        serve.delete(APPLICATION)
        serve.shutdown()
        ray.shutdown()


def _count(plan: ReplicaPlan) -> str:
    many = str(plan.most) if plan.least == plan.most else f"{plan.least} to {plan.most}"
    return f"{many} replicas"


def _url(options: ServerOptions) -> str:
    return f"http://{options.host}:{options.port}"

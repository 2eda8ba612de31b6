"""An engine in this process: its thread, the loop of its services, and its models.

Owns what a Python object starts and ends: one engine with one memory ledger, and a service for each
model on one event loop. Knows no modality and no pipeline: a model arrives with the functions that
open its two halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config, ScheduleOptions
from triptych.core.options.relevance import check_in_process
from triptych.core.options.table import Resolved, resolve_keywords
from triptych.core.process import logs
from triptych.core.process.lazy import load
from triptych.core.process.loop_thread import LoopThread
from triptych.core.weights.resolve import ResolvedModel, open_resolved
from triptych.modalities.service import ModelService

MakeService = Callable[[EngineClient], ModelService[Any]]
OpenService = Callable[[ResolvedModel, Config], MakeService]

_PATIENCE_S = 3600.0
"""The target for first tokens of a model without other clients: so long that it cuts no step."""


def read_keywords(models: Sequence[str], options: Mapping[str, Any]) -> Resolved:
    """The options of an engine in this process, from the keywords of a Python object.

    Raises `ConfigError` for options that are unknown, or for commands alone.
    """
    resolved = resolve_keywords({"model": tuple(models), **options})
    if resolved.explicit & {"log_level", "log_format"}:
        raise ConfigError(
            "log_level and log_format are for commands; in Python use"
            " logging.getLogger('triptych').setLevel('DEBUG')."
        )
    return resolved


def schedule_in_process(options: Resolved) -> ScheduleOptions:
    """The options of one model's scheduler: full steps, unless a target for first tokens is set.

    Steps are cut for the prompts of other clients, and one model in this process has none.
    """
    schedule, name = options.config.schedule, "target_first_token_s"
    if options.sources[name] != "default":
        return schedule
    return replace(schedule, target_first_token_s=_PATIENCE_S)


def config_in_process(options: Resolved, *, num_models: int) -> Config:
    """The configuration of an engine in this process. Raises `ConfigError` for a server's options.

    Ranks are processes of their own: they log at the level of this one. A slow reader in this
    process blocks no other client.
    """
    check_in_process(options)
    config = options.config
    server = replace(config.server, log_level=logs.current_level(), stream_timeout_s=math.inf)
    schedule = schedule_in_process(options) if num_models == 1 else config.schedule
    return replace(config, server=server, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """A model of a host: `loader` is the import path of its engine half."""

    resolved: ResolvedModel
    open_service: OpenService
    loader: str


class EngineHost:
    """One engine in this process and the services of its models, by name."""

    def __init__(self, loop: LoopThread, client: EngineClient, services: Mapping[str, Any]) -> None:
        self.loop = loop
        self.client = client
        self.services = services

    @classmethod
    def start(cls, models: Sequence[HostedModel], config: Config) -> Self:
        """Start an engine, and load its models unless with load="first-use".

        Raises errors of `core.errors.SetupError`; nothing keeps running then.
        """
        loop = LoopThread("triptych-pipeline")
        try:
            return loop.run(cls._start(loop, models, config))
        except BaseException:  # also Ctrl-C: nothing may keep running without its owner
            loop.close()
            raise

    @classmethod
    async def _start(cls, loop: LoopThread, models: Sequence[HostedModel], config: Config) -> Self:
        from triptych.schedulers.engine import EngineCore
        from triptych.schedulers.local import LocalClient

        makers = {  # first: they fail fast
            model.resolved.name: open_resolved(model.resolved, model.open_service, config)
            for model in models
        }
        device, ledger = load("triptych.core.runtime.devices.device:open_device")(config.device)
        loaders = [
            open_resolved(model.resolved, load(model.loader), config, device, ledger)
            for model in models
        ]
        client = LocalClient(EngineCore(loaders, config=config, ledger=ledger))
        host = cls(loop, client, {name: make(client) for name, make in makers.items()})
        try:
            for name in makers if config.models.load == "startup" else ():
                await client.load(name)
        except BaseException:
            await host._end()
            raise
        return host

    async def _end(self) -> None:
        for service in self.services.values():
            await service.close()
        await self.client.close()

    def close(self) -> None:
        """End the services and the engine, and release its memory. A second call does nothing."""
        if not self.loop.is_closed:
            self.loop.run(self._end())
            self.loop.close()

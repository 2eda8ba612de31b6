"""Base class of all Python pipelines: a model and its engine in this process.

Owns the start and end of the engine and of the thread with its event loop. Knows no modality: a
pipeline declares its modalities and opens both halves of a model.
"""

from __future__ import annotations

import argparse
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from triptych.core.bundle.resolve import resolve_all
from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import ConfigError, TriptychError, UnknownModel
from triptych.core.options.config import Config, ScheduleOptions
from triptych.core.options.relevance import check_in_process, check_relevance
from triptych.core.options.table import Resolved, resolve_keywords, resolve_with_sources
from triptych.core.process import logs
from triptych.core.process.lazy import load
from triptych.core.process.loop_thread import LoopThread, run_in_order
from triptych.core.weights.progress import Progress, RichProgress, SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, ResolvedModel, open_resolved
from triptych.modalities.modality import Modality, modality_of
from triptych.modalities.service import ModelService

ServiceT = TypeVar("ServiceT", bound=ModelService[Any])
Answer = TypeVar("Answer")
Entry = TypeVar("Entry")
Check = Callable[[ResolvedModel, Config], None]
"""Raises `RequestError`s for requests that a model cannot serve, according to its files."""

_PATIENCE_S = 3600.0
"""The target for first tokens in one process: so long that it cuts no step."""


def schedule_in_process(options: Resolved) -> ScheduleOptions:
    """The options of a pipeline's scheduler: full steps, unless a target for first tokens is set.

    Steps are cut for the prompts of other clients, and a pipeline has none.
    """
    schedule, name = options.config.schedule, "target_first_token_s"
    if options.sources[name] != "default":
        return schedule
    return replace(schedule, target_first_token_s=_PATIENCE_S)


class Pipeline(ABC, Generic[ServiceT]):
    """One model and its engine in this process, called from any thread or loop."""

    _modalities: ClassVar[tuple[Modality, ...]]
    """The modalities of its models, in matching order; the last is the main one."""

    def __init__(self, service: ServiceT, model: str, loop: LoopThread) -> None:
        self._service = service
        self._model = model
        self._loop = loop

    @classmethod
    def _default(cls) -> str:
        """Return the embedded model."""
        return cls._modalities[-1].default

    @classmethod
    @abstractmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], ServiceT]:
        """Read the API half of a model, and return a function that builds its service."""

    @classmethod
    def from_pretrained(
        cls, model: str = EMBEDDED_REFERENCE, *, progress: bool = True, **options: Any
    ) -> Self:
        """Load `model` (as `--model` takes it); `options` are those of `triptych serve`.

        Raises errors of `core.errors.SetupError`: for options that are unknown, not read by such a
        model or only for a server, for invalid weights, and for too little memory.
        """
        resolved = resolve_keywords({"model": (model,), **options})
        if resolved.explicit & {"log_level", "log_format"}:
            raise ConfigError(
                "log_level and log_format are for commands; in Python use"
                " logging.getLogger('triptych').setLevel('DEBUG')."
            )
        return cls._from_resolved(resolved, RichProgress() if progress else SilentProgress())

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, check: Check | None = None) -> Self:
        """Load the model of a command; `check` may refuse it first. Logs only with --log-level."""
        resolved = resolve_with_sources(args)
        if resolved.sources["log_level"] != "default":
            logs.configure(resolved.config.server)
        return cls._from_resolved(resolved, RichProgress(), check)

    @classmethod
    def from_config(cls, config: Config, progress: Progress) -> Self:
        """Load the one model of a configuration; warns of options that it does not read."""
        return cls._from_resolved(Resolved.of(config), progress)

    @classmethod
    def _from_resolved(
        cls, options: Resolved, progress: Progress, check: Check | None = None
    ) -> Self:
        check_in_process(options)
        # Ranks are processes of their own: they log at the level of this one.
        server = replace(options.config.server, log_level=logs.current_level())
        config = replace(options.config, server=server, schedule=schedule_in_process(options))
        models = config.models
        if len(models.model) > 1:
            raise ConfigError("A pipeline runs one model; `triptych serve` takes several.")
        if models.model == (EMBEDDED_REFERENCE,):
            models = replace(models, model=())
        sources = [source for each in cls._modalities for source in each.load_sources()]
        (resolved,) = resolve_all(models, progress, sources=sources, defaults=(cls._default(),))
        cls._check_kind(resolved)
        check_relevance(options, (modality_of(resolved, cls._modalities).role,))
        if check is not None:
            check(resolved, config)
        loop = LoopThread("triptych-pipeline")
        try:
            service = loop.run(cls._start(resolved, config))
        except BaseException:
            loop.close()
            raise
        return cls(service, resolved.name, loop)

    @classmethod
    def _check_kind(cls, resolved: ResolvedModel) -> None:
        """Raise `ConfigError` with the right pipeline for a model of another kind."""
        modalities: Sequence[Modality] = load("triptych.modalities.registry:MODALITIES")
        found = modality_of(resolved, modalities)
        is_known = found is not modalities[-1]  # the last matches every model
        if is_known and found.role not in {each.role for each in cls._modalities}:
            pipeline = next(iter(found.pipelines))
            raise ConfigError(
                f"{resolved.name} is a model of another kind ({found.role}): use {pipeline}."
            )

    @classmethod
    async def _start(cls, resolved: ResolvedModel, config: Config) -> ServiceT:
        """Start an engine, and load its model unless with load="first-use"."""
        from triptych.schedulers.engine import Engine
        from triptych.schedulers.local import LocalClient

        # A slow reader in this process blocks no other client.
        config = replace(config, server=replace(config.server, stream_timeout_s=math.inf))
        make_service = open_resolved(resolved, cls._open_service, config)  # first: it fails fast
        device, ledger = load("triptych.core.runtime.devices.device:open_device")(config.device)
        open_loader = load(modality_of(resolved, cls._modalities).engine)
        loader = open_resolved(resolved, open_loader, config, device, ledger)
        service = make_service(LocalClient(Engine([loader], config=config, ledger=ledger)))
        try:
            if config.models.load == "startup":
                await service.client.load(resolved.name)
        except BaseException:  # also Ctrl-C: nothing may keep running without its owner
            await cls._end(service)
            raise
        return service

    @classmethod
    async def _end(cls, service: ServiceT) -> None:
        """Stop the engine of `service`."""
        await service.client.close()

    def _map_entries(
        self,
        answer: Callable[[Entry], Coroutine[Any, Any, Answer]],
        entries: Iterable[Entry],
        num_at_once: int,
    ) -> Iterator[Answer | TriptychError]:
        """Yield the answer to each entry, in order; errors of `answer` are yielded as well."""

        async def attempt(entry: Entry) -> Answer | TriptychError:
            try:
                return await answer(entry)
            except TriptychError as error:
                return error

        async def attempts() -> AsyncGenerator[Answer | TriptychError, None]:
            async with aclosing(run_in_order(map(attempt, entries), num_at_once)) as answers:
                async for each in answers:
                    yield each

        return self._loop.iterate(attempts)

    def _check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` if an entry names another model."""
        if name is not None and name != self._model:
            raise UnknownModel.among([self._model], str(name))

    def close(self) -> None:
        """Stop the engine and release its memory. A second call does nothing."""
        if not self._loop.is_closed:
            self._loop.run(self._end(self._service))
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Base class of all Python pipelines: a model on an engine in this process.

Owns the choice of the model and its calls. The engine is its own, or that of an object with several
models (`modalities.host`). Knows no modality: a pipeline declares its modalities and opens both
halves of a model.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from triptych.core.bundle.resolve import resolve_all
from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import ConfigError, TriptychError, UnknownModel
from triptych.core.options.config import Config
from triptych.core.options.pipeline_config import PipelineConfig
from triptych.core.options.relevance import check_relevance
from triptych.core.options.table import Resolved, resolve_with_sources
from triptych.core.process import logs
from triptych.core.process.lazy import load
from triptych.core.process.loop_thread import run_in_order
from triptych.core.weights.progress import Progress, RichProgress, SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, ResolvedModel
from triptych.modalities.host import EngineHost, HostedModel, config_in_process, read_keywords
from triptych.modalities.modality import Modality, modality_of
from triptych.modalities.service import ModelService

ServiceT = TypeVar("ServiceT", bound=ModelService[Any])
Answer = TypeVar("Answer")
Entry = TypeVar("Entry")
Check = Callable[[ResolvedModel, Config], None]
"""Raises `RequestError`s for requests that a model cannot serve, according to its files."""


class Pipeline(ABC, Generic[ServiceT]):
    """One model on an engine in this process, called from any thread or loop."""

    _modalities: ClassVar[tuple[Modality, ...]]
    """The modalities of its models, in matching order; the last is the main one."""

    def __init__(self, model: str, host: EngineHost, *, owns_host: bool = True) -> None:
        self._model = model
        self._host = host
        self._loop = host.loop
        self._owns_host = owns_host

    @property
    def _service(self) -> ServiceT:
        service: ServiceT = self._host.services[self._model]
        return service

    @property
    def name(self) -> str:
        """The name of its model."""
        return self._model

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
        resolved = read_keywords((model,), options)
        return cls._from_resolved(resolved, RichProgress() if progress else SilentProgress())

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, check: Check | None = None) -> Self:
        """Load the model of a command; `check` may refuse it first. Logs only with --log-level."""
        resolved = resolve_with_sources(args)
        if resolved.sources["log_level"] != "default":
            logs.configure(resolved.config.server)
        return cls._from_resolved(resolved, RichProgress(), check)

    @classmethod
    def from_config(cls, config: PipelineConfig | Config, progress: Progress | None = None) -> Self:
        """Load the one model of a configuration.

        Options that it does not read are warnings in a `Config` built by hand.
        """
        given = config.resolved if isinstance(config, PipelineConfig) else Resolved.of(config)
        return cls._from_resolved(given, progress or RichProgress())

    @classmethod
    def _from_resolved(
        cls, options: Resolved, progress: Progress, check: Check | None = None
    ) -> Self:
        config = config_in_process(options, num_models=1)
        models = config.models
        if len(models.model) > 1:
            raise ConfigError("A pipeline runs one model; `triptych.Engine` takes several.")
        if models.model == (EMBEDDED_REFERENCE,):
            models = replace(models, model=())
        sources = [source for each in cls._modalities for source in each.load_sources()]
        (resolved,) = resolve_all(models, progress, sources=sources, defaults=(cls._default(),))
        cls._check_kind(resolved)
        check_relevance(options, (modality_of(resolved, cls._modalities).role,))
        if check is not None:
            check(resolved, config)
        (resolved,) = load("triptych.modalities.registry:with_draft")((resolved,), config, progress)
        return cls(resolved.name, EngineHost.start([cls.hosted(resolved)], config))

    @classmethod
    def hosted(cls, resolved: ResolvedModel) -> HostedModel:
        """A model as a host starts it for this pipeline."""
        return HostedModel(
            resolved=resolved,
            open_service=cls._open_service,
            loader=modality_of(resolved, cls._modalities).engine,
        )

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
        """Stop the pipeline's own engine and release its memory. A second call does nothing.

        An engine with several models is closed by its own object.
        """
        if self._owns_host:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

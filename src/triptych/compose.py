"""The composition root: builds engine and API from all modalities.

Owns the wiring. Each process builds only its half: the engine's builder imports torch, the API's
imports FastAPI, and neither imports the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from triptych.core.engine_api.model_changes import (
    AddModel,
    KeepModel,
    ModelChange,
    RemoveModel,
    Sleep,
)
from triptych.core.options.config import Config
from triptych.core.options.pipeline import WHOLE
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.process.lazy import load
from triptych.core.process.metrics import DEVICE_INFO, series
from triptych.core.transport.messages import MessageCodec
from triptych.core.weights.layout import stored_bytes
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, ResolvedModel, place_of
from triptych.kept_adapters import with_base_model, without_gone
from triptych.modalities import registry
from triptych.modalities.modality import ApiPart, ApiSetup, modality_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from triptych.core.engine_api.client import EngineClient
    from triptych.core.http.models import ModelCard, ServedModels
    from triptych.core.http.runtime_models import RuntimeModels
    from triptych.core.runtime.devices.device import Device
    from triptych.core.store.store import DocumentStore
    from triptych.schedulers.base import ModelLoader
    from triptych.schedulers.engine import EngineCore

_PAGES = Path(__file__).with_name("page")
"""Folder of the web page."""


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a child process, as JSON. It holds secrets: never on a command line.

    `folder` holds the sockets; `listener_fd` is the API's inherited listening socket;
    `device_budget_bytes` is the memory budget of the engine's first start, set on restarts;
    `has_color` whether log lines may have colors. `added`, `removed`, `idle_times` (seconds, or
    `None` for ever) and `is_asleep` are the changes of the models since the first start, set on
    restarts.
    """

    config: Config
    models: tuple[ResolvedModel, ...]
    folder: str
    listener_fd: int = -1
    device_budget_bytes: int = 0
    has_color: bool = False
    added: tuple[ResolvedModel, ...] = ()
    removed: tuple[str, ...] = ()
    idle_times: dict[str, float | None] = {}
    is_asleep: bool = False

    @property
    def kept_models(self) -> tuple[ResolvedModel, ...]:
        """The models of the first start that are still served."""
        return tuple(model for model in self.models if model.name not in self.removed)

    @property
    def kept_config(self) -> Config:
        """The configuration without the adapters of models that are served no longer."""
        added = [model.name for model in self.added]
        return without_gone(self.config, removed=self.removed, added=added)

    @property
    def changes(self) -> list[ModelChange]:
        """The changes of the models since the first start."""
        changes: list[ModelChange] = [RemoveModel(name) for name in self.removed]
        changes += [AddModel(model) for model in self.added]
        changes += [
            KeepModel(name, math.inf if idle_s is None else idle_s)
            for name, idle_s in self.idle_times.items()
        ]
        return [*changes, Sleep()] if self.is_asleep else changes


def with_models(config: Config, models: Sequence[ResolvedModel]) -> Config:
    """Return `config` with the references of `models`, so that default models count as well.

    Adapters are for these models from then on, whatever models come and go.
    """
    references = tuple(model.reference for model in models)
    config = replace(config, models=replace(config.models, model=references))
    if not config.adapters.lora_paths:
        return config
    texts = [model.name for model in models if registry.role_of(model) == "chat"]
    return with_base_model(config, texts)


def build_codec() -> MessageCodec:
    """Build the codec with the request and delta types of all modalities."""
    wires = dict.fromkeys(tuple(modality.wire) for modality in registry.MODALITIES)
    requests, deltas = zip(*wires, strict=True)
    return MessageCodec(request=_union(requests), payload=_union(deltas))


def _union(places: Sequence[str]) -> Any:
    return reduce(or_, map(load, places))


def build_engine(config: Config, models: Sequence[ResolvedModel]) -> EngineCore:
    """Build the engine that owns the device. Raises `DeviceError` if there is none."""
    from triptych.schedulers.engine import EngineCore
    from triptych.schedulers.late_loader import LateLoader

    device, ledger = load("triptych.core.runtime.devices.device:open_device")(config.device)

    def open_loader(model: ResolvedModel) -> ModelLoader:
        opener = load(modality_of(model, registry.MODALITIES).engine)
        loader: ModelLoader = opener(model, config, device, ledger)
        return loader

    engine = EngineCore(list(map(open_loader, models)), config=config, ledger=ledger)
    engine.open_loader = partial(LateLoader, open_loader)
    engine.metrics.gauges[series(DEVICE_INFO, device=device.name)] = 1
    engine.device = _describe(device)
    return engine


def _describe(device: Device) -> str:
    """The device in the head of a start."""
    if not device.is_cpu:
        return device.name
    num_threads = load("torch:get_num_threads")()
    levels = load("triptych.core.runtime.kernels.native.build:processor_levels")()
    return f"CPU, {num_threads} threads" + (f" ({levels[0]})" if levels else "")


def build_app(config: Config, models: Sequence[ResolvedModel], client: EngineClient) -> FastAPI:
    """Build the HTTP app in front of `client`.

    `app.state.start` resumes the work of an earlier run; `app.state.warm` prepares what first
    requests would wait for; `app.state.close` closes the services.
    """
    from triptych.core.engine_api.aliases import AliasClient
    from triptych.core.http.app import create_app
    from triptych.core.http.auth import owners
    from triptych.core.http.batches.routes import batches_router
    from triptych.core.http.batches.runner import BatchRunner
    from triptych.core.http.files.routes import files_router
    from triptych.core.http.files.user_files import UserFiles
    from triptych.core.http.models import Task
    from triptych.core.http.page import PagesRouter, read_pages
    from triptych.core.media.child import DecodePool
    from triptych.core.options.served_names import ServedNames
    from triptych.modalities.talk.composition import open_talk
    from triptych.schedulers.admission import Admission

    pool = DecodePool.from_options(config.server, registry.decoders())
    exit_stack = AsyncExitStack()
    exit_stack.push_async_callback(pool.close)
    aliases = ServedNames.read(config.models).aliases
    num_keys = len(owners(config.server))
    store = _open_store(config, num_keys, exit_stack)
    setup = ApiSetup(
        config=config,
        models=_by_role(models),
        client=AliasClient(client, aliases),
        pool=pool,
        admission=Admission(options=config.schedule, num_keys=num_keys),
        exit_stack=exit_stack,
        store=store,
    )
    parts = [load(modality.api)(setup) for modality in registry.MODALITIES]
    routers = [router for part in parts for router in part.routers]
    routers += open_talk(config, parts)
    tasks = [Task(*task) for task in registry.tasks()]
    dialects = [dialect for part in parts for dialect in part.dialects]
    user_files = UserFiles(store)
    batches = BatchRunner(user_files)
    routers += [files_router(user_files), batches_router(batches)]
    if config.server.page:
        routers.append(PagesRouter(read_pages(_PAGES)))
    app = create_app(config, client, routers, _cards(parts, models, aliases), tasks, dialects)
    app.state.more_models = tuple(each for part in parts for each in part.more)
    if app.state.tracing is not None:
        exit_stack.push_async_callback(app.state.tracing.close)
    app.state.user_files = user_files
    app.state.further_names = further_names(models)
    app.state.runtime_models = _runtime_models(config, models, client, app.state.served, parts)
    exit_stack.push_async_callback(app.state.runtime_models.close)
    batches.serve(app)
    exit_stack.push_async_callback(batches.close)
    app.state.start = batches.start
    app.state.warm = partial(_warm, parts)
    app.state.close = exit_stack.aclose
    return app


def _open_store(config: Config, num_keys: int, exit_stack: AsyncExitStack) -> DocumentStore | None:
    """The store of files and answers, closed with the app; `None` where it is off."""
    from triptych.core.store.store import DocumentStore

    store = DocumentStore.from_options(config.store, num_owners=num_keys)
    if store is not None:
        exit_stack.push_async_callback(store.close)
    return store


def _runtime_models(
    config: Config,
    models: Sequence[ResolvedModel],
    client: EngineClient,
    served: ServedModels,
    parts: Sequence[ApiPart],
) -> RuntimeModels:
    """The models of the app, which callers with an admin key may change."""
    from triptych.core.http.runtime_models import RuntimeModels

    return RuntimeModels(
        config=config,
        client=client,
        served=served,
        parts=ApiParts(parts),
        models={model.name: model for model in models},
        sources=[source.name for source in registry.known_sources()],
        refusal=_fixed_models(config),
    )


def _fixed_models(config: Config) -> str:
    """Why the models of a server cannot change while it runs; empty: they can."""
    replicas = config.replicas
    causes = {
        "--replicas": replicas.replicas != "1" or bool(replicas.ray_address),
        "--external-engine": config.server.external_engine,
        "--pipeline-role": PipelinePlan.of(config).role != WHOLE,
    }
    flag = next((flag for flag, is_given in causes.items() if is_given), "")
    return flag and f"With {flag} the models of a server are those of its start."


class ApiParts:
    """Opens and drops models in the API halves of all modalities."""

    def __init__(self, parts: Sequence[ApiPart]) -> None:
        self._parts = parts

    def open(self, model: ResolvedModel) -> tuple[ModelCard, Callable[[], None]]:
        """Open a model in every part of its kind (see `core.http.runtime_models.Parts`)."""
        role = registry.role_of(model)
        opened = [each for part in self._parts if (each := part.open_model(model, role))]
        card = next(each.card for each in opened if each.card is not None)

        def join() -> None:
            for each in opened:
                each.join()

        return card.model_copy(update={"weight_bytes": _weight_bytes(model)}), join

    def has_further(self, name: str) -> bool:
        """Whether a part has something else of this name, an adapter."""
        return any(name in each for part in self._parts for each in part.more)

    async def drop(self, name: str) -> None:
        """Forget a model in every part."""
        for part in self._parts:
            await part.drop_model(name)


def _cards(
    parts: Sequence[ApiPart], models: Sequence[ResolvedModel], aliases: Mapping[str, str]
) -> list[ModelCard]:
    """Return the cards of the models in their order, then those of their aliases."""
    sizes = {model.name: {"weight_bytes": _weight_bytes(model)} for model in models}
    cards = {
        card.id: card.model_copy(update=sizes.get(card.id, {}))
        for part in parts
        for card in part.cards
    }
    of_aliases = (
        cards[name].model_copy(update={"id": alias})
        for alias, name in aliases.items()
        if name in cards  # else its model was deleted before this process began
    )
    return [*(cards[model.name] for model in models), *of_aliases]


def further_names(models: Sequence[ResolvedModel]) -> Mapping[str, str]:
    """Return the names of models by a reference to them that is a name, and not their own."""
    found = (model for model in models if place_of(model.reference) == EMBEDDED_REFERENCE)
    embedded = next(found, None)
    return {} if embedded is None else {EMBEDDED_REFERENCE: embedded.name}


def _warm(parts: Sequence[ApiPart]) -> None:
    for part in parts:
        part.warm()


def _weight_bytes(model: ResolvedModel) -> int | None:
    """The size of the weights of a model and of its parts; none where they are not in files."""
    folder = Path(model.folder)
    return sum(map(stored_bytes, (folder, *folder.glob("*/")))) or None


def _by_role(models: Sequence[ResolvedModel]) -> Mapping[str, Sequence[ResolvedModel]]:
    """Return the models of each role, in order; empty for roles without models."""
    found: defaultdict[str, list[ResolvedModel]] = defaultdict(list)
    for model in models:
        found[registry.role_of(model)].append(model)
    return found

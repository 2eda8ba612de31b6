"""Models that come and go while the server runs.

Owns their order: a model is fetched by a child process, opened by its modality, added to the engine
and then listed, so that no request meets half of it; it leaves in the opposite order, after the
requests that use it. Knows no modality and no format of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.model_changes import AddModel, RemoveModel
from triptych.core.errors import (
    EngineDown,
    InvalidRequest,
    ModelRefused,
    Overloaded,
    SetupError,
    UnknownModel,
    UnsupportedOption,
)
from triptych.core.http.models import ModelCard, ServedModels
from triptych.core.options.config import Config, ModelOptions
from triptych.core.weights.fetching import Fetch, FetchOrder, FetchProgress, fetch
from triptych.core.weights.pipeline_index import is_pipeline
from triptych.core.weights.pull_policy import check_may_pull, is_hub_id
from triptych.core.weights.resolve import ResolvedModel, path_of, place_of, served_name
from triptych.core.weights.store import StoredModel, remove, stored_models

MAX_PULLS = 4
"""The most models that are fetched at a time."""
MAX_MODELS = 64
"""The most models that are served at a time: processes send each other the whole list."""
_INTERVAL_S = 0.1


@contextmanager
def refused_models() -> Iterator[None]:
    """Raise `ModelRefused` for errors that would end a start, for the caller to see."""
    try:
        yield
    except SetupError as error:
        raise ModelRefused(error.message, param="model") from error


class Parts(Protocol):
    """The routes of all modalities, as far as models join and leave them."""

    def open(self, model: ResolvedModel) -> tuple[ModelCard, Callable[[], None]]:
        """Open a model, on any thread; return its card and the call that adds it to the routes."""

    def has_further(self, name: str) -> bool:
        """Whether something that is no model, an adapter, is called so."""

    async def drop(self, name: str) -> None:
        """Forget a model that was opened."""


class Pull:
    """One model on its way, by `work`. It ends when the last of those who follow it leaves."""

    def __init__(
        self, reference: str, work: Callable[[Pull], Coroutine[Any, Any, ModelCard]]
    ) -> None:
        self.reference = reference
        self.latest: FetchProgress | None = None
        self.is_left = False
        self.task = asyncio.create_task(work(self))
        self._num_followers = 0

    async def follow(self) -> AsyncGenerator[FetchProgress | ModelCard, None]:
        """Yield the progress, and the model's card last. Raises the errors of the work."""
        self._num_followers += 1
        shown: FetchProgress | None = None
        try:
            while not self.task.done():
                await asyncio.wait({self.task}, timeout=_INTERVAL_S)
                if self.latest is not None and self.latest is not shown:
                    shown = self.latest
                    yield shown
            yield await self.task
        finally:
            self._num_followers -= 1
            if not self._num_followers:
                self.is_left = True
                self.task.cancel()


@dataclass(slots=True, kw_only=True)
class RuntimeModels:
    """The models of a server, which callers with an admin key may change.

    `models` are those that are served, `sources` the short names of others. `refusal` says why
    this server's models cannot change; empty: they can. `on_change` is called with the models
    after each change.
    """

    config: Config
    client: EngineClient
    served: ServedModels
    parts: Parts
    models: dict[str, ResolvedModel]
    sources: Sequence[str] = ()
    refusal: str = ""
    fetch: Fetch = fetch
    on_change: Callable[[Sequence[ResolvedModel]], None] = lambda models: None
    _pulls: dict[str, Pull] = field(default_factory=dict)
    _revisions: dict[str, str] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)
    _adding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, request: Request) -> RuntimeModels:
        """Return those of a request's server. Raises `UnsupportedOption` if they cannot change."""
        models: RuntimeModels | None = request.app.state.runtime_models
        refusal = "The models of this server are those of its start."
        if models is None or models.refusal:
            raise UnsupportedOption(models.refusal if models else refusal)
        return models

    def pull(self, reference: str, *, name: str = "", revision: str = "") -> Pull | ModelCard:
        """Begin to fetch a model, or return the running fetch, or the card of a served model.

        Raises `UnsupportedOption` for sources that are not allowed, `InvalidRequest` if the name is
        taken, `Overloaded`.
        """
        if not name and not revision and reference in self.served.cards:
            return self.served.cards[reference]
        check_may_pull(reference, self.sources, self.config.server)
        name = name or served_name(reference)
        self._check_name(name, reference)
        running = self._pulls.get(name)
        self._check_revision(name, reference, revision)
        if name in self.models:
            return self.served.cards[name]
        if running is None or running.is_left:
            self._check_numbers()
            order = FetchOrder(reference=reference, name=name, options=self._options(revision))
            running = self._pulls[name] = Pull(reference, partial(self._work, order))
            self._revisions[name] = revision
            running.task.add_done_callback(partial(self._forget, name, running))
        return running

    def _forget(self, name: str, pull: Pull, task: asyncio.Task[ModelCard]) -> None:
        if self._pulls.get(name) is pull:  # else another has begun
            del self._pulls[name]
        if not task.cancelled():
            task.exception()  # its followers have it

    def _check_numbers(self) -> None:
        """Raise `Overloaded` for more fetches or models than the server has at a time."""
        if sum(not pull.is_left for pull in self._pulls.values()) >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being fetched.", retry_after_s=30.0)
        if len(self.models) + len(self._pulls) >= MAX_MODELS:
            raise Overloaded(f"{MAX_MODELS} models are served: delete one.", retry_after_s=60.0)

    def _check_name(self, name: str, reference: str) -> None:
        """Raise an error if a model cannot come under `name`."""
        known = self.models.get(name)
        used = place_of(known.reference) if known else ""
        if name in self._pulls:
            used = place_of(self._pulls[name].reference)
        if name in self._leaving:
            raise Overloaded(f"{name} is being deleted; try again later.", retry_after_s=5.0)
        is_other = name in self.served.aliases or self.parts.has_further(name)
        if (used and used != place_of(reference)) or is_other:
            raise InvalidRequest(
                f"Another model or adapter is served as {name!r}: delete it, or choose another"
                " name.",
                param="name",
            )

    def _check_revision(self, name: str, reference: str, revision: str) -> None:
        """Raise `InvalidRequest` for a revision of a model that has none, or of one that is there.

        That of a model of the start is the option's.
        """
        is_there = name in self.models or name in self._pulls
        given = self._revisions.get(name, self.config.models.revision)
        if revision and is_there and revision != given:
            raise InvalidRequest(
                f"{name} is served at another revision: delete it, or choose another name.",
                param="revision",
            )
        if revision and not is_hub_id(reference, self.sources):
            raise InvalidRequest(
                "Only repositories of the hub have revisions; leave it out.", param="revision"
            )

    def _options(self, revision: str) -> ModelOptions:
        """The options for a model that came after the start: the references are not its own."""
        options = self.config.models
        return replace(
            options, model=(), served_model_name=(), model_override=(), revision=revision
        )

    async def _work(self, order: FetchOrder, pull: Pull) -> ModelCard:
        with refused_models():
            return await self._fetch_and_add(order, pull)

    async def _fetch_and_add(self, order: FetchOrder, pull: Pull) -> ModelCard:
        async with aclosing(self.fetch(order)) as notes:
            async for note in notes:
                if isinstance(note, ResolvedModel):
                    # What was begun here is finished, even if no request waits for it any more.
                    return await asyncio.shield(asyncio.ensure_future(self._add(note)))
                pull.latest = note
        raise AssertionError("a fetch ends with a model or an error")

    async def _add(self, model: ResolvedModel) -> ModelCard:
        """Serve a model. Raises the error that it would end a start with; nothing stays then."""
        if self.config.models.model_override and is_pipeline(Path(model.folder)):
            raise UnsupportedOption(
                "--model-override is for the image models of the start: no other can be added."
            )
        async with self._adding:
            if model.name in self.models:  # by a fetch that was left when it was nearly done
                return self.served.cards[model.name]
            return await self._open_and_list(model)

    async def _open_and_list(self, model: ResolvedModel) -> ModelCard:
        try:
            card, join = await asyncio.to_thread(self.parts.open, model)
            await self.client.change(AddModel(model))
        except BaseException:
            await self.parts.drop(model.name)
            raise
        join()
        self.models[model.name] = model
        self.served.add(card)
        self.on_change(tuple(self.models.values()))
        return card

    async def delete(self, asked: str) -> int | None:
        """Serve a model no longer, and delete its files if they are in a cache.

        Requests that use it are finished first, and new ones are refused. Returns the bytes that
        were deleted; `None` if the files are kept: they are in a folder that is not the server's,
        or another model has them, too. Raises `UnknownModel`.
        """
        name = self.served.aliases.get(asked, asked)
        if name not in self.models:
            raise UnknownModel.among(self.models, asked)
        return await asyncio.shield(asyncio.ensure_future(self._delete(self.models.pop(name))))

    async def _delete(self, model: ResolvedModel) -> int | None:
        self._leaving.add(model.name)
        self.served.remove(model.name)
        self.on_change(tuple(self.models.values()))
        try:
            with suppress(EngineDown):  # no later engine has it
                await self.client.change(RemoveModel(model.name))
            await self.parts.drop(model.name)
            async with self._adding:  # no model is opened that may have the same files
                if any(other.folder == model.folder for other in self.models.values()):
                    return None
                return await asyncio.to_thread(_delete_files, model, self.config.models)
        finally:
            self._leaving.discard(model.name)

    async def close(self) -> None:
        """End the fetches."""
        tasks = [pull.task for pull in self._pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _delete_files(model: ResolvedModel, options: ModelOptions) -> int | None:
    """Delete the files of a model in a cache of ours or the hub's; `None` if it is in neither.

    A folder or file that was named by its path stays where it is, also in a cache.
    """
    folder = Path(model.folder).resolve()
    if path_of(place_of(model.reference)).exists():
        return None
    stored: StoredModel | None = next(
        (each for each in stored_models(options) if each.folder.resolve() == folder), None
    )
    if stored is None:
        return None
    remove(stored, options)
    return stored.num_bytes

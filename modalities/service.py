"""Base class of the services behind HTTP routes and Python pipelines.

Owns the lookup of models by name, default seeds, limits on memory held by calls, and the merging of
streams of several jobs. Knows no modality, no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from triptych.core.engine_api.aliases import AliasClient
from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import Overloaded, UnknownModel
from triptych.core.options.config import Config
from triptych.core.process.loop_thread import End
from triptych.core.weights.resolve import ResolvedModel, open_resolved
from triptych.modalities.modality import OpenedModel, OpenModel
from triptych.schedulers.admission import Admission

if TYPE_CHECKING:
    from triptych.core.http.models import ModelCard
    from triptych.core.options.declaration import Role


class Named(Protocol):
    """A model as the API process knows it."""

    @property
    def name(self) -> str:
        """The name that callers use."""
        ...


RANDOM_SEED = -1
"""Requests a new seed, as in other servers, even if the operator has set one."""
ModelT = TypeVar("ModelT", bound=Named)
Item = TypeVar("Item")


class ModelService(Generic[ModelT]):
    """Answers calls to `models` through an engine.

    `admission` limits the admitted work; services may share one. `default_seed` is the operator's.
    """

    kind: ClassVar[str] = "model"
    """The name of its kind of models in errors."""
    seed_bits: ClassVar[int] = 62
    """The number of bits of random seeds."""

    def __init__(
        self,
        client: EngineClient,
        models: Iterable[ModelT],
        admission: Admission,
        *,
        default_seed: int | None = None,
    ) -> None:
        self.client = client
        self.models: dict[str, ModelT] = {model.name: model for model in models}
        self._aliases = client.aliases if isinstance(client, AliasClient) else {}
        self._admission = admission
        self._default_seed = default_seed
        self._ends: list[Callable[[], Awaitable[None]]] = []

    @property
    def max_jobs(self) -> int:
        """The most jobs that one call may need."""
        return self._admission.max_jobs

    def model(self, name: str) -> ModelT:
        """Return the model called `name`. Raises `UnknownModel` with the list of models."""
        own_name = self._aliases.get(name, name)
        if own_name not in self.models:
            raise UnknownModel.among(self.models, name, self.kind)
        return self.models[own_name]

    def add(self, model: ModelT) -> None:
        """Answer calls to `model`, too."""
        self.models[model.name] = model

    async def remove(self, name: str) -> None:
        """Answer no calls to a model any more, and end what was started for it."""
        self.models.pop(name, None)

    def at_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Call `end` when the service is closed: it ends what was started for it."""
        self._ends.append(end)

    async def close(self) -> None:
        """End what was started for the service."""
        for end in self._ends:
            await end()

    async def ready(self, name: str) -> float:
        """Load a model that is not in memory; returns the seconds that it took."""
        states = {each.model: each.state for each in self.client.status().models}
        if states.get(name) == "ready":
            return 0.0
        begun_s = time.monotonic()
        await self.client.load(name)
        return time.monotonic() - begun_s

    def _seed(self, requested: int | None) -> int:
        """Return the seed of a call: its own, the operator's, or a new one, also for -1."""
        given = self._default_seed if requested is None else requested
        return secrets.randbits(self.seed_bits) if given in (None, RANDOM_SEED) else given


def opener(
    service: ModelService[ModelT],
    role: Role,
    open_model: Callable[[ResolvedModel], ModelT],
    card: Callable[[ModelT], ModelCard],
) -> OpenModel:
    """Return a function that opens the models of one role for `service`."""

    def open_for(resolved: ResolvedModel, its_role: Role) -> OpenedModel | None:
        if its_role != role:
            return None
        model = open_resolved(resolved, open_model)
        return OpenedModel(join=partial(service.add, model), card=card(model))

    return open_for


def default_seed(config: Config) -> int | None:
    """Return the operator's seed, if it is set."""
    return config.device.seed if config.device.seed >= 0 else None


class HoldLimit:
    """Limits what all calls of a service hold together; `refusal` is the error beyond that."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self.held = 0.0

    def check(self, amount: float, most: float) -> None:
        """Raise `Overloaded` if the total with `amount` would exceed `most`."""
        if amount > 0 and self.held + amount > most:
            raise Overloaded(self._refusal, retry_after_s=5.0)

    def take(self, amount: float, most: float) -> None:
        """Count `amount` more, or less if it is negative. Raises as `check` does."""
        self.check(amount, most)
        self.held += amount

    @contextmanager
    def hold(self, amount: float, most: float) -> Iterator[None]:
        """Count `amount` while it is held. Raises `Overloaded` if the total would exceed `most`."""
        self.take(amount, most)
        try:
            yield
        finally:
            self.held -= amount


async def merge(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all `sources` as they arrive.

    No item is lost, the first error ends all, and closing the generator closes every source. The
    queue holds one item, so a slow consumer slows its sources down (and through them the engine)
    instead of filling memory.
    """
    queue: asyncio.Queue[Item | End] = asyncio.Queue(maxsize=1)

    async def pump(source: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:  # carried to the consumer, which raises it
            await queue.put(End(error))
        else:
            await queue.put(End())

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if not isinstance(item, End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

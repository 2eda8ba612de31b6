"""The LoRA adapters that calls may name: those of `--lora-paths`, and those loaded from Python.

Owns the names and what content each has: the engine knows a loaded adapter by its digest, so that
another one under the same name never meets what was cached for the first. Loads no torch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad
from triptych.core.errors import Conflict, InvalidRequest, NotFound, SetupError, UnsupportedOption
from triptych.core.options.config import Config
from triptych.core.weights.peft import adapter_digest, locate_adapter
from triptych.modalities.diffusion.wire import AdapterUse


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The content of an adapter, and its file."""

    digest: str
    place: str


class ImageAdapterNames:
    """The adapters of one image service."""

    def __init__(self, client: EngineClient, config: Config) -> None:
        self._client, self._config = client, config
        self._declared = [each.name for each in config.adapters.places()]
        self._loaded: dict[str, _Loaded] = {}
        self._coming: set[str] = set()  # a second load under a name would keep its memory

    def __iter__(self) -> Iterator[str]:
        return iter((*self._declared, *self._loaded))

    async def load(self, model: str, name: str, place: str) -> None:
        """Load the adapter at `place` under a name.

        Raises `Conflict` for a name that is taken, and `InvalidRequest` for an adapter that is not
        there or that the model cannot take.
        """
        if self._config.adapters.enable_lora is False:
            raise UnsupportedOption("Adapters are off here: leave out enable_lora.")
        self._check_free(name)
        self._coming.add(name)
        try:
            found = await asyncio.to_thread(self._read, place)
            await self._run(model, AdapterLoad(digest=found.digest, place=found.place))
            self._loaded[name] = found
        except SetupError as error:
            raise InvalidRequest(f"adapter {name[:80]}: {error.message}", param="lora") from error
        finally:
            self._coming.discard(name)

    async def unload(self, model: str, names: Collection[str]) -> None:
        """Withdraw loaded adapters, and wait until no image uses them. Raises `NotFound`."""
        for name in names:
            if name not in self._loaded:
                known = ", ".join(self._loaded) or "none"
                raise NotFound(f"No adapter {name[:80]!a} was loaded here; loaded: {known}.")
        for name in names:
            found = self._loaded.pop(name)
            if found.digest not in {each.digest for each in self._loaded.values()}:
                await self._run(model, AdapterDrop(digest=found.digest))

    @property
    def loaded(self) -> Mapping[str, _Loaded]:
        """The adapters that may be unloaded, by name."""
        return self._loaded

    async def resolve(self, model: str, uses: Sequence[AdapterUse]) -> tuple[AdapterUse, ...]:
        """The adapters by the names that the engine has for them, all in its memory."""
        found = []
        for use in uses:
            if (own := self._loaded.get(use.name)) is None:
                found.append(use)
                continue
            # The model may have been unloaded since; otherwise this does nothing.
            await self._run(model, AdapterLoad(digest=own.digest, place=own.place))
            found.append(AdapterUse(own.digest, use.scale))
        return tuple(found)

    def _check_free(self, name: str) -> None:
        if name in self or name in self._coming:
            raise Conflict(
                f"An adapter is called {name[:80]!a}: unload it, or choose another name."
            )

    def _read(self, place: str) -> _Loaded:
        """On another thread: the content and the file of an adapter. Raises `WeightsError`."""
        file = locate_adapter(place, self._config.models)
        return _Loaded(adapter_digest(file), str(file.absolute()))

    async def _run(self, model: str, request: AdapterLoad | AdapterDrop) -> None:
        job_id = f"adapter-{uuid.uuid4().hex}"
        async for _ in self._client.submit(model, request, job_id=job_id):
            pass

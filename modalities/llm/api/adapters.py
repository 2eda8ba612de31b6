"""The LoRA adapters of text models: their names, and loading and unloading them.

Owns which names there are, and what content each has; the engine loads what a request names, when
it does. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad
from triptych.core.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    NotFound,
    RequestError,
    SetupError,
    UnsupportedOption,
    WeightsError,
)
from triptych.core.options.config import Config
from triptych.core.weights.peft import TextAdapter, adapter_digest, is_of_text, locate_adapter
from triptych.core.weights.pipeline_index import prefix_errors
from triptych.core.weights.pull_policy import check_may_load_adapter
from triptych.core.weights.resolve import path_of

_OFF = "Adapters are off here: the operator sets --enable-lora."


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """An adapter that requests may name: the model it changes, its content and its file."""

    name: str
    model: str
    digest: str
    place: str
    created: int = field(default_factory=lambda: int(time.time()))


class AdapterNames:
    """The adapters of some text models.

    `models` returns the names of those that may have adapters now; those of `seeing` take images,
    and get adapters without a base model only where no other model may.
    """

    def __init__(
        self,
        client: EngineClient,
        models: Callable[[], Sequence[str]],
        config: Config,
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
        seeing: Collection[str] = (),
    ) -> None:
        self._client, self._models, self._config = client, models, config
        self._aliases, self._seeing = aliases, seeing
        self._adapters: dict[str, NamedAdapter] = {}

    @classmethod
    def open(
        cls,
        client: EngineClient,
        models: Callable[[], Sequence[str]],
        config: Config,
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
        seeing: Collection[str] = (),
        taken: Collection[str] = (),
    ) -> AdapterNames:
        """The names of `--lora-paths`. `taken` are those of all models.

        Raises `ConfigError` for a name or a model that cannot be, `WeightsError` for an adapter
        that cannot be read.
        """
        options = config.adapters
        if 0 < options.max_loaded_loras < options.max_num_loras:
            raise ConfigError(
                f"--max-loaded-loras {options.max_loaded_loras}: it is less than --max-num-loras"
                f" {options.max_num_loras}; raise it, or lower that."
            )
        names = cls(client, models, config, aliases=aliases, seeing=seeing)
        for each in config.adapters.places():
            with prefix_errors(f"adapter {each.name}"):
                file = locate_adapter(each.path, config.models)
                if not is_of_text(file):
                    continue
                try:
                    names._check_name(each.name, taken)
                    names._check_room(each.name)
                    model = names._base(each.base_model_name)
                except (InvalidRequest, NotFound, Conflict) as error:
                    raise ConfigError(f"--lora-paths: {error.message}") from error
                names._add(names._read(each.name, model, file))
        return names

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(self._adapters.values())

    def find(self, name: str) -> NamedAdapter | None:
        """The adapter of this name, or of `MODEL:NAME`."""
        if (found := self._adapters.get(name)) is not None:
            return found
        model, _, last = name.rpartition(":")
        found = self._adapters.get(last) if model else None
        is_base = found is not None and self._aliases.get(model, model) == found.model
        return found if is_base else None

    def of_model(self, name: str, model: str) -> NamedAdapter:
        """The adapter `name` of a model. Raises `NotFound` with the adapters that there are."""
        found = self.find(name)
        if found is None or found.model != model:
            known = ", ".join(each.name for each in self if each.model == model) or "none"
            raise NotFound(
                f"{model} has no adapter {name[:80]!a} here; adapters: {known}.", param="lora_path"
            )
        return found

    def check_may_load(self, place: str) -> None:
        """Raise `UnsupportedOption` unless a caller over HTTP may name this place."""
        if all(place != each.path for each in self._config.adapters.places()):
            check_may_load_adapter(place, self._config.server)

    async def load(
        self,
        name: str,
        place: str,
        *,
        base_model: str = "",
        replaces: bool = False,
        taken: Collection[str] = (),
    ) -> NamedAdapter:
        """Offer the adapter at `place` as `name`, once its model has it.

        With `replaces` it takes the place of one with this name, whose requests end with the
        content that they began with. `taken` are the names of all models. Raises `Conflict` for a
        name that is taken, `NotFound` for a place or a model that is not there, and
        `InvalidRequest` for an adapter that the model cannot take.
        """
        self._check_runtime()
        self._check_name(name, taken, replaces=replaces)
        self._check_room(name)
        model = self._base(base_model)
        adapter = await asyncio.to_thread(self._find_file, name, model, place)
        try:
            await self._run(model, AdapterLoad(digest=adapter.digest, place=adapter.place))
        except SetupError as error:
            raise InvalidRequest(error.message, param="lora_path") from error
        try:  # again: other names may have come, and models may have gone
            self._check_name(name, taken, replaces=replaces)
            self._check_room(name)
            self._base(model)
        except RequestError:
            await self._drop(adapter)
            raise
        former = self._adapters.get(name)
        self._add(adapter)
        if former is not None:
            await self._drop(former)
        return adapter

    async def unload(self, name: str) -> NamedAdapter:
        """Withdraw an adapter, and wait until the requests that use it have ended.

        Raises `NotFound`.
        """
        self._check_runtime()
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise NotFound(f"There is no adapter {name[:80]!a} here.", param="lora_name")
        await self._drop(adapter)
        return adapter

    def forget(self, model: str) -> None:
        """Withdraw the adapters of a model that is gone."""
        kept = {each.name: each for each in self if each.model != model}
        self._adapters = kept

    async def _drop(self, adapter: NamedAdapter) -> None:
        """Release the memory of an adapter that is named no more, if its model is still there."""
        is_named = any(
            (each.model, each.digest) == (adapter.model, adapter.digest) for each in self
        )
        if not is_named and adapter.model in self._models():
            await self._run(adapter.model, AdapterDrop(digest=adapter.digest))

    async def _run(self, model: str, request: AdapterLoad | AdapterDrop) -> None:
        async for _ in self._client.submit(model, request, job_id=f"adapter-{uuid.uuid4().hex}"):
            pass

    def _check_runtime(self) -> None:
        """Raise `UnsupportedOption` where adapters are off, or the engine has replicas."""
        if self._config.adapters.enable_lora is False:
            raise UnsupportedOption(_OFF)
        if self._client.status().num_replicas > 1:
            raise UnsupportedOption(
                "Replicas load no adapters at run time: name them with --lora-paths."
            )

    def _check_name(self, name: str, taken: Collection[str], *, replaces: bool = False) -> None:
        models = (self._aliases, self._aliases.values(), self._models(), taken)
        if any(name in each for each in models):
            raise Conflict(f"A model is called {name[:80]!a}; choose another name.")
        if name in self._adapters and not replaces:
            raise Conflict(
                f"An adapter is called {name[:80]!a}; unload it first, or set load_inplace.",
                param="lora_name",
            )

    def _check_room(self, name: str) -> None:
        most = self._config.adapters.max_loaded_loras
        if 0 < most <= len(self._adapters.keys() - {name}):
            raise Conflict(f"There are {most} adapters (--max-loaded-loras): unload one first.")

    def _base(self, name: str) -> str:
        """The model that an adapter changes. Raises `InvalidRequest` unless there is one."""
        models = self._models()
        known = ", ".join(models) or "none"
        if name:
            own = self._aliases.get(name, name)
            if own not in models:
                raise NotFound(f"No text model {name[:80]!a} takes adapters here; models: {known}.")
            return own
        models = [model for model in models if model not in self._seeing] or models
        if len(models) != 1:
            raise InvalidRequest(
                f"Set base_model_name: text models that take adapters here are {known}.",
                param="base_model_name",
            )
        return models[0]

    def _find_file(self, name: str, model: str, place: str) -> NamedAdapter:
        """On another thread: the adapter at a place that a request names."""
        try:
            file = locate_adapter(place, self._config.models)
        except WeightsError as error:
            is_there = os.path.exists(path_of(place))  # which is false for what no path can be
            kind: Callable[..., Exception] = InvalidRequest if is_there else NotFound
            raise kind(error.message, param="lora_path") from error
        if not file.exists():
            raise NotFound(f"There is no file {file.name[:80]} there.", param="lora_path")
        try:
            return self._read(name, model, file)
        except WeightsError as error:
            raise InvalidRequest(error.message, param="lora_path") from error

    def _read(self, name: str, model: str, file: Path) -> NamedAdapter:
        TextAdapter.read(str(file), self._config.models)
        digest = adapter_digest(file)
        return NamedAdapter(name=name, model=model, digest=digest, place=str(file.absolute()))

    def _add(self, adapter: NamedAdapter) -> None:
        self._adapters[adapter.name] = adapter


def fields_of(adapter: NamedAdapter | None) -> dict[str, Any]:
    """The fields of a `TokenRequest` that name an adapter."""
    if adapter is None:
        return {}
    return {"adapter": adapter.digest, "adapter_place": adapter.place}

"""The models as Ollama's clients list and show them.

Owns the information about a model's files and abilities. Files are read on a thread at the first
request. Knows no route.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from triptych.core.engine_api.reports import ModelStatus
from triptych.core.errors import UnknownModel
from triptych.core.http.model_names import with_tag, without_tag
from triptych.core.process.metrics import DEVICE_INFO, held_bytes, labelled_series
from triptych.core.process.once import once
from triptych.core.text.context_length import context_length
from triptych.core.weights.layout import TensorInfo, read_json, read_layout, weight_files
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.ollama.dialect import time_text
from triptych.modalities.llm.api.service import LlmService

_FOR_EVER = "9999-12-31T23:59:59Z"
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_PACKED = ("I32", "U8", "I8")
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""The GGUF names of fields of config.json."""


class ModelDetails(BaseModel):
    """The format, family and size of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    """A model of `/api/tags`, or a loaded model of `/api/ps`."""

    name: str
    model: str
    modified_at: str | None = None
    size: int
    digest: str
    details: ModelDetails
    size_vram: int | None = None
    expires_at: str | None = None
    context_length: int | None = None


class ListedModels(BaseModel):
    """Answer of `/api/tags` and `/api/ps`."""

    models: list[ListedModel]


class ShownModel(BaseModel):
    """Answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Information about a model that is not in its files."""

    capabilities: Sequence[str]
    context_length: int
    template: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Information in a model's files. `num_parameters` is 0 for packed weights."""

    config: Mapping[str, Any]
    modified_at: str
    num_bytes: int
    num_parameters: int
    encoding: str

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Read the headers of a model's files. Raises `WeightsError`."""
        config = read_json(folder / "config.json")
        tensors = list(read_layout(folder).values())
        encoding = _encoding(tensors)
        is_counted = encoding not in _PACKED
        num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        stats = [file.stat() for file in weight_files(folder)]
        changed_s = max((stat.st_mtime for stat in stats), default=0.0)
        return cls(
            config=config,
            modified_at=time_text(datetime.fromtimestamp(changed_s, UTC)),
            num_bytes=sum(stat.st_size for stat in stats),
            num_parameters=num_parameters if is_counted else 0,
            encoding=encoding if is_counted else _quantization(config),
        )

    @property
    def family(self) -> str:
        """The architecture of the model."""
        return str(self.config.get("model_type", ""))

    def details(self) -> ModelDetails:
        """The details of `/api/tags`."""
        return ModelDetails(
            parent_model="",
            format="safetensors",
            family=self.family,
            families=[self.family],
            parameter_size=_size_text(self.num_parameters),
            quantization_level=self.encoding,
        )

    def info(self, max_length: int) -> dict[str, str | int]:
        """The further information of `/api/show`, under the names of GGUF files."""
        text = {**self.config, **self.config.get("text_config", {})}
        sizes = {
            f"{self.family}.{name}": text[field]
            for field, name in _SIZES.items()
            if isinstance(text.get(field), int)
        }
        length = {f"{self.family}.context_length": max_length}
        count = {"general.parameter_count": self.num_parameters} if self.num_parameters else {}
        return {"general.architecture": self.family, **count, **length, **sizes}


class Catalogue:
    """The models that Ollama's clients may use; `service` has those that write text."""

    def __init__(self, models: Sequence[ResolvedModel], service: LlmService) -> None:
        self._service = service
        self._status = service.client.status
        self._models: dict[str, ResolvedModel] = {}
        self._files: dict[str, Callable[[], ModelFiles]] = {}
        for model in models:
            self.add(model)

    def add(self, model: ResolvedModel) -> None:
        """List a model."""
        self._models[model.name] = model
        self._files[model.name] = once(_reader(model))

    def remove(self, name: str) -> None:
        """List a model no longer."""
        self._models.pop(name, None)
        self._files.pop(name, None)

    def has(self, asked: str) -> bool:
        """Whether there is a model of that name, with or without its tag."""
        return without_tag(asked, self._models) in self._models

    def name(self, asked: str) -> str:
        """The served name of a model. Raises `UnknownModel`."""
        name = without_tag(asked, self._models)
        if name not in self._models:
            raise UnknownModel.among(map(with_tag, self._models), asked)
        return name

    async def list_all(self) -> ListedModels:
        """List all models."""
        models = [await self._list_entry(name) for name in self._models]
        return ListedModels(models=models)

    async def list_loaded(self) -> ListedModels:
        """The models in memory, with the memory that each uses."""
        status = self._status()
        states = {each.model: each for each in status.models if each.state == "ready"}
        gauges = status.last_beat.gauges if status.last_beat else {}
        models = []
        for name in filter(self._models.__contains__, states):
            listed = await self._list_entry(name)
            files = await asyncio.to_thread(self._files[name])
            num_bytes = held_bytes(name, gauges)
            held = {
                "size": num_bytes,
                "size_vram": num_bytes if _is_gpu(gauges) else 0,
                "expires_at": _expiry(states[name]),
                "context_length": self._known(name, files).context_length,
            }
            models.append(ListedModel(**{**listed.model_dump(exclude={"modified_at"}), **held}))
        return ListedModels(models=models)

    async def show(self, asked: str) -> ShownModel:
        """Show one model. Raises `UnknownModel`."""
        name = self.name(asked)
        files = await asyncio.to_thread(self._files[name])
        abilities = self._known(name, files)
        lines = [f"{option} {value:g}" for option, value in abilities.sampling.items()]
        return ShownModel(
            modelfile=f"FROM {with_tag(name)}\n",
            parameters="\n".join(lines),
            template=abilities.template,
            details=files.details(),
            model_info=files.info(abilities.context_length),
            capabilities=list(abilities.capabilities),
            modified_at=files.modified_at,
        )

    def _known(self, name: str, files: ModelFiles) -> Abilities:
        """The abilities of a model; a model without text output makes embeddings."""
        if name in self._service.models:
            return _abilities(self._service, name)
        length = context_length(files.config.get)
        return Abilities(capabilities=["embedding"], context_length=length)

    async def _list_entry(self, name: str) -> ListedModel:
        files = await asyncio.to_thread(self._files[name])
        return ListedModel(
            name=with_tag(name),
            model=with_tag(name),
            modified_at=files.modified_at,
            size=files.num_bytes,
            digest=self._models[name].digest,
            details=files.details(),
        )


def _abilities(service: LlmService, name: str) -> Abilities:
    model = service.model(name)  # with the context that it has
    special = {"vision": service.sees(name), "thinking": model.answers.has_reasoning}
    able = [word for word, is_able in special.items() if is_able]
    return Abilities(
        capabilities=["completion", "tools", *able],
        context_length=model.context_length,
        template=model.template.source if model.template else "",
        sampling=model.default_sampling,
    )


def _expiry(status: ModelStatus) -> str:
    """When a model will be unloaded if no request uses it."""
    if status.keep_s < 0:
        return _FOR_EVER
    return time_text(datetime.now(UTC) + timedelta(seconds=status.keep_s - status.idle_s))


def _reader(model: ResolvedModel) -> Callable[[], ModelFiles]:
    return lambda: ModelFiles.read(Path(model.folder))


def _encoding(tensors: Sequence[TensorInfo]) -> str:
    """The type of most of the weights."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.format.upper() or tensor.dtype] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0] if num_bytes else ""


def _quantization(config: Mapping[str, Any]) -> str:
    return str(config.get("quantization_config", {}).get("quant_method", "")).upper()


def _size_text(count: int) -> str:
    """A rounded number of parameters, such as 7.6B; empty if it is unknown."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, ""))
    return f"{count / size:.4g}{unit}" if count else ""


def _is_gpu(gauges: Mapping[str, float]) -> bool:
    return any(labels["device"] != "cpu" for labels, _ in labelled_series(gauges, DEVICE_INFO))

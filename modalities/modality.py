"""The interface between a modality and the server.

Owns its types, and the lookup of a model's modality. Each modality's `modality.py` declares its
object; `registry` lists them. An object refers to code by import path (see `core.process.lazy`), so
that each process loads only its half.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from triptych.core.options.command import Command
from triptych.core.options.declaration import Role
from triptych.core.process.lazy import load

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    from triptych.core.engine_api.client import EngineClient
    from triptych.core.engine_api.tokens import TokenRequest
    from triptych.core.http.dialects import Dialect
    from triptych.core.http.models import ModelCard, MoreModels
    from triptych.core.media.child import DecodePool
    from triptych.core.media.fetch import Fetched
    from triptych.core.options.config import Config
    from triptych.core.store.store import DocumentStore
    from triptych.core.weights.resolve import ResolvedModel, Source
    from triptych.modalities.service import ModelService
    from triptych.schedulers.admission import Admission


FindLink: TypeAlias = "Callable[[str, Request], Fetched | None]"
"""Returns the file of a URL of this server, for the caller of a request."""
EncodeChat: TypeAlias = "Callable[..., Awaitable[TokenRequest]]"
"""Encodes a conversation, from the model's name, the messages and the options of its template."""


def _no_warmup() -> None:
    """Do nothing: most modalities need no warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model that the API half of a modality has opened. `join` adds it to the routes.

    `card` is its entry in `/v1/models`, which one modality has for it.
    """

    join: Callable[[], None]
    card: ModelCard | None = None


OpenModel: TypeAlias = "Callable[[ResolvedModel, Role], OpenedModel | None]"
"""Opens a model of a role that comes after the start; `None` for roles without routes here. It may
block, on a thread of its own. Raises the errors of a start."""
DropModel: TypeAlias = "Callable[[str], Awaitable[None]]"
"""Forgets a model that was opened, joined or not, and ends what was started for it."""


def _open_nothing(model: ResolvedModel, role: Role) -> OpenedModel | None:
    """Return None: most parts have routes for models of few roles."""
    return None


async def _drop_nothing(name: str) -> None:
    """Do nothing: a part without models."""


def no_link(url: str, request: Request) -> None:
    """Return None: no URL is a link of this server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """One kind of model: its recognition, message types, and the entry points of its halves.

    `task` is its task (see `core.http.models.Task`), `more_tasks` those of some of its models.
    `matches` checks a model's folder and config.json (empty for a folder of components). `wire` are
    the types of requests and deltas between API and engine. `api` builds an `ApiPart` from an
    `ApiSetup`; `engine` builds a `schedulers.base.ModelLoader` from a model, the configuration, the
    device and its ledger. `decoders` are modules whose functions run in decode children. `sources`
    are models with short names; `default` is the model served by default, or empty. `more_roles`
    are further roles of its models. `pipelines` are the modules of Python classes by name.
    """

    role: Role
    task: tuple[str, str, str]
    more_tasks: Sequence[tuple[str, str, str]] = ()
    matches: Callable[[Path, Mapping[str, Any]], bool]
    wire: Sequence[str]
    api: str
    engine: str
    default: str = ""
    sources: Sequence[str] = ()
    decoders: Sequence[str] = ()
    more_roles: Sequence[Role] = ()
    pipelines: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Command] = ()

    @property
    def kind(self) -> str:
        """The kind of its models in one word; a vision model is a chat model in `task`."""
        return self.task[0] if self.role == "asr" else self.role

    def load_sources(self) -> list[Source]:
        """Load the models with short names."""
        return [load(place) for place in self.sources]


def modality_of(model: ResolvedModel, modalities: Sequence[Modality]) -> Modality:
    """Return the first of `modalities` that matches `model`, or the last.

    Raises `WeightsError` if the model's configuration cannot be read, or names no type.
    """
    from triptych.core.errors import WeightsError
    from triptych.core.weights.layout import read_json
    from triptych.core.weights.pipeline_index import is_pipeline

    folder = Path(model.folder)
    config = {} if is_pipeline(folder) else read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str | None):
        raise WeightsError("config.json: model_type is not a text.")
    *others, last = modalities
    return next((each for each in others if each.matches(folder, config)), last)


@dataclass(slots=True, kw_only=True)
class ApiSetup:
    """The shared inputs of every modality's API half.

    `models` are listed by role. One `pool` decodes all uploads. One `admission` limits the work of
    all modalities, so that a key's share covers all its requests. `store` keeps objects that
    outlive their request, if there is a store. `exit_stack` closes resources at shutdown.
    Modalities provide functions to those opened after them: `find_link` opens images that were
    returned as links, `prompt_encoders` encode conversations with images, one per vision model.
    `encode_chat`, which encodes conversations of chat models, is set last and read on use.
    """

    config: Config
    models: Mapping[Role, Sequence[ResolvedModel]]
    client: EngineClient
    pool: DecodePool
    admission: Admission
    exit_stack: AsyncExitStack
    store: DocumentStore | None = None
    find_link: FindLink = no_link
    prompt_encoders: dict[str, Any] = field(default_factory=dict)
    encode_chat: EncodeChat | None = None


@dataclass(frozen=True, slots=True)
class ApiPart:
    """The routes and models that a modality adds to the app.

    Its routes exist without models, and answer with an error then. `dialects` are its APIs other
    than OpenAI's. `warm` prepares what first requests would wait for. `open_model` and `drop_model`
    are for models that come and go while the server runs; `more` are adapters, which do so as well.
    `service` answers its calls, for what composes several modalities.
    """

    routers: Sequence[APIRouter] = ()
    cards: Sequence[ModelCard] = ()
    dialects: Sequence[Dialect] = ()
    warm: Callable[[], None] = _no_warmup
    open_model: OpenModel = _open_nothing
    drop_model: DropModel = _drop_nothing
    more: Sequence[MoreModels] = ()
    service: ModelService[Any] | None = None

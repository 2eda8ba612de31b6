"""What a modality is to the rest of the server: one object, and what its API half is built from.

Owns these types, and how a model's modality is found. Each modality's `modality.py` makes its
object; `registry` lists them. An object names code by its place (see `core.process.lazy`), so that
each process loads its own half alone.
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
    from triptych.core.http.models import ModelCard
    from triptych.core.media.child import DecodePool
    from triptych.core.media.fetch import Fetched
    from triptych.core.options.config import Config
    from triptych.core.store.store import DocumentStore
    from triptych.core.weights.resolve import ResolvedModel, Source
    from triptych.schedulers.admission import Admission


FindLink: TypeAlias = "Callable[[str, Request], Fetched | None]"
"""What a URL of this server's own names, for the caller of a request."""
EncodeChat: TypeAlias = "Callable[..., Awaitable[TokenRequest]]"
"""The conversation as a model takes it: of the model's name, messages, options of its template."""


def _has_nothing_to_warm() -> None:
    """Most modalities have what they need once they are open."""


def no_link(url: str, request: Request) -> None:
    """No URL leads here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """One kind of model: how it is recognized, its messages, what opens its halves.

    `task` says what it does (see `core.http.models.Task`), `more_tasks` what some of its models do
    instead. `matches` looks at a model's folder and
    its config.json (empty for a folder of parts). `wire`
    are the types of requests and deltas between API and engine. `api` makes an `ApiPart` of an
    `ApiSetup`; `engine` makes a `schedulers.base.ModelLoader` of a model, the configuration, the
    device and its ledger. `decoders` are modules whose functions run in decode children.
    `sources` are models with a name of their own; `default` is served when no model is named, and
    empty where there is none.
    `also` are roles that such a model has beside its own. `pipelines` are Python objects by name.
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
    also: Sequence[Role] = ()
    pipelines: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Command] = ()

    def load_sources(self) -> list[Source]:
        """The models that come under a name of their own."""
        return [load(place) for place in self.sources]


def modality_of(model: ResolvedModel, modalities: Sequence[Modality]) -> Modality:
    """The first of `modalities` that `model` belongs to; the last takes what is left.

    Raises `WeightsError` where the configuration cannot be read.
    """
    from triptych.core.weights.layout import read_json
    from triptych.core.weights.pipeline_index import is_pipeline

    folder = Path(model.folder)
    config = {} if is_pipeline(folder) else read_json(folder / "config.json")
    *others, last = modalities
    return next((each for each in others if each.matches(folder, config)), last)


@dataclass(slots=True, kw_only=True)
class ApiSetup:
    """What every modality's half of the API is made of.

    `models` are those of each role. One `pool` decodes all that is uploaded. One `admission` bounds
    what all let in, so that a key has its share once, whatever it asks for. `store` keeps what
    outlives its request, if anything does. `ending` holds what is to be closed in the end.
    Modalities offer things to those that are opened after them: `find_link` opens images that
    were answered as links, `prompt_encoders` encode conversations with images in them, one for
    each vision model. `encode_chat`, which encodes those of a chat model, comes last: it is looked
    for when it is needed.
    """

    config: Config
    models: Mapping[Role, Sequence[ResolvedModel]]
    client: EngineClient
    pool: DecodePool
    admission: Admission
    ending: AsyncExitStack
    store: DocumentStore | None = None
    find_link: FindLink = no_link
    prompt_encoders: dict[str, Any] = field(default_factory=dict)
    encode_chat: EncodeChat | None = None


@dataclass(frozen=True, slots=True)
class ApiPart:
    """What a modality adds to the app. Its routes are there without a model, too, and say so.

    `dialects` are the APIs beside OpenAI's that its routes speak. `warm` begins what a first
    request of some kind would wait for.
    """

    routers: Sequence[APIRouter] = ()
    cards: Sequence[ModelCard] = ()
    dialects: Sequence[Dialect] = ()
    warm: Callable[[], None] = _has_nothing_to_warm

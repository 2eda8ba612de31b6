"""The composition root: the only place that knows every part.

Owns what is plugged into what. Each process builds only its half: the engine's builder imports
torch, the API's imports FastAPI, neither imports the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from triptych.core.config import Config
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.core.transport.codec import Codec
from triptych.core.weights.resolve import ResolvedModel

if TYPE_CHECKING:
    from fastapi import FastAPI

    from triptych.core.client import EngineClient
    from triptych.schedulers.engine import Engine


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor hands to a child, as JSON. Holds secrets: never on a command line.

    `folder` is where the sockets are; `listener_fd` is the API's inherited listening socket.
    """

    config: Config
    models: tuple[ResolvedModel, ...]
    folder: str
    listener_fd: int = -1


def build_codec() -> Codec:
    """The types of every modality that cross between API and engine."""
    return Codec(request=TokenRequest, payload=TokenDelta)


def build_engine(config: Config, models: Sequence[ResolvedModel]) -> Engine:
    """The engine that owns the device. Raises `DeviceError` where there is none."""
    from triptych.core.bring_up import bring_up
    from triptych.modalities.llm.loader import LlmLoader
    from triptych.schedulers.engine import Engine

    device, ledger = bring_up(config.device)
    loaders = [LlmLoader(model, config, device, ledger) for model in models]
    return Engine(loaders, config=config, ledger=ledger)


def build_app(config: Config, models: Sequence[ResolvedModel], client: EngineClient) -> FastAPI:
    """The HTTP app in front of `client`."""
    from triptych.core.http.app import create_app
    from triptych.core.http.models import models_router
    from triptych.modalities.llm.replies import card_of
    from triptych.modalities.llm.routes import llm_router
    from triptych.modalities.llm.service import LlmService
    from triptych.modalities.llm.text import TextModel

    texts = [TextModel.open(model, config.models) for model in models]
    service = LlmService.from_config(config, texts, client)
    cards = [card_of(text) for text in texts]
    return create_app(config, client, [llm_router(service), models_router(cards)])

"""The composition root: the only place that knows every part.

Owns what is plugged into what. Each process builds only its half: the engine's builder imports
torch, the API's imports FastAPI, neither imports the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from triptych.core.config import Config
from triptych.core.embedding import EmbedDelta, EmbedRequest
from triptych.core.images import ImageDelta, ImageRequest
from triptych.core.speech import SpeechDelta, SpeechRequest, TranscribeDelta, TranscribeRequest
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.core.transport.codec import MessageCodec
from triptych.core.weights.opening import opening
from triptych.core.weights.resolve import ResolvedModel
from triptych.roles import role_of, with_role

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from triptych.core.client import EngineClient
    from triptych.core.device import Device
    from triptych.core.http.models import ModelCard
    from triptych.core.ledger import Ledger
    from triptych.core.media.child import DecodePool
    from triptych.modalities.diffusion.links import PictureLinks
    from triptych.schedulers.admission import Admission
    from triptych.schedulers.base import ModelLoader
    from triptych.schedulers.engine import Engine


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor hands to a child, as JSON. Holds secrets: never on a command line.

    `folder` is where the sockets are; `listener_fd` is the API's inherited listening socket.
    """

    config: Config
    models: tuple[ResolvedModel, ...]
    folder: str
    listener_fd: int = -1


def build_codec() -> MessageCodec:
    """The types of every modality that cross between API and engine."""
    return MessageCodec(
        request=TokenRequest | EmbedRequest | SpeechRequest | TranscribeRequest | ImageRequest,
        payload=TokenDelta | EmbedDelta | SpeechDelta | TranscribeDelta | ImageDelta,
    )


def build_engine(config: Config, models: Sequence[ResolvedModel]) -> Engine:
    """The engine that owns the device. Raises `DeviceError` where there is none."""
    from triptych.core.bring_up import bring_up
    from triptych.schedulers.engine import Engine

    device, ledger = bring_up(config.device)
    loaders = [_open_loader(model, config, device, ledger) for model in models]
    return Engine(loaders, config=config, ledger=ledger)


def _open_loader(
    model: ResolvedModel, config: Config, device: Device, ledger: Ledger
) -> ModelLoader:
    match role_of(model):
        case "speech":
            from triptych.modalities.tts.loader import open_speech_loader

            return open_speech_loader(model, config, device, ledger)
        case "recognition":
            from triptych.modalities.tts.recognition.loader import RecognitionLoader

            return RecognitionLoader(model, config, device, ledger)
        case "image":
            from triptych.modalities.diffusion.loader import DiffusionLoader

            return DiffusionLoader(model, config, device, ledger)
        case "embedding":
            from triptych.modalities.llm.embedding.loader import open_embedding_loader

            return open_embedding_loader(model, config, device, ledger)
        case "vision":
            from triptych.modalities.vlm.loader import VisionLoader

            return VisionLoader(model, config, device, ledger)
        case "chat":
            from triptych.modalities.llm.loader import LlmLoader

            return LlmLoader(model, config, device, ledger)


def build_app(config: Config, models: Sequence[ResolvedModel], client: EngineClient) -> FastAPI:
    """The HTTP app in front of `client`. `app.state.close` ends what its services have started."""
    from triptych.core.http.app import create_app
    from triptych.core.media import pictures
    from triptych.core.media.child import DecodePool
    from triptych.modalities.diffusion.routes import picture_links
    from triptych.modalities.tts.audio import decode
    from triptych.schedulers.admission import Admission

    pool = DecodePool.from_options(config.server, [decode.__name__, pictures.__name__])
    admission = Admission(options=config.schedule)
    links = picture_links(config)
    ending = AsyncExitStack()
    ending.push_async_callback(pool.close)
    setup = _Setup(config, models, client, pool, admission, links, ending)
    parts = [build(setup) for build in (_text, _embeddings, _speech, _images)]
    cards = {card.id: card for part in parts for card in part.cards}
    listed = [cards[model.name] for model in models]
    routers = [router for part in parts for router in part.routers]
    app = create_app(config, client, routers, listed)
    app.state.close = ending.aclose
    return app


@dataclass(frozen=True, slots=True)
class _Setup:
    """What every modality's half of the API is made of.

    One pool decodes all that is uploaded. One admission bounds what all of them let in, so that a
    key has its share once, whatever it asks for. Pictures that were answered as links can be shown
    to models that see. `ending` holds what is to be closed in the end.
    """

    config: Config
    models: Sequence[ResolvedModel]
    client: EngineClient
    pool: DecodePool
    admission: Admission
    links: PictureLinks
    ending: AsyncExitStack


@dataclass(frozen=True, slots=True)
class _ApiPart:
    """What a modality adds to the app. Its routes are there without a model, too, and say so."""

    routers: Sequence[APIRouter]
    cards: Sequence[ModelCard]


def _text(setup: _Setup) -> _ApiPart:
    from triptych.modalities.llm.replies import card_of
    from triptych.modalities.llm.routes import llm_router
    from triptych.modalities.llm.service import LlmService
    from triptych.modalities.llm.text import TextModel
    from triptych.modalities.vlm.prompt_encoder import open_eyes

    eyes = open_eyes(with_role(setup.models, "vision"), setup.config, setup.ending)
    texts = [
        opening(model, TextModel.open, setup.config.models)
        for model in with_role(setup.models, "chat")
    ]
    texts += [entry.text for entry in eyes.values()]
    service = LlmService.from_config(
        setup.config, texts, setup.client, eyes=eyes, admission=setup.admission
    )
    cards = [card_of(text, sees=text.name in eyes) for text in texts]
    setup.ending.push_async_callback(service.close)
    return _ApiPart([llm_router(service, setup.links.find)], cards)


def _embeddings(setup: _Setup) -> _ApiPart:
    from triptych.modalities.llm.embedding.routes import embedding_cards, embeddings_router
    from triptych.modalities.llm.embedding.service import EmbeddingService
    from triptych.modalities.llm.embedding.text import EmbeddingModel

    own = [model.name for model in with_role(setup.models, "embedding")]
    able = [model for model in setup.models if role_of(model) in ("embedding", "chat")]
    opened = [opening(model, EmbeddingModel.open, setup.config.models) for model in able]
    service = EmbeddingService.from_config(
        setup.config, opened, setup.client, admission=setup.admission
    )
    cards = [card for card in embedding_cards(service) if card.id in own]
    return _ApiPart([embeddings_router(service)], cards)


def _speech(setup: _Setup) -> _ApiPart:
    from triptych.modalities.tts.audio import decode
    from triptych.modalities.tts.frontend import open_front_end
    from triptych.modalities.tts.recognition.routes import recognition_cards, recognition_router
    from triptych.modalities.tts.recognition.service import RecognitionService
    from triptych.modalities.tts.recognition.transcript import WhisperTokenizer
    from triptych.modalities.tts.routes import speech_cards, speech_router
    from triptych.modalities.tts.service import SpeechService
    from triptych.modalities.tts.voices.routes import voices_router
    from triptych.modalities.tts.voices.service import VoiceService
    from triptych.modalities.tts.voices.store import VoiceStore

    fronts = [
        opening(model, open_front_end, setup.config.models)
        for model in with_role(setup.models, "speech")
    ]
    hearing = [
        opening(model, WhisperTokenizer.open) for model in with_role(setup.models, "recognition")
    ]
    voices = VoiceService(VoiceStore.from_config(setup.config), fronts, setup.pool)
    speech = SpeechService.from_config(
        setup.config, fronts, setup.client, voices=voices, admission=setup.admission
    )
    recognition = RecognitionService.from_config(
        setup.config,
        hearing,
        setup.client,
        decode.ClipReader(setup.pool),
        admission=setup.admission,
    )
    routers = [speech_router(speech), voices_router(voices), recognition_router(recognition)]
    return _ApiPart(routers, [*speech_cards(speech), *recognition_cards(recognition)])


def _images(setup: _Setup) -> _ApiPart:
    from triptych.core.media import pictures
    from triptych.modalities.diffusion.image_model import ImageModel
    from triptych.modalities.diffusion.routes import image_cards, images_router
    from triptych.modalities.diffusion.service import ImageService

    drawing = [opening(model, ImageModel.open) for model in with_role(setup.models, "image")]
    reader = pictures.PictureReader(setup.pool)
    service = ImageService.from_config(
        setup.config, drawing, setup.client, reader=reader, admission=setup.admission
    )
    return _ApiPart([images_router(service, setup.links)], image_cards(service))

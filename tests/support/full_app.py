"""The whole server: every route of the real app, each in front of a made-up engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi import FastAPI

from support.asr import FakeAsrEngine, asr_service, timed_tokens
from support.embedding_models import WORDS, save_tokenizer, write
from support.http import READY, FakeEngine, make_service
from support.image_app import FakeImageEngine, image_model, make_image_service
from support.other_apis import DIALECTS, other_api_routers
from support.speech_app import FakeSpeechEngine, SpellingFrontEnd
from support.voices_app import PARROT
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.http.app import create_app
from triptych.core.http.batches.routes import batches_router
from triptych.core.http.batches.runner import BatchRunner
from triptych.core.http.files.routes import files_router
from triptych.core.http.files.user_files import UserFiles
from triptych.core.http.models import Task
from triptych.core.media.audio.decode import DECODERS
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions, ServerOptions
from triptych.core.store.store import DocumentStore
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.asr.api.routes import asr_cards, asr_router
from triptych.modalities.diffusion.api.routes import image_cards, image_links, images_router
from triptych.modalities.embedding.api.cohere import cohere_router
from triptych.modalities.embedding.api.ollama import ollama_embeddings_router
from triptych.modalities.embedding.api.routes import embedding_cards, embeddings_router
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.tei import tei_router
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.wire import EmbedDelta
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.conversations import conversations_router
from triptych.modalities.llm.api.responses.routes import responses_router
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.registry import MODALITIES
from triptych.modalities.talk.speaking.chat_sound import ServedSound
from triptych.modalities.tts.api.routes import speech_cards, speech_models_router, speech_router
from triptych.modalities.tts.api.service import SpeechService
from triptych.modalities.tts.api.voices.routes import voices_router
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceQuota, VoiceStore
from triptych.schedulers.admission import Admission

MODELS = {
    "chat": "tiny",
    "embedding": "words",
    "speech": "hum",
    "transcription": "ears",
    "image": "paint",
}
NUM_DIMENSIONS = 8


class OwnPool:
    """Decodes in this process what a `DecodePool` would in a child."""

    async def run(self, name: str, data: bytes, **args: Any) -> Any:
        pieces = [piece.tobytes() for piece in DECODERS[name](bytes(data), **args)]
        return SimpleNamespace(data=b"".join(pieces))


@dataclass
class VectorEngine:
    """An engine client whose vectors are all the same."""

    journal: JobJournal = field(default_factory=JobJournal)
    finished: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    changes: list[ModelChange] = field(default_factory=list)

    async def change(self, change: ModelChange) -> None:
        self.changes.append(change)

    async def unload(self, model: str) -> None:
        self.unloaded.append(model)

    async def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> AsyncGenerator[Output, None]:
        vector = np.full(NUM_DIMENSIONS, 0.5, "<f4").tobytes()
        for index in range(len(request.texts)):
            is_last = index == len(request.texts) - 1
            delta = EmbedDelta(
                text=index, vectors=vector, finish_reason="stop" if is_last else None
            )
            yield Output(job_id=job_id, payload=delta, is_final=is_last)
        self.finished.append(job_id)

    def status(self) -> EngineStatus:
        return READY

    async def load(self, model: str) -> None: ...

    async def close(self) -> None: ...


@dataclass
class FullApp:
    """An app, and the engines behind it."""

    app: FastAPI
    chat: FakeEngine
    embedding: VectorEngine
    speech: FakeSpeechEngine
    transcription: FakeAsrEngine
    image: FakeImageEngine

    @property
    def num_finished(self) -> dict[str, int]:
        """Jobs that came to their end, by the kind of model."""
        return {kind: len(getattr(self, kind).finished) for kind in MODELS}


def embedding_model(folder: Path) -> EmbeddingModel:
    """An encoder without weights, called words."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    sizes = {"vocab_size": len(WORDS), "hidden_size": NUM_DIMENSIONS, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 64}
    config = {"model_type": "bert", "architectures": ["BertModel"], **sizes}
    write(folder / "config.json", config)
    resolved = ResolvedModel(name="words", reference="words", folder=str(folder), digest="00")
    return EmbeddingModel.open(resolved, ModelOptions())


def open_full_app(folder: Path, **server: Any) -> FullApp:
    """Every route, with a model of each kind."""
    full_app = FullApp(
        app=FastAPI(),
        chat=FakeEngine(answer="hi"),
        embedding=VectorEngine(),
        speech=FakeSpeechEngine(step_samples=20_000),
        transcription=FakeAsrEngine([(2.0, (timed_tokens(" Hello.", 0.0, 1.0),))]),
        image=FakeImageEngine(),
    )
    config = Config(server=ServerOptions(**server))
    links = image_links(config)
    text = make_service(folder / "text", full_app.chat)
    words = EmbeddingService.from_config(
        config, [embedding_model(folder / "words")], full_app.embedding
    )
    front = SpellingFrontEnd(takes_instructions=True)
    store = VoiceStore(folder / "voices", VoiceQuota(per_owner=50, in_total=50))
    voices = VoiceService(store, [front, PARROT], OwnPool())  # type: ignore[arg-type]
    admission = Admission(options=ScheduleOptions())
    speech = SpeechService(full_app.speech, [front], admission, max_characters=4096)
    transcriptions = asr_service(full_app.transcription, is_multilingual=True)
    images = make_image_service(full_app.image, image_model(max_references=16))
    text.sound = ServedSound(transcriptions, speech)
    cards = [card_of(model) for model in text.models.values()]
    cards += embedding_cards(words) + speech_cards(speech)
    cards += asr_cards(transcriptions) + image_cards(images)
    routers = [llm_router(text, links.find), embeddings_router(words), speech_router(speech)]
    routers += [speech_models_router(speech), voices_router(voices)]
    routers += [asr_router(transcriptions), images_router(images, links)]
    user_files = UserFiles(DocumentStore("memory", max_bytes=2**24, ttl_s=3600.0))
    batches = BatchRunner(user_files)
    routers += [score_router(words), cohere_router(words), tei_router(words)]
    routers += [files_router(user_files), batches_router(batches)]
    routers += [*other_api_routers(text, folder / "text"), ollama_embeddings_router(words)]
    kept = DocumentStore.from_options(config.store)
    answering = Answering.open(text, kept, config.server, links.find)
    routers += [responses_router(answering), conversations_router(answering)]
    tasks = [Task(*modality.task) for modality in MODALITIES]
    full_app.app = create_app(config, full_app.chat, routers, cards, tasks, DIALECTS)
    full_app.app.state.user_files = user_files
    batches.serve(full_app.app)
    return full_app

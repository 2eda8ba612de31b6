"""The app with the APIs of Anthropic and Ollama, in front of a made-up engine.

The fixtures are for a `conftest` to import. One app of each kind is for all tests of a module: the
process that runs its template takes a while to start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import APIRouter, FastAPI
from safetensors.numpy import save_file

from support.http import FakeEngine, in_process, make_service
from support.text_models import write_text_folder
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.modalities.llm.api.anthropic.dialect import ANTHROPIC
from triptych.modalities.llm.api.anthropic.routes import anthropic_router
from triptych.modalities.llm.api.ollama.dialect import OLLAMA
from triptych.modalities.llm.api.ollama.models import Catalogue
from triptych.modalities.llm.api.ollama.routes import ollama_router
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.service import LlmService

WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINKS = ModelOptions(reasoning_parser="think")


DIALECTS = [ANTHROPIC, OLLAMA]


def other_api_routers(service: LlmService, folder: Path) -> list[APIRouter]:
    """Their routes before `service`, whose model is in `folder`: with a file of 6000 weights."""
    resolved = write_text_folder(folder, max_position_embeddings=4096, model_type="llama")
    save_file({"weight": np.zeros((60, 100), np.float32)}, str(folder / "model.safetensors"))
    return [anthropic_router(service), ollama_router(service, Catalogue([resolved], service))]


def other_apis_app(
    folder: Path,
    engine: FakeEngine,
    *,
    models: ModelOptions | None = None,
    schedule: dict[str, int] | None = None,
    **server: Any,
) -> FastAPI:
    """The whole app in front of `engine`, with all APIs."""
    service = make_service(folder, engine, models, **(schedule or {}))
    routers = [llm_router(service), *other_api_routers(service, folder)]
    cards = [card_of(model) for model in service.models.values()]
    config = Config(server=ServerOptions(**server))
    return create_app(config, engine, routers, cards, dialects=DIALECTS)


@pytest.fixture(scope="module")
def idle_app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """An app where nothing comes to the engine."""
    engine = FakeEngine(error=AssertionError("it was asked"))
    return other_apis_app(tmp_path_factory.mktemp("idle"), engine)


@pytest.fixture(scope="module")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, shared_engine: FakeEngine) -> FastAPI:
    return other_apis_app(tmp_path_factory.mktemp("app"), shared_engine)


@pytest.fixture(scope="module")
def thinking_app(tmp_path_factory: pytest.TempPathFactory, shared_engine: FakeEngine) -> FastAPI:
    return other_apis_app(tmp_path_factory.mktemp("thinking"), shared_engine, models=THINKS)


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    """The engine, as new."""
    vars(shared_engine).update(vars(FakeEngine()))
    return shared_engine


@pytest.fixture
async def client(app: FastAPI, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(app) as client:
        yield client


@pytest.fixture
async def thinker(thinking_app: FastAPI, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.answer = f"<think>Hm, well.</think>I look.\n{CALL}\n{CALL}"
    async with in_process(thinking_app) as client:
        yield client

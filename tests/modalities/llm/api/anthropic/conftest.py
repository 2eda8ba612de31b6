"""The app with the Messages API, in front of a made-up engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from support.http import FakeEngine, in_process
from support.other_apis import CALL, THINKS, other_apis_app


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

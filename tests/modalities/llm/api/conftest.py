"""A client of the routes, in front of an engine that makes answers up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from support.http import FakeEngine, in_process, make_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(make_app(tmp_path, engine)) as client:
        yield client

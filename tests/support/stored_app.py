"""An app that keeps files and answers batches, in front of a made-up engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from support.http import FakeEngine, make_service
from triptych.core.http.app import create_app
from triptych.core.http.batches.routes import batches_router
from triptych.core.http.batches.runner import BatchRunner
from triptych.core.http.files.routes import files_router
from triptych.core.http.files.user_files import UserFiles
from triptych.core.options.config import Config, ServerOptions, StoreOptions
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.routes import llm_router

PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class StoredApp:
    """An app with what it is made of."""

    app: FastAPI
    store: DocumentStore | None
    user_files: UserFiles
    batches: BatchRunner


def make_stored_app(
    folder: Path,
    engine: FakeEngine,
    *,
    place: str = "memory",
    max_bytes: int = 2**24,
    num_places: int = 2,
    schedule: dict[str, int] | None = None,
    **server: Any,
) -> StoredApp:
    """The app; its model is called tiny. Nothing is kept where `place` is off."""
    if not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True)
    service = make_service(folder, engine, **(schedule or {}))
    store = None if place == "off" else DocumentStore(place, max_bytes=max_bytes, ttl_s=3600.0)
    user_files = UserFiles(store)
    batches = BatchRunner(user_files)
    cards = [card_of(model) for model in service.models.values()]
    routers = [llm_router(service), files_router(user_files), batches_router(batches)]
    config = Config(
        server=ServerOptions(**server), store=StoreOptions(batch_concurrency=num_places)
    )
    app = create_app(config, engine, routers, cards)
    app.state.user_files = user_files
    batches.serve(app)
    return StoredApp(app, store, user_files, batches)


@asynccontextmanager
async def running(made: StoredApp) -> AsyncIterator[StoredApp]:
    """The app from its start to its end, on this loop."""
    await made.batches.start()
    try:
        yield made
    finally:
        await made.batches.close()
        if made.store is not None:
            await made.store.close()


def chat_line(custom_id: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A line of a batch that asks for a chat."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": PATH, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    """A file of lines, those that are text as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    return "".join(f"{text}\n" for text in texts).encode()

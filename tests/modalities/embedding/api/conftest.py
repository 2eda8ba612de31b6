"""A server of tiny models with real weights, at every route for vectors."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from support.embedding_models import save, save_cross_encoder, write
from support.http import live
from triptych.core.http.app import create_app
from triptych.core.http.models import Task
from triptych.core.options.config import Config, DeviceOptions
from triptych.core.runtime.devices.device import open_device
from triptych.modalities.embedding.api.cohere import cohere_router
from triptych.modalities.embedding.api.routes import embedding_cards, embeddings_router
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.tei import tei_router
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.embedding.modality import EMBEDDING
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient


@pytest.fixture(scope="package")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of it: `tiny` makes vectors, of length one, `judge` scores pairs."""
    folder = tmp_path_factory.mktemp("models")
    judge, _ = save_cross_encoder(folder / "judge")
    tiny = save(folder / "tiny", pooling_mode_mean_tokens=True)
    write(folder / "tiny" / "config_sentence_transformers.json", {"prompts": {"query": "w9 w8 "}})
    config = Config(device=DeviceOptions(device="cpu"))
    device, ledger = open_device(config.device)
    loaders = [open_embedding_loader(each, config, device, ledger) for each in (tiny, judge)]
    client = LocalClient(EngineCore(loaders, config=config, ledger=ledger))
    opened = [EmbeddingModel.open(each, config.models) for each in (tiny, judge)]
    service = EmbeddingService.from_config(config, opened, client)
    routers = [make(service) for make in (score_router, cohere_router, tei_router)]
    tasks = [Task(*EMBEDDING.task), *(Task(*task) for task in EMBEDDING.more_tasks)]
    routers.append(embeddings_router(service))
    app = create_app(config, client, routers, embedding_cards(service), tasks)
    with live(app) as server, httpx.Client(base_url=server.url) as asked:
        yield asked

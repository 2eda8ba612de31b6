"""Embeddings from Python: load a model, call it.

Owns the `EmbeddingPipeline` object: the same engine and service as the server, in this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from triptych.core.client import EngineClient
from triptych.core.config import Config
from triptych.core.errors import UnsupportedOption
from triptych.core.option import Role
from triptych.core.weights.resolve import ResolvedModel, Source
from triptych.modalities.llm.embedding.service import EmbedCall, EmbeddingService, Floats
from triptych.modalities.llm.embedding.source import MINILM
from triptych.modalities.llm.embedding.text import EmbeddingModel
from triptych.modalities.pipeline import Pipeline
from triptych.schedulers.base import ModelLoader

if TYPE_CHECKING:
    from triptych.core.device import Device
    from triptych.core.ledger import Ledger

BATCH = 1024
"""Texts handed to the engine at a time."""


class EmbeddingPipeline(Pipeline[EmbeddingService]):
    """One model that turns texts into vectors.

    with EmbeddingPipeline.from_pretrained() as embed:
        near, far = embed(["a kitten", "a cat", "stock prices"]) @ embed("a pet").T
    """

    _embedded: ClassVar[str] = MINILM.name
    _role: ClassVar[Role] = "embedding"
    _sources: ClassVar[Sequence[Source]] = (MINILM,)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], EmbeddingService]:
        model = EmbeddingModel.open(resolved, config.models)
        return lambda client: EmbeddingService.from_config(config, [model], client)

    @classmethod
    def _open_loader(
        cls, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> ModelLoader:
        from triptych.modalities.llm.embedding.loader import open_embedding_loader

        if not config.models.pool_embeddings:
            raise UnsupportedOption("EmbeddingPipeline pools: vectors per token come over HTTP.")
        return open_embedding_loader(resolved, config, device, ledger)

    @property
    def num_dimensions(self) -> int:
        """Length of a vector."""
        return self._service.model(self._model).num_dimensions

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        dimensions: int = 0,
        prompt_name: str = "",
        max_tokens: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> Floats:
        """Vectors `[N, D]` of N texts, in their order; see `EmbedCall` for the options.

        `on_progress` hears how many texts are done. Raises `RequestError`s.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        vectors: list[Floats] = []
        for first in range(0, len(texts), BATCH):
            call = EmbedCall(
                model=self._model,
                call_id=uuid.uuid4().hex,
                texts=texts[first : first + BATCH],
                dimensions=dimensions,
                prompt_name=prompt_name,
                max_tokens=max_tokens,
            )
            vectors += self._loop.run(self._service.embed(call)).vectors
            if on_progress is not None:
                on_progress(len(vectors))
        return np.stack(vectors) if vectors else np.zeros((0, self.num_dimensions), np.float32)

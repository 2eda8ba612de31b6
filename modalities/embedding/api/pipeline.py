"""The Python interface for embeddings.

Owns the `EmbeddingPipeline`: the server's engine and service, in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import InvalidRequest, TriptychError, UnsupportedOption
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.api.service import (
    EmbedCall,
    EmbeddingService,
    Floats,
    ScoreCall,
)
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.modality import EMBEDDING
from triptych.modalities.modality import Modality
from triptych.modalities.pipeline import Pipeline

BATCH = 1024
"""Texts sent to the engine at a time."""
Progress = Callable[[int], None]


class EmbedOptions(TypedDict, total=False):
    """Options of a call, as in `EmbedCall`."""

    dimensions: int
    prompt_name: str
    max_tokens: int


class ScoreOptions(TypedDict, total=False):
    """Options of `EmbeddingPipeline.score`, as in `ScoreCall`."""

    max_tokens: int
    max_document_tokens: int
    has_activation: bool


class EmbeddingPipeline(Pipeline[EmbeddingService]):
    """One model that turns texts into vectors.

    with EmbeddingPipeline.from_pretrained() as embed:
        near, far = embed(["a kitten", "stock prices"]) @ embed("a pet").T

    Every call has an async version that may be awaited on any loop.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (EMBEDDING,)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], EmbeddingService]:
        if not config.models.pool_embeddings:
            raise UnsupportedOption(
                "EmbeddingPipeline always pools: use HTTP for vectors per token."
            )
        model = EmbeddingModel.open(resolved, config.models)
        return lambda client: EmbeddingService.from_config(config, [model], client)

    @property
    def num_dimensions(self) -> int:
        """The length of a vector."""
        return self._service.model(self._model).num_dimensions

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        on_progress: Progress | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Floats:
        """Vectors `[N, D]` of N texts, in order.

        `on_progress` is called on the pipeline's own thread with the number of texts done. Raises
        `RequestError`s.
        """
        return self._loop.run(self._embed(texts, options, on_progress))

    async def acall(self, texts: str | Sequence[str], **options: Unpack[EmbedOptions]) -> Floats:
        """Async version of calling the pipeline."""
        return await self._loop.run_async(self._embed(texts, options))

    def score(
        self, query: str | Sequence[str], documents: Sequence[str], **options: Unpack[ScoreOptions]
    ) -> list[float]:
        """How well each of N documents answers a query, in the order of the documents.

        N queries are compared with one document each. The scores of a reranker are between 0 and 1,
        those of other models are cosines.
        """
        return self._loop.run(self._score(query, documents, options))

    async def ascore(
        self, query: str | Sequence[str], documents: Sequence[str], **options: Unpack[ScoreOptions]
    ) -> list[float]:
        """Async version of `score`."""
        return await self._loop.run_async(self._score(query, documents, options))

    def map(
        self, entries: Iterable[Mapping[str, Any]], *, num_in_flight: int = 8
    ) -> Iterator[Floats | TriptychError]:
        """The vectors of many entries, in order, `num_in_flight` at a time.

        An entry holds `texts` (one or several) and options of a call; a `model` must be this one.
        An entry that fails yields its error and does not affect the others.
        """

        def embed(entry: Mapping[str, Any]) -> Coroutine[Any, Any, Floats]:
            own = ("texts", "model")
            options: Any = {name: value for name, value in entry.items() if name not in own}
            return self._embed(entry.get("texts", ()), options, model=entry.get("model"))

        return self._map_entries(embed, entries, min(num_in_flight, self._service.max_jobs))

    async def _score(
        self, query: str | Sequence[str], documents: Sequence[str], options: ScoreOptions
    ) -> list[float]:
        queries = [query] if isinstance(query, str) else list(query)
        if isinstance(documents, str) or len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                "score takes one query and a list of documents, or as many queries as documents.",
                param="documents",
            )
        call = ScoreCall(model=self._model, queries=queries, documents=documents, **options)
        return list((await self._service.score(call)).scores)

    async def _embed(
        self,
        texts: str | Sequence[str],
        options: EmbedOptions,
        on_progress: Progress | None = None,
        model: str | None = None,
    ) -> Floats:
        self._check_model(model)
        texts = [texts] if isinstance(texts, str) else list(texts)
        vectors: list[Floats] = []
        for first in range(0, len(texts), BATCH):
            part = texts[first : first + BATCH]
            call = EmbedCall(model=self._model, inputs=part, **options)
            vectors += (await self._service.embed(call)).vectors
            if on_progress is not None:
                on_progress(len(vectors))
        return np.stack(vectors) if vectors else np.zeros((0, self.num_dimensions), np.float32)

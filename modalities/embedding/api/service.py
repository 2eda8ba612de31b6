"""Embeddings and scores of documents, for HTTP routes, the command line and the Python pipeline.

Owns the steps of a call: tokenizing, admission, engine jobs, then truncating and normalizing
vectors, or comparing them. Knows nothing of HTTP or torch.

Shape suffixes: N texts, T tokens of a text, D dimensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import structs

from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InvalidRequest, RequestError, UnknownModel, UnsupportedOption
from triptych.core.options.config import Config
from triptych.core.text.threads import on_text_thread
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.kinds import ModelKind
from triptych.modalities.embedding.wire import EmbedRequest
from triptych.modalities.service import ModelService
from triptych.schedulers.admission import Admission

Floats = npt.NDArray[np.float32]
TextIds = tuple[int, ...]
TextOrIds = str | Sequence[int]
_MAX_TOGETHER = 64  # texts of one call that a decoder reads at a time
_STATE = SamplingParams(max_tokens=1, returns_state=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedCall:
    """One call: texts, or their token ids. `dimensions` 0 keeps all of them.

    `max_tokens`, `keeps_end` and `prompt_name` as in `EmbeddingModel.encode`; they only apply to
    texts. `normalizes` selects unit vectors; `None`: as the model defines.
    """

    model: str
    inputs: Sequence[TextOrIds]
    dimensions: int = 0
    prompt_name: str = ""
    max_tokens: int = 0
    keeps_end: bool = False
    normalizes: bool | None = None
    caller: Caller = field(default_factory=Caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """Queries and documents to compare, in pairs. A single query is compared with all documents.

    `max_tokens` and `keeps_end` as in `EmbeddingModel.encode` or `encode_pairs`; documents are
    first truncated to `max_document_tokens`, 0: not at all. Without `has_activation` a
    cross-encoder's scores are its logits, before the sigmoid. `instruction` is for models that
    judge by a prompt. Errors about texts name the field `param`.
    """

    model: str
    queries: Sequence[str]
    documents: Sequence[str]
    max_tokens: int = 0
    max_document_tokens: int = 0
    keeps_end: bool = False
    has_activation: bool = True
    instruction: str = ""
    param: str = "documents"
    caller: Caller = field(default_factory=Caller)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each document with its query."""
        queries = [*self.queries] * (len(self.documents) if len(self.queries) == 1 else 1)
        return list(zip(queries, self.documents, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """The scores in the order of the documents."""

    scores: Sequence[float]
    num_tokens: int

    @property
    def ranking(self) -> list[tuple[int, float]]:
        """The indices of the documents with their scores, the best first."""
        return sorted(enumerate(self.scores), key=lambda entry: -entry[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbedResult:
    """The vectors in the order of the texts: `[D]` each, or `[T, D]` without pooling."""

    vectors: Sequence[Floats]
    num_tokens: int


class EmbeddingService(ModelService[EmbeddingModel]):
    """Serves embeddings from an engine client. Without `pools` there is a vector per token."""

    kind = "embedding model"

    def __init__(
        self,
        client: EngineClient,
        models: Sequence[EmbeddingModel],
        admission: Admission,
        *,
        pools: bool = True,
    ) -> None:
        super().__init__(client, models, admission)
        self._pools = pools

    @property
    def pools(self) -> bool:
        """Whether a text has one vector instead of one per token."""
        return self._pools

    @classmethod
    def from_config(
        cls,
        config: Config,
        models: Sequence[EmbeddingModel],
        client: EngineClient,
        *,
        admission: Admission | None = None,
    ) -> Self:
        """The service of `models` with the bounds of a configuration."""
        admission = admission or Admission(options=config.schedule)
        return cls(client, models, admission, pools=config.models.pool_embeddings)

    async def embed(self, call: EmbedCall) -> EmbedResult:
        """Embed the texts of a call. Cancelling it ends the work. Raises `TriptychError`s."""
        model = self.model(call.model)
        if model.scores_pairs:
            able = [each.name for each in self.models.values() if not each.scores_pairs]
            raise UnknownModel.among(able, call.model, self.kind)
        self._check(model, call)
        ids = await on_text_thread(sum(map(len, call.inputs)), _token_ids, model, call)
        num_tokens = sum(map(len, ids))
        call.caller.record.add_prompt(call.model, num_tokens)
        num_jobs = min(len(ids), _MAX_TOGETHER) if model.is_causal else 1
        key = call.caller.principal.key
        with self._admission.admit(key=key, num_jobs=num_jobs, num_tokens=num_tokens):
            if model.is_causal:
                given = await self._run_decoder(call, ids, _STATE)
            else:
                given = await self._run_encoder(call, ids)
        vectors = [self._read(data, model, call) for data in given]
        return EmbedResult(vectors=vectors, num_tokens=num_tokens)

    async def score(self, call: ScoreCall) -> ScoreResult:
        """Score documents for queries: by a cross-encoder, or by the cosine of vectors.

        Cancelling it ends the work. Raises `TriptychError`s.
        """
        model = self.model(call.model)
        try:
            if call.instruction and model.kind is not ModelKind.JUDGE:
                raise UnsupportedOption(
                    f"{call.model} takes no instruction: put it before the query.",
                    param="instruction",
                )
            if model.kind is ModelKind.JUDGE:
                return await self._judge_pairs(model, call)
            return await (
                self._score_pairs(model, call)
                if model.is_cross_encoder
                else self._score_cosine(model, call)
            )
        except RequestError as error:
            error.param = call.param if error.param == "input" else error.param
            raise

    async def _score_pairs(self, model: EmbeddingModel, call: ScoreCall) -> ScoreResult:
        pairs = await on_text_thread(
            sum(map(len, (*call.queries, *call.documents))),
            model.encode_pairs,
            call.pairs,
            max_tokens=call.max_tokens,
            max_document_tokens=call.max_document_tokens,
            keeps_end=call.keeps_end,
        )
        num_tokens = sum(map(len, pairs.token_ids))
        call.caller.record.add_prompt(call.model, num_tokens)
        key = call.caller.principal.key
        with self._admission.admit(key=key, num_jobs=1, num_tokens=num_tokens):
            request = EmbedRequest(
                texts=pairs.token_ids,
                second_starts=pairs.second_starts,
                tenant=call.caller.principal.tenant,
            )
            deltas = await self._run(call, request, call.caller.call_id)
        given = b"".join(delta.vectors for delta in deltas)
        scores = np.frombuffer(given, "<f4").astype(np.float64)
        has_sigmoid = call.has_activation and model.has_sigmoid
        return ScoreResult(scores=_scores(scores, has_sigmoid), num_tokens=num_tokens)

    async def _judge_pairs(self, model: EmbeddingModel, call: ScoreCall) -> ScoreResult:
        """The scores of "yes" less those of "no", after a prompt that asks for one of them."""
        if call.max_tokens:
            raise UnsupportedOption(
                f"The prompts of {call.model} are not truncated: set max_tokens_per_doc.",
                param="truncate_prompt_tokens",
            )
        ids = await on_text_thread(
            sum(map(len, (*call.queries, *call.documents))),
            model.encode_judged,
            call.pairs,
            call.instruction,
            max_document_tokens=call.max_document_tokens,
        )
        num_tokens = sum(map(len, ids))
        call.caller.record.add_prompt(call.model, num_tokens)
        key, num_jobs = call.caller.principal.key, min(len(ids), _MAX_TOGETHER)
        with self._admission.admit(key=key, num_jobs=num_jobs, num_tokens=num_tokens):
            sampling = structs.replace(_STATE, state_token_ids=model.judge.answers)
            given = await self._run_decoder(call, ids, sampling)
        yes_N, no_N = np.frombuffer(b"".join(given), "<f4").astype(np.float64).reshape(-1, 2).T
        return ScoreResult(scores=_scores(yes_N - no_N, call.has_activation), num_tokens=num_tokens)

    async def _score_cosine(self, model: EmbeddingModel, call: ScoreCall) -> ScoreResult:
        if not self._pools:
            raise UnsupportedOption(
                "With --no-pool-embeddings texts cannot be compared: each has many vectors."
            )
        if not call.has_activation:
            raise UnsupportedOption(
                "use_activation is for cross-encoders; the cosine of two vectors has none.",
                param="use_activation",
            )
        queries = await self.embed(_side(call, "queries", call.max_tokens))
        is_cut = 0 < call.max_document_tokens <= model.max_length
        most = call.max_document_tokens if is_cut else call.max_tokens
        documents = await self.embed(_side(call, "documents", most))
        first_ND, second_ND = (
            np.asarray(side.vectors, np.float64) for side in (queries, documents)
        )
        lengths = np.linalg.norm(first_ND, axis=-1) * np.linalg.norm(second_ND, axis=-1)
        scores = np.sum(first_ND * second_ND, axis=-1) / np.maximum(lengths, 1e-12)
        scores = np.clip(scores, -1.0, 1.0)  # rounding may exceed 1 for equal texts
        return ScoreResult(
            scores=scores.tolist(), num_tokens=queries.num_tokens + documents.num_tokens
        )

    async def _run_encoder(self, call: EmbedCall, ids: Sequence[TextIds]) -> list[bytes]:
        """The vectors of all texts, from one job."""
        request = EmbedRequest(texts=tuple(ids), tenant=call.caller.principal.tenant)
        deltas = await self._run(call, request, call.caller.call_id)
        return [delta.vectors for delta in deltas if delta.vectors]

    async def _run_decoder(
        self, call: EmbedCall | ScoreCall, ids: Sequence[TextIds], sampling: SamplingParams
    ) -> list[bytes]:
        """The last states of all texts: one job per text, whose prefix may be cached."""
        places = asyncio.Semaphore(_MAX_TOGETHER)
        call_id, tenant = call.caller.call_id, call.caller.principal.tenant

        async def ask(index: int) -> bytes:
            request = TokenRequest(prompt_ids=ids[index], sampling=sampling, tenant=tenant)
            async with places:
                deltas = await self._run(call, request, f"{call_id}.{index}")
            return b"".join(delta.state for delta in deltas)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(index)) for index in range(len(ids))]
        except BaseExceptionGroup as errors:  # the first error of a text fails the call
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run(self, call: EmbedCall | ScoreCall, request: Any, job_id: str) -> list[Any]:
        """The deltas of a job."""
        caller = call.caller
        outputs = self.client.submit(
            call.model,
            request,
            job_id=job_id,
            deadline_s=caller.deadline_s,
            client=caller.client,
        )
        async with aclosing(outputs) as stream:
            return [output.payload async for output in stream if output.payload is not None]

    def _check(self, model: EmbeddingModel, call: EmbedCall) -> None:
        dimensions = call.dimensions
        if model.is_causal and not self._pools:
            raise UnsupportedOption(
                "Decoders do not return vectors per token: pool them, or use an encoder."
            )
        if dimensions > model.num_dimensions:
            raise InvalidRequest(
                f"dimensions is {dimensions}; {model.name} has {model.num_dimensions}.",
                param="dimensions",
            )
        if dimensions and not self._pools:
            raise UnsupportedOption(
                "dimensions is not offered with --no-pool-embeddings: omit it.",
                param="dimensions",
            )
        if call.normalizes is False and model.normalizes and not model.is_causal:
            raise UnsupportedOption(
                f"The vectors of {model.name} have length one by its last layer: omit normalize.",
                param="normalize",
            )

    def _read(self, data: bytes, model: EmbeddingModel, call: EmbedCall) -> Floats:
        vectors = np.frombuffer(data, "<f4").astype(np.float32)
        if not self._pools:
            return vectors.reshape(-1, model.num_dimensions)
        is_shortened = 0 < call.dimensions < model.num_dimensions
        if is_shortened:
            vectors = vectors[: call.dimensions]
        normalizes = model.normalizes if call.normalizes is None else call.normalizes
        # Decoder states and shortened vectors are not normalized by the model.
        is_done = model.normalizes and not (is_shortened or model.is_causal)
        if normalizes and not is_done:
            vectors = vectors / max(float(np.linalg.norm(vectors)), 1e-12)
        return vectors


def _scores(logits_N: npt.NDArray[np.float64], has_sigmoid: bool) -> list[float]:
    scores_N = 1 / (1 + np.exp(-logits_N)) if has_sigmoid else logits_N
    return [float(score) for score in scores_N]


def _side(call: ScoreCall, name: str, max_tokens: int) -> EmbedCall:
    """A separate call for the queries or the documents of a call."""
    caller = replace(call.caller, call_id=f"{call.caller.call_id}.{name}")
    texts: Sequence[str] = getattr(call, name)
    return EmbedCall(
        model=call.model,
        inputs=texts,
        max_tokens=max_tokens,
        keeps_end=call.keeps_end,
        caller=caller,
    )


def _token_ids(model: EmbeddingModel, call: EmbedCall) -> tuple[TextIds, ...]:
    """The token ids of every input, in order."""
    texts = [each for each in call.inputs if isinstance(each, str)]
    encoded = iter(
        model.encode(
            texts,
            prompt_name=call.prompt_name,
            max_tokens=call.max_tokens,
            keeps_end=call.keeps_end,
        )
        if texts
        else ()
    )
    return tuple(
        next(encoded) if isinstance(each, str) else model.check(each) for each in call.inputs
    )

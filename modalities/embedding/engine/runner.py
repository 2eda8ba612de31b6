"""Running an encoder on texts, and turning their states into vectors.

Owns pooling, the projections after it and the copy to the host. The scheduler decides which texts
share a step; `encoder.py` has the network. Implements
`core.runtime.engine.staged_runner.StagedModel`: a text is a unit of one stage.

Shape suffixes: T tokens of a text, N texts, C hidden, D dimensions of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import NonFinite, WeightsError
from triptych.core.runtime.engine.staged_runner import Yield
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.modalities.embedding.pooling import PoolingSpec
from triptych.modalities.embedding.wire import EmbedDelta, EmbedRequest

STAGE = "embed"
PROJECTIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}


@dataclass(slots=True)
class TextWork:
    """One running text (`core.runtime.engine.staged_runner.Work`)."""

    index: int
    token_ids: tuple[int, ...]
    second_start: int
    is_done: bool = False

    @property
    def next_stage(self) -> Stage | None:
        """Its only stage; `None` when that is over."""
        return None if self.is_done else Stage(STAGE, len(self.token_ids))


class StateEncoder(Protocol):
    """An encoder, as `packed_texts.PackedEncoder`."""

    def __call__(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] = ()
    ) -> list[Tensor]:
        """The states of each text's tokens, `[T, C]`, in the order of the texts."""


class Embedder:
    """An encoder with pooling and projections. Without `pools` a text yields a vector per token."""

    def __init__(
        self, encoder: StateEncoder, spec: PoolingSpec, dense: nn.Module, *, pools: bool = True
    ) -> None:
        self._encoder = encoder
        self._spec = spec
        self._dense = dense
        self._pools = pools

    def begin(self, request: EmbedRequest, unit: int) -> TextWork:
        """Start the work on one text."""
        text = request.texts[unit]
        second_start = request.second_starts[unit] if request.second_starts else len(text)
        return TextWork(unit, text, second_start)

    def advance(self, works: Sequence[TextWork]) -> Sequence[Yield]:
        """Embed all texts in one forward pass."""
        states = self._encoder(
            [work.token_ids for work in works], [work.second_start for work in works]
        )
        if self._pools:
            vectors_ND = self._vectors(torch.stack([self._pool(state) for state in states]))
            fetch = _Fetch(list(vectors_ND))
        else:
            fetch = _Fetch([self._vectors(state.float()) for state in states])
        for work in works:
            work.is_done = True
        return [fetch.of(row, work.index) for row, work in enumerate(works)]

    def _pool(self, states_TC: Tensor) -> Tensor:
        """A text's pooled state `[C]` in float32."""
        match self._spec.mode:
            case "cls":
                return states_TC[0].float()
            case "last":
                return states_TC[-1].float()
            case "max":
                return states_TC.float().amax(0)
            case "mean":
                return states_TC.float().mean(0)
            case "mean_sqrt":
                return states_TC.float().sum(0) / float(len(states_TC) ** 0.5)
            case "mean_weighted":
                weights_T1 = torch.arange(1.0, len(states_TC) + 1, device=states_TC.device)[:, None]
                return (states_TC.float() * weights_T1).sum(0) / weights_T1.sum()

    def _vectors(self, pooled_NC: Tensor) -> Tensor:
        vectors_ND: Tensor = self._dense(pooled_NC)
        normed_ND: Tensor = nn.functional.normalize(vectors_ND, dim=-1)
        return normed_ND if self._spec.normalizes else vectors_ND


class _Fetch:
    """The vectors of a step, copied to the host together."""

    def __init__(self, vectors: list[Tensor]) -> None:
        self._sizes = [vector.numel() for vector in vectors]
        self._flat = HostCopy(torch.cat([vector.flatten() for vector in vectors]))

    def of(self, row: int, text: int) -> Callable[[], EmbedDelta]:
        """A call that waits for the device and returns the delta of a row."""

        def fetch() -> EmbedDelta:
            vector = self._flat.get().split(self._sizes)[row]
            if not vector.isfinite().all():
                raise NonFinite("The model's vector holds values that are not finite.")
            return EmbedDelta(text=text, vectors=vector.numpy().astype("<f4").tobytes())

        return fetch


def load_dense(folder: Path, spec: PoolingSpec, device: torch.device) -> nn.Module:
    """The projections after pooling, in float32. Raises `WeightsError` if damaged."""
    layers: list[nn.Module] = []
    for place in spec.dense:
        with Checkpoint.open(folder / place) as checkpoint:
            config = checkpoint.config
            if config.get("use_residual"):
                raise WeightsError("A projection adds its input, which is not supported.")
            linear = nn.Linear(
                int(config["in_features"]),
                int(config["out_features"]),
                bool(config.get("bias", True)),
                device=device,
            )
            targets = [TensorTarget(f"linear.{n}", value) for n, value in linear.named_parameters()]
            load_tensors(checkpoint, targets)
        name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        if name not in PROJECTIONS:
            raise WeightsError(f"The projection's activation {name[:40]!r} is not supported.")
        layers += [linear.requires_grad_(False), PROJECTIONS[name]()]
    return nn.Sequential(*layers)

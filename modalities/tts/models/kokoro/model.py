"""Kokoro as a whole: sentences of phonemes in, samples out, several at once.

Owns batching and what of a sentence is drawn from its seed. Knows nothing of files, text or HTTP.
Every sentence is one piece: norms and recurrences run over all of it, so the first sample needs
the last phoneme, and streaming goes sentence by sentence.

Legend: B rows, T tokens, F frames, S samples, C channels, Y the two style vectors together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from triptych.core.errors import InvalidRequest, NonFinite
from triptych.modalities.tts.models.kokoro.config import (
    BOUNDARY_ID,
    SAMPLE_RATE,
    KokoroConfig,
)
from triptych.modalities.tts.models.kokoro.decoder import Decoder
from triptych.modalities.tts.models.kokoro.extent import Extent
from triptych.modalities.tts.models.kokoro.prosody import ProsodyPredictor
from triptych.modalities.tts.models.kokoro.source import source_noise
from triptych.modalities.tts.models.kokoro.text import Albert, TextEncoder
from triptych.modalities.tts.models.kokoro.voices import Voices, style_of

MIN_SPEED, MAX_SPEED = 0.25, 4.0
TOKEN_BUCKET, FRAME_BUCKET = 32, 128
MAX_BATCH_TOKENS, MAX_BATCH_FRAMES = 4096, 4096
MAX_FRAMES = 4096
"""The longest sentence, about 100 s: what one row may need of memory is bounded."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One row's request. `style_Y` is its voice's for this length, `seed` draws its noise."""

    phoneme_ids: tuple[int, ...]
    style_Y: Tensor
    speed: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sentence whose timing is known: its features, each held for its token's frames."""

    sentence: Sentence
    features_FC: Tensor
    text_FC: Tensor

    @property
    def num_frames(self) -> int:
        """How long it will be."""
        return len(self.text_FC)


class KokoroModel(nn.Module):
    """The network. Names follow the released checkpoint."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = Albert(config.albert, config.num_tokens)
        self.bert_encoder = nn.Linear(config.albert.hidden_size, config.hidden_size)
        self.predictor = ProsodyPredictor(config)
        self.text_encoder = TextEncoder(config)
        self.decoder = Decoder(config)

    @property
    def samples_per_frame(self) -> int:
        """Samples per decoder frame."""
        return 2 * self.config.generator.samples_per_pitch

    def plan(self, sentences: Sequence[Sentence]) -> list[Plan]:
        """Time sentences in one batch. Raises `InvalidRequest` where one gets too long."""
        device = self.bert_encoder.weight.device
        rows = [(BOUNDARY_ID, *s.phoneme_ids, BOUNDARY_ID) for s in sentences]
        extent = Extent.of([len(row) for row in rows], device)
        ids_BT = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        style_BY = self._styles(sentences)[1]
        hidden_BTC = self.bert_encoder(self.bert(ids_BT, extent))
        features_BTC, frames_BT = self.predictor.durations(hidden_BTC, style_BY, extent)
        speed_B1 = torch.tensor([[s.speed] for s in sentences], device=device)
        frames_BT = (frames_BT / speed_B1).round().clamp(min=1).long()
        text_BTC = self.text_encoder(ids_BT, extent)
        durations = zip(extent.lengths, frames_BT.cpu(), strict=True)
        held = [_hold(frames_T[:length]).to(device) for length, frames_T in durations]
        return [
            Plan(sentence=s, features_FC=features_TC[index_F], text_FC=text_TC[index_F])
            for s, index_F, features_TC, text_TC in zip(
                sentences, held, features_BTC, text_BTC, strict=True
            )
        ]

    def render(self, plans: Sequence[Plan], noise_BSH: Tensor) -> list[Tensor]:
        """The samples [S] of timed sentences, in one batch. `noise_BSH` is standard normal."""
        device = self.bert_encoder.weight.device
        extent = Extent.of([plan.num_frames for plan in plans], device)
        timbre_BY, prosody_BY = self._styles([plan.sentence for plan in plans])
        features_BFC = pad_sequence([plan.features_FC for plan in plans], batch_first=True)
        text_BFC = pad_sequence([plan.text_FC for plan in plans], batch_first=True)
        curves = self.predictor.curves(features_BFC, prosody_BY, extent)
        pcm_BS = self.decoder(text_BFC.transpose(1, 2), curves, noise_BSH, timbre_BY, extent)
        num_samples = extent.stretched(self.samples_per_frame).lengths
        return [pcm_S[:length] for pcm_S, length in zip(pcm_BS, num_samples, strict=True)]

    def noise(self, plans: Sequence[Plan]) -> Tensor:
        """Each sentence's own noise [B, S, H], padded."""
        rows = [source_noise(p.sentence.seed, p.num_frames * self.samples_per_frame) for p in plans]
        return pad_sequence(rows, batch_first=True).to(self.bert_encoder.weight.device)

    def _styles(self, sentences: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
        """Timbre and prosody, both [B, style size]."""
        style_BY = torch.stack([s.style_Y for s in sentences])
        timbre_BY, prosody_BY = style_BY.to(self.bert_encoder.weight).chunk(2, dim=-1)
        return timbre_BY, prosody_BY


@dataclass(frozen=True, slots=True, kw_only=True)
class Kokoro:
    """A loaded model with its voices.

    A row's samples depend on its own sentence alone, up to the rounding of batched arithmetic.
    """

    config: KokoroConfig
    model: KokoroModel
    voices: Voices
    sample_rate: int = SAMPLE_RATE

    def sentence(
        self, phoneme_ids: Sequence[int], voice: str, *, speed: float = 1.0, seed: int = 0
    ) -> Sentence:
        """A checked request. Raises `InvalidRequest` or `ContextLengthExceeded`."""
        ids = tuple(phoneme_ids)
        self.config.check_ids(ids)
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(
                f"The speed must lie between {MIN_SPEED} and {MAX_SPEED}.", param="speed"
            )
        style_Y = style_of(self.voices.table(voice), len(ids))
        return Sentence(phoneme_ids=ids, style_Y=style_Y, speed=speed, seed=seed)

    def synthesize(
        self, phoneme_ids: Sequence[int], voice: str, *, speed: float = 1.0, seed: int = 0
    ) -> Tensor:
        """One sentence's samples [S] at 24 kHz, on the CPU. Raises as `sentence` does."""
        return self.synthesize_batch((self.sentence(phoneme_ids, voice, speed=speed, seed=seed),))[
            0
        ]

    @torch.inference_mode()
    def synthesize_batch(self, sentences: Sequence[Sentence]) -> list[Tensor]:
        """The samples [S] of every sentence, in order.

        Sentences of like lengths share a batch: first by tokens, then, once timed, by frames.
        Raises `NonFinite` when the network's output is no audio.
        """
        plans = _in_batches(sentences, _num_tokens, self.model.plan, TOKEN_BUCKET, MAX_BATCH_TOKENS)
        return _in_batches(plans, _num_frames, self._render, FRAME_BUCKET, MAX_BATCH_FRAMES)

    def _render(self, plans: Sequence[Plan]) -> list[Tensor]:
        rows = [pcm_S.cpu() for pcm_S in self.model.render(plans, self.model.noise(plans))]
        if not all(bool(pcm_S.isfinite().all()) for pcm_S in rows):
            raise NonFinite("The speech model gave something that is no audio.")
        return rows


def _num_tokens(sentence: Sentence) -> int:
    return len(sentence.phoneme_ids) + 2


def _num_frames(plan: Plan) -> int:
    return plan.num_frames


def _hold(frames_T: Tensor) -> Tensor:
    """For every frame, the token it belongs to [F]."""
    num_frames = int(frames_T.sum())
    if num_frames > MAX_FRAMES:
        raise InvalidRequest(
            f"A sentence of {num_frames} frames is too long (at most {MAX_FRAMES}); split it, or"
            " speak faster."
        )
    return torch.repeat_interleave(frames_T)


def _in_batches(
    items: Sequence[Item],
    size_of: Callable[[Item], int],
    run: Callable[[Sequence[Item]], list[Result]],
    bucket: int,
    budget: int,
) -> list[Result]:
    """`run` over batches of items of like size, its results in the items' order."""
    results: dict[int, Result] = {}
    for batch in _batches([size_of(item) for item in items], bucket, budget):
        results.update(zip(batch, run([items[index] for index in batch]), strict=True))
    return [results[index] for index in range(len(items))]


def _batches(sizes: Sequence[int], bucket: int, budget: int) -> Iterator[list[int]]:
    """Indices of `sizes` that share a bucket, as many at once as `budget` holds when padded."""
    order = sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True)
    batch: list[int] = []
    for index in order:
        is_like = batch and sizes[index] // bucket == sizes[batch[0]] // bucket
        if batch and not (is_like and (len(batch) + 1) * sizes[batch[0]] <= budget):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

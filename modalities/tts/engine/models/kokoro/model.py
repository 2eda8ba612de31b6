"""The whole Kokoro model: sentences of phonemes in, samples out, several at once.

Owns batching: sentences are planned one by one, and their sound is decoded in buckets of length.
Knows nothing of files, text or HTTP. A sentence cannot be streamed in part: norms and recurrences
run over all of it, so the first sample needs the last phoneme.

Legend: B rows, T tokens, F frames, P pitch values, S samples, C channels, Y style vectors, K and N
frequencies and spectra.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from triptych.core.errors import InvalidRequest, NonFinite
from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.tts.configs.kokoro import BOUNDARY_ID, SAMPLE_RATE, KokoroConfig
from triptych.modalities.tts.configs.mixture import parse_mixture
from triptych.modalities.tts.engine.models.kokoro.encoders import (
    Albert,
    PhonemeEncoder,
    ProsodyPredictor,
)
from triptych.modalities.tts.engine.models.kokoro.istftnet import KokoroDecoder, source_noise
from triptych.modalities.tts.engine.models.kokoro.layers import AWAIT, LengthMask, Sliced, gmacs

MIN_SPEED, MAX_SPEED = 0.25, 4.0
FRAME_BUCKET = 128
MAX_BATCH_FRAMES = 4096
MAX_FRAMES = 4096
"""The longest sentence, about 100 s; it bounds the memory of a row."""

Noise = Callable[[int, int], Tensor]
"""Standard normal noise [S, H] for a seed and a number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceRequest:
    """One row's request. `style_Y` is its voice's style for this length, `seed` keys its noise."""

    phoneme_ids: tuple[int, ...]
    style_Y: Tensor
    speed: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProsodyPlan:
    """A sentence with its timing and pitch, before its sound is generated.

    Holds phoneme features for every frame, pitch and energy, and the source's spectra. `durations`
    are the frames of each token, boundaries included.
    """

    durations: tuple[int, ...]
    timbre_Y: Tensor
    text_FC: Tensor
    pitch_P: Tensor
    energy_P: Tensor
    source_KN: Tensor

    @property
    def num_frames(self) -> int:
        """The number of decoder frames."""
        return len(self.text_FC)


class KokoroModel(nn.Module):
    """The network. Names follow the released checkpoint."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = Albert(config.albert, config.num_tokens)
        self.bert_encoder = nn.Linear(config.albert.hidden_size, config.hidden_size)
        self.predictor = ProsodyPredictor(config)
        self.text_encoder = PhonemeEncoder(config)
        self.decoder = KokoroDecoder(config)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.bert_encoder.weight.device

    def plan(self, sentence: SentenceRequest, noise: Noise = source_noise) -> Sliced[ProsodyPlan]:
        """Compute a sentence's timing and pitch. Raises `InvalidRequest` if it gets too long.

        Never batched, and a tenth of the work at most: durations are rounded and phases wrap, so
        that a batch's different rounding of the last bit would sometimes be audible.
        """
        ids = (BOUNDARY_ID, *sentence.phoneme_ids, BOUNDARY_ID)
        ids_1T = to_device(torch.tensor([ids]), self.device)
        style_Y = to_device_like(sentence.style_Y, self.bert_encoder.weight)
        timbre_1Y, prosody_1Y = style_Y[None].chunk(2, dim=-1)
        hidden_1TC = self.bert_encoder((yield from self.bert(ids_1T)))
        yield gmacs(self.predictor.text_encoder, ids_1T[:, None])
        features_1TC, frames_1T = self.predictor.durations(hidden_1TC, prosody_1Y)
        frames_T = (frames_1T[0] / sentence.speed).round().clamp(min=1).long()
        copied = HostCopy(frames_T)
        yield AWAIT
        durations = tuple(copied.get().tolist())
        num_frames = sum(durations)
        if num_frames > MAX_FRAMES:
            raise InvalidRequest(
                f"A sentence of {num_frames} frames is too long (at most {MAX_FRAMES}); split it,"
                " or speak faster."
            )
        token_F = torch.repeat_interleave(frames_T, output_size=num_frames)
        pitch_1P, energy_1P = yield from self.predictor.curves(features_1TC[:, token_F], prosody_1Y)
        yield gmacs(self.text_encoder, ids_1T[:, None])
        num_samples = pitch_1P.shape[1] * self.config.generator.samples_per_pitch
        noise_SH = to_device_like(noise(sentence.seed, num_samples), pitch_1P)
        return ProsodyPlan(
            durations=durations,
            timbre_Y=timbre_1Y[0],
            text_FC=self.text_encoder(ids_1T)[0, token_F],
            pitch_P=pitch_1P[0],
            energy_P=energy_1P[0],
            source_KN=self.decoder.generator.source(pitch_1P[0], noise_SH),
        )

    def render(self, plans: Sequence[ProsodyPlan]) -> Sliced[list[Tensor]]:
        """The samples [S] of each plan, decoded in one batch."""
        return self.decoder(  # type: ignore[no-any-return]
            _pad([plan.text_FC for plan in plans]).transpose(1, 2),
            (_pad([plan.pitch_P for plan in plans]), _pad([plan.energy_P for plan in plans])),
            _pad([plan.source_KN.T for plan in plans]).transpose(1, 2),
            torch.stack([plan.timbre_Y for plan in plans]),
            LengthMask.of([plan.num_frames for plan in plans], self.device),
        )


class Voices:
    """Named style tables [N, 1, Y] in memory, and mixtures of them."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self._tables = dict(tables)
        self._mixed = lru_cache(maxsize=64)(self._mix)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the voices, in order."""
        return tuple(sorted(self._tables))

    def table(self, voice: str) -> Tensor:
        """The style table [N, 1, Y] of a voice or mixture. Raises `InvalidRequest`."""
        return self._mixed(parse_mixture(voice))

    def _mix(self, mixture: tuple[tuple[str, float], ...]) -> Tensor:
        return torch.stack([self._table(name) * share for name, share in mixture]).sum(0)

    def _table(self, name: str) -> Tensor:
        if name in self._tables:
            return self._tables[name]
        close = difflib.get_close_matches(name, self.names, n=3) or self.names[:5]
        raise InvalidRequest(
            f"Unknown voice {name[:40]!r}; did you mean {', '.join(close)}?", param="voice"
        )


def style_of(table_N1Y: Tensor, num_phonemes: int) -> Tensor:
    """The style vector [Y] for a sentence of `num_phonemes` phonemes."""
    return table_N1Y[min(num_phonemes, len(table_N1Y)) - 1, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kokoro:
    """A loaded model with its voices.

    Sentences of one call share batches. A sentence's samples depend on itself alone: other
    sentences of the batch change them by less than 1e-5, and their number not at all.
    """

    config: KokoroConfig
    model: KokoroModel
    voices: Voices
    sample_rate: int = SAMPLE_RATE

    def sentence(
        self, phoneme_ids: Sequence[int], voice: str, *, speed: float = 1.0, seed: int = 0
    ) -> SentenceRequest:
        """A checked request. Raises `InvalidRequest` or `ContextLengthExceeded`."""
        ids = tuple(phoneme_ids)
        self.config.check_ids(ids)
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(
                f"The speed must be between {MIN_SPEED} and {MAX_SPEED}.", param="speed"
            )
        style_Y = style_of(self.voices.table(voice), len(ids))
        return SentenceRequest(phoneme_ids=ids, style_Y=style_Y, speed=speed, seed=seed)


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of `lengths` in batches: lengths of one bucket, within `budget` when padded."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch:
            longest = lengths[batch[0]]
            is_like = lengths[index] // FRAME_BUCKET == longest // FRAME_BUCKET
            if not is_like or (len(batch) + 1) * longest > budget:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def require_finite(pcm_S: Tensor) -> Tensor:
    """Samples on the host. Raises `NonFinite` if any is not finite."""
    if not bool(pcm_S.isfinite().all()):
        raise NonFinite("The speech model returned samples that are not finite.")
    return pcm_S

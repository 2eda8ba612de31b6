"""Transcribing one recording, stage by stage.

Owns the order of the work (spectrogram, encode, decode, align, the next window), decoding a window
with temperature fallback, and the rules of timestamps after OpenAI's `decoding.py`
(`ApplyTimestampRules`). `windows` has a window's prompt and cut; the scheduler decides when a stage
runs. Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.engine.staged_runner import Yield, advance_each
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.asr.engine.recording import Recording
from triptych.modalities.asr.engine.tokens import (
    ExpectedTokens,
    SeededSampler,
    Writing,
    no_number,
)
from triptych.modalities.asr.engine.whisper.features import LogMel, Spectrogram
from triptych.modalities.asr.engine.whisper.model import (
    WhisperNetwork,
    WhisperWindow,
    token_positions,
)
from triptych.modalities.asr.spec import FRAMES_PER_POSITION, FRAMES_PER_S, WhisperSpec
from triptych.modalities.asr.windows import (
    Attempt,
    TimedSpan,
    TranscriptCursor,
    best_attempt,
    compression_ratio,
    has_words,
    temperatures,
)
from triptych.modalities.asr.wire import (
    TimedTokens,
    TranscribeDelta,
    TranscribeRequest,
    TranscriptToken,
)


class TokenRules:
    """The token rules of one model, with masks on the device."""

    def __init__(self, spec: WhisperSpec, device: torch.device) -> None:
        self._spec = spec
        never = (*spec.suppressed_ids, spec.no_timestamps_id)
        self._never, self._never_first = (
            torch.tensor(ids, dtype=torch.long, device=device)
            for ids in (never, spec.suppressed_first_ids)
        )

    def apply(self, logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Mask the tokens in `logits_V` (float32, in place) that may not follow `token_ids`."""
        logits_V.index_fill_(0, self._never, -torch.inf)
        if token_ids:
            self._continue(logits_V, token_ids)
        else:
            self._begin(logits_V)
        first = self._spec.first_timestamp_id
        is_time = logits_V[first:].logsumexp(0) > logits_V[:first].max()
        # Not an `if`, which would wait for the device.
        logits_V[:first].masked_fill_(is_time, -torch.inf)
        return logits_V

    def _begin(self, logits_V: Tensor) -> None:
        first = self._spec.first_timestamp_id
        logits_V.index_fill_(0, self._never_first, -torch.inf)
        logits_V[:first] = -torch.inf
        if self._spec.max_first_timestamp is not None:
            logits_V[first + self._spec.max_first_timestamp + 1 :] = -torch.inf

    def _continue(self, logits_V: Tensor, token_ids: Sequence[int]) -> None:
        spec = self._spec
        first = spec.first_timestamp_id
        is_after_time = spec.is_timestamp(token_ids[-1])
        is_second = is_after_time and (len(token_ids) < 2 or spec.is_timestamp(token_ids[-2]))
        times = [token_id for token_id in token_ids if spec.is_timestamp(token_id)]
        if is_second:  # a pair, or the window's first timestamp, is complete: text must follow
            logits_V[first:] = -torch.inf
        elif is_after_time:  # half a pair: the other half, or the end
            logits_V[: spec.end_id] = -torch.inf
        if times:
            earliest = times[-1] if is_after_time and not is_second else times[-1] + 1
            logits_V[first:earliest] = -torch.inf


MAX_EXPECTED = 64
"""Expected tokens of a stage: more would delay concurrent chat."""
TOKENS_PER_STAGE = 8
"""Few enough not to delay concurrent chat, many enough to amortize the cost of a stage."""


@dataclass(frozen=True, kw_only=True)
class SpeechRecognizer:
    """Shared by all recordings. Implements `core.runtime.engine.staged_runner.StagedModel`."""

    network: WhisperNetwork
    mel: LogMel
    rules: TokenRules
    tokenizer: Tokenizer

    @classmethod
    def of(cls, network: WhisperNetwork, tokenizer: Tokenizer) -> SpeechRecognizer:
        """The recognizer of a network."""
        return cls(
            network=network,
            mel=LogMel(network.spec, network.device),
            rules=TokenRules(network.spec, network.device),
            tokenizer=tokenizer,
        )

    def begin(self, request: TranscribeRequest, unit: int) -> TranscriptionJob:
        """Start the work on a recording, which is one unit."""
        return TranscriptionJob(self, request)

    def advance(self, works: Sequence[TranscriptionJob]) -> list[Yield]:
        """Run the next stage of each job."""
        return advance_each(TranscriptionJob.advance, works)


class TranscriptionJob(Recording):
    """One running request."""

    def __init__(self, recognizer: SpeechRecognizer, request: TranscribeRequest) -> None:
        self._recognizer = recognizer
        self._spec = recognizer.network.spec
        self._request = request
        pcm_S = np.frombuffer(request.pcm, np.dtype("<f4"))
        self._spectrogram = Spectrogram(recognizer.mel, torch.from_numpy(pcm_S.copy()))
        self._cursor = TranscriptCursor(self._spec, request.prompt_ids)
        self._language = request.language or ("" if self._spec.languages else "en")
        self._sampler = SeededSampler(request.seed)
        self._start()

    def _run(self) -> Iterator[Stage]:
        while not self._spectrogram.is_made:
            yield Stage("listen", self._recognizer.mel.window_frames)
            self._spectrogram.make()
        while not self._is_over:
            yield from self._window()

    @property
    def _is_over(self) -> bool:
        left = self._spectrogram.num_frames - self._cursor.frame
        return left <= 0 or (not self._request.is_last and left < self._spec.window_frames)

    def _window(self) -> Iterator[Stage]:
        start = self._cursor.frame
        num_frames = min(self._spec.window_frames, self._spectrogram.num_frames - start)
        network = self._recognizer.network
        yield Stage("encode", 1)
        hidden_1PD = network.embed(self._spectrogram.window(start))
        for layer in range(self._spec.config.encoder_layers):
            yield Stage("encode", 1)
            hidden_1PD = network.encode(hidden_1PD, layer)
        decoder = WhisperWindow(network, hidden_1PD)
        if not self._language:
            yield Stage("decode", 1)
            self._language = self._detect(decoder)
        attempt = yield from self._decode(decoder)
        spans = self._cursor.take(attempt, num_frames)
        sampled = zip(attempt.token_ids, attempt.logprobs, strict=True)
        tokens = [TranscriptToken(token_id, logprob=logprob) for token_id, logprob in sampled]
        if self._request.has_word_times and spans:
            yield Stage("align", num_frames)
            self._align(decoder, spans, tokens, (start, num_frames))
        self._finish(attempt, spans, tokens, start)

    def _finish(
        self,
        attempt: Attempt,
        spans: tuple[TimedSpan, ...],
        tokens: list[TranscriptToken],
        start: int,
    ) -> None:
        segments = tuple(
            TimedTokens(
                start_s=(start + span.start_frame) / FRAMES_PER_S,
                end_s=(start + span.end_frame) / FRAMES_PER_S,
                tokens=tuple(
                    token
                    for token in tokens[span.start : span.stop]
                    if self._spec.is_text(token.token_id)
                ),
                avg_logprob=attempt.avg_logprob,
                no_speech_prob=attempt.no_speech_prob,
                compression_ratio=attempt.compression_ratio,
                temperature=attempt.temperature,
            )
            for span in spans
        )
        self._delta = TranscribeDelta(
            segments=segments,
            language=self._language,
            heard_s=min(self._cursor.frame, self._spectrogram.num_frames) / FRAMES_PER_S,
            finish_reason="stop" if self._is_over else None,
        )

    def _detect(self, decoder: WhisperWindow) -> str:
        """The likeliest language, from the logits after the start token."""
        logits_V = self._recognizer.network.logits(decoder.feed([self._spec.start_id]))[0]
        decoder.rewind(0)
        codes, ids = zip(*self._spec.languages.items(), strict=True)
        scores = HostCopy(logits_V.index_select(0, to_device(torch.tensor(ids), logits_V.device)))
        language: str = codes[int(scores.get().argmax())]
        return language

    def _decode(self, decoder: WhisperWindow) -> Generator[Stage, None, Attempt]:
        """Try temperatures until a result is good; otherwise return the best."""
        start_ids = self._spec.start_ids(self._language, self._request.task)
        prompt_ids = (*self._cursor.prompt_ids, *start_ids)
        start_at = len(prompt_ids) - len(start_ids)
        yield Stage("decode", TOKENS_PER_STAGE)
        hidden_TD = decoder.feed(prompt_ids)
        ends_2D = torch.stack((hidden_TD[start_at], hidden_TD[-1]))
        logits_TV = self._recognizer.network.logits(ends_2D)
        no_speech = HostCopy(logits_TV[0].softmax(0)[self._spec.no_speech_id])
        no_speech_prob = float(no_speech.get())
        if not math.isfinite(no_speech_prob):
            raise no_number()
        attempts: list[Attempt] = []
        for temperature in temperatures(self._request.temperature):
            decoder.rewind(len(prompt_ids))
            attempt = yield from self._attempt(
                decoder, logits_TV[1].clone(), temperature, len(prompt_ids), no_speech_prob
            )
            if attempt.is_good:
                return attempt
            attempts.append(attempt)
        return best_attempt(attempts)

    def _attempt(
        self,
        decoder: WhisperWindow,
        logits_V: Tensor,
        temperature: float,
        num_prompt_tokens: int,
        no_speech_prob: float,
    ) -> Generator[Stage, None, Attempt]:
        """Sample tokens until the end token or the bound, `TOKENS_PER_STAGE` per stage."""
        spec, shared = self._spec, self._recognizer

        def choose(logits_V: Tensor, token_ids: list[int]) -> tuple[int, float]:
            return self._sampler.sample(shared.rules.apply(logits_V, token_ids), temperature)

        expected = None
        if temperature == 0 and self._cursor.frame == 0:
            expected = ExpectedTokens(
                self._expected_ids(),
                feed=lambda ids: shared.network.logits(decoder.feed(ids)),
                keep=lambda num: decoder.rewind(num_prompt_tokens + num),
            )
        writing = Writing(
            feed=lambda token_id: shared.network.logits(decoder.feed([token_id]))[0],
            choose=choose,
            end_ids=(spec.end_id,),
            max_tokens=min(
                spec.max_new_tokens, spec.config.max_target_positions - num_prompt_tokens
            ),
            tokens_per_stage=TOKENS_PER_STAGE,
            expected=expected,
        )
        written = yield from writing.write(logits_V)
        text = shared.tokenizer.decode([at for at in written.token_ids if spec.is_text(at)]).strip()
        return Attempt(
            token_ids=written.token_ids,
            logprobs=written.logprobs,
            avg_logprob=written.avg_logprob,
            no_speech_prob=no_speech_prob,
            compression_ratio=compression_ratio(text),
            temperature=temperature,
            has_ended=written.has_ended,
            has_words=has_words(text),
        )

    def _expected_ids(self) -> list[int]:
        """The expected segments of a window as they are written, without the end of the last one.

        Later segments, which other windows write, have times without a token.
        """
        ids: list[int] = []
        window_s = self._spec.window_frames / FRAMES_PER_S
        for segment in takewhile(lambda each: each.end_s <= window_s, self._request.expected):
            ids.append(self._spec.timestamp_id(segment.start_s))
            ids.extend(token.token_id for token in segment.tokens)
            ids.append(self._spec.timestamp_id(segment.end_s))
        return ids[: min(MAX_EXPECTED, len(ids) - 1)]

    def _align(
        self,
        decoder: WhisperWindow,
        spans: tuple[TimedSpan, ...],
        tokens: list[TranscriptToken],
        window: tuple[int, int],
    ) -> None:
        """Set the times of every text token of the spans, in place."""
        spec, (start, num_frames) = self._spec, window
        places = [
            at
            for span in spans
            for at in range(span.start, span.stop)
            if spec.is_text(tokens[at].token_id)
        ]
        opening = (*spec.start_ids(self._language, self._request.task), spec.no_timestamps_id)
        token_ids = (*opening, *(tokens[at].token_id for at in places), spec.end_id)
        num_positions = max(num_frames // FRAMES_PER_POSITION, 1)
        attention_HTP = decoder.attention(token_ids, num_positions)
        spoken = slice(len(opening) - 1, -1)
        positions = token_positions(attention_HTP, spoken, spec.config.median_filter_width)
        times = [
            (start + FRAMES_PER_POSITION * int(position)) / FRAMES_PER_S for position in positions
        ]
        for place, start_s, end_s in zip(places, times, times[1:], strict=False):
            token = tokens[place]
            tokens[place] = TranscriptToken(token.token_id, start_s, end_s, token.logprob)

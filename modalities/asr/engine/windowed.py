"""Recognizing a recording window by window, for families on transformers' classes.

Owns the windows' bounds, the segments of their tokens, loading, and the memory bound. A family is a
`window_model.WindowModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import transformers
from msgspec.structs import replace as replace_struct
from tokenizers import Tokenizer

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import WeightsError
from triptych.core.runtime.engine.staged_runner import Yield, advance_each
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.whole import check_complete, load_whole
from triptych.core.text.tokenizer import decode, read_tokenizer
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.asr.engine.blueprint import BlueprintSetup
from triptych.modalities.asr.engine.recording import Recording
from triptych.modalities.asr.engine.tokens import SeededSampler
from triptych.modalities.asr.engine.window_model import Heard, Window, WindowModel
from triptych.modalities.asr.pauses import is_silent, padded, window_end
from triptych.modalities.asr.spec import MAX_PART_S, SAMPLE_RATE
from triptych.modalities.asr.windows import compression_ratio
from triptych.modalities.asr.wire import (
    TimedTokens,
    TranscribeDelta,
    TranscribeRequest,
    TranscriptToken,
)

_FLOAT_BYTES = 4
_POSITIONS_PER_S = 50
"""The most encoder positions per second of the families."""
_SENTENCE_ENDS = (".", "?", "!", "\u3002", "\uff1f", "\uff01")
_WORD_STARTS = ("\u2581", "\u0120", " ")
_PAUSE_S = 1.0


class WindowedBlueprint:
    """Implements `engine.blueprint.RecognizerBlueprint` for a family."""

    def __init__(self, family: type[WindowModel], setup: BlueprintSetup) -> None:
        self._family = family
        self._setup = setup

    def weight_bytes(self) -> int:
        """Bytes that the weights take."""
        tensors = self._setup.checkpoint.tensors.values()
        item_bytes: int = self._setup.dtype.itemsize
        num_values: int = sum(math.prod(each.shape) for each in tensors)
        return num_values * item_bytes

    def recording_bytes(self) -> int:
        """An upper estimate: the samples, a window's layer, its caches and logits."""
        sizes = list(_sizes(self._setup.checkpoint.config))
        width, inner, depth, heads = (max(each) for each in zip(*sizes, strict=True))
        num_positions = round(self._family.max_window_s * _POSITIONS_PER_S)
        layer = num_positions * (8 * width + 2 * inner + 2 * depth * width)
        num_values: int = layer + heads * num_positions * num_positions
        item_bytes: int = self._setup.dtype.itemsize
        return MAX_PART_S * SAMPLE_RATE * _FLOAT_BYTES + num_values * item_bytes

    def build(self, report: Callable[[float], None]) -> WindowedRecognizer:
        """Load the weights with transformers."""
        setup, family = self._setup, self._family
        kind, processor_kind = (
            _library_class(family.network_class),
            _library_class(family.processor_class),
        )
        with library_errors(f"{setup.name}: its processor cannot be read"):
            processor = processor_kind.from_pretrained(
                setup.checkpoint.folder, local_files_only=True, trust_remote_code=False
            )
        with library_errors(f"{setup.name}: its weights are not usable as {kind.__name__}"):
            network, info = load_whole(kind, setup.checkpoint, dtype=setup.dtype)
        check_complete(info, setup.checkpoint)
        network.to(setup.device).eval().requires_grad_(False)
        pack_linears(network, setup.native)
        report(1.0)
        tokenizer = read_tokenizer(setup.checkpoint.folder, setup.name)
        return WindowedRecognizer(family(network, processor, tokenizer), tokenizer)


def _library_class(name: str) -> Any:
    found = getattr(transformers, name, None)
    if found is None:
        raise WeightsError(
            f"The installed transformers {transformers.__version__} has no {name}: install a newer"
            " one."
        )
    return found


def _sizes(config: Any) -> Iterator[list[int]]:
    """Width, inner width, depth and heads, each at least 1, of a config and those inside it."""
    names = (
        ("hidden_size", "d_model", "hidden_dim", "decoder_hidden_size"),
        ("intermediate_size", "encoder_ffn_dim", "ffn_dim"),
        ("num_hidden_layers", "decoder_num_hidden_layers", "num_layers"),
        ("num_attention_heads", "encoder_attention_heads", "num_heads"),
    )
    yield [max(1, *(int(config.get(name) or 0) for name in each)) for each in names]
    for inner in config.values():
        if isinstance(inner, dict):
            yield from _sizes(inner)


@dataclass(frozen=True)
class WindowedRecognizer:
    """Shared by all recordings. Implements `core.runtime.engine.staged_runner.StagedModel`."""

    model: WindowModel
    tokenizer: Tokenizer

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without the spelling of special ones, which would act as such."""
        text = decode(self.tokenizer, token_ids).strip() if token_ids else ""
        for token in self.tokenizer.get_added_tokens_decoder().values():
            text = text.replace(token.content, "")
        return text

    def begin(self, request: TranscribeRequest, unit: int) -> WindowedRecording:
        """Start the work on a recording, which is one unit."""
        return WindowedRecording(self, request)

    def advance(self, works: Sequence[WindowedRecording]) -> list[Yield]:
        """Run the next stage of each recording."""
        return advance_each(WindowedRecording.advance, works)


class WindowedRecording(Recording):
    """One running request."""

    def __init__(self, recognizer: WindowedRecognizer, request: TranscribeRequest) -> None:
        self._model, self._tokenizer = recognizer.model, recognizer.tokenizer
        self._request = request
        self._pcm_S = np.frombuffer(request.pcm, np.dtype("<f4"))
        self._max_samples = round(self._model.max_window_s * SAMPLE_RATE)
        self._heard = 0
        self._window = Window(
            pcm_S=self._pcm_S[:0],
            language=request.language,
            task=request.task,
            prompt=recognizer.plain_text(request.prompt_ids),
            temperature=request.temperature,
            sampler=SeededSampler(request.seed),
        )
        self._start()

    @property
    def _is_over(self) -> bool:
        left = len(self._pcm_S) - self._heard
        return left <= 0 or (not self._request.is_last and left < self._max_samples)

    def _run(self) -> Iterator[Stage]:
        while not self._is_over:
            start, end = self._heard, window_end(self._pcm_S, self._heard, self._max_samples)
            pcm_S = self._pcm_S[start:end]
            yield Stage("listen", len(pcm_S) / SAMPLE_RATE)
            heard = Heard()
            if not is_silent(pcm_S):
                window = replace(self._window, pcm_S=padded(pcm_S))
                heard = yield from self._model.hear(window)
            # Like Whisper's, later windows have the language of the first speech.
            language = self._window.language or heard.language
            self._window = replace(self._window, language=language)
            self._heard = end
            self._finish(heard, start, end)

    def _finish(self, heard: Heard, start: int, end: int) -> None:
        start_s, end_s = start / SAMPLE_RATE, end / SAMPLE_RATE
        self._delta = TranscribeDelta(
            segments=tuple(self._segments(heard, start_s, end_s)),
            language=self._window.language,
            heard_s=end_s,
            finish_reason="stop" if self._is_over else None,
        )

    def _segments(self, heard: Heard, start_s: float, end_s: float) -> Iterator[TimedTokens]:
        """Sentences where tokens have times, else the window."""
        if not heard.has_times:
            if heard.tokens:
                yield self._segment(heard.tokens, start_s, end_s)
            return
        for tokens in self._sentences(heard.tokens):
            placed = tuple(
                replace_struct(
                    token,
                    start_s=min(start_s + token.start_s, end_s),
                    end_s=min(start_s + token.end_s, end_s),
                )
                for token in tokens
            )
            yield self._segment(placed, placed[0].start_s, placed[-1].end_s)

    def _segment(
        self, tokens: tuple[TranscriptToken, ...], start_s: float, end_s: float
    ) -> TimedTokens:
        if not self._request.has_word_times:
            tokens = tuple(replace_struct(token, start_s=-1.0, end_s=-1.0) for token in tokens)
        text = decode(self._tokenizer, [token.token_id for token in tokens]).strip()
        return TimedTokens(
            start_s=start_s,
            end_s=end_s,
            tokens=tokens,
            avg_logprob=sum(token.logprob for token in tokens) / len(tokens),
            compression_ratio=compression_ratio(text),
            temperature=self._request.temperature,
        )

    def _sentences(
        self, tokens: Sequence[TranscriptToken]
    ) -> Iterator[tuple[TranscriptToken, ...]]:
        """Tokens cut after sentences and long pauses."""
        start = 0
        for at in range(1, len(tokens)):
            before, after = tokens[at - 1], tokens[at]
            spelled = (self._tokenizer.id_to_token(each.token_id) for each in (before, after))
            ended, begun = (text or "" for text in spelled)
            is_sentence = ended.endswith(_SENTENCE_ENDS) and begun.startswith(_WORD_STARTS)
            if is_sentence or after.start_s - before.end_s >= _PAUSE_S:
                yield tuple(tokens[start:at])
                start = at
        yield tuple(tokens[start:])

"""Windowed decoding, for codecs without an exact streaming twin: chunks with context before them.

Owns how much of the past a window contains, and which of its samples are returned. A chunk holds
the frames of one push; the caller chooses its size. The sound of the context frames is cut off.
Longer contexts make smoother seams, so decoders that keep their state are preferred.

Semantics (frames S so far, d of them decoded, buffer b, chunk c, voice prompt P): a window holds
S[max(0, d - b) : d + c]. With `ONCE`, P precedes the first window; with `ROLLING`, also later ones:
as much of P's tail as fills the context up to b frames.

Shapes: see `codecs.protocol`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.tts.engine.codecs.protocol import DecodedAudio


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotCodec:
    """A codec that decodes whole stretches: `codes_BQF` to `pcm_BS`, F * hop samples a row."""

    decode: Callable[[Tensor], Tensor]
    num_codebooks: int
    sample_rate: int
    hop: int


class PromptUse(StrEnum):
    """Which windows begin with the voice's frames."""

    NEVER = "never"
    ONCE = "once"
    ROLLING = "rolling"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """The context of a window's chunk: a number of past frames, and the voice's frames."""

    buffer: int = 0
    prompt_use: PromptUse = PromptUse.NEVER


@dataclass(slots=True)
class _RowFrames:
    """The frames before the next chunk: the prompt, and the last `buffer` decoded ones."""

    prompt_QF: Tensor
    past_QF: Tensor
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Window:
    """A chunk with its context, and the counts of prompt frames and past frames in it."""

    codes_QF: Tensor
    num_prompt: int
    num_past: int

    @property
    def num_context(self) -> int:
        return self.num_prompt + self.num_past

    @property
    def num_frames(self) -> int:
        return self.codes_QF.shape[1]


class WindowDecoder:
    """A `CodecDecoder` over a codec's one-shot decoding."""

    latency = 0
    state_bytes = 0  # a few codes a row

    def __init__(self, codec: OneShotCodec, policy: WindowPolicy, *, num_rows: int) -> None:
        self._codec = codec
        self._policy = policy
        self._rows: dict[int, _RowFrames] = {}
        self.sample_rate, self.hop, self.num_rows = codec.sample_rate, codec.hop, num_rows

    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        """Start a new stream in each of `rows`; `seeds` are ignored."""
        nothing_Q0 = torch.zeros(self._codec.num_codebooks, 0, dtype=torch.int64)
        self._rows.update({row: _RowFrames(nothing_Q0, nothing_Q0) for row in rows})

    def prime(self, row: int, prompt_QF: Tensor) -> None:
        """Store the voice's frames before the row's first chunk; their sound is discarded."""
        if self._policy.prompt_use is not PromptUse.NEVER:
            self._rows[row].prompt_QF = prompt_QF

    @torch.inference_mode()
    def push(
        self, codes_BQF: Tensor, rows: Sequence[int], num_valid: Sequence[int] | None = None
    ) -> DecodedAudio:
        """Decode one chunk of each of `rows`."""
        valid = num_valid or [codes_BQF.shape[-1]] * len(rows)
        windows = [
            self._window(self._rows[row], codes_QF[:, :count])
            for codes_QF, row, count in zip(codes_BQF, rows, valid, strict=True)
        ]
        pcm_BS = pad_sequence(self._decode_all(windows), batch_first=True)
        for row, window in zip(rows, windows, strict=True):  # only decoded frames become the past
            self._move_on(self._rows[row], window)
        starts = tuple(window.num_context * self.hop for window in windows)
        stops = tuple(window.num_frames * self.hop for window in windows)
        return DecodedAudio(pcm_BS, starts, stops)

    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        """End the streams in `rows`; there are no delayed samples."""
        for row in rows:
            del self._rows[row]
        none = (0,) * len(rows)
        return DecodedAudio(torch.zeros(len(rows), 0), none, none)

    def _window(self, row: _RowFrames, chunk_QF: Tensor) -> _Window:
        past_QF = to_device(row.past_QF, chunk_QF.device)
        prompt_QF = to_device(row.prompt_QF, chunk_QF.device)
        if row.has_begun:
            is_rolling = self._policy.prompt_use is PromptUse.ROLLING
            room = self._policy.buffer - past_QF.shape[1] if is_rolling else 0
            prompt_QF = prompt_QF[:, max(prompt_QF.shape[1] - room, 0) :]
        codes_QF = torch.cat((prompt_QF, past_QF, chunk_QF), 1)
        return _Window(codes_QF, prompt_QF.shape[1], past_QF.shape[1])

    def _move_on(self, row: _RowFrames, window: _Window) -> None:
        decoded_QF = window.codes_QF[:, window.num_prompt :]
        row.past_QF = decoded_QF[:, max(decoded_QF.shape[1] - self._policy.buffer, 0) :].clone()
        row.has_begun = row.has_begun or window.num_frames > window.num_context

    def _decode_all(self, windows: Sequence[_Window]) -> list[Tensor]:
        """Decode windows of equal length together: padding would change real frames."""
        groups = defaultdict(list)
        for index, window in enumerate(windows):
            if window.num_frames > window.num_context:
                groups[window.num_frames].append(index)
        pcm: dict[int, Tensor] = {}
        for indexes in groups.values():
            codes_BQF = torch.stack([windows[index].codes_QF for index in indexes])
            pcm.update(zip(indexes, self._codec.decode(codes_BQF), strict=True))
        nothing = next(iter(pcm.values()), torch.zeros(0))[:0]
        return [pcm.get(index, nothing) for index in range(len(windows))]

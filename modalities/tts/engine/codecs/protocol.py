"""The interface of streaming codec decoders.

Owns the types that callers use: the protocol, a loaded codec, and the audio that a push returns.
Knows no codec and no layer.

Shape suffixes, in all modules of this folder: B rows of this call, Q codebooks, F frames, S
samples, C channels, T time steps of some layer, L past steps kept by a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Audio decoded by one call: row `b` of the call owns `pcm_BS[b, starts[b] : stops[b]]`.

    The bounds are known on the host without waiting for the device. Samples outside of them are
    undefined: before a stream's start, or of frames beyond a row's `num_valid`.
    """

    pcm_BS: Tensor
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def row(self, index: int) -> Tensor:
        """The samples of the call's `index`-th row, a view of shape [S]."""
        return self.pcm_BS[index, self.starts[index] : self.stops[index]]


@runtime_checkable
class CodecDecoder(Protocol):
    """A codec's decoder with per-row state on its device.

    Rows are slots 0..num_rows-1. A row's stream lasts from `init_state` to `flush`; its
    concatenated audio equals one-shot decoding of its concatenated codes, whatever the chunk sizes
    and whatever the other rows of its batches. After `n` pushed frames a row has returned `max(0, n
    * hop - latency)` samples; `flush` returns the rest.
    """

    sample_rate: int
    hop: int
    """Samples per frame of codes."""
    latency: int
    """Samples by which output trails input: the codec's lookahead or trimming."""
    num_rows: int
    """The number of row slots."""

    @property
    def state_bytes(self) -> int:
        """Device bytes of all rows' state."""

    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        """Start a new stream in each of `rows`, discarding any earlier one.

        `seeds` key the noise of codecs that add some (default 0); other codecs ignore them.
        """

    def push(
        self, codes_BQF: Tensor, rows: Sequence[int], num_valid: Sequence[int] | None = None
    ) -> DecodedAudio:
        """Decode the next frames of `rows`, time last.

        Row `b` owns the first `num_valid[b]` frames of `codes_BQF[b]` (default: all). `rows` must
        not repeat a row.
        """

    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        """End the streams in `rows` and return their remaining samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCodec:
    """A loaded codec. `encode` maps samples [S] at the decoder's rate to codes [Q, F].

    A code from `codebook_size` on ends the row that sampled it.
    """

    decoder: CodecDecoder
    codebook_size: int
    encode: Callable[[Tensor], Tensor] | None = None

"""What a streaming codec decoder is, whatever the codec.

Owns the nouns that callers use: the protocol, a loaded codec, and the audio a push gives back.
Knows no codec and no layer.

Shape suffixes, here and beside: B rows of this call, Q codebooks, F frames,
S samples, C channels, T time steps of some layer, L past steps kept by a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """What one call decoded: row `b` of the call owns `pcm_BS[b, starts[b] : stops[b]]`.

    The bounds are known on the host without waiting for the device. What lies outside of them is
    undefined: samples before a stream's start, or of frames beyond a row's `num_valid`.
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

    Rows are slots 0..num_rows-1. A row lives from `init_state` to `flush`; its concatenated audio
    equals one-shot decoding of its concatenated codes, whatever the chunk sizes and whatever the
    other rows of its batches. After `n` pushed frames a row has given out
    `max(0, n * hop - latency)` samples; `flush` gives the rest.
    """

    sample_rate: int
    hop: int
    """Samples per frame of codes."""
    latency: int
    """Samples by which output trails input: what the codec reads ahead, or trims."""
    num_rows: int
    """Number of row slots."""

    @property
    def state_bytes(self) -> int:
        """Device bytes of all rows' state."""

    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        """Start a new stream in each of `rows`, forgetting what was there.

        `seeds` key the noise of the codecs that add some (default 0); the others ignore them.
        """

    def push(
        self, codes_BQF: Tensor, rows: Sequence[int], num_valid: Sequence[int] | None = None
    ) -> DecodedAudio:
        """Decode the next frames of `rows`, time last.

        Row `b` owns the first `num_valid[b]` frames of `codes_BQF[b]` (default: all). `rows` must
        not repeat a row.
        """

    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        """End the streams in `rows` and return the samples still held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCodec:
    """A loaded codec. `encode` maps samples [S] at the decoder's rate to codes [Q, F].

    Codes from `codebook_size` on end the row that drew them.
    """

    decoder: CodecDecoder
    codebook_size: int
    encode: Callable[[Tensor], Tensor] | None = None

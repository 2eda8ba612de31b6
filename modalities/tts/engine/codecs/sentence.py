"""Global decoders behind the streaming protocol: audio comes when the sentence is complete.

For codecs whose every sample depends on the whole utterance (Kokoro, F5, and whatever normalises
or attends over all of time), so that callers need no second code path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.modalities.tts.engine.codecs.protocol import CodecKind, DecodedAudio


class SentenceDecoder:
    """A `CodecDecoder` that collects a row's codes and decodes them at `flush`.

    `decode` maps one row's codes [1, Q, F] to its samples [1, S]. Rows are decoded one by one:
    padding them to one length would change what a global decoder hears.
    """

    latency = 0
    kind = CodecKind.GLOBAL

    def __init__(
        self, decode: Callable[[Tensor], Tensor], *, sample_rate: int, hop: int, num_rows: int
    ) -> None:
        self._decode = decode
        self.sample_rate, self.hop, self.num_rows = sample_rate, hop, num_rows
        self._codes: dict[int, list[Tensor]] = {}

    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        """Start a new sentence in each of `rows`."""
        self._codes.update({row: [] for row in rows})

    def push(
        self, codes_BQF: Tensor, rows: Sequence[int], num_valid: Sequence[int] | None = None
    ) -> DecodedAudio:
        """Collect; no audio yet."""
        valid = num_valid or [codes_BQF.shape[-1]] * len(rows)
        for codes_QF, row, count in zip(codes_BQF, rows, valid, strict=True):
            self._codes[row].append(codes_QF[:, :count].clone())
        return DecodedAudio(codes_BQF.new_empty(len(rows), 0), (0,) * len(rows), (0,) * len(rows))

    @torch.inference_mode()
    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        """Decode the sentences in `rows`."""
        parts = [self._codes.pop(row) for row in rows]
        audio = [self._decode(torch.cat(p, -1)[None])[0] if p else torch.empty(0) for p in parts]
        pcm_BS = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
        return DecodedAudio(pcm_BS, (0,) * len(rows), tuple(len(samples) for samples in audio))

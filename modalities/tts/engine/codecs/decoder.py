"""The streaming decoder: a codec's adapter, its streaming tree, and the state of its rows.

Owns row bookkeeping, and the check at load that streaming equals one-shot decoding. Knows no codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.graphs.backend import Tensors
from triptych.core.runtime.graphs.buckets import Bucket, row_sizes, smallest
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.layers.row_by_row import row_by_row
from triptych.modalities.tts.engine.codecs.protocol import DecodedAudio
from triptych.modalities.tts.engine.codecs.stages import (
    CodecStep,
    SettledStep,
    SignalRate,
    StreamingStage,
)

# Largest error of the probe, relative to its loudest sample. Half types round at every layer; some
# libraries' norms compute in float32 whatever the type.
_TOLERANCES = MappingProxyType({torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1})
_PROBE_CHUNKS = (1, 3, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The interface between a codec family's model and the streaming decoder.

    `stage` decodes latents; `embed` maps codes [B, Q, F] to them, [B, C, F * rate], each frame
    separately. `one_shot` is the library's own decoding, [B, Q, F] to [B, S]; the probe compares
    against it. `weight` is any weight of the decoder, for its type and device.
    """

    stage: StreamingStage
    embed: Callable[[Tensor], Tensor]
    one_shot: Callable[[Tensor], Tensor]
    sample_rate: int
    num_codebooks: int
    codebook_size: int
    weight: Tensor
    rate: int = 1

    @property
    def device(self) -> torch.device:
        """The device that holds the codec."""
        return self.weight.device

    def probe_codes(self, num_rows: int, num_frames: int, *, seed: int = 0) -> Tensor:
        """Random codes [B, Q, F] in the codec's range."""
        shape = (num_rows, self.num_codebooks, num_frames)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.codebook_size, shape, generator=generator).to(self.device)


class StreamingDecoder:
    """A `CodecDecoder` over a tree of streaming stages.

    State is held in one tensor per layer, indexed by row, on the model's device. `verify=False`
    skips the probe (then the first push allocates state).
    """

    def __init__(self, adapter: Adapter, *, num_rows: int, verify: bool = True) -> None:
        self._adapter = adapter
        self._signal = adapter.stage.bind(SignalRate(adapter.rate))
        self._states = tuple(adapter.stage.states())
        self.sample_rate, self.num_rows = adapter.sample_rate, num_rows
        self.hop, self.latency = self._signal.rate, self._signal.lag
        # Frames pushed so far; -1 without a stream.
        self._frames = np.full(num_rows, -1, np.int64)
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, device=adapter.device)
        with torch.inference_mode():
            self._nothing_1C0 = adapter.embed(adapter.probe_codes(1, 1))[..., :0]
        self._graphs: CapturedSteps | None = None
        self._uploads = Uploads(adapter.device)
        self._settled_at: int | None = None  # frames; unknown before the first push
        if verify:
            self._verify()

    @property
    def state_bytes(self) -> int:
        """Bytes of all rows' state."""
        return sum(s.tensor.nbytes for s in self._states if s.tensor is not None)

    @torch.inference_mode()
    def capture_with(self, graphs: CapturedSteps) -> None:
        """Capture pushes to rows past their start from now on; padding has an extra row."""
        self._graphs = graphs
        self._seeds = torch.cat((self._seeds, self._seeds.new_zeros(1)))
        for state in self._states:
            if (slots := state.tensor) is not None:
                state.tensor = torch.cat((slots, slots.new_zeros(1, *slots.shape[1:])))

    @torch.inference_mode()
    def init_state(self, rows: Sequence[int], *, seeds: Sequence[int] | None = None) -> None:
        """Start a new stream in each of `rows`."""
        device = self._adapter.device
        rows_B = to_device(torch.tensor(rows), device)
        for state in self._states:
            state.clear(rows_B)
        self._seeds[rows_B] = to_device(torch.tensor(seeds or [0] * len(rows)), device)
        self._frames[list(rows)] = 0

    @torch.inference_mode()
    def push(
        self, codes_BQF: Tensor, rows: Sequence[int], num_valid: Sequence[int] | None = None
    ) -> DecodedAudio:
        """Decode the next frames of `rows`."""
        num_frames = codes_BQF.shape[-1]
        valid = [num_frames] * len(rows) if num_valid is None else list(num_valid)
        assert len(codes_BQF) == len(rows) == len(valid), "codes, rows and counts go together"
        step = self._step(rows, num_frames, valid)
        audio = self._replay(codes_BQF, step, rows, valid)
        if audio is None:
            if step.is_ragged:
                codes_BQF = step.without_invalid(codes_BQF, 1)
            audio = self._run(self._adapter.embed(codes_BQF), step, rows, valid)
            self._settled_at = max(self._settled_at or 0, step.reach)
        self._frames[list(rows)] += valid
        return audio

    @torch.inference_mode()
    def flush(self, rows: Sequence[int]) -> DecodedAudio:
        """End the streams in `rows`."""
        step = self._step(rows, 0, None)
        if step.num_steps(self._signal):
            audio = self._run(self._nothing_1C0.expand(len(rows), -1, -1), step, rows, ())
        else:
            none = (0,) * len(rows)
            audio = DecodedAudio(self._nothing_1C0.new_empty(len(rows), 0), none, none)
        self._frames[list(rows)] = -1
        return audio

    def _step(self, rows: Sequence[int], num_frames: int, valid: Sequence[int] | None) -> CodecStep:
        starts = self._frames[list(rows)].tolist()
        assert min(starts) >= 0, "push or flush of a row that init_state has not started"
        assert len(set(rows)) == len(rows), "a row occurs twice in one call"
        return CodecStep(
            rows, num_frames=num_frames, starts=starts, num_valid=valid, seeds=self._seeds
        )

    def _run(
        self, latents_BCT: Tensor, step: CodecStep, rows: Sequence[int], valid: Sequence[int]
    ) -> DecodedAudio:
        with row_by_row(len(rows), latents_BCT.device):
            pcm_BCS: Tensor = self._adapter.stage(latents_BCT, step)
        starts = self._frames[list(rows)].tolist()
        return DecodedAudio(pcm_BCS[:, 0], *step.bounds(self._signal, starts, valid))

    def _replay(
        self, codes_BQF: Tensor, step: CodecStep, rows: Sequence[int], valid: Sequence[int]
    ) -> DecodedAudio | None:
        """As `_run`, from a captured graph; none if the step is not, or cannot be, captured."""
        is_settled = self._settled_at is not None and step.min_start >= self._settled_at
        size = smallest(row_sizes(self.num_rows), len(rows))
        if self._graphs is None or step.is_ragged or not is_settled or size is None:
            return None
        starts = self._frames[list(rows)]
        padding = np.ones(size - len(rows), np.int64)
        packed = self._uploads.pack(
            (np.append(rows, self.num_rows * padding), np.append(starts, step.min_start * padding))
        )
        padded_BQF = codes_BQF.new_zeros(size, *codes_BQF.shape[1:])
        padded_BQF[: len(rows)] = codes_BQF
        outputs = self._graphs.run(
            Bucket(size, size * step.num_frames),
            partial(self._decode_settled, step.num_frames),
            [padded_BQF, packed],
            [state.tensor for state in self._states if state.tensor is not None],
        )
        if outputs is None:
            return None
        bounds = step.bounds(self._signal, starts.tolist(), valid)
        return DecodedAudio(outputs[0][: len(rows)], *bounds)

    def _decode_settled(self, num_frames: int, inputs: Tensors) -> Tensors:
        """All samples of a push, `[B, S]`."""
        codes_BQF, packed = inputs
        rows_B, starts_B = packed.view(2, -1).unbind()
        step = SettledStep(rows_B, num_frames=num_frames, starts_B=starts_B, seeds=self._seeds)
        with row_by_row(len(codes_BQF), codes_BQF.device):
            pcm_BCS: Tensor = self._adapter.stage(self._adapter.embed(codes_BQF), step)
        return [pcm_BCS[:, 0]]

    def probe(self) -> tuple[Tensor, Tensor]:
        """Random codes, and their sound decoded in chunks. Allocates all state."""
        num_frames = -(-self.latency // self.hop) + sum(_PROBE_CHUNKS)
        codes_BQF = self._adapter.probe_codes(1, num_frames)
        return codes_BQF, stream_row(self, codes_BQF, _PROBE_CHUNKS)

    def _verify(self) -> None:
        """Decode random codes in chunks and at once; raise `WeightsError` if they differ."""
        codes_BQF, streamed_S = self.probe()
        with torch.inference_mode():
            whole_S = self._adapter.one_shot(codes_BQF)[0]
        if streamed_S.shape != whole_S.shape:
            raise WeightsError(
                f"Streaming decodes {len(streamed_S)} samples, but the codec's own decoder gives"
                f" {len(whole_S)}; decode whole sentences instead."
            )
        error = float((streamed_S - whole_S).abs().max() / whole_S.abs().max().clamp(min=1e-12))
        if not error <= _TOLERANCES.get(self._adapter.weight.dtype, 0.1):
            raise WeightsError(
                f"Streaming differs from the codec's own decoder by {error:.1e} of full scale;"
                " decode whole sentences instead."
            )


def state_bytes(adapter: Adapter, num_rows: int) -> int:
    """Bytes of the state of `num_rows` rows. The codec may be on torch's meta device.

    Raises `WeightsError` if it cannot stream.
    """
    decoder = StreamingDecoder(adapter, num_rows=num_rows, verify=False)
    decoder.probe()
    return decoder.state_bytes


def stream_row(decoder: StreamingDecoder, codes_1QF: Tensor, chunks: Sequence[int]) -> Tensor:
    """All samples of one stream pushed to row 0 in `chunks` (then the rest) and flushed."""
    decoder.init_state([0])
    parts = [*chunks, codes_1QF.shape[-1] - sum(chunks)]
    audio = [decoder.push(part, [0]).row(0) for part in codes_1QF.split(parts, -1) if part.numel()]
    return torch.cat([*audio, decoder.flush([0]).row(0)])

"""The embedded voice's codec: chunks, rows and seeds; what its synthesis makes of a pitch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.voice_model import CODEC, voice_codec
from triptych.modalities.tts.configs.voice import CodecConfig
from triptych.modalities.tts.engine.codecs import CodecDecoder, StreamingDecoder
from triptych.modalities.tts.engine.models.voice.codec import VoiceCodec, voice_decoder
from triptych.modalities.tts.engine.models.voice.synthesis import Spectra, excite, synthesize

NUM_ROWS = 3
HOP = CODEC.hop * CODEC.frames_per_step


@cache
def model() -> VoiceCodec:
    torch.manual_seed(1)
    return voice_codec()


@cache
def decoder() -> StreamingDecoder:
    return voice_decoder(model(), num_rows=NUM_ROWS)


def codes_of(num_steps: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (CODEC.num_codebooks, num_steps)
    return torch.randint(CODEC.num_levels, shape, generator=generator)


@torch.inference_mode()
def one_shot(codes_QF: Tensor, seed: int) -> Tensor:
    return synthesize(model()(codes_QF[None]), torch.tensor([seed]), CODEC)[0]


def assert_same(streamed: Tensor, whole: Tensor) -> None:
    assert streamed.shape == whole.shape
    assert (streamed - whole).abs().max() <= 1e-5 * whole.abs().max().clamp(min=1.0)


def test_it_declares_what_it_is() -> None:
    assert isinstance(decoder(), CodecDecoder)
    assert decoder().hop == HOP
    assert decoder().latency == 3 * CODEC.hop


@settings(max_examples=6, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_any_chunks_equal_one_shot_after_the_declared_delay(chunks: list[int], seed: int) -> None:
    codes = codes_of(sum(chunks), seed)
    decoder().init_state([1], seeds=[seed])
    parts, num_steps = [], 0
    for chunk in codes.split(chunks, -1):
        parts.append(decoder().push(chunk[None], [1]).row(0))
        num_steps += chunk.shape[-1]
        assert sum(map(len, parts)) == num_steps * HOP - decoder().latency
    parts.append(decoder().flush([1]).row(0))
    assert_same(torch.cat(parts), one_shot(codes, seed))


def test_rows_of_different_lengths_and_ages_share_a_batch() -> None:
    codes = [codes_of(9, 1), codes_of(6, 2)]
    decoder().init_state([2], seeds=[7])
    first = decoder().push(codes[0][None, :, :3], [2]).row(0)
    decoder().init_state([0], seeds=[8])
    padded = torch.stack([codes[1], codes[0][:, 3:]])
    both = decoder().push(padded, [0, 2], num_valid=[4, 6])
    rest = decoder().push(codes[1][None, :, 4:], [0]).row(0)
    ends = decoder().flush([0, 2])
    assert_same(torch.cat([first, both.row(1), ends.row(1)]), one_shot(codes[0], 7))
    assert_same(torch.cat([both.row(0), rest, ends.row(0)]), one_shot(codes[1], 8))


def test_noise_is_keyed_by_the_seed_alone() -> None:
    codes = codes_of(8, 3)
    assert torch.equal(one_shot(codes, 4), one_shot(codes, 4))
    assert not torch.equal(one_shot(codes, 4), one_shot(codes, 5))


def voiced(hz: float, num_frames: int, config: CodecConfig) -> Spectra:
    shape = (1, config.num_bins, num_frames)
    pitch = torch.full((1, num_frames), math.log2(hz), dtype=torch.float64)
    silent = torch.full(shape, -20.0)
    return Spectra(
        harmonic=torch.zeros(shape),
        harmonic_phase=torch.zeros(shape),
        residual=silent,
        residual_phase=torch.zeros(shape),
        pitch=pitch,
        voicing=torch.ones_like(pitch),
    )


@pytest.mark.parametrize("hz", [125.0, 250.0])
def test_pulses_come_at_the_pitch_and_hold_its_harmonics_alone(hz: float) -> None:
    config = CodecConfig()
    before = torch.zeros(1, 2, dtype=torch.float64)
    wave = excite(voiced(hz, 80, config), before, config).wave[0]
    spectrum = torch.fft.rfft(wave).abs() / (len(wave) / 2)  # one second: a bin is 1 Hz
    harmonics = torch.arange(int(hz), 10_000, int(hz))
    torch.testing.assert_close(spectrum[harmonics], torch.ones(len(harmonics)), atol=0.02, rtol=0)
    spectrum[torch.arange(0, len(spectrum), int(hz))] = 0
    assert spectrum.max() < 0.02


def test_a_frame_without_voice_has_no_pulses_and_keeps_the_phase() -> None:
    config = CodecConfig()
    spectra = voiced(200.0, 6, config)
    spectra = replace(spectra, voicing=torch.tensor([[1.0, 1, -1, -1, 1, 1]]))
    before = torch.zeros(1, 2, dtype=torch.float64)
    whole = excite(spectra, before, config)
    quiet = whole.wave[0, 2 * config.hop : 4 * config.hop]
    assert not quiet.any()
    assert whole.ends[0, 0, 1] % 1 == whole.ends[0, 0, 3] % 1
    assert whole.ends[0, 1, 2] == 0

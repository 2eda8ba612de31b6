"""Chunked decoding equals one-shot decoding, for every codec, chunk list, batch and row order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from support.codec_models import MODELS, encodec, mimi, random_model, randomize
from support.tiers import first
from triptych.modalities.tts.engine.codecs import (
    CodecDecoder,
    StreamingDecoder,
    adapter_for,
    build_decoder,
)

NUM_ROWS = 3
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}
CHUNKS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@cache
def decoder_of(name: str, dtype: torch.dtype = torch.float64) -> StreamingDecoder:
    torch.manual_seed(0)
    return build_decoder(random_model(name, dtype), num_rows=NUM_ROWS)


@cache
def codes_of(name: str, dtype: torch.dtype, num_frames: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random codes [Q, F] and the library's own decoding of them [S]."""
    adapter = adapter_for(random_model(name, dtype))
    codes = adapter.probe_codes(1, num_frames, seed=seed)
    with torch.inference_mode():
        return codes[0], adapter.one_shot(codes)[0].clone()


def assert_same(streamed: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
    assert streamed.shape == whole.shape
    scale = whole.abs().max().clamp(min=1.0) if whole.numel() else 1.0
    assert ((streamed - whole).abs() <= TOLERANCES[dtype] * scale).all()


@pytest.mark.parametrize("dtype", first([torch.float32, torch.float64]), ids=str)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(chunks=CHUNKS)
def test_any_chunk_list_equals_one_shot_after_the_declared_delay(
    name: str, dtype: torch.dtype, chunks: list[int]
) -> None:
    decoder = decoder_of(name, dtype)
    codes, whole = codes_of(name, dtype, sum(chunks), 1)
    decoder.init_state([1])
    parts, num_frames = [], 0
    for chunk in codes.split(chunks, -1):
        parts.append(decoder.push(chunk[None], [1]).row(0))
        num_frames += chunk.shape[-1]
        assert sum(map(len, parts)) == max(0, num_frames * decoder.hop - decoder.latency)
    parts.append(decoder.flush([1]).row(0))
    assert_same(torch.cat(parts), whole, dtype)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_join_leave_and_reuse_slots_without_touching_each_other(
    name: str, data: st.DataObject
) -> None:
    """Random batches of rows of different ages, each with its own number of new frames."""
    decoder = decoder_of(name)
    live: dict[int, tuple[Tensor, Tensor, int, list[Tensor]]] = {}
    for seed in range(data.draw(st.integers(6, 12))):
        row = data.draw(st.integers(0, NUM_ROWS - 1))
        if row not in live:
            decoder.init_state([row])
            live[row] = (*codes_of(name, torch.float64, 12, seed % 4), 0, [])
        elif data.draw(st.integers(0, 3)) == 0:
            codes, _, done, parts = live.pop(row)
            parts.append(decoder.flush([row]).row(0))
            assert_same(torch.cat(parts), one_shot(name, codes[:, :done]), torch.float64)
        rows = data.draw(st.permutations(sorted(live)))
        push_ragged(decoder, live, rows, [data.draw(st.integers(0, 3)) for _ in rows])


def push_ragged(
    decoder: StreamingDecoder,
    live: dict[int, tuple[Tensor, Tensor, int, list[Tensor]]],
    rows: Sequence[int],
    wanted: Sequence[int],
) -> None:
    counts = [
        min(n, live[row][0].shape[1] - live[row][2]) for row, n in zip(rows, wanted, strict=True)
    ]
    if not any(counts):
        return
    some = next(iter(live.values()))[0]
    batch = some.new_zeros(len(rows), some.shape[0], max(counts))
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        codes, _, done, _ = live[row]
        batch[index, :, :count] = codes[:, done : done + count]
    audio = decoder.push(batch, rows, counts)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        codes, whole, done, parts = live[row]
        live[row] = (codes, whole, done + count, [*parts, audio.row(index)])


def one_shot(name: str, codes: Tensor) -> Tensor:
    if not codes.shape[-1]:
        return torch.empty(0, dtype=torch.float64)
    with torch.inference_mode():
        return adapter_for(random_model(name)).one_shot(codes[None])[0]


@pytest.mark.parametrize("name", MODELS)
def test_nan_stays_in_its_row_and_goes_with_it(name: str) -> None:
    decoder = decoder_of(name)
    codes, whole = codes_of(name, torch.float64, 9, 1)
    decoder.init_state([0, 1])
    poison(decoder, 0)
    audio = [decoder.push(part.expand(2, -1, -1), [0, 1]) for part in codes.split(3, -1)]
    audio.append(decoder.flush([0, 1]))
    assert torch.cat([part.row(0) for part in audio]).isnan().any()
    assert_same(torch.cat([part.row(1) for part in audio]), whole, torch.float64)
    decoder.init_state([0])
    again = torch.cat([decoder.push(codes[None], [0]).row(0), decoder.flush([0]).row(0)])
    assert_same(again, whole, torch.float64)


@torch.inference_mode()
def poison(decoder: StreamingDecoder, row: int) -> None:
    for state in decoder._states:
        if state.tensor is not None:  # kernels of one step keep no past
            state.tensor[row] = torch.nan


@pytest.mark.parametrize("name", MODELS)
def test_invalid_frames_of_a_row_never_reach_its_sound(name: str) -> None:
    """Frames beyond `num_valid` may hold anything, even codes that do not exist."""
    decoder = decoder_of(name)
    codes, whole = codes_of(name, torch.float64, 9, 1)
    garbage = torch.full_like(codes, 10**6)
    decoder.init_state([2])
    parts = [
        decoder.push(torch.cat((part, garbage[:, :2]), -1)[None], [2], [3]).row(0)
        for part in codes.split(3, -1)
    ]
    assert_same(torch.cat([*parts, decoder.flush([2]).row(0)]), whole, torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_streaming_costs_at_most_five_percent_more_operations(name: str) -> None:
    model = random_model(name)  # float64, for the counter cannot see into oneDNN's LSTM
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # nor into fused attention
    decoder, adapter = build_decoder(model, num_rows=1), adapter_for(model)
    # Long against the latency, whose frames a flush decodes once more, as five seconds are.
    num_frames = max(60, 30 * decoder.latency // decoder.hop)
    codes = adapter.probe_codes(1, num_frames)
    with FlopCounterMode(display=False) as whole, torch.inference_mode():
        adapter.one_shot(codes)
    decoder.init_state([0])
    with FlopCounterMode(display=False) as streamed:
        for part in codes.split(num_frames // 10, -1):
            decoder.push(part, [0])
        decoder.flush([0])
    assert 0 < streamed.get_total_flops() <= 1.05 * whole.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_streams_what_bfloat16_decodes(name: str) -> None:
    decoder = decoder_of(name, torch.bfloat16)
    codes, whole = codes_of(name, torch.bfloat16, 8, 1)
    decoder.init_state([0])
    parts = [decoder.push(part[None], [0]).row(0) for part in codes.split(3, -1)]
    assert_same(torch.cat([*parts, decoder.flush([0]).row(0)]), whole, torch.bfloat16)


def test_delays_are_the_theoretical_ones() -> None:
    # DAC of strides 3, 2: three frames for the first convolution; at each rate 39 steps for the
    # residual units and half a kernel for upsampling; three samples for the last convolution.
    dac = ((3 * 3 + 2 + 39) * 2 + 1 + 39) + 3
    # EnCodec reflects the start, so a layer waits for what it reflects: six frames; at each rate,
    # residual units of dilation 1 and 2; six samples.
    encodec_24khz = (((6 * 4 + 2 + 4) * 3 + 6) * 2 + 6) + 6
    expected = {"mimi": 0, "encodec": encodec_24khz, "dac": dac}
    assert {name: decoder_of(name).latency for name in expected} == expected


def test_replicated_starts_stream_too() -> None:
    model = mimi(pad_mode="replicate").double()
    randomize(model)
    decoder = build_decoder(model, num_rows=1)
    assert decoder.latency == 0


def test_non_causal_seanet_becomes_lookahead() -> None:
    model = encodec(use_causal_conv=False, pad_mode="constant", num_lstm_layers=1)
    randomize(model)
    assert build_decoder(model, num_rows=1).latency > 0


def test_decoders_honour_the_protocol() -> None:
    assert isinstance(decoder_of("mimi"), CodecDecoder)
    assert decoder_of("mimi").state_bytes > 0

"""Codecs for 64 streams: one frame for each, against windows.

A server without state decodes a window for each frame.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import torch
from place import Place, Record, attempt

from triptych.modalities.tts.engine.codecs import adapter_for, build_decoder

NAMES = ("mimi", "snac", "dac")


def run(place: Place) -> Iterator[Record]:
    """One record for each codec."""
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for its models
    for name in NAMES[:1] if place.is_tiny else NAMES:
        yield attempt(f"{name}, {num_streams(place)} streams", partial(measured, place, name))


def num_streams(place: Place) -> int:
    """Streams that speak at once."""
    return 2 if place.is_tiny else 64


def measured(place: Place, name: str) -> dict[str, Any]:
    """A push of one frame for all streams, and a window for all streams."""
    from codec_streaming import LEFT_CONTEXT, make

    num_before, num_repeats = (3, 1) if place.is_tiny else (LEFT_CONTEXT, 5)
    num_rows = num_streams(place)
    model = make(name, torch.float32).to(place.device)
    decoder, adapter = build_decoder(model, num_rows=num_rows, verify=False), adapter_for(model)
    frame = adapter.probe_codes(num_rows, 1).to(place.device)
    window = adapter.probe_codes(num_rows, num_before + 1).to(place.device)
    rows = range(num_rows)
    decoder.init_state(rows)
    for _ in range(2 + 2 * decoder.latency // decoder.hop):
        decoder.push(frame, rows)
    push_s = place.wall_s(partial(decoder.push, frame, rows), num_repeats)
    with torch.inference_mode():
        window_s = place.wall_s(partial(adapter.one_shot, window), num_repeats)
    frame_s = decoder.hop / decoder.sample_rate
    return {
        "push_ms": 1e3 * push_s,
        "window_ms": 1e3 * window_s,
        "ratio": window_s / push_s,
        "times_real_time": frame_s / push_s,
    }

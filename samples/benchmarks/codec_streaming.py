"""Streaming codecs on the CPU: exactness, work and speed, against the alternatives.

    python samples/benchmarks/codec_streaming.py            # all codecs, about three minutes
    python samples/benchmarks/codec_streaming.py mimi dac

Random weights at published sizes: speed and exactness do not depend on training. Prints two
Markdown tables.

- Exactness: the largest difference, relative to the peak sample, between decoding in random chunks
  and decoding at once; also for transformers' own chunked call, if a model has one.
- Work: operations of streaming five seconds and flushing, relative to decoding them at once.
- Speed: one frame pushed to a warm stream, against decoding a window of that frame and the 72
  before it, as a stateless server does. Both take turns within each repeat.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DacConfig,
    DacModel,
    EncodecConfig,
    EncodecModel,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    MimiConfig,
    MimiModel,
    XcodecConfig,
    XcodecModel,
)
from transformers.cache_utils import DynamicCache

from triptych.modalities.tts.engine.codecs import StreamingDecoder, adapter_for, build_decoder
from triptych.modalities.tts.engine.codecs.decoder import Adapter, stream_row
from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig

LEFT_CONTEXT = 72
NUM_ROWS = 8
PEER_CHUNK = 25

_DAC_24KHZ = MappingProxyType(
    {
        "sampling_rate": 24_000,
        "upsampling_ratios": [8, 5, 4, 2],
        "downsampling_ratios": [2, 4, 5, 8],
    }
)
MODELS: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "mimi": lambda: MimiModel(MimiConfig()),
        "encodec": lambda: EncodecModel(EncodecConfig()),
        "dac": lambda: DacModel(DacConfig(**_DAC_24KHZ)),
        "xcodec": lambda: XcodecModel(XcodecConfig()),
        "higgs": lambda: HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig()),
        "snac": lambda: Snac(SnacConfig()),
    }
)


def make(name: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights that keep signals at a usual loudness."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for part in ("encoder", "acoustic_encoder", "encoder_semantic", "semantic_model"):
        if hasattr(model, part):
            setattr(model, part, None)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_matrix = tensor.dim() > 1 and tensor.is_floating_point()
            if key.endswith(("alpha", "beta", "original0")) or not tensor.is_floating_point():
                continue
            if is_matrix:
                tensor.normal_(0, 0.6 * tensor[0].numel() ** -0.5)
            elif key.endswith(("scale", "gamma", "bias")):
                tensor.normal_(0, 0.2)
    return model.to(dtype)


def error(got: Tensor, whole: Tensor) -> str:
    """Largest difference relative to the peak sample; or the number of missing samples."""
    if got.shape != whole.shape:
        return f"{len(whole) - len(got)} of {len(whole)} samples lost"
    return f"{float((got - whole).abs().max() / whole.abs().max()):.0e}"


def own_error(name: str, dtype: torch.dtype) -> str:
    """Ours, with random chunks."""
    model = make(name, dtype)
    decoder, adapter = build_decoder(model, num_rows=1, verify=False), adapter_for(model)
    codes = adapter.probe_codes(1, 40)
    chunks, shuffle = [1], random.Random(0)
    while sum(chunks) < 30:
        chunks.append(shuffle.randint(1, 7))
    with torch.inference_mode():
        return error(stream_row(decoder, codes, chunks), adapter.one_shot(codes)[0])


def peer_error(name: str) -> str:
    """Transformers' own chunked call, in float32, chunks of 25 frames."""
    if name not in PEERS:
        return "none"
    model = make(name, torch.float32)
    adapter = adapter_for(model)
    codes = adapter.probe_codes(1, 3 * PEER_CHUNK)
    with torch.inference_mode():
        return error(PEERS[name](model, codes), adapter.one_shot(codes)[0])


def _mimi_chunks(model: Any, codes: Tensor) -> Tensor:
    """Keeps keys and values, but resets its convolutions."""
    past, parts = DynamicCache(config=model.config), []
    for part in codes.split(PEER_CHUNK, -1):
        out = model.decode(part, None, past)  # by place: transformers 5.24 renamed it
        parts.append(out.audio_values[0, 0])
    return torch.cat(parts)


PEERS: MappingProxyType[str, Callable[[Any, Tensor], Tensor]] = MappingProxyType(
    {"mimi": _mimi_chunks}
)


def work_ratio(name: str) -> float:
    """Operations of streaming five seconds, relative to one-shot.

    In float64, because the counter does not see oneDNN's LSTM, nor fused attention.
    """
    model: Any = make(name, torch.float64)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    decoder, adapter = build_decoder(model, num_rows=1, verify=False), adapter_for(model)
    codes = adapter.probe_codes(1, 5 * decoder.sample_rate // decoder.hop)
    with FlopCounterMode(display=False) as whole, torch.inference_mode():
        adapter.one_shot(codes)
    decoder.init_state([0])
    with FlopCounterMode(display=False) as streamed:
        for part in codes.split(PEER_CHUNK, -1):
            decoder.push(part, [0])
        decoder.flush([0])
    return float(streamed.get_total_flops() / whole.get_total_flops())


@contextmanager
def stopwatch(into: list[float]) -> Iterator[None]:
    """Append the milliseconds of the block."""
    start = time.perf_counter()
    yield
    into.append((time.perf_counter() - start) * 1e3)


def times(
    decoder: StreamingDecoder, adapter: Adapter, repeats: int
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of a one-frame push of one row, of eight, and of a window, taking turns."""
    frame = adapter.probe_codes(NUM_ROWS, 1)
    window = adapter.probe_codes(1, LEFT_CONTEXT + 1)
    rows = range(NUM_ROWS)
    decoder.init_state(rows)
    for _ in range(2 + 2 * decoder.latency // decoder.hop):  # past all warm-up of the stream
        decoder.push(frame, rows)
    one: list[float] = []
    eight: list[float] = []
    windows: list[float] = []
    for _ in range(repeats + 1):
        with stopwatch(one):
            for _ in range(4):
                decoder.push(frame[:1], [0])
        one[-1] /= 4
        with stopwatch(eight):
            decoder.push(frame, rows)
        with stopwatch(windows), torch.inference_mode():
            adapter.one_shot(window)
    return one[1:], eight[1:], windows[1:]


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"


def exactness_row(name: str) -> str:
    """One line of the first table."""
    decoder = build_decoder(MODELS[name](), num_rows=1, verify=False)
    milliseconds = 1e3 / decoder.sample_rate
    cells = (
        name,
        f"{decoder.hop * milliseconds:.1f}",
        f"{decoder.latency} ({decoder.latency * milliseconds:.1f} ms)",
        own_error(name, torch.float64),
        own_error(name, torch.float32),
        peer_error(name),
    )
    return f"| {' | '.join(cells)} |"


def speed_row(name: str, repeats: int) -> str:
    """One line of the second table."""
    model = make(name, torch.float32)
    decoder, adapter = build_decoder(model, num_rows=NUM_ROWS), adapter_for(model)
    one, eight, windows = times(decoder, adapter, repeats)
    ratios = [window / push for window, push in zip(windows, one, strict=True)]
    frame_ms = 1e3 * decoder.hop / decoder.sample_rate
    cells = (
        name,
        spread(one),
        spread(windows),
        f"{spread(ratios)} x",
        f"{frame_ms / statistics.median(one):.1f} x",
        f"{NUM_ROWS * frame_ms / statistics.median(eight):.1f} x",
        f"{work_ratio(name):.3f}",
        f"{decoder.state_bytes / NUM_ROWS / 2**10:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.codecs or [*MODELS]
    print("| codec | frame, ms | delay, samples | float64 | float32 | transformers, in chunks |")
    print("|---|---|---|---|---|---|")
    for name in names:
        print(exactness_row(name), flush=True)
    print()
    print(
        "| codec | push of 1 frame, ms | window of 73, ms | push is faster by | real time, 1 row"
        " | real time, 8 rows | work by one-shot's | state per row, KiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        print(speed_row(name, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()

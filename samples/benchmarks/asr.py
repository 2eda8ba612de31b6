"""Real-time factor of recognition against transformers' pipeline: same weights, same audio.

    python samples/benchmarks/asr.py talk.wav --repeats 5

Both run in this process and take turns, on one thread each by default. Prints CPU seconds per
second of audio: on a busy machine wall-clock time has little meaning.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import pipeline

from triptych import TranscriptionPipeline
from triptych.core.media.audio.intake import read_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import RichProgress
from triptych.core.weights.resolve import resolve
from triptych.modalities.asr.api.pipeline import OWN_LIMITS
from triptych.modalities.asr.source import WHISPER_TINY
from triptych.modalities.asr.spec import SAMPLE_RATE

Hear = Callable[[Pcm], str]


def theirs(folder: str, dtype: str) -> Hear:
    """Transformers' pipeline, with timestamps and default options."""
    hear = pipeline("automatic-speech-recognition", model=folder, dtype=getattr(torch, dtype))
    return lambda pcm_S: str(
        hear({"raw": pcm_S, "sampling_rate": SAMPLE_RATE}, return_timestamps=True)["text"]
    )


def measure(hear: Hear, pcm_S: Pcm) -> float:
    """CPU seconds, over all threads, per second of audio."""
    before_s = time.process_time()
    hear(pcm_S)
    return (time.process_time() - before_s) * SAMPLE_RATE / len(pcm_S)


def spread(values: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a file with speech")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    args = parser.parse_args()
    pcm_S = read_clip(Path(args.file).read_bytes(), sample_rate=SAMPLE_RATE, limits=OWN_LIMITS)
    resolved = resolve(
        WHISPER_TINY.name,
        name=None,
        options=ModelOptions(),
        progress=RichProgress(),
        sources=(WHISPER_TINY,),
    )
    with TranscriptionPipeline.from_pretrained(threads=args.threads, dtype=args.dtype) as ours:
        rivals: dict[str, Hear] = {"triptych": lambda sound: ours(sound).text}
        for dtype in ("float32", "bfloat16"):
            rivals[f"transformers, {dtype}"] = theirs(resolved.folder, dtype)
        for name, hear in rivals.items():
            print(f"{name}: {hear(pcm_S).strip()[:160]}")  # the first run also warms up
        factors: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(args.repeats):
            for name, hear in rivals.items():
                factors[name].append(measure(hear, pcm_S))
    print(f"{len(pcm_S) / SAMPLE_RATE:.1f} s of sound, {args.threads} thread(s)")
    for name, values in factors.items():
        ratios = [theirs / own for theirs, own in zip(values, factors["triptych"], strict=True)]
        print(f"{name:24} {spread(values)}   x {spread(ratios)}")


if __name__ == "__main__":
    main()

"""The cases of captured steps.

A case fails where a replay gave other bits, where nothing was replayed, and where steps that were
to be captured ran eagerly.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import modality_images
import modality_sight
import modality_sound
import modality_text
import torch
from agreement import Figures, Tokens
from engines import Waves, counted_replays
from modality_text import row
from model_case import Ask, EngineCase, must
from msgspec.structs import replace

from triptych.core.engine_api.sampling_params import SamplingParams

STEPS = (200, 9, 17, 40, 80, 120, 33, 64, 5, 150, 21, 100)
"""The tokens of rows that begin together: batches of all sizes, as they end one by one."""
LEAST_REPLAYS = 2 * max(STEPS) - 20
"""Of a case of chats; prompts take some of the steps."""
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(top_k=20, top_p=0.9, seed=4),
    SamplingParams(temperature=0.0, top_logprobs=5),
)


def lasting(folder: Path) -> Waves:
    """Rows of many lengths; twice, of which the second finds everything captured."""

    def wave(first: int) -> list[object]:
        return [
            row(3 + 11 * place, first + place, replace(WAYS[place % len(WAYS)], max_tokens=num))
            for place, num in enumerate(STEPS)
        ]

    return wave(0), wave(100)


def verified(dtype: str, least: int, ask: Ask) -> Figures:
    """Every replay is compared; the engine fails a request whose step differs."""
    with counted_replays() as replays:
        ask(dtype=dtype, device_graph_capture=True, debug_verify_replay=True)
    must(replays.num_replayed >= least, f"only {replays.num_replayed} steps were replayed")
    must(replays.num_eager == 0, f"{replays.num_eager} steps to be captured ran eagerly")
    return {
        "replays": replays.num_replayed,
        "eager": replays.num_eager,
        "captures": len(replays.keys),
    }


def unwaited(ask: Ask) -> Figures:
    """No operation of a step may wait for the device once all is captured.

    Waiting for the end of a step, by an event, is not counted.
    """
    with counted_waits() as (waits, begin), counted_replays() as replays:
        rows = ask(
            dtype="bfloat16",
            device_graph_capture=True,
            on_wave=lambda number: begin() if number == 1 else None,
        )
    num_tokens = sum(len(Tokens.of(each).ids) for each in rows)
    must(replays.num_replayed >= LEAST_REPLAYS, f"only {replays.num_replayed} replays")
    places = ", ".join(f"{place} {count}" for place, count in waits.most_common(5))
    must(not waits, f"{waits.total()} waits: {places}")
    return {"tokens": num_tokens, "replays": replays.num_replayed, "waits": waits.total()}


@contextmanager
def counted_waits() -> Iterator[tuple[Counter[str], Callable[[], None]]]:
    """Counts by the line that waited, from when the function is called."""
    is_gpu, waits = torch.cuda.is_available(), Counter[str]()

    def begin() -> None:
        if is_gpu:
            torch.cuda.set_sync_debug_mode("warn")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield waits, begin
        finally:
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")
            for each in caught:
                if "synchronizing" in str(each.message):
                    waits[f"{Path(each.filename).name}:{each.lineno}"] += 1


def _chat(name: str, like: str, dtype: str = "bfloat16", **options: bool) -> EngineCase:
    """A case of chats with other requests, and more options."""
    case = _named(modality_text.CASES, like)
    return EngineCase(
        name=f"replay, {name}, {dtype}",
        write=case.write,
        requests=lasting,
        compare=partial(verified, dtype, LEAST_REPLAYS),
        options={**case.options, "max_batch_size": 12, "max_batch_input_tokens": 256, **options},
    )


def _as_it_is(cases: Sequence[object], like: str, least: int) -> EngineCase:
    """The same requests with captured steps."""
    case = _named(cases, like)
    dtype = "bfloat16" if "bfloat16" in like else "float32"
    return case.under(f"replay, {case.name}", partial(verified, dtype, least))


def _named(cases: Sequence[object], name: str) -> EngineCase:
    return next(each for each in cases if isinstance(each, EngineCase) and each.name == name)


def _all() -> Iterator[EngineCase]:
    chats = {
        "llama": "chat, llama, bfloat16",
        "qwen3-moe": "chat, qwen3-moe, bfloat16",
        "olmo2 by transformers": "chat, olmo2, bfloat16",
        "llama, deterministic": "chat, llama, deterministic",
        "llama, cache in int8": "chat, llama, cache in int8",
        "llama, cache in float8": "chat, llama, cache in float8_e4m3fn",
        "llama, q8_0": "chat, llama, q8_0, bfloat16",
        "llama, q4_k": "chat, llama, q4_k, bfloat16",
        "llama, gptq": "chat, llama, gptq, bfloat16",
        "llama, fp8": "chat, fp8, bfloat16",
        "llama, fp8 in squares": "chat, fp8 in squares, bfloat16",
    }
    for name, like in chats.items():
        yield _chat(name, like)
    yield _chat("llama", "chat, llama, bfloat16", "float32")
    yield _chat("llama", "chat, llama, float16", "float16")
    if torch.cuda.is_available():  # a CPU refuses the option
        for name in ("llama", "qwen3-moe", "llama, cache in int8", "llama, fp8"):
            yield _chat(f"{name}, prompts", chats[name], device_graph_prompts=True)
    yield EngineCase(
        name="replay, waits of a decode step",
        write=_named(modality_text.CASES, "chat, llama, bfloat16").write,
        requests=lasting,
        compare=unwaited,
        options={"max_length": 512, "max_batch_size": 12},
    )
    for family in modality_sight.FAMILIES:
        yield _as_it_is(modality_sight.CASES, f"vision, {family}, bfloat16", 20)
    for model in ("csm", "higgs", "orpheus", "voice"):
        yield _as_it_is(modality_sound.CASES, f"speech, {model}, bfloat16", 40)
    for name in (
        "Flux 256 wide, bfloat16",
        "Flux 256 wide, edits",
        "PixArtSigma, bfloat16",
        "StableDiffusionXL, bfloat16",
        *(f"Flux 256 wide, cache {cache}" for cache in modality_images.CACHES),
    ):
        yield _as_it_is(modality_images.CASES, f"images, {name}", 4)


CASES: Sequence[EngineCase] = tuple(_all())

"""Window layers with pages of their own: answers are transformers', logits those of whole pages.

Prompts of 300 tokens and answers of 64 pass windows of 64, in chunks longer than these, in company,
after hits and preemptions, with so few pages that those given back are used again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.batch_driver import BatchDriver, is_same
from support.decoder_families import TINY
from support.decoder_rig import load_decoder
from support.dense_families import DENSE
from support.every_path import LONG
from support.kernel_levels import LEVELS, open_kernels
from support.mixture_families import MIXTURES, save_mixture
from support.tiers import first
from support.token_world import token_request
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder

WINDOWED = (
    *("gemma3", "gemma4", "gpt-oss", "llama-4"),  # each in a way of its own
    *("gemma4-large", "phi3", "olmo3", "cohere2", "ministral", "exaone4", "starcoder2", "dots1"),
)
PAGE_SIZE, MAX_LENGTH, STEP_TOKENS = 16, 512, 144


@lru_cache(maxsize=1)
def saved(folder: Path, family: str) -> Any:
    """A tiny model in `folder`, and transformers' model."""
    if family in MIXTURES:
        return save_mixture(folder, family)
    kind, extra = DENSE[family]
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **LONG, **extra})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().save_pretrained(folder)
    return model


def prompt(length: int, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(3, TINY["vocab_size"]) for _ in range(length))


def driver_of(decoder: Decoder, native: NativeKernels | None, **given: Any) -> BatchDriver:
    layout = decoder.config.kv_layout(PAGE_SIZE, decoder.dtype)
    options = {"depth": 2, "max_batch_input_tokens": STEP_TOKENS, "max_batch_size": 3}
    options |= {"max_step_s": 0.0} | given  # chunks do not depend on the machine's speed
    return BatchDriver(decoder, layout, native, max_length=MAX_LENGTH, **options)


def answers(driver: BatchDriver) -> Iterator[tuple[str, list[int]]]:
    """Rows that begin, are preempted, hit, part and fork; `(job, tokens)`."""

    def run(**prompts: tuple[int, ...]) -> Iterator[tuple[str, list[int]]]:
        for name, ids in prompts.items():
            driver.submit(name, token_request(ids, max_tokens=64, temperature=0.0))
        driver.run()
        for name, ids in prompts.items():
            yield name, [*ids, *(token for d in driver.deltas(name) for token in d.token_ids)]

    first = prompt(300, 1)
    found = dict(run(long=first, short=prompt(21, 2), other=prompt(290, 3)))
    yield from found.items()
    follow_up = (*found["other"], *prompt(9, 4))
    part = *first[:160], *prompt(60, 5)
    yield from run(turn=follow_up, part=part, fork=part)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gemma3", "torch"),
        *product(WINDOWED[:4], LEVELS[:1]),
        *first(product(WINDOWED[4:], LEVELS[:1]), 0),
    ],
)
def test_answers_are_those_of_whole_pages(tmp_path: Path, family: str, kernels: str) -> None:
    reference = saved(tmp_path, family)
    native = None if kernels == "torch" else open_kernels(kernels)
    decoder = load_decoder(tmp_path, native=native)
    window = decoder.config.kv_layout(PAGE_SIZE, decoder.dtype).longest_window
    size = WindowSize.least(window, PAGE_SIZE, num_rows=3, step_tokens=STEP_TOKENS)
    driver = driver_of(decoder, native, num_pages=44, windows=size)
    rows = list(answers(driver))
    counters = driver.scheduler.stats().counters
    assert counters["preemptions_total"] > 0
    cached = {name: driver.deltas(name)[-1].num_cached_tokens for name, _ in rows}
    assert cached["turn"] == 352, cached
    for _, tokens in rows:
        num_prompt = len(tokens) - 64
        with torch.inference_mode():
            expected_TV = reference(torch.tensor([tokens[:-1]])).logits[0]
        assert expected_TV[num_prompt - 1 :].argmax(1).tolist() == tokens[num_prompt:]
    if native is None:  # torch's sums follow from the batch
        return
    options = {"num_pages": 32, "enable_prefix_caching": False, "max_batch_size": 1, "depth": 1}
    alone = driver_of(decoder, native, **options)
    for name, tokens in rows[-3:-1]:
        request = token_request(tuple(tokens[:-64]), max_tokens=64, temperature=0.0)
        alone.submit(name, request)
        alone.run()
        for position, logits_V in alone.logits[name].items():
            assert is_same(driver.logits[name][position], logits_V), (name, position)

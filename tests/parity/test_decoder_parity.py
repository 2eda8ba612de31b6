"""The decoder against transformers: same random weights, through every path, in both types."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import FAMILIES, TINY, save_family
from support.decoder_rig import (
    Rig,
    Row,
    assert_errs_no_more_than_in_bfloat16,
    decoder_rig,
    load_decoder,
)
from support.kernel_levels import FLOAT32_LEVELS
from support.tiers import among
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.kernels.native.library import NativeKernels

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
OpenRig = Callable[..., Rig]
Build = Callable[[str, dict[str, Any]], tuple[Path, Any]]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Saves a tiny random checkpoint with transformers; returns its folder and the reference."""

    @lru_cache
    def make(family: str, extra: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, save_family(folder, family, **json.loads(extra))

    yield lambda family, extra: make(family, json.dumps(extra))
    make.cache_clear()


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, build: Build) -> tuple[Path, Any]:
    return build(*FAMILIES[request.param])


HIGHEST_AND_PORTABLE = {*FLOAT32_LEVELS[:1], *FLOAT32_LEVELS[-1:]}


@pytest.fixture(scope="session", params=["torch", *among(FLOAT32_LEVELS, HIGHEST_AND_PORTABLE)])
def open_rig(
    request: pytest.FixtureRequest, kernels_of: Callable[[str | None], NativeKernels]
) -> OpenRig:
    """Everything runs by torch, and by the C kernels of each level, in float32."""
    native = None if request.param == "torch" else kernels_of(request.param)

    def open_rig(folder: Path, **options: Any) -> Rig:
        return decoder_rig(load_decoder(folder, native=native, **options), native=native)

    return open_rig


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(TINY["vocab_size"]) for _ in range(length)]


def assert_same_logits(rows: list[Row], reference: Any) -> None:
    """Every logit a row was given equals the reference's on the row's own tokens."""
    for row in rows:
        assert row.logits
        with torch.inference_mode():
            expected_TV = reference(torch.tensor([row.tokens[:-1]])).logits[0]
        for position, logits_V in row.logits.items():
            torch.testing.assert_close(logits_V, expected_TV[position - 1], atol=1e-4, rtol=1e-4)


def test_full_prefill_and_decode(open_rig: OpenRig, model: tuple[Path, Any]) -> None:
    folder, reference = model
    rig = open_rig(folder)
    row = rig.open(prompt(21))
    rig.prefill(row)
    rig.decode(row, num_steps=12)
    assert len(row.tokens) == 21 + 13
    assert_same_logits([row], reference)


def test_chunks_of_odd_sizes(open_rig: OpenRig, model: tuple[Path, Any]) -> None:
    folder, reference = model
    rig = open_rig(folder)
    row = rig.open(prompt(37))
    for size in (1, 5, 11, 3, 17):
        rig.step((row, size))
    rig.decode(row, num_steps=3)
    assert_same_logits([row], reference)


def test_prefix_hit(open_rig: OpenRig, model: tuple[Path, Any]) -> None:
    folder, reference = model
    rig = open_rig(folder)
    donor = rig.open(prompt(22))
    rig.prefill(donor)
    mates = [rig.open(donor.tokens[:20] + prompt(n, seed=5)) for n in (1, 6)]
    for mate, num_pages in zip(mates, (5, 3), strict=True):
        rig.share(mate, donor, num_pages)
    rig.prefill(*mates)
    rig.decode(donor, *mates, num_steps=4)
    assert_same_logits([donor, *mates], reference)


def test_preempt_and_resume(open_rig: OpenRig, model: tuple[Path, Any]) -> None:
    folder, reference = model
    rig = open_rig(folder)
    rows = [rig.open(prompt(n)) for n in (9, 14)]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=5)
    rig.preempt(rows[0])
    rig.decode(rows[1], num_steps=3)  # may take the freed pages
    rig.step((rows[0], 6), (rows[1], 0))
    rig.prefill(rows[0])
    rig.decode(*rows, num_steps=3)
    assert_same_logits(rows, reference)


def test_bfloat16_errs_no_more_than_transformers(
    kernels: NativeKernels, model: tuple[Path, Any]
) -> None:
    """Through every path at once."""
    folder, reference = model
    fields = reference.config.to_dict()
    num_experts = fields.get("num_local_experts") or fields.get("num_experts") or 0
    if num_experts > fields.get("num_experts_per_tok", 0):
        pytest.skip(
            "a token that goes to another expert, for a bit of rounding, errs by any amount"
        )
    decoder = load_decoder(folder, dtype=torch.bfloat16, native=kernels)
    rig = decoder_rig(decoder, native=kernels)
    rows = [rig.open(prompt(n)) for n in (33, 21)]
    rig.step((rows[0], 14))
    rig.step((rows[0], 19), (rows[1], 21))
    rig.decode(*rows, num_steps=6)
    rig.preempt(rows[1])
    mate = rig.open(rows[0].tokens[:32] + prompt(5, seed=5))
    rig.share(mate, rows[0], 8)
    rig.prefill(rows[1], mate)
    rig.decode(*rows, mate, num_steps=6)

    assert_errs_no_more_than_in_bfloat16([*rows, mate], reference)


@pytest.mark.parametrize("num_rows", among([1, 2, 3, 5, 8, 13, 16], [1, 5, 16]))
def test_mixed_batches(open_rig: OpenRig, build: Build, num_rows: int) -> None:
    """Rows join one another at random: decodes beside chunks of any size."""
    for name in ("llama", "mistral", "qwen3"):
        folder, reference = build(*FAMILIES[name])
        rig, source = open_rig(folder), random.Random(num_rows)
        rows = [rig.open(prompt(source.randint(1, 40), seed=i)) for i in range(num_rows)]
        while any(len(row.logits) < 4 for row in rows):
            chosen = source.sample(rows, source.randint(1, num_rows))
            rig.step(*((row, next_count(row, source)) for row in chosen))
        assert_same_logits(rows, reference)


def next_count(row: Row, source: random.Random) -> int:
    left = len(row.tokens) - row.num_cached
    is_decoding = left == 1 and bool(row.logits)
    return 0 if is_decoding else source.randint(1, left)


def test_rows_are_the_same_alone_and_in_any_batch(
    open_rig: OpenRig, model: tuple[Path, Any]
) -> None:
    prompts = [prompt(n) for n in (3, 30, 17, 8, 25)]
    sampling = [SamplingParams(temperature=float(i % 2), seed=i, top_p=0.9) for i in range(5)]

    def run(indices: list[int]) -> dict[int, list[int]]:
        rig = open_rig(model[0])
        rows = {i: rig.open(prompts[i], sampling[i]) for i in indices}
        rig.prefill(*rows.values())
        rig.decode(*rows.values(), num_steps=10)
        return {i: row.tokens for i, row in rows.items()}

    alone = {i: run([i])[i] for i in range(5)}
    assert run([0, 1, 2, 3, 4]) == alone
    assert run([4, 2, 0]) == {i: alone[i] for i in (4, 2, 0)}


def test_seeded_tokens_depend_on_neither_chunks_nor_preemption(
    open_rig: OpenRig, build: Build
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=9, top_k=50)
    rig = open_rig(build(*FAMILIES["llama"])[0])
    whole, pieces = (rig.open(prompt(20), sampling) for _ in range(2))
    rig.prefill(whole)
    rig.decode(whole, num_steps=8)
    for size in (3, 12, 5):
        rig.step((pieces, size))
    rig.decode(pieces, num_steps=3)
    rig.preempt(pieces)
    rig.step((pieces, 11))
    rig.prefill(pieces)
    rig.decode(pieces, num_steps=4)
    assert pieces.tokens == whole.tokens


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling(open_rig: OpenRig, build: Build, scaling: str) -> None:
    folder, reference = build("Llama", {"rope_parameters": SCALINGS[scaling]})
    rig = open_rig(folder)
    rows = [rig.open(prompt(n)) for n in (50, 7)]
    rig.step((rows[0], 29), (rows[1], 7))
    rig.step((rows[0], 21), (rows[1], 0))
    rig.decode(*rows, num_steps=4)
    assert_same_logits(rows, reference)


def test_dynamic_rope_at_a_served_length_beyond_the_models_own(
    open_rig: OpenRig, build: Build
) -> None:
    """Transformers agrees with us where its sequence is exactly as long as what we serve."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    folder, reference = build("Llama", {"rope_parameters": scaling, "max_position_embeddings": 32})
    rig = open_rig(folder, max_length=48)
    row = rig.open(prompt(48))
    rig.step((row, 19))
    rig.prefill(row)
    assert_same_logits([row], reference)


@pytest.mark.parametrize(("max_length", "lengths"), [(32, (30, 5)), (96, (40, 60))])
def test_longrope_on_either_side_of_the_trained_length(
    open_rig: OpenRig, build: Build, max_length: int, lengths: tuple[int, int]
) -> None:
    folder, reference = build("Llama", {"rope_parameters": LONGROPE})
    rig = open_rig(folder, max_length=max_length)
    rows = [rig.open(prompt(n)) for n in lengths]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=2)
    assert_same_logits(rows, reference)

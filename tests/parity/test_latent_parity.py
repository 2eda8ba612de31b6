"""Families with latent attention against transformers: every path, after prompts of 300 tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import LATENT, save_family
from support.decoder_rig import Rig, Row, assert_errs_no_more_than_in_bfloat16, load_decoder
from triptych.core.runtime.kernels.native.library import NativeKernels

EXPERTS = LATENT | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "attention_bias": False,
    "num_hidden_layers": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "youtu, direct queries": (
        "Youtu",
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "num_hidden_layers": 2},
    ),
    "minicpm3": (
        "MiniCPM3",
        LATENT
        | {"scale_emb": 3.0, "scale_depth": 1.1, "dim_model_base": 20, "attention_bias": False},
    ),
    "deepseek-v2-lite": ("DeepseekV2", EXPERTS | {"q_lora_rank": None}),
    "deepseek-v2, groups": (
        "DeepseekV2",
        EXPERTS | GROUPS | {"topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "deepseek-v3": ("DeepseekV3", EXPERTS | GROUPS | {"rope_parameters": YARN}),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        EXPERTS | {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
LONG = {"max_position_embeddings": 512, "initializer_range": 0.1}
PAGE_SIZE = 16


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    family, extra = MODELS[request.param]
    folder = tmp_path_factory.mktemp("latent")
    return folder, save_family(folder, family, **LONG | extra)


def open_rig(
    folder: Path,
    dtype: torch.dtype,
    native: NativeKernels | None,
    cache: torch.dtype | None = None,
) -> Rig:
    decoder = load_decoder(folder, dtype=dtype, native=native)
    assert (decoder._fused is None) == (native is None)  # the one native step runs them
    layout = decoder.config.kv_layout(PAGE_SIZE, cache or dtype)
    return Rig(decoder, layout, native=native, max_length=512, max_batch_size=4)


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 199) for _ in range(length)]


def every_path(rig: Rig) -> list[Row]:
    """Chunks, decode steps, a preempted row, a prefix hit, and steps that mix them."""
    first, second = rig.open(prompt(300, 1)), rig.open(prompt(41, 2))
    for size in (64, 128, 7):
        rig.step((first, size))
    rig.step((first, 101), (second, 41))
    rig.decode(first, second, num_steps=31)
    rig.preempt(first)
    rig.step((first, 257), (second, 0))
    mate = rig.open(second.tokens[:48] + prompt(20, 3))
    rig.share(mate, second, 3)
    rig.step((first, len(first.tokens) - 257), (mate, 20), (second, 0))
    rig.decode(first, mate, num_steps=32)
    assert [len(row.logits) for row in (first, mate)] == [64 + 1, 33]
    return [first, second, mate]


def test_float32_is_transformers(native: NativeKernels, model: tuple[Path, Any]) -> None:
    folder, reference = model
    for kernels in (None, native):
        for row in every_path(open_rig(folder, torch.float32, kernels)):
            with torch.inference_mode():
                expected_TV = reference(torch.tensor([row.tokens[:-1]])).logits[0]
            places = [position - 1 for position in row.logits]
            found_NV = torch.stack(list(row.logits.values()))
            torch.testing.assert_close(found_NV, expected_TV[places], atol=2e-4, rtol=2e-4)
            chosen = [row.tokens[position] for position in row.logits]
            assert expected_TV[places].argmax(1).tolist() == chosen


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_errs_no_more_than_transformers(
    native: NativeKernels, tmp_path: Path, name: str
) -> None:
    """Every expert is chosen: with few of them, rounding may choose others."""
    family, extra = MODELS[name]
    if "n_routed_experts" in extra:
        extra = extra | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    reference = save_family(tmp_path, family, **LONG | extra)
    rows = every_path(open_rig(tmp_path, torch.bfloat16, native))
    assert_errs_no_more_than_in_bfloat16(rows, reference)


def test_logits_are_bitwise_the_same_alone(native: NativeKernels, model: tuple[Path, Any]) -> None:
    """Of a kernel level: one family runs on all in `test_decoder_parity`."""
    folder, reference = model
    cache = torch.int8 if reference.config.model_type == "youtu" else torch.bfloat16
    together = every_path(open_rig(folder, torch.bfloat16, native, cache))
    for row in together:
        rig = open_rig(folder, torch.bfloat16, native, cache)
        alone = rig.open(row.tokens[: row.num_prompt_tokens])
        rig.prefill(alone)
        rig.decode(alone, num_steps=len(row.tokens) - row.num_prompt_tokens - 1)
        assert alone.tokens == row.tokens
        for position, logits_V in row.logits.items():
            assert torch.equal(alone.logits[position], logits_V)

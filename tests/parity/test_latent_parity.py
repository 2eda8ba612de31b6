"""Families with latent attention against transformers: every path, after prompts of 300 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import LATENT, save_family
from support.decoder_rig import Rig, assert_errs_no_more_than_in_bfloat16
from support.every_path import (
    LONG,
    assert_same_alone,
    assert_same_tokens,
    every_path,
    open_rig,
)
from support.tiers import first
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
INDEX = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16, "n_shared_experts": 1}
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
    "deepseek-v3.2": ("DeepseekV32", EXPERTS | GROUPS | INDEX | {"rope_parameters": YARN}),
    "deepseek-v3.2, within its index": (
        "DeepseekV32",
        EXPERTS | GROUPS | INDEX | {"index_topk": 512},
    ),
    "glm-5, layers that share a choice": (
        "GlmMoeDsa",
        EXPERTS | INDEX | {"index_topk_freq": 2, "head_dim": 8, "num_hidden_layers": 4},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        EXPERTS | {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mistral 4": (
        "Mistral4",
        EXPERTS
        | GROUPS
        | {"head_dim": 18, "n_shared_experts": 1, "first_k_dense_replace": 0}
        | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "partial_rotary_factor": 4 / 9}},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    family, extra = MODELS[request.param]
    folder = tmp_path_factory.mktemp("latent")
    return folder, save_family(folder, family, **LONG | extra)


def test_float32_is_transformers(native: NativeKernels, model: tuple[Path, Any]) -> None:
    folder, reference = model
    for kernels in (None, native):
        assert_same_tokens(every_path(open_rig(folder, torch.float32, kernels)), reference)


@pytest.mark.parametrize("name", first(MODELS, 3))
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


@pytest.mark.parametrize("model", first(MODELS, 3), indirect=True, scope="module")
def test_logits_are_bitwise_the_same_alone(native: NativeKernels, model: tuple[Path, Any]) -> None:
    """Of a kernel level: one family runs on all in `test_decoder_parity`."""
    folder, reference = model
    is_small = reference.config.model_type in ("youtu", "glm_moe_dsa")
    cache = torch.int8 if is_small else torch.bfloat16

    def rig() -> Rig:
        return open_rig(folder, torch.bfloat16, native, cache)

    assert_same_alone(every_path(rig()), rig)

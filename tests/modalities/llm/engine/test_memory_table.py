"""The start's memory table and the ledger have the bytes of a cache that are allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.decoder_families import FAMILIES, LATENT, TINY
from support.dense_families import DENSE
from support.llm_loader import MIB, config, loader
from support.mixture_families import save_mixture
from support.recurrent_models import recurrent_model
from triptych.core.ledger import Ledger
from triptych.core.options.config import CacheOptions, ModelOptions


def save_recurrent(folder: Path, name: str) -> None:
    recurrent_model(name).save_pretrained(folder)


def save_expert(folder: Path, name: str) -> None:
    save_mixture(folder, name, max_position_embeddings=2048)


def save_dense(folder: Path, name: str) -> None:
    family, extra = (DENSE | FAMILIES)[name]
    fields = TINY | extra | {"max_position_embeddings": 2048}
    model = f"{family.removesuffix('Text')}ForCausalLM"
    kind = getattr(transformers, f"{family}Config")
    getattr(transformers, model)(kind(**fields)).save_pretrained(folder)


def save_indexed(folder: Path, name: str) -> None:
    fields = TINY | LATENT | {"max_position_embeddings": 2048, "index_topk": 16, "n_group": 1}
    config = transformers.GlmMoeDsaConfig(
        **fields | {"topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
        moe_intermediate_size=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk_pattern=name,
    )
    transformers.GlmMoeDsaForCausalLM(config).save_pretrained(folder)


CASES: dict[str, tuple[Callable[[Path, str], Any], str, str, str]] = {
    "windows": (save_dense, "gemma3", "auto", "auto"),
    "windows and shared cells": (save_dense, "gemma4", "int8", "auto"),
    "windows and sinks": (save_expert, "gpt-oss", "auto", "auto"),
    "windows in chunks": (save_expert, "llama-4", "float8_e4m3fn", "auto"),
    "half layers": (save_recurrent, "nemotron-h", "auto", "auto"),
    "pairs": (save_recurrent, "falcon-h1", "int8", "auto"),
    "states beside latents": (save_recurrent, "kimi-linear", "int8", "auto"),
    "latents": (save_dense, "youtu", "auto", "auto"),
    "latents in int8": (save_dense, "youtu", "int8", "auto"),
    "keys of an index": (save_indexed, "FSFS", "int8", "auto"),
    "windows of a class": (save_dense, "gemma3", "auto", "transformers"),
    "states of a class": (save_recurrent, "falcon-h1", "auto", "transformers"),
    "latents of a class": (save_dense, "youtu", "auto", "transformers"),
}
SHARES = {
    "windows": 62,
    "windows and shared cells": 56,
    "windows and sinks": 50,
    "windows in chunks": 50,
}
"""Percents of the memory that full attention in all layers would take for as many tokens."""


@pytest.mark.parametrize("case", CASES)
def test_the_table_has_what_is_allocated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    save, name, form, impl = CASES[case]
    save(tmp_path, name)
    ledger = Ledger(256 * MIB)
    options = config(cache=CacheOptions(kv_cache_format=form), models=ModelOptions(model_impl=impl))
    with caplog.at_level(logging.DEBUG):
        loaded = loader(tmp_path, ledger, options).load(lambda _: None)
    kv, held = loaded.runner.kv, ledger.by_owner()
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kv.tensors)
    num_state_bytes = 0 if kv.states is None else kv.states.num_bytes
    assert (held["tiny/kv"], held.get("tiny/states", 0)) == (num_bytes, num_state_bytes)
    (row,) = [each.fields for each in caplog.records if each.msg == "memory"]
    assert row["caches_mib"] == round((num_bytes + num_state_bytes) / MIB, 1) > 0
    share = 100 * num_bytes // (kv.num_pages * replace(kv.layout, num_window_pages=0).page_bytes)
    assert (kv.layout.num_window_pages > 0) == (case in SHARES)
    assert share == SHARES.get(case, 100)
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"{share} % of the memory" in line for line in lines) == (case in SHARES)
    loaded.close()

"""Prefixes from host memory and from disk: the same tokens as those of a cold run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.decoder_families import FAMILIES
from support.recurrent_models import RECURRENT
from support.roles import answer, engine, role_config, save_text_family, series
from support.tiers import nightly
from support.vision_folders import write_vision_folder
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.config import Config
from triptych.schedulers.local import LocalClient

_MODELS = [  # the cells of pages, the layers that read them, and the parts that come back at least
    ("llama", "auto", 40),
    nightly("llama", "bfloat16", 40),
    ("llama", "int8", 40),
    nightly("llama", "float8_e4m3fn", 40),
    nightly("qwen2-window", "auto", 40),
    ("mistral", "auto", 6),  # windows alone
    ("qwen3.5", "auto", 40),
    ("youtu", "auto", 40),
    ("llava", "auto", 40),
]


def tier_config(folder: Path, connector: str = "null", **options: Any) -> Config:
    """An engine with a cache of one row: every other prompt evicts the last one."""
    if connector == "tiered":
        settings = {"disk_offload_dir": str(folder / "pages")}
        options |= {"kv_connector_config": json.dumps(settings), "hicache_ratio": 4.0}
    config = role_config("prefill_and_decode", "", folder, kv_connector=connector, **options)
    return replace(
        config,
        models=replace(config.models, max_length=100),
        schedule=replace(config.schedule, max_batch_size=1),
    )


def requests() -> list[TokenRequest]:
    """Greedy and seeded, of different beginnings; the cache holds 25 pages."""
    rules: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]
    return [
        TokenRequest(
            prompt_ids=tuple(3 + (n * 7 + start) % 50 for n in range(70)),
            sampling=SamplingParams(max_tokens=9, **rule),
        )
        for start, rule in enumerate(rules * 2)
    ]


async def answers(client: LocalClient, name: str) -> list[tuple[int, ...]]:
    return [await answer(client, each, f"{name}-{n}") for n, each in enumerate(requests())]


@pytest.mark.parametrize(("family", "cells", "least"), _MODELS)
async def test_tokens_are_those_of_a_cold_run(
    family: str, cells: str, least: int, tmp_path: Path
) -> None:
    folder, model = tmp_path / "model", None
    if family in FAMILIES or family in RECURRENT:
        save_text_family(folder, family)
    else:
        model = msgspec.structs.replace(write_vision_folder(folder, family), name="tiny")
    async with engine(tier_config(tmp_path, kv_cache_format=cells), folder, model) as cold:
        expected = await answers(cold, "cold")
    config = tier_config(tmp_path, "tiered", kv_cache_format=cells)
    async with engine(config, folder, model) as first:
        assert await answers(first, "first") == expected
        assert await answers(first, "again") == expected
        assert await series(first, "kv_host_page_hits_total", least) >= least
        has_windows = await series(first, "kv_window_pages") > 0
        assert has_windows == (family in ("qwen2-window", "mistral"))
        assert await series(first, "kv_disk_page_hits_total") == 0
    async with engine(config, folder, model) as second:
        assert await answers(second, "restarted") == expected
        assert await series(second, "kv_disk_page_hits_total", least) >= least
    assert len(set(expected)) > 1

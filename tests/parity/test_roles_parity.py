"""Prefill in one engine and decode in another: the same tokens as those of one engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.decoder_families import FAMILIES, save_family
from support.roles import answer, engine, role_config, series
from support.serve_process import free_port
from support.text_models import write_text_folder
from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenRequest

_KINDS = ("llama", "qwen2-window", "qwen3", "mixtral")


@pytest.fixture(scope="module", params=_KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, extra = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder, family, **extra)
    config = json.loads((folder / "config.json").read_text())
    write_text_folder(folder, **config)
    return folder


def requests() -> list[TokenRequest]:
    """Greedy and seeded; two begin alike; one has no whole page."""
    prompts = [tuple(range(3, 3 + n)) for n in (3, 4, 9, 37, 60)]
    prompts.append((*range(3, 30), 7, 7, 7, 9))
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    rules: list[dict[str, Any]] = [greedy, drawn]
    return [
        TokenRequest(prompt_ids=prompt, sampling=SamplingParams(max_tokens=12, **rule))
        for prompt in prompts
        for rule in rules
    ]


@pytest.mark.parametrize("way", ["unix", "tcp"])
async def test_tokens_are_those_of_one_engine(folder: Path, way: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/pages" if way == "unix" else f"127.0.0.1:{free_port()}"
    if way == "tcp" and "llama" not in folder.name:
        pytest.skip("the way knows nothing of the family")
    async with engine(role_config("prefill_and_decode", "", tmp_path), folder) as whole:
        expected = [await answer(whole, each, str(n)) for n, each in enumerate(requests())]
    async with (
        engine(role_config("prefill", address, tmp_path), folder) as prefill,
        engine(role_config("decode", address, tmp_path), folder) as decode,
    ):
        await series(decode, "page_links", 1)
        got = [await answer(decode, each, str(n)) for n, each in enumerate(requests())]
        num_pages = await series(decode, "pages_received_total", 22)
        assert await series(decode, "page_fallbacks_total") == 0
        assert await series(prefill, "pages_sent_total", num_pages) == num_pages
    assert got == expected

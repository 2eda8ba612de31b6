"""Prefill in one engine and decode in another: the same tokens as those of one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from support.decoder_families import FAMILIES, save_family
from support.http import in_process
from support.pictures import picture, saved
from support.roles import answer, engine, role_config, series
from support.serve_process import free_port
from support.text_models import write_text_folder
from support.vision_folders import data_url, shown, write_vision_folder
from triptych.compose import build_app
from triptych.core.config import Config
from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenRequest
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.engine import feature_memory
from triptych.schedulers.local import LocalClient

_NUM_PAGES = 14 + 1
"""Whole pages of the longest prompt, and of the one that leaves it."""
_WAYS = [  # what pages cross, of which model, in which format
    ("unix", "llama", "auto"),
    ("tcp", "llama", "auto"),
    ("tcp", "llama", "bfloat16"),
    ("unix", "llama", "int8"),
    ("tcp", "llama", "float8_e4m3fn"),
    ("unix", "qwen2-window", "auto"),
    ("unix", "qwen3", "auto"),
    ("unix", "mixtral", "auto"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family."""

    @cache
    def write(name: str) -> Path:
        family, extra = FAMILIES[name]
        folder = tmp_path_factory.mktemp(name)
        save_family(folder, family, **extra)
        write_text_folder(folder, **json.loads((folder / "config.json").read_text()))
        return folder

    return write


def requests() -> list[TokenRequest]:
    """Greedy and seeded; two begin alike; one has no whole page."""
    prompts = [tuple(range(3, 3 + n)) for n in (3, 9, 37, 60)]
    prompts.append((*range(3, 30), 7, 7, 7, 9))
    greedy, drawn = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    rules: list[dict[str, Any]] = [greedy, drawn]
    return [
        TokenRequest(prompt_ids=prompt, sampling=SamplingParams(max_tokens=12, **rule))
        for prompt in prompts
        for rule in rules
    ]


@pytest.mark.parametrize(("way", "family", "cells"), _WAYS)
async def test_tokens_are_those_of_one_engine(
    way: str, family: str, cells: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, requested = folder_of(family), requests()
    address = f"unix:{tmp_path}/pages" if way == "unix" else f"127.0.0.1:{free_port()}"
    whole_config, *configs = (
        role_config(role, address, tmp_path, kv_cache_format=cells)
        for role in ("prefill_and_decode", "prefill", "decode")
    )
    async with engine(whole_config, folder) as whole:
        expected = [await answer(whole, each, str(n)) for n, each in enumerate(requested)]
    async with engine(configs[0], folder) as prefill, engine(configs[1], folder) as decode:
        await series(decode, "page_links", 1)
        got = [await answer(decode, each, str(n)) for n, each in enumerate(requested)]
        assert await series(decode, "pages_received_total", _NUM_PAGES) == _NUM_PAGES
        assert await series(decode, "page_fallbacks_total") == 0
        assert await series(prefill, "pages_sent_total", _NUM_PAGES) == _NUM_PAGES
    assert got == expected
    assert len(set(got)) > 6


async def ask(
    config: Config, model: ResolvedModel, client: LocalClient, *pictures: Image.Image
) -> str:
    """What a model says of pictures."""
    urls = [data_url(saved(each)) for each in pictures or (picture(),)]
    body = shown(*urls) | {"model": "tiny", "temperature": 0}
    app = build_app(config, [model], client)
    async with in_process(app) as http:
        response = await http.post("/v1/chat/completions", json=body, timeout=60)
    await app.state.close()
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_pictures_are_encoded_where_prompts_are_computed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = msgspec.structs.replace(write_vision_folder(folder), name="tiny")
    address = f"unix:{tmp_path}/pages"
    whole_config, *configs = (
        role_config(role, address, tmp_path) for role in ("prefill_and_decode", "prefill", "decode")
    )
    async with engine(whole_config, folder, model) as whole:
        expected = await ask(whole_config, model, whole)
    async with (
        engine(configs[0], folder, model) as prefill,
        engine(configs[1], folder, model) as decode,
    ):
        await series(decode, "page_links", 1)
        assert await ask(configs[1], model, decode) == expected
        assert await series(decode, "pages_received_total", 4) >= 4
        assert await series(decode, "page_fallbacks_total") == 0
        assert await series(prefill, "pictures_encoded_total", 1) == 1
        assert await series(decode, "pictures_encoded_total") == 0


@pytest.mark.parametrize(
    ("way", "family"),
    [("unix", "llava"), ("tcp", "qwen3_vl"), ("unix", "gemma3"), ("tcp", "idefics3")],
)
async def test_answers_about_pictures_that_were_encoded_elsewhere(
    way: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_memory, "PAGE_BYTES", 600)  # several of a picture
    folder = tmp_path / "model"
    model = msgspec.structs.replace(write_vision_folder(folder, family), name="tiny")
    address = f"unix:{tmp_path}/features" if way == "unix" else f"127.0.0.1:{free_port()}"
    configs = {
        role: role_config(role, address, tmp_path, encoder=address)
        for role in ("prefill_and_decode", "encode")
    }
    alone = role_config("prefill_and_decode", "", tmp_path)
    shown = [picture(40, 60), picture(90, 30)]
    async with engine(alone, folder, model) as whole:
        expected = await ask(alone, model, whole, *shown)
    language = configs["prefill_and_decode"]
    async with engine(language, folder, model) as reader:
        async with engine(configs["encode"], folder, model) as encoder:
            await series(reader, "feature_page_links", 1)
            assert await ask(language, model, reader, *shown) == expected
            assert await series(encoder, "pictures_encoded_total", 2) == 2
            assert await series(reader, "feature_fetches_total", 2) == 2
            num_pages = await series(encoder, "feature_pages_sent_total", 4)
            assert await series(reader, "feature_pages_received_total", num_pages) == num_pages
            assert await series(reader, "feature_fallbacks_total") == 0
            assert await series(reader, "pictures_encoded_total") == 0
        turned = [each.rotate(90) for each in shown]  # nobody is left who would encode these
        assert await ask(language, model, reader, *turned)
        assert await series(reader, "pictures_encoded_total", 2) == 2


async def test_three_roles_share_a_chat_with_a_picture(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = msgspec.structs.replace(write_vision_folder(folder), name="tiny")
    pages, features = f"unix:{tmp_path}/pages", f"unix:{tmp_path}/features"
    alone = role_config("prefill_and_decode", "", tmp_path)
    configs = {
        "encode": role_config("encode", features, tmp_path),
        "prefill": role_config("prefill", pages, tmp_path, encoder=features),
        "decode": role_config("decode", pages, tmp_path),
    }
    async with engine(alone, folder, model) as whole:
        expected = await ask(alone, model, whole)
    async with (
        engine(configs["encode"], folder, model) as encoder,
        engine(configs["prefill"], folder, model) as prefill,
        engine(configs["decode"], folder, model) as decode,
    ):
        await series(prefill, "feature_page_links", 1)
        await series(decode, "page_links", 1)
        assert await ask(configs["decode"], model, decode) == expected
        assert await series(encoder, "pictures_encoded_total", 1) == 1
        assert await series(prefill, "pictures_encoded_total") == 0
        assert await series(decode, "pictures_encoded_total") == 0
        assert await series(decode, "page_fallbacks_total") == 0

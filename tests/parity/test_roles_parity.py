"""Prefill in one engine and decode in another: the same tokens as those of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from support.images import image, saved
from support.roles import answer, engine, role_config, save_text_family, series
from support.serve_process import free_port
from support.tiers import first, nightly
from support.vision_folders import write_vision_folder
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.multimodal import ImageSource
from triptych.modalities.vlm.api.preparation import ImageProcessorCache, InProcessPreparation
from triptych.modalities.vlm.api.prompt_encoder import VisionPromptEncoder
from triptych.modalities.vlm.engine import feature_memory
from triptych.modalities.vlm.processing.probe import read_facts
from triptych.schedulers.local import LocalClient

_NUM_PAGES = 14 + 1
"""Whole pages of the longest prompt, and of the one that leaves it."""
_WAYS = [  # what pages cross, of which model, in which format, in how many parts
    ("unix", "llama", "auto", _NUM_PAGES),
    nightly("tcp", "llama", "auto", _NUM_PAGES),
    nightly("tcp", "llama", "bfloat16", _NUM_PAGES),
    nightly("unix", "llama", "int8", _NUM_PAGES),
    ("tcp", "llama", "float8_e4m3fn", _NUM_PAGES),
    ("unix", "qwen2-window", "auto", 28),
    ("tcp", "qwen3.5", "auto", 19),
    nightly("unix", "qwen3", "auto", _NUM_PAGES),
    nightly("unix", "mixtral", "auto", _NUM_PAGES),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family."""

    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_text_family(folder, name)
        return folder

    return write


def requests() -> list[TokenRequest]:
    """Greedy and seeded; two begin alike; one has no whole page."""
    prompts = [tuple(range(3, 3 + n)) for n in (3, 9, 37, 60)]
    prompts.append((*range(3, 30), 7, 7, 7, 9))
    greedy, sampled = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    rules: list[dict[str, Any]] = [greedy, sampled]
    return [
        TokenRequest(prompt_ids=prompt, sampling=SamplingParams(max_tokens=12, **rule))
        for prompt in prompts
        for rule in rules
    ]


@pytest.mark.parametrize(("way", "family", "cells", "num_parts"), _WAYS)
async def test_tokens_are_those_of_one_engine(
    way: str,
    family: str,
    cells: str,
    num_parts: int,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
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
        assert await series(decode, "pages_received_total", num_parts) == num_parts
        assert await series(decode, "page_fallbacks_total") == 0
        assert await series(prefill, "pages_sent_total", num_parts) == num_parts
    assert got == expected
    assert len(set(got)) > 6


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], ResolvedModel]:
    """A tiny model of a family that sees."""

    @cache
    def write(family: str) -> ResolvedModel:
        folder = tmp_path_factory.mktemp(family)
        return msgspec.structs.replace(write_vision_folder(folder, family), name="tiny")

    return write


async def chats(model: ResolvedModel) -> list[TokenRequest]:
    """Of one image and of two."""
    return [
        await chat(model, image(40, 60)),
        await chat(model, image(90, 30), image(50, 50)),
    ]


async def chat(model: ResolvedModel, *shown: Image.Image) -> TokenRequest:
    """A chat with images, as the API would send it to the engine."""
    config = Config()
    images = ImageProcessorCache.from_config(InProcessPreparation(model), config)
    encoder = VisionPromptEncoder.open(model, read_facts(model.folder), images, config)
    files = [ImageSource(file=Fetched(saved(each), "")) for each in shown]
    messages = [{"role": "user", "content": [*files, "What is this?"]}]
    request = await encoder.encode_messages(messages)
    sampling = SamplingParams(temperature=0.0, max_tokens=9)
    return msgspec.structs.replace(request, sampling=sampling)


async def answers(client: LocalClient, requested: Sequence[TokenRequest]) -> list[tuple[int, ...]]:
    return [await answer(client, each, str(n)) for n, each in enumerate(requested)]


async def test_images_are_encoded_where_prompts_are_computed(
    seen: Callable[[str], ResolvedModel], tmp_path: Path
) -> None:
    model = seen("llava")
    requested = await chats(model)
    folder, address = Path(model.folder), f"unix:{tmp_path}/pages"
    whole_config, *configs = (
        role_config(role, address, tmp_path) for role in ("prefill_and_decode", "prefill", "decode")
    )
    async with engine(whole_config, folder, model) as whole:
        expected = await answers(whole, requested)
    async with (
        engine(configs[0], folder, model) as prefill,
        engine(configs[1], folder, model) as decode,
    ):
        await series(decode, "page_links", 1)
        assert await answers(decode, requested) == expected
        assert await series(decode, "pages_received_total", 4) >= 4
        assert await series(decode, "page_fallbacks_total") == 0
        assert await series(prefill, "images_encoded_total", 3) == 3
        assert await series(decode, "images_encoded_total") == 0


@pytest.mark.parametrize(
    ("way", "family"), first([("tcp", "qwen3_vl"), ("unix", "llava"), ("tcp", "idefics3")])
)
async def test_answers_about_images_that_were_encoded_elsewhere(
    way: str,
    family: str,
    seen: Callable[[str], ResolvedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature_memory, "PAGE_BYTES", 600)  # several of an image
    model = seen(family)
    requested = await chats(model)
    folder = Path(model.folder)
    address = f"unix:{tmp_path}/features" if way == "unix" else f"127.0.0.1:{free_port()}"
    alone = role_config("prefill_and_decode", "", tmp_path)
    language = role_config("prefill_and_decode", "", tmp_path, encoder=address)
    async with engine(alone, folder, model) as whole:
        expected = await answers(whole, requested)
    async with engine(language, folder, model) as reader:
        async with engine(role_config("encode", address, tmp_path), folder, model) as encoder:
            await series(reader, "feature_page_links", 1)
            assert await answers(reader, requested[1:]) == expected[1:]
            assert await series(encoder, "images_encoded_total", 2) == 2
            assert await series(reader, "feature_fetches_total", 2) == 2
            num_pages = await series(encoder, "feature_pages_sent_total", 4)
            assert await series(reader, "feature_pages_received_total", num_pages) == num_pages
            assert await series(reader, "feature_fallbacks_total") == 0
            assert await series(reader, "images_encoded_total") == 0
        assert await answers(reader, requested[:1]) == expected[:1]  # nobody else is there
        assert await series(reader, "images_encoded_total", 1) == 1


async def test_three_roles_share_a_chat_with_images(
    seen: Callable[[str], ResolvedModel], tmp_path: Path
) -> None:
    model = seen("llava")
    requested = await chats(model)
    folder, pages = Path(model.folder), f"unix:{tmp_path}/pages"
    features = f"unix:{tmp_path}/features"
    alone = role_config("prefill_and_decode", "", tmp_path)
    configs = {
        "encode": role_config("encode", features, tmp_path),
        "prefill": role_config("prefill", pages, tmp_path, encoder=features),
        "decode": role_config("decode", pages, tmp_path),
    }
    async with engine(alone, folder, model) as whole:
        expected = await answers(whole, requested)
    async with (
        engine(configs["encode"], folder, model) as encoder,
        engine(configs["prefill"], folder, model) as prefill,
        engine(configs["decode"], folder, model) as decode,
    ):
        await series(prefill, "feature_page_links", 1)
        await series(decode, "page_links", 1)
        assert await answers(decode, requested) == expected
        assert await series(encoder, "images_encoded_total", 3) == 3
        assert await series(prefill, "images_encoded_total") == 0
        assert await series(decode, "images_encoded_total") == 0
        assert await series(decode, "page_fallbacks_total") == 0

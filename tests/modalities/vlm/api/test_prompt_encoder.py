"""Conversations with images become prompts: where images stand, and what no text can spell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.images import image, saved
from support.vision_folders import EXTRA, PARTS, STRINGS, write_vision_folder
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.prompt_content import Array
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InvalidRequest, PayloadTooLarge
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import Config, ServerOptions, VisionOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.multimodal import ImageSource
from triptych.modalities.vlm.api import preparation
from triptych.modalities.vlm.api.preparation import (
    ImageProcessorCache,
    InProcessPreparation,
    load_facts,
    probe_facts,
)
from triptych.modalities.vlm.api.prompt_encoder import RUN, VisionPromptEncoder
from triptych.modalities.vlm.prepared import PreparedImage, VisionFacts
from triptych.modalities.vlm.processing.probe import read_facts

CONFIG = Config(server=ServerOptions(), vision=VisionOptions(max_images=3))
RED = ImageSource(file=Fetched(saved(image()), "image/png"))
WIDE = ImageSource(file=Fetched(saved(image(90, 30)), "image/png"))


def open_model(folder: Path, family: str = "llava", template: str = PARTS) -> VisionPromptEncoder:
    model = write_vision_folder(folder, family, template=template)
    images = ImageProcessorCache.from_config(InProcessPreparation(model), CONFIG)
    return VisionPromptEncoder.open(model, read_facts(model.folder), images, CONFIG)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> VisionPromptEncoder:
    return open_model(tmp_path_factory.mktemp("llava"))


def message(*parts: str | ImageSource, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def words(encoder: VisionPromptEncoder, prompt: TokenRequest) -> str:
    """The prompt as text, a `*` for each position of an image."""
    ids = [
        FIRST_FRAME_ID if token_id >= FIRST_FRAME_ID else token_id for token_id in prompt.prompt_ids
    ]
    decode = encoder.text.tokenizer.decode
    return "".join(
        "*" if token_id == FIRST_FRAME_ID else decode([token_id], skip_special_tokens=False)
        for token_id in ids
    )


async def test_images_stand_where_they_were_shown(encoder: VisionPromptEncoder) -> None:
    prompt = await encoder.encode_messages([message("a", RED, "b", RED, WIDE, "c")])
    stars = 16 * "*"
    assert words(encoder, prompt) == (
        f"<|im_start|>user\na{stars}b{stars}{stars}c<|im_end|>\n<|im_start|>assistant\n"
    )
    first, second, third = prompt.contents
    assert first.span.digest == second.span.digest != third.span.digest
    start = len("xuser\na")
    assert first.span.runs == ((start, 16),)
    assert third.span.runs == ((start + 33, 16),)
    assert prompt.prompt_ids[start : start + 16] == prompt.prompt_ids[start + 17 : start + 33]
    assert not set(prompt.prompt_ids[start : start + 16]) & set(
        prompt.prompt_ids[start + 33 : start + 49]
    )


async def test_separators_of_a_family_are_special_tokens(tmp_path: Path) -> None:
    encoder = open_model(tmp_path, "qwen2_vl")
    prompt = await encoder.encode_messages([message(RED, "?")])
    shown = words(encoder, prompt)
    assert "<|vision_start|>*" in shown
    assert "*<|vision_end|>?" in shown
    (found,) = prompt.contents
    assert found.span.grid[0] * found.span.grid[1] == found.span.num_features == shown.count("*")


@pytest.mark.parametrize("spelled", [*EXTRA, RUN, "<|im_end|>", "\ue000"])
async def test_a_caller_cannot_spell_an_image(encoder: VisionPromptEncoder, spelled: str) -> None:
    prompt = await encoder.encode_messages([message(f"x{spelled}y", RED)])
    assert len(prompt.contents) == 1
    assert words(encoder, prompt).count("*") == 16
    special = encoder.text.tokenizer.token_to_id(spelled)
    honest = await encoder.encode_messages([message("xy", RED)])
    assert prompt.prompt_ids.count(special) == honest.prompt_ids.count(special)
    text = "".join(chr(byte) for byte in f"x{spelled}y".encode())
    shown = [encoder.text.token_bytes(i) for i in prompt.prompt_ids if i < FIRST_FRAME_ID]
    assert text.encode("latin-1") in b"".join(shown)


async def test_templates_that_take_strings(tmp_path: Path) -> None:
    encoder = open_model(tmp_path, template=STRINGS)
    prompt = await encoder.encode_messages(
        [message("You see.", role="system"), message(RED, "b <image>")]
    )
    assert f"user\n{16 * '*'}b <image><" in words(encoder, prompt)
    assert "system\nYou see.<" in words(encoder, prompt)


async def test_text_alone_is_read_as_by_any_model(encoder: VisionPromptEncoder) -> None:
    as_string = await encoder.encode_messages([{"role": "user", "content": "hi"}])
    assert as_string == await encoder.encode_messages([message("hi")])
    assert as_string.contents == ()


async def test_template_that_drops_images_is_refused(tmp_path: Path) -> None:
    only_last = PARTS.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    encoder = open_model(tmp_path, template=only_last)
    with pytest.raises(InvalidRequest, match="0 of 1 images"):
        await encoder.encode_messages([message(RED, "a"), message("b")])


async def test_too_many_images(encoder: VisionPromptEncoder) -> None:
    with pytest.raises(InvalidRequest, match="at most 3 images"):
        await encoder.encode_messages([message(*[RED] * 4)])


async def test_images_that_are_too_much_together(tmp_path: Path) -> None:
    model = write_vision_folder(tmp_path)
    images = ImageProcessorCache.from_config(InProcessPreparation(model), CONFIG)
    facts, two = read_facts(model.folder), 2 * 3 * 28 * 28
    encoder = VisionPromptEncoder.open(model, facts, images, CONFIG, max_bytes=two)
    assert len((await encoder.encode_messages([message(RED, WIDE)])).contents) == 2
    with pytest.raises(PayloadTooLarge, match="3 images of this chat") as refused:
        await encoder.encode_messages([message(RED, WIDE, RED)])
    assert refused.value.param == "messages"


async def test_a_coarse_image_is_scaled_down(tmp_path: Path) -> None:
    asked = []

    async def prepare(file: Fetched, *, model: str, max_pixels: int) -> PreparedImage:
        asked.append(max_pixels)
        array = Array("uint8", (1,), b"x")
        return PreparedImage(digest=bytes(32), inputs={"p": array}, spelling=(2,))

    model = write_vision_folder(tmp_path)
    images = ImageProcessorCache(prepare, max_bytes=100)
    encoder = VisionPromptEncoder.open(model, read_facts(model.folder), images, CONFIG)
    coarse = ImageSource(file=RED.file, is_coarse=True)
    await encoder.encode_messages([message(RED, coarse)])
    assert sorted(asked) == [512 * 512, CONFIG.vision.max_input_image_pixels]


async def test_tenants_share_nothing_of_an_image(encoder: VisionPromptEncoder) -> None:
    prompts = [
        await encoder.encode_messages([message(RED, "?")], tenant=tenant)
        for tenant in ("", "a", "b", "a")
    ]
    shared, first, other, again = prompts
    assert first == again
    assert len({prompt.contents[0].span.digest for prompt in prompts}) == 3
    assert first.contents[0].inputs == other.contents[0].inputs
    assert len(first.prompt_ids) == len(shared.prompt_ids)
    assert len(set(first.prompt_ids) & set(other.prompt_ids)) == len(set(shared.prompt_ids)) - 16


def test_facts_are_read_without_torch_and_are_the_same(tmp_path: Path) -> None:
    model = write_vision_folder(tmp_path)
    assert probe_facts([model.folder]) == (read_facts(model.folder),)


def test_facts_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    facts = (VisionFacts("<image>", {"vocab_size": 7}),)

    def ask(folders: list[str]) -> tuple[VisionFacts, ...]:
        asked.append(folders)
        return facts

    monkeypatch.setattr(preparation, "probe_facts", ask)
    one = ResolvedModel(name="a", reference="a", folder="here", digest="1")
    other = msgspec.structs.replace(one, digest="2")
    for model in (one, one, other, one):
        assert load_facts([model], str(tmp_path)) == facts
    assert len(asked) == 2
    for each in (tmp_path / "facts").iterdir():
        each.write_bytes(b"{")
    assert load_facts([one], str(tmp_path)) == facts
    assert len(asked) == 3
    described = msgspec.structs.replace(one, folder=str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    for text in (b"{}", b"{}", b'{"image_token": "<other>"}'):
        (tmp_path / "model" / "processor_config.json").write_bytes(text)
        assert load_facts([described], str(tmp_path)) == facts
    assert len(asked) == 5, "what a processor is made of has changed once"
    (tmp_path / "file").write_bytes(b"")
    assert load_facts([one], str(tmp_path / "file")) == facts


class Kitchen:
    """Prepares on command, and records the tenants."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[bytes | bytearray] = []
        self.num_cancelled = 0

    async def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> PreparedImage:
        self.begun.append(file.data)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if file.data == b"bad":
            raise InvalidRequest("It is bad.")
        array = Array("uint8", (10,), bytes(10))
        return PreparedImage(digest=bytes(32), inputs={"pixel_values": array}, spelling=(1,))


async def look(images: ImageProcessorCache, data: bytes, **given: Any) -> PreparedImage:
    return await images.prepared(Fetched(data, ""), **{"model": "m", "max_pixels": 1, **given})


async def waiting(images: ImageProcessorCache, number: int) -> None:
    """Return when so many wait for images that are being prepared."""
    while sum(run.num_waiting for run in images._running.values()) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)  # and the work has begun


async def test_an_image_is_prepared_once() -> None:
    kitchen = Kitchen()
    kitchen.gate.set()
    images = ImageProcessorCache(kitchen, max_bytes=25)
    for data in (b"a", b"a", b"b", b"a", b"c", b"a", b"b"):
        await look(images, data)
        assert images.num_bytes <= 25
    assert kitchen.begun == [b"a", b"b", b"c", b"b"]
    await look(images, b"b", model="n")
    await look(images, b"b", max_pixels=2)
    await look(images, b"b", tenant="t")
    assert len(kitchen.begun) == 7


async def test_concurrent_preparations_share_work_and_error() -> None:
    kitchen = Kitchen()
    images = ImageProcessorCache(kitchen, max_bytes=0)
    good = [asyncio.create_task(look(images, b"a")) for _ in range(3)]
    bad = [asyncio.create_task(look(images, b"bad")) for _ in range(2)]
    await waiting(images, 5)
    good[0].cancel()
    kitchen.gate.set()
    done = await asyncio.gather(*good, *bad, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert isinstance(done[1], PreparedImage)
    assert all(isinstance(error, InvalidRequest) for error in done[3:])
    assert len(kitchen.begun) == 2
    assert images.num_bytes == 0


async def test_abandoned_preparation_is_cancelled() -> None:
    kitchen = Kitchen()
    images = ImageProcessorCache(kitchen, max_bytes=100)
    tasks = [asyncio.create_task(look(images, b"a")) for _ in range(2)]
    await waiting(images, 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert kitchen.num_cancelled == 1
    kitchen.gate.set()
    assert await look(images, b"a")

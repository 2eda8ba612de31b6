"""Images in chat through a live server with a tiny model, as the `openai` package sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.images import image, saved
from support.serve_process import Server, eventually
from support.vision_folders import data_url, shown, write_vision_folder

MODEL = "eyes"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("live")
    write_vision_folder(folder / MODEL, max_position_embeddings=512)
    options = ("--model", str(folder / MODEL), "--device", "cpu", "--num-decode-children", "1")
    with Server(*options, engine="real", log=folder / "log") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as connection:
        yield connection


def message(data: bytes, text: str, kind: str = "png") -> dict[str, Any]:
    return dict(shown(data_url(data, kind), text=text)["messages"][0])


def ask(client: openai.OpenAI, *messages: dict[str, Any]) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=4,
        extra_body={"ignore_eos": True},
    )


def num_encoded(server: Server) -> float:
    series = f'triptych_images_encoded_total{{model="{MODEL}"}} '
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.removeprefix(series)) for line in lines if line.startswith(series))


def test_an_image_is_encoded_once_however_often_it_returns(
    server: Server, client: openai.OpenAI
) -> None:
    first = message(saved(image(90, 60)), "x" * 40)
    asked = ask(client, first)
    assert asked.usage.completion_tokens == 4
    details = asked.usage.prompt_tokens_details.model_dump()
    assert (details["image_tokens"], details["cached_images"]) == (16, 0)

    asked_message = {"role": "assistant", "content": asked.choices[0].message.content}
    again = ask(client, first, asked_message, {"role": "user", "content": "And now?"})
    details = again.usage.prompt_tokens_details.model_dump()
    assert (details["image_tokens"], details["cached_images"]) == (16, 1)
    assert details["cached_tokens"] >= 32

    elsewhere = ask(client, {"role": "system", "content": "Be brief."}, first)
    details = elsewhere.usage.prompt_tokens_details.model_dump()
    assert (details["cached_tokens"], details["cached_images"]) == (0, 1)
    eventually(lambda: num_encoded(server) == 1)  # counts come with the next heartbeat


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    asked_message = message(saved(image(70, 50), "jpeg"), "What is this?", "jpeg")
    whole = ask(client, asked_message)
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[asked_message],  # type: ignore[list-item]
        temperature=0,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *pieces, last = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert last.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize(
    ("data", "kind", "status", "code"),
    [
        (saved(image())[:60], "png", 400, "invalid_request"),
        (saved(image(1, 1)), "png", 400, "invalid_request"),
        (b"GIF89a" + bytes(99), "gif", 415, "unsupported_media_type"),
    ],
)
def test_a_bad_image_is_the_callers_fault(
    client: openai.OpenAI, data: bytes, kind: str, status: int, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client, message(data, "What is this?", kind))
    assert (refused.value.status_code, refused.value.code) == (status, code)
    assert refused.value.param == "messages"


def test_model_card_lists_image_input(server: Server) -> None:
    (card,) = httpx.get(f"http://127.0.0.1:{server.port}/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]

"""Special tokens over HTTP: parsed, kept and counted where a caller asks for it; open messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, processors

from support.http import ANSWER, FakeEngine, chat, documents, refused
from support.text_models import write_text_folder
from triptych.core.errors import InvalidRequest
from triptych.core.options.config import ModelOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.text import TextModel

TURN = "<|im_start|>user\nhi<|im_end|>\n"


async def ids(client: httpx.AsyncClient, **fields: Any) -> list[int]:
    reply = await client.post("/tokenize", json={"model": "tiny", **fields})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["tokens"])


async def complete(client: httpx.AsyncClient, **fields: Any) -> Any:
    reply = await client.post("/v1/completions", json={"model": "tiny", "max_tokens": 3, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_rendered_conversation_can_be_sent_as_text(client: httpx.AsyncClient) -> None:
    messages = chat("hi")["messages"]
    by_template = await ids(client, messages=messages, add_generation_prompt=False)
    assert await ids(client, prompt=TURN, parse_special=True) == by_template
    assert len(await ids(client, prompt=TURN)) == len(TURN)
    for parses, num_tokens in ((True, len(by_template)), (False, len(TURN))):
        reply = await complete(client, prompt=TURN, parse_special=parses)
        assert reply["usage"]["prompt_tokens"] == num_tokens


async def test_detokenize_keeps_special_tokens_where_asked(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "tokens": await ids(client, prompt=TURN, parse_special=True)}
    for skips, text in ((None, "user\nhi\n"), (True, "user\nhi\n"), (False, TURN)):
        reply = await client.post("/detokenize", json={**body, "skip_special_tokens": skips})
        assert reply.json() == {"prompt": text, "content": text}


async def test_tokenize_returns_token_strings(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "<|im_end|>é", "parse_special": True}
    reply = await client.post("/tokenize", json={**body, "return_token_strs": True})
    assert reply.json()["token_strs"] == ["<|im_end|>", "�", "�"]
    assert (await client.post("/tokenize", json=body)).json()["token_strs"] is None


async def test_a_content_is_read_as_llama_cpp_reads_it(client: httpx.AsyncClient) -> None:
    spelled = await ids(client, prompt=TURN, parse_special=True, add_special_tokens=False)
    plain = await ids(client, prompt=TURN, add_special_tokens=False)
    assert spelled != plain
    for fields, wanted in (({}, spelled), ({"parse_special": False}, plain)):
        assert await ids(client, content=TURN, **fields) == wanted
    begun = {"content": "hi", "add_special": True}
    assert await ids(client, **begun) == await ids(client, prompt="hi")
    body = {"content": "<|im_end|>é", "with_pieces": True}
    pieces = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert [each["piece"] for each in pieces] == ["<|im_end|>", [0xC3], [0xA9]]
    assert [each["id"] for each in pieces] == await ids(client, content="<|im_end|>é")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "content": "a"}, "prompt"),
        ({"content": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"content": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"content": "a", "return_token_strs": True}, "return_token_strs"),
        ({"prompt": "a", "add_special": True}, "add_special"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
    ],
)
async def test_fields_of_one_form_are_not_for_another(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert refused(await client.post("/tokenize", json=fields))["param"] == param


def test_a_models_first_token_can_be_left_out(tmp_path: Path) -> None:
    resolved = write_text_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TextModel.open(resolved, ModelOptions())
    assert text.encode_text("a")[0] == 0
    assert text.encode_text("a", add_special_tokens=False) == text.encode_text("a")[1:]


async def test_a_route_can_leave_the_first_token_out(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def encode(self: TextModel, text: str, **reading: bool) -> tuple[int, ...]:
        seen.append(reading["add_special_tokens"])
        return (3,)

    monkeypatch.setattr(TextModel, "encode_text", encode)
    for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        await ids(client, prompt="a", **given)
        await complete(client, prompt="a", **given)
    assert seen == [True, True, True, True, False, False]


@pytest.mark.parametrize("prompt", [[0, 0, 45, 46], [45, 0, 46], "aé\U0001f427b", TURN])
@pytest.mark.parametrize("stream", [True, False])
async def test_offsets_point_into_the_text(
    client: httpx.AsyncClient, prompt: Any, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": prompt, "parse_special": True, "max_tokens": 3}
    body |= {"echo": True, "logprobs": 0, "stream": stream}
    reply = await client.post("/v1/completions", json=body)
    parts = [c["choices"][0] for c in documents(reply.text)[:-1]] if stream else None
    parts = parts or [reply.json()["choices"][0]]
    text = "".join(part["text"] for part in parts)
    entries = [
        entry
        for part in parts
        for entry in zip(part["logprobs"]["tokens"], part["logprobs"]["text_offset"], strict=True)
    ]
    assert text.endswith(ANSWER[:3])
    assert entries[-3:] == [(ANSWER[n], len(text) - 3 + n) for n in range(3)]
    for token, offset in entries:
        assert 0 <= offset <= len(text)
        if token.isascii() and not token.startswith("<|"):
            assert text[offset : offset + len(token)] == token


async def test_an_open_message_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [*chat("hi")["messages"], {"role": "assistant", "content": "Of <|im_end|> "}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True}
    reply = await client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER[:2]
    (request,) = engine.submitted.values()
    assert list(request.prompt_ids) == await ids(client, **body)
    shown = await client.post(
        "/detokenize",
        json={"model": "tiny", "tokens": request.prompt_ids, "skip_special_tokens": False},
    )
    assert shown.json()["prompt"] == TURN + "<|im_start|>assistant\nOf <|im_end|> "
    assert request.prompt_ids.count(2) == 1  # the caller's own is spelled, not meant


@pytest.fixture
def folder(tmp_path: Path) -> ResolvedModel:
    return write_text_folder(tmp_path)


def with_template(folder: ResolvedModel, template: str) -> TextModel:
    file = Path(folder.folder) / "template.jinja"
    file.write_text(template)
    return TextModel.open(folder, ModelOptions(chat_template=str(file)))


async def test_a_template_that_trims_messages_trims_an_open_one(folder: ResolvedModel) -> None:
    text = with_template(folder, "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    messages = [{"role": "assistant", "content": " a b  "}]
    assert await text.render(messages, continue_final_message=True) == "[a b"


async def test_a_template_that_hides_the_message_cannot_continue_it(folder: ResolvedModel) -> None:
    text = with_template(folder, "{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequest, match="does not render the last message"):
        await text.render(messages, continue_final_message=True)


async def test_an_open_message_in_parts_goes_on_with_its_last(folder: ResolvedModel) -> None:
    text = with_template(folder, "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": parts}]
    assert await text.render(messages, continue_final_message=True) == "[a][b"
    seen = [{"role": "user", "content": [*parts, {"type": "image"}]}]
    with pytest.raises(InvalidRequest, match="ends with text"):
        await text.render(seen, continue_final_message=True)


def test_a_space_that_a_tokenizer_leaves_out_is_not_counted() -> None:
    from triptych.modalities.llm.api.samples import TokenText, _as_shown

    word = TokenText(token_id=5, text=" a", data=b" a", shown=b" a", logprob=-1.0)
    special = replace(word, shown=b"")
    assert [token.shown for token in _as_shown((special, word, word), "a a")] == [b"", b"a", b" a"]
    assert list(_as_shown((special, word), " a")) == [special, word]


async def test_usage_comes_with_every_chunk_where_asked(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/chat/completions", chat(max_tokens=3)),
        ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3}),
    ):
        options = {"continuous_usage_stats": True}
        reply = await client.post(path, json={**body, "stream": True, "stream_options": options})
        chunks = documents(reply.text)[:-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 3)
        assert all(chunk["choices"] for chunk in chunks)
        options["include_usage"] = False  # the switch of both, as in vLLM
        reply = await client.post(path, json={**body, "stream": True, "stream_options": options})
        assert not any(chunk.get("usage") for chunk in documents(reply.text)[:-1])
        options["include_usage"] = True
        reply = await client.post(path, json={**body, "stream": True, "stream_options": options})
        *chunks, last, done = documents(reply.text)
        assert (last["choices"], done) == ([], "[DONE]")
        assert all(chunk["usage"] for chunk in chunks)


async def test_openrouters_word_for_usage_is_understood(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, usage={"include": True})
    reply = await client.post("/v1/chat/completions", json=body)
    assert documents(reply.text)[-2]["usage"]["completion_tokens"] == len(ANSWER)


async def test_a_completion_without_an_end_fills_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt="hi", max_tokens=-1)
    await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    limits = [request.sampling.max_tokens for request in engine.submitted.values()]
    assert limits == [4096 - 2, 16]

"""Gaps between two texts: the prompts of families, over the routes too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from support.http import ANSWER, FakeEngine, in_process
from support.other_apis import other_apis_app
from support.text_models import byte_tokenizer, write_text_folder
from triptych.core.errors import UnsupportedOption
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.infill import GapPrompt
from triptych.modalities.llm.api.text import TextModel

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PROJECT = ("<|repo_name|>", "<|file_sep|>")
CODESTRAL = ("[SUFFIX]", "[PREFIX]")


def tokenizer_with(*tokens: str) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (QWEN, ["<|fim_prefix|>", 7, "<|fim_suffix|>", 8, 9, "<|fim_middle|>"]),
        (CODESTRAL, ["[SUFFIX]", 8, 9, "[PREFIX]", 7]),
    ],
)
def test_each_family_has_its_order(tokens: tuple[str, ...], expected: list[int | str]) -> None:
    tokenizer = tokenizer_with(*tokens)
    gap = GapPrompt.of(tokenizer)
    assert gap is not None
    found = [tokenizer.token_to_id(part) if isinstance(part, str) else part for part in expected]
    assert gap.ids([7], [8, 9]) == tuple(found)


def test_a_model_with_a_part_of_the_tokens_fills_no_gaps(tmp_path: Path) -> None:
    assert GapPrompt.of(tokenizer_with(*QWEN[:2])) is None
    model = TextModel.open(write_text_folder(tmp_path), ModelOptions())
    with pytest.raises(UnsupportedOption, match=r"tiny was not trained .* leave suffix out"):
        model.encode_gap("a", "b")


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a<|fim_suffix|>", "suffix": "b", "max_tokens": 2, **fields}


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """The tokenizer of the model of the routes."""
    tokenizer = tokenizer_with(*QWEN, *PROJECT)
    monkeypatch.setattr("support.text_models.byte_tokenizer", lambda: tokenizer)
    written = partial(write_text_folder, vocab_size=tokenizer.get_vocab_size())
    monkeypatch.setattr("support.http.write_text_folder", written)
    return tokenizer


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"stop_token_ids": [9]}),
        ("/api/generate", {"max_tokens": None, "stream": False}),
    ],
)
async def test_both_texts_reach_the_engine_as_plain_text(
    route: str, fields: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine()
    app = other_apis_app(tmp_path / "tiny", engine)
    body = {name: value for name, value in text(**fields).items() if value is not None}
    async with in_process(app) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    prefix, suffix, middle, pad = map(tokenizer.token_to_id, QWEN)
    ids = request.prompt_ids
    assert (ids[0], ids[-1], ids.count(suffix)) == (prefix, middle, 1)
    assert {*fields.get("stop_token_ids", ()), pad} <= set(request.sampling.stop_token_ids)


@pytest.mark.parametrize(
    "fields", [{"prompt": [1, 2]}, {"echo": True}, {"truncate_prompt_tokens": 3}]
)
async def test_what_a_suffix_cannot_be_with_is_named(fields: Any, client: Any) -> None:
    reply = await client.post("/v1/completions", json=text(**fields))
    assert reply.status_code == 400
    assert "suffix" in json.dumps(reply.json()["error"])


HINTS = {"samplers": ["top_k", "infill"], "n_indent": 1, "t_max_predict_ms": 500, "id_slot": 0}


def filled(**fields: Any) -> dict[str, Any]:
    return {"input_prefix": "a = ", "prompt": "1 ", "input_suffix": "\nb", "n_predict": 9, **fields}


async def test_infill_answers_as_llama_cpp_does(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    app = other_apis_app(tmp_path / "tiny", engine)
    extra = [{"filename": "c.py", "text": "<|fim_middle|>"}, {"text": "d"}]
    async with in_process(app) as client:
        reply = await client.post(
            "/infill", json=filled(input_extra=extra, return_tokens=True, **HINTS)
        )
        cached = await client.post("/infill", json=filled(n_predict=0))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert (body["content"], body["stop_type"], body["stop"]) == (ANSWER[:9], "limit", True)
    assert body["tokens_predicted"] == len(body["tokens"]) == 9
    assert set(reply.headers["x-triptych-ignored"].split(", ")) == set(HINTS)
    assert cached.json()["content"] == ""
    asked, warmed = engine.submitted.values()
    assert body["tokens_evaluated"] == len(asked.prompt_ids)
    project, file = map(tokenizer.token_to_id, PROJECT)
    prefix, suffix, middle, _ = map(tokenizer.token_to_id, QWEN)
    marks = [project, file, file, file, prefix, suffix, middle]
    assert [each for each in asked.prompt_ids if each in marks] == marks
    text = tokenizer.decode(asked.prompt_ids, skip_special_tokens=True)
    assert text == "myproject\nc.py\n<|fim_middle|>\ntmp\nd\nfilename\na = 1 \nb"
    assert project not in warmed.prompt_ids
    assert warmed.sampling.max_tokens == 1


async def test_infill_streams(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with in_process(other_apis_app(tmp_path / "tiny", FakeEngine())) as client:
        reply = await client.post("/infill", json=filled(stream=True, stop=["quick"], n_predict=-1))
    *chunks, last = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]
    assert "".join(chunk["content"] for chunk in chunks) == "The "
    assert not any(chunk["stop"] for chunk in chunks)
    assert (last["stop"], last["stop_type"], last["stopping_word"]) == (True, "word", "quick")


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}, {"mirostat": 2}, {"x": 1}])
async def test_infill_names_what_it_cannot(
    tmp_path: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    async with in_process(other_apis_app(tmp_path / "tiny", FakeEngine())) as client:
        reply = await client.post("/infill", json=filled(**fields))
    assert reply.status_code == 400
    assert next(iter(fields)) in reply.text


def test_the_first_of_further_files_are_left_out_where_they_do_not_fit() -> None:
    gap = GapPrompt.of(tokenizer_with(*QWEN))
    assert gap is not None
    files = [(name, name * 50) for name in "abc"]
    found = gap.further(files, lambda text: tuple(text.encode()), 180)
    assert bytes(found).decode() == "".join(f"\n\n--- snippet ---\n\n{n * 50}" for n in "bc")
    assert gap.further(files, lambda text: tuple(text.encode()), 60) == ()

"""docs/http*.md name every field that is not OpenAI's, inert or refused, and every route."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from support.http import FakeEngine
from triptych.compose import build_app
from triptych.core import limits
from triptych.core.http.fields import INERT
from triptych.core.options.config import Config
from triptych.modalities.asr.api.protocol import REFUSED, TranscriptionFields
from triptych.modalities.embedding.api.protocol import EmbeddingsRequest
from triptych.modalities.llm.api.anthropic import unsupported as of_anthropic
from triptych.modalities.llm.api.ollama import unsupported as of_ollama
from triptych.modalities.llm.api.protocol import ChatRequest, CompletionRequest
from triptych.modalities.llm.api.responses import unsupported as of_responses
from triptych.modalities.llm.api.tokenizer_protocol import DetokenizeRequest, TokenizeRequest
from triptych.modalities.llm.api.unsupported import CHAT, COMMON, COMPLETION, IGNORED, MESSAGE

OPENAIS = {
    *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens"),
    *("max_tokens", "messages", "model", "n", "presence_penalty", "prompt", "seed", "stop"),
    *("stream", "stream_options", "temperature", "top_logprobs", "top_p"),
}
DOCS = Path(__file__).parents[2] / "docs"


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of the whole app."""
    return build_app(Config(), (), FakeEngine()).openapi()


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(title: str, name: str = "http_text") -> str:
    return page(name).partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_refused_field_is_named() -> None:
    text = section("Fields that are refused by name")
    for name in (*COMMON, *CHAT, *COMPLETION, *MESSAGE):
        assert f"`{name}`" in text


def test_every_inert_field_is_named() -> None:
    text = section("Fields that are accepted without effect")
    for name in INERT:
        assert f"`{name}`" in text or f".{name}`" in text


def test_every_inert_field_is_one_of_the_table_and_says_why() -> None:
    mentioned = set()
    for schema in document()["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if "without effect" in field.get("description", ""):
                assert INERT[name] in field["description"]
                mentioned.add(name)
    assert mentioned == INERT.keys()


def test_every_field_in_addition_to_openais_is_named() -> None:
    text = section("Fields in addition to OpenAI's")
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    fields |= {*TokenizeRequest.model_fields, *DetokenizeRequest.model_fields} - {"tokens"}
    for name in fields - {*OPENAIS, *INERT}:
        assert f"`{name}`" in text or f"`{name}." in text, name


def test_every_route_is_named() -> None:
    text = page("http")
    for path in document()["paths"]:
        assert path.replace(":path", "") in text


def test_every_field_of_embeddings_is_named() -> None:
    text = page("http_embeddings")
    for name in EmbeddingsRequest.model_fields:
        assert f"`{name}`" in text
    assert f"{limits.MAX_EMBEDDING_INPUTS} texts" in text


def test_limits_are_those_of_the_code() -> None:
    text = section("Limits", "http")
    assert f"{limits.MAX_HEAD_BYTES // 1024} KiB" in text
    assert f"{limits.HEAD_TIMEOUT_S:g} s" in text


def test_every_field_of_transcriptions_is_named() -> None:
    text = page("http_transcription")
    names = {field.alias or name for name, field in TranscriptionFields.model_fields.items()}
    for name in names | {name.removesuffix("[]") for name in REFUSED}:
        assert f"`{name}`" in text


def test_every_ignored_field_is_named() -> None:
    text = section("Fields that are ignored")
    tables = (IGNORED, of_responses.IGNORED, of_anthropic.IGNORED, of_ollama.IGNORED)
    names = {name for table in tables for name in table}
    names |= {f"options.{name}" for name in of_ollama.IGNORED_OPTIONS}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []

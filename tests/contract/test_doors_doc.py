"""docs/anthropic.md and docs/ollama.md name every field of these APIs, honoured or not."""

from __future__ import annotations

from pathlib import Path

from triptych.modalities.embedding.api.ollama import EmbedBody
from triptych.modalities.llm.api.anthropic import protocol as anthropic
from triptych.modalities.llm.api.anthropic import unsupported as not_of_anthropic
from triptych.modalities.llm.api.ollama import protocol as ollama
from triptych.modalities.llm.api.ollama import unsupported as not_of_ollama

DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_of_anthropic_is_named() -> None:
    page = (DOCS / "anthropic.md").read_text(encoding="utf-8")
    tables = (
        *(not_of_anthropic.BODY, not_of_anthropic.IGNORED, not_of_anthropic.OUTPUT),
        not_of_anthropic.TOOL,
        *(not_of_anthropic.TEXT, not_of_anthropic.IMAGE, not_of_anthropic.CALL),
    )
    refused = {name for table in tables for name in table} | set(not_of_anthropic.BLOCKS)
    honoured = {*anthropic.MessagesRequest.model_fields, *anthropic.ToolDefinition.model_fields}
    for name in refused | honoured - {"type"}:
        assert f"`{name}`" in page, name


def test_every_field_of_ollama_is_named() -> None:
    page = (DOCS / "ollama.md").read_text(encoding="utf-8")
    tables = (
        *(not_of_ollama.OPTIONS, not_of_ollama.IGNORED, not_of_ollama.IGNORED_OPTIONS),
        *(not_of_ollama.GENERATE, not_of_ollama.SHOW),
    )
    names = {name for table in tables for name in table}
    for body in (ollama.OllamaOptions, ollama.OllamaChatRequest, ollama.GenerateRequest, EmbedBody):
        names |= set(body.model_fields)
    for name in names - {"model", "options", "stream"}:
        assert f"`{name}`" in page, name
    for route in not_of_ollama.ROUTES:
        assert f"`{route.removesuffix('/{digest}')}`" in page, route

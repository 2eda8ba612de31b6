"""What a refusal says is so: it names what exists, and denies nothing that the product has.

All texts are collected that say why an option or a field is refused, ignored or without effect, and
all messages that are raised. A sentence that denies something the product has in some form is read
by a person once, and listed here; any other fails.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import triptych.core.http
import triptych.modalities
from triptych.core.http.fields import INERT, RefusedField
from triptych.core.options import refused
from triptych.modalities.embedding.api.protocol import OF_VECTORS, EmbeddingsRequest
from triptych.modalities.embedding.api.score_routes import REFUSED as REFUSED_SCORES
from triptych.modalities.embedding.api.score_routes import RerankRequest
from triptych.modalities.llm.api import unsupported as of_openai
from triptych.modalities.llm.api.anthropic import unsupported as of_anthropic
from triptych.modalities.llm.api.anthropic.protocol import MessagesRequest
from triptych.modalities.llm.api.ollama import unsupported as of_ollama
from triptych.modalities.llm.api.ollama.protocol import GenerateRequest, OllamaOptions
from triptych.modalities.llm.api.protocol import ChatRequest, CompletionRequest
from triptych.modalities.llm.api.responses import unsupported as of_responses
from triptych.modalities.llm.api.responses.protocol import ResponseRequest

ROOT = Path(__file__).parents[2]
SURFACE = set(
    re.findall(r"--[a-z0-9-]+", (ROOT / "tests/contract/cli_surface.txt").read_text("utf-8"))
)
OPENAPI = json.loads((ROOT / "tests/contract/openapi.json").read_text("utf-8"))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")

HAS: Mapping[str, tuple[str, str]] = {
    "files": (r"files?|stor(?:e|ed|es|age)|kept", "/v1/files"),
    "scores": (r"scor(?:e|es|ed|ing)|rerank\w*", "/v1/score"),
    "embeddings": (r"embed\w*|vectors?", "/v1/embeddings"),
    "tools": (r"tools?|calls?", "tools"),
    "quantized weights": (r"quanti[sz]\w*", "--quantization-encoding"),
    "images": (r"images?|vision", "/v1/images/generations"),
    "speech": (r"speech|voices?|spoken|audio|sounds?", "/v1/audio/speech"),
    "asr": (r"recogni[sz]\w*|transcri\w*|translat\w*", "/v1/audio/transcriptions"),
    "batches": (r"batch\w*", "/v1/batches"),
    "adapters": (r"adapters?|lora\w*", "--lora-paths"),
    "reasoning": (r"reasoning|thinking", "reasoning_effort"),
    "answers that are kept": (r"conversations?|answers?|responses?", "/v1/conversations"),
    "fetching": (r"fetch\w*", "--allowed-media-domains"),
    "probabilities": (r"logprobs|log-probabilities", "logprobs"),
    "forms": (r"grammars?|schemas?|structured", "response_format"),
    "caches": (r"cach\w*|prefix\w*", "--enable-prefix-caching"),
    "streams": (r"stream\w*|progress", "stream"),
    "templates": (r"templates?", "--chat-template"),
    "prompts": (r"prompts?", "prompt"),
    "priorities": (r"priorit\w*", "priority"),
    "metrics": (r"metrics", "/metrics"),
    "keys": (r"keys", "--api-key"),
    "models": (r"models?", "--model"),
    "unloading": (r"unload\w*|stays", "--idle-unload-s"),
}
"""What the product has: the words for it, and the route, flag or field that shows that it does."""
DENIES = re.compile(r"\b(no|not|never|nothing|none|nobody|without|cannot|only|alone|until)\b", re.I)
RAISED_DENIES = re.compile(
    r"\b(there (?:is|are) no|(?:is|are) not (?:supported|offered|served|stored|scored|kept|taken)"
    r"|no \w+ api|nothing is)\b",
    re.I,
)

TRUE = {
    "conversations are not cut",
    "a prompt's progress is not reported",
    "an answer cites nothing",
    "answers are the same with and without a cache",
    "answers are the same without it",
    "changes of the cache are not published",
    "there are no cache diagnostics",
    "code from model repositories never runs",
    "diffusion language models are not served",
    "it does not affect answers",
    "models are not compiled",
    "models are not trained here",
    "no model here turns images into vectors",
    "no model is fetched for a request",
    "no other model answers",
    "no prompts are stored",
    "prompts are never truncated",
    "only /v1/responses stores answers",
    "post texts to /v1/score or /v1/rerank as items of a list",
    "prompts that do not fit are refused with 400",
    "the cache use above which no prompt starts",
    "only the model calls tools",
    "there is no search for tools",
    "this server is the only provider",
    "a label that does not affect answers",
    "no part of a prompt is dropped",
    "which no answer depends on",
}
"""Denials in the tables that are so, or deny nothing; read by a person."""
TRUE_RAISED = {
    "Conversations are not shortened here",
    "Nothing is kept here",
    "Images by file id are not offered",
    "There is no model for this route here",
    "There is no such file here",
    "dimensions is not offered with --no-pool-embeddings",
    "file_id is not offered for images",
    "prompt_logprobs is not offered in streams",
    "prompt_logprobs is not offered with images",
    "return_token_ids is not offered with images",
    "there is no model of that name",
    "there are no audio files in the input",
    "thinking between_tools is not offered",
}
"""The same in messages that are raised: about one thing that was named, a pair of fields, or a
server with --store off, which they say."""
FOREIGN = {
    "--build-arg": "docker build",
    "--cacert": "curl",
    "--environments": "samples/clients/run.py",
    "--output-schema": "codex exec",
    "--from-file": "kubectl",
    "--from-literal": "kubectl",
    "--gpus": "docker run",
    "--head": "ray start",
    "--index-url": "pip",
    "--mm-encoder-tp-mode": "vLLM",
    "--no": "a prefix, in words",
    "--no-deps": "pip",
    "--now": "systemctl",
    "--requests": "samples/benchmarks",
    "--time": "docker stop",
}
"""Flags of other programs, in messages and docs."""


def tables() -> Iterator[tuple[str, str]]:
    """Every text of a table that refuses or ignores something, with the name of the latter."""
    yield from refused.REFUSED.items()
    yield from ((flag, entry.reason) for entry in refused.FIXED for flag in entry.flags)
    yield from ((f"{option} {value}", said) for (option, value), said in refused._VALUES.items())
    for module in modules():
        for attribute, table in vars(module).items():
            if not isinstance(table, Mapping):
                continue
            for name, said in table.items():
                place = f"{module.__name__}.{attribute}: {name}"
                if isinstance(said, RefusedField):
                    yield place, said.instead
                elif isinstance(said, tuple) and said[:1] in (("GET",), ("POST",), ("DELETE",)):
                    yield place, said[1]
                elif isinstance(said, str) and re.search("IGNORED|INERT|BLOCKS", attribute):
                    yield place, said


@cache
def modules() -> tuple[object, ...]:
    """Where fields are declared."""
    names = [
        found.name
        for package in (triptych.core.http, triptych.modalities)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if ".api." in found.name or ".http." in found.name
    ]
    return tuple(importlib.import_module(name) for name in names)


@cache
def raised() -> frozenset[str]:
    """Messages of all errors that are raised, `{}` for what is filled in."""
    found = set()
    for folder in ("core", "modalities", "schedulers", "src/triptych/replicas"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    found |= {text for arg in node.exc.args[:1] if (text := spelled(arg))}
    return frozenset(found)


def spelled(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return ""


def clauses(text: str) -> list[str]:
    return [clause.strip() for clause in re.split(r"[;:,.]\s+|\.$|\n", text) if clause.strip()]


def denied(text: str, denies: re.Pattern[str] = DENIES) -> dict[str, str]:
    """Clauses that deny something the product has, and what that is."""
    return {
        clause: what
        for clause in clauses(text)
        for what, (words, _) in HAS.items()
        if denies.search(clause) and re.search(rf"\b(?:{words})\b", clause, re.I)
    }


def exists(flag: str) -> bool:
    return flag in SURFACE or flag.replace("--no-", "--") in SURFACE


def test_the_product_has_what_this_test_takes_it_to_have() -> None:
    fields = {name for each in OPENAPI["schemas"].values() for name in each.get("properties", ())}
    for words, evidence in HAS.values():
        assert evidence in SURFACE | OPENAPI["paths"].keys() | fields, evidence
        assert words


def test_no_table_denies_what_the_product_has() -> None:
    said = dict(tables())
    assert len(said) > 500
    false = {name: denied(text).keys() - TRUE for name, text in said.items()}
    assert {name: found for name, found in false.items() if found} == {}


def test_no_message_denies_what_the_product_has() -> None:
    found = {
        clause
        for text in raised()
        for clause in denied(text, RAISED_DENIES)
        if "{}" not in clause  # about something that was named
    }
    assert found - TRUE_RAISED == set()


def test_what_was_read_is_still_said() -> None:
    """No sentence is excused that nothing says any more."""
    said = {clause for _, text in tables() for clause in clauses(text)}
    assert said >= TRUE
    assert {clause for text in raised() for clause in clauses(text)} >= TRUE_RAISED


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("files are not stored; leave it out.", "files"),
        ("texts are not scored; embed them and compare.", "scores"),
        ("other quantized weights are not offered yet: serve GGUF files.", "quantized weights"),
        ("there are no tool calls", "tools"),
        ("a model stays until its memory is needed", "unloading"),
        ("there is no files API.", "files"),
        ("nothing is fetched", "fetching"),
        ("no embeddings are made here.", "embeddings"),
        ("there is no batch API; send single requests.", "batches"),
        ("only text is served, no speech.", "speech"),
        ("adapters cannot be loaded.", "adapters"),
        ("conversations are never kept.", "answers that are kept"),
        ("streams are not supported.", "streams"),
    ],
)
def test_a_false_refusal_would_be_found(text: str, what: str) -> None:
    found = denied(text)
    assert what in found.values()
    assert not found.keys() <= TRUE


def test_every_flag_that_a_text_names_exists() -> None:
    texts = [*(text for _, text in tables()), *raised()]
    named = {flag for text in texts for flag in FLAG.findall(text)}
    assert len(named) > 50
    assert {flag for flag in named if not exists(flag)} - FOREIGN.keys() == set()


def test_every_flag_that_the_docs_name_exists_or_is_refused_by_name() -> None:
    theirs = {*refused.REFUSED, *refused.FIXED_BY_FLAG, *refused.TRANSLATED, *FOREIGN}
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {(file.name, flag) for file in files for flag in FLAG.findall(file.read_text("utf-8"))}
    unknown = {(name, flag) for name, flag in named if not exists(flag)}
    assert {(name, flag) for name, flag in unknown if flag not in theirs} == set()


def test_a_refused_flag_about_a_route_names_what_does_it_here() -> None:
    """`--file-storage-path` is about /v1/files: its reason may not leave that out."""
    about = re.compile(
        r"(?:^|-)(file-storage|scor|rerank|batch|voice|conversation|response)[a-z]*(?:-|$)"
    )
    silent = {
        flag
        for flag, reason in refused.REFUSED.items()
        if about.search(flag.removeprefix("--"))
        and not re.search(r"/v1/|--[a-z]|`triptych|leave it out|/metrics|see |docs/", reason)
    }
    assert silent == set()


REFUSED_BY = (
    (ChatRequest, of_openai.COMMON | of_openai.CHAT),
    (CompletionRequest, of_openai.COMMON | of_openai.COMPLETION),
    (MessagesRequest, of_anthropic.BODY),
    (ResponseRequest, of_responses.REQUEST),
    (GenerateRequest, of_ollama.GENERATE),
    (OllamaOptions, of_ollama.OPTIONS),
    (EmbeddingsRequest, of_openai.COMMON | OF_VECTORS),
    (RerankRequest, REFUSED_SCORES),
)


@pytest.mark.parametrize(
    ("kind", "table"), REFUSED_BY, ids=lambda each: getattr(each, "__name__", "")
)
def test_no_field_is_refused_and_honoured(kind: type, table: Mapping[str, RefusedField]) -> None:
    honoured = {
        name
        for name, field in kind.model_fields.items()  # type: ignore[attr-defined]
        if "without effect" not in (field.description or "")
    }
    assert honoured & table.keys() <= {"logprobs"}
    ignored: Mapping[str, str] = getattr(kind, "ignored", {})
    assert not ignored.keys() & (honoured | table.keys())


def section(title: str) -> str:
    page = (ROOT / "docs/http_text.md").read_text("utf-8")
    return re.split(r"\n##+ ", page.partition(f"## {title}\n")[2])[0]


def test_the_docs_call_no_honoured_field_inert() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Fields that are accepted without effect"), re.M)
    names = {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert names - {"mirostat"} <= {*INERT, "summary", "generate_summary"}


def test_the_docs_call_no_other_field_refused() -> None:
    text = section("Fields that are refused by name").partition("Both text routes:")[2]
    table = {
        *of_openai.COMMON,
        *of_openai.CHAT,
        *of_openai.COMPLETION,
        *of_openai.MESSAGE,
        *OF_VECTORS,
        *("structured_outputs", "structural_tag", "whitespace_pattern", "best_of", "n"),
        *("text", "image_url", "image_file", "tool", "tool_call_id"),
    }
    assert set(re.findall(r"`(\w+)`", text)) <= table

"""Chat templates: compiled once at start, run in a sandbox that cannot change anything.

Owns the jinja2 environment that Hugging Face templates expect. A template comes with the model or
from the operator, never from a request.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.core.errors import ConfigError

MAX_TEMPLATE_CHARS = 256 * 1024


class _GenerationBlock(Extension):
    """Reads `{% generation %}` blocks, which mark the assistant's words for training, as text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares this attribute as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    """Compile a chat template. Raises `ConfigError` when it is oversized or malformed."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ConfigError(f"The chat template is over {MAX_TEMPLATE_CHARS} characters.")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"The chat template is malformed: {error}.") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(layout)

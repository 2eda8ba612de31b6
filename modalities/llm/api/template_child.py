"""Chat templates as programs: parsed where a model is opened, run in a child process.

Owns the jinja2 environment that Hugging Face templates expect. A template comes with the model or
from the operator, never from a request; its sandbox keeps it from everything but its values, and
the child's limits (`core/media/worker.py`) end what takes too long or too much. Even compiling is
left to the child, since it computes what is constant.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REASON_CHARS = 300
_SAMPLE = "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%c') }}{% endfor %}{{ 1 / 0 }}"


class _GenerationBlock(Extension):
    """Reads `{% generation %}` blocks, which mark the assistant's words for training, as text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares this attribute as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> Environment:
    """What templates are parsed and run in."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, which jinja2's own filter escapes for HTML; takes what transformers' does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(layout)


# -- in a child ----------------------------------------------------------------------------------

DECODERS: Mapping[str, Any] = MappingProxyType({})


def prepare(source: str) -> Mapping[str, Callable[..., Generator[bytes, None, str]]]:
    """What runs the template of this source; a sample has everything loaded that may be needed."""
    rendering = Rendering(_SAMPLE)
    for _ in rendering({"messages": [{"role": "user"}]}):
        pass
    return {"render": partial(_render, Rendering(source))}


def _render(rendering: Rendering, data: bytes) -> Generator[bytes, None, str]:
    return (yield from rendering(json.loads(data)))


class Rendering:
    """One template, compiled when it is first run."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: Template | None = None

    def __call__(self, values: Mapping[str, Any]) -> Generator[bytes, None, str]:
        """Yields what the template makes of `values`; returns why it does not, or nothing.

        Raises `MemoryError`, which is not the template's own.
        """
        try:
            if self._template is None:
                self._template = environment().from_string(self._source)
            yield self._template.render(values).encode(errors="replace")  # half a surrogate pair
        except MemoryError:
            raise
        except Exception as error:  # a template is a foreign program: it may raise anything
            return str(error)[:_MAX_REASON_CHARS] or type(error).__name__
        return ""

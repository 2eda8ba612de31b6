"""Chat templates as programs: parsed where a model is opened, run in a child process.

Owns the jinja2 environment that Hugging Face templates expect. A template comes with the model or
from the operator, never from a request. Its sandbox gives it access to its values only, and the
child's limits (`core/media/worker.py`) stop a rendering that takes too much time or memory. The
child also compiles, since compiling evaluates constant expressions.
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
    """Renders `{% generation %}` blocks, which mark the assistant's text for training, as text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares this attribute as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> Environment:
    """The environment that templates are parsed and run in."""
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
    """Plain JSON, with the arguments of transformers' filter; jinja2's own escapes for HTML."""
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
    """The `Rendering` of a template's source, after a sample that loads all lazy imports."""
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
        """Yield the text rendered from `values`; return the reason of a failure, or nothing.

        Raises `MemoryError`.
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

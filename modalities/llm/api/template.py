"""A model's chat template: where it comes from, and how it renders a conversation.

Owns the limits of one rendering, the errors of an aborted one, and the continuation of the last
message: a mark is added to its text and the rendered conversation is cut there, as transformers
does it. `template_child` runs templates in a process that can be killed, because an endless loop
would block a thread for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateSyntaxError

from triptych.core.errors import (
    ConfigError,
    InvalidRequest,
    RequestError,
    TemplateFailed,
    WeightsError,
)
from triptych.core.media.child import DecodeLimits, DecodePool
from triptych.core.options.config import ModelOptions
from triptych.core.process.regular_file import read_regular
from triptych.modalities.llm.api import template_child

MAX_TEMPLATE_BYTES = 256 * 1024
LIMITS = DecodeLimits(
    memory_bytes=512 * 2**20,
    cpu_s=2,
    wall_s=20.0,
    input_bytes=2**30,
    output_bytes=64 * 2**20,
    num_waiting=1024,
    num_requests_per_child=2**31,
    niceness=0,
)
_END_MARK = "\ue000continue\ue001"
"""A text that no caller can write: stand-ins for private use characters contain a number."""
_NUM_CHILDREN = 2
"""The second process starts when a conversation arrives while the first is busy."""


class ChatTemplate:
    """The chat template of one model. Raises `ConfigError` for a malformed template."""

    def __init__(self, source: str, *, model: str, file: str = "The chat template") -> None:
        _check(source, file)
        self.source = source
        self._model = model
        self._pool = DecodePool(
            [template_child.__name__],
            num_children=_NUM_CHILDREN,
            limits=LIMITS,
            args={"source": source},
            things="conversations",
        )

    @classmethod
    def find(
        cls, folder: Path, config: Mapping[str, Any], options: ModelOptions, *, model: str
    ) -> Self | None:
        """The operator's template, or the one in a model's folder or its `tokenizer_config.json`.

        Raises `ConfigError` or `WeightsError` for an unusable template.
        """
        if options.chat_template:
            option, path = "--chat-template", Path(options.chat_template).expanduser()
            return cls(_read(path, ConfigError, option), model=model, file=option)
        if (file := folder / "chat_template.jinja").exists():
            return cls(_read(file, WeightsError, file.name), model=model, file=file.name)
        source = _source_of(config)
        return None if source is None else cls(source, model=model, file="tokenizer_config.json")

    def start(self) -> None:
        """Start the process in the background, before the first conversation needs it."""
        self._pool.start(1)

    async def render(self, messages: Any, **values: Any) -> str:
        """The rendered conversation.

        Raises `InvalidRequest` with the template's own message, `TemplateFailed` for an aborted
        rendering, and `Unavailable` as `DecodePool.run` does.
        """
        try:
            values = {"messages": messages, **values}
            packed = json.dumps(values, ensure_ascii=False).encode(errors="surrogatepass")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"A chat template takes plain values alone: {error}.", param="messages"
            ) from error
        try:
            rendered = await self._pool.run("render", packed)
        except RequestError as error:
            raise TemplateFailed(
                f"The chat template of {self._model} did not come to an end with these messages"
                f" within {LIMITS.cpu_s} s and {LIMITS.memory_bytes // 2**20} MiB: shorten them, or"
                " mend the template (--chat-template).",
                param="messages",
            ) from error
        if rendered.value:
            raise InvalidRequest(
                f"The chat template of {self._model} rejects these messages: {rendered.value}",
                param="messages",
            )
        return str(rendered.data, "utf-8")

    async def close(self) -> None:
        """Stop the process."""
        await self._pool.close()


def _check(source: str, file: str) -> None:
    if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"{file}: a chat template is at most {MAX_TEMPLATE_BYTES} bytes.")
    try:
        template_child.environment().parse(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ConfigError(f"{file}: the chat template is malformed: {error}.") from error


def _read(path: Path, kind: type[ConfigError | WeightsError], what: str) -> str:
    try:
        return read_regular(path, MAX_TEMPLATE_BYTES).decode()
    except OSError as error:
        raise kind(f"{what}: cannot read that file ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise kind(f"{what}: that file is not UTF-8 text.") from error


def _source_of(config: Mapping[str, Any]) -> str | None:
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates: the plain one is called "default"
        entries = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def mark_last(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the mark at the end. Raises `InvalidRequest` if they do not end in text."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": f"{content}{_END_MARK} "}]
    *parts, end = content or [{}]
    if end.get("type") != "text":
        raise InvalidRequest(
            "continue_final_message needs a last message that ends with text.", param="messages"
        )
    return [*before, {**last, "content": [*parts, {**end, "text": f"{end['text']}{_END_MARK} "}]}]


def cut_at_mark(rendered: str) -> str:
    """The rendered conversation up to the mark.

    Spaces before the mark are trimmed if the template trims messages. Raises `InvalidRequest` if
    the mark is missing.
    """
    before, mark, after = rendered.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "The chat template does not render the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()

"""Answers of gpt-oss: messages on channels, by OpenAI's harmony format.

Owns the format: the channel `analysis` is reasoning, a message to `functions.<name>` is a call, and
all other text on `commentary` and `final` is the answer.
"""

from __future__ import annotations

import re

from triptych.modalities.llm.api.tools.json_text import json_text
from triptych.modalities.llm.api.tools.pieces import (
    CallArguments,
    CallStart,
    Reading,
    Reasoning,
    ToolSchemas,
    Words,
)
from triptych.modalities.llm.api.tools.source import TextSource

_MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
ANALYSIS = "<|channel|>analysis<|message|>"
"""The mark that opens reasoning."""
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
"""The text that ends reasoning and opens the answer."""
_TOOL = re.compile(r"to=functions\.([\w.-]+)")


def harmony(source: TextSource, tools: ToolSchemas) -> Reading:
    """Implements the `ReadCalls` protocol."""
    while not (source.is_over and not source.text):
        head, message = yield from source.before((_MESSAGE,))
        if not message:
            if "<|" not in head:  # no format at all: plain text
                yield Words(head)
            return
        tool = _TOOL.search(head)
        if tool is not None:
            yield from source.spaces()
            if (yield from source.next()) == "{":
                yield CallStart(tool[1])
                yield from json_text(source, CallArguments)
            yield from source.before(ENDS)
        elif "<|channel|>analysis" in head:
            yield from source.reasoning(ENDS, Reasoning)
        else:
            yield from source.until(ENDS, Words)

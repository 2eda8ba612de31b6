"""What is read of answers with calls, by the parser of a family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from triptych.modalities.llm.api.tools.formats import CALL_FORMATS, REASONING_FORMATS
from triptych.modalities.llm.api.tools.parser import AnswerParser
from triptych.modalities.llm.api.tools.pieces import Answer

WEATHER = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "get_time": {}}
PARIS = ("get_weather", {"city": "Paris", "days": 2})
TIME = ("get_time", {})


def loaded(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def read(text: str, family: str, cuts: Sequence[int] = (), **options: Any) -> Answer:
    reasoning = REASONING_FORMATS.get(options.pop("reasoning", ""))
    parser = AnswerParser(reasoning, CALL_FORMATS[family], TOOLS, **options)
    ends = [0, *sorted(cuts), len(text)]
    pieces = [piece for start, end in pairwise(ends) for piece in parser.push(text[start:end])]
    return Answer.of([*pieces, *parser.finish()])

"""Requests to the Messages API."""

from __future__ import annotations

from typing import Any

from support.other_apis import WEATHER_SCHEMA

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOL = {"name": "get_weather", "description": "Tells it.", "input_schema": WEATHER_SCHEMA}

FORM = {"type": "json_schema", "schema": WEATHER_SCHEMA}


def message(text: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }

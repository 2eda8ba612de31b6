"""Converts values of options from text, and formats them.

Owns types, choices, ranges and secrets of single values. Knows no sources and no other options.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.options import refused
from triptych.core.options.declaration import Option
from triptych.core.process.typed import convert, decode_json

SECRETS = frozenset({"admin_key", "api_key", "hf_token", "ssl_keyfile_password"})
KEYS = frozenset({"admin_key", "api_key"})
"""Options with several keys. Other servers split a text at commas, so no key contains one."""
MASK = "***"
"""Shown in place of a secret."""


def format_value(value: Any) -> str:
    """Return a value as the command line and YAML spell it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def convert_value(option: Option, value: Any, where: str, *, is_text: bool) -> Any:
    """Convert `value` to the option's type and check it against choices and range."""
    given = value
    if value is None and "null" in option.choices:
        value = "null"  # YAML reads the word as nothing
    if option.is_repeatable:
        value = _texts(value)
    if option.is_numbers:
        value, is_text = _numbers(value)
    if is_text and option.is_switch and isinstance(value, str):
        value = {"on": "true", "yes": "true", "off": "false", "no": "false"}.get(
            value.lower(), value
        )
    try:
        converted = convert(value, option.type, strict=not is_text)
    except msgspec.ValidationError as error:
        shown = "something else" if option.name in SECRETS else repr(given)
        advice = refused.value_reason(option.name, str(given))
        instead = f" Instead, {advice}" if advice else ""
        raise ConfigError(f"{where}: expected {_kind(option)}, got {shown}.{instead}") from error
    _check_value(option, converted, where)
    return converted


def _check_value(option: Option, converted: Any, where: str) -> None:
    """Raise `ConfigError` for a mask, several keys in one, and a value that is not allowed."""
    parts = converted if isinstance(converted, tuple) else (converted,)
    if option.name in SECRETS and MASK in parts:
        raise ConfigError(f"{where}: {MASK!r} is the mask of a secret; give the secret itself.")
    if option.name in KEYS and any("," in key for key in converted):
        raise ConfigError(f"{where}: a key contains no comma; give each key separately.")
    if option.choices and converted not in option.choices:
        advice = refused.value_reason(option.name, converted)
        advice = advice or f"use one of {', '.join(option.choices)}."
        raise ConfigError(f"{where}: {converted!r} is not offered: {advice}")
    numbers = converted if option.is_numbers else (converted,)
    if option.within is not None and not all(number in option.within for number in numbers):
        shown = format_value(converted)
        advice = refused.value_reason(option.name, shown)
        instead = f" For the meaning of {shown} in other servers, {advice}" if advice else ""
        raise ConfigError(f"{where}: must be {option.within}, got {shown}.{instead}")


def _texts(value: Any) -> Any:
    """Return a list of texts; each text may be a JSON list, as other servers take origins."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [text for each in value for text in _json_list(each)]


def _json_list(text: Any) -> list[Any]:
    if isinstance(text, str) and text.startswith("["):
        with suppress(msgspec.DecodeError):
            return decode_json(text, list[str])
    return [text]


def _numbers(value: Any) -> tuple[Any, bool]:
    """Split a list of numbers; also returns whether they are still text."""
    if isinstance(value, str):
        return [number.strip() for number in value.split(",")], True
    return ([value] if isinstance(value, int | float) else value), False


def _kind(option: Option) -> str:
    if option.is_repeatable:
        return "text or a list of texts"
    if option.is_numbers:
        whole = "whole " if option.type == tuple[int, ...] else ""
        return f"{whole}numbers separated by commas"
    if option.is_switch:
        return "true or false"
    names = {int: "a whole number", float: "a number", str: "text"}
    return names[option.type]

"""Configurations as objects of Python: `PipelineConfig` and `AudioGenerationConfig`.

Owns their fields: the options of this project under any name that a command takes, alone or in the
groups that such objects have elsewhere. Each is honoured or refused by name when the object is
made. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml

from triptych.core.errors import ConfigError, UnsupportedOption
from triptych.core.options.config import Config
from triptych.core.options.config_file import read_config_file
from triptych.core.options.table import (
    SECTIONS,
    Resolved,
    declared,
    describe,
    option_name,
    resolve_keywords,
    value_of,
)
from triptych.core.options.values import format_value

_GROUPS = frozenset(
    (*SECTIONS, "model", "kv_cache", "sampling", "profiling", "lora", "speculative")
)
"""Fields that may hold a mapping of further fields."""
_log = logging.getLogger(__name__)


class PipelineConfig:
    """The options of an engine in this process, checked when they are given.

        config = PipelineConfig(model="embedded", max_length=2048, kv_cache={"page_size": 32})
        with Engine.from_config(config) as engine:
            engine.chat("Hello")

    Fields are options of `triptych serve` by any of their names, and those of other servers with
    the same meaning; fields that are `None` or empty are left out. `config_file` is read first.
    Attributes of the object are the options by their own names.
    """

    def __init__(self, *, config_file: str | Path | None = None, **options: Any) -> None:
        """Check the options. Raises `ConfigError`, naming the field and what to use instead."""
        from_file = read_config_file(str(config_file)) if config_file else {}
        self.resolved: Resolved = resolve_keywords({**_unique(from_file), **_unique(options)})

    @property
    def config(self) -> Config:
        """All options, by section."""
        return self.resolved.config

    def __getattr__(self, name: str) -> Any:
        option = None if name.startswith("_") else declared().get(name)
        if option is None:
            raise AttributeError(f"{type(self).__name__!r} has no option {name!r}")
        return value_of(self.resolved.config, option)

    def __repr__(self) -> str:
        shown = describe(self.resolved)
        given = (f"{o.name}={value!r}" for o, value, source in shown if source != "default")
        return f"{type(self).__name__}({', '.join(given)})"

    def resolve(self) -> None:
        """Do nothing: a configuration is checked when it is made."""

    @property
    def graph_quantization_encoding(self) -> str | None:
        """The encoding of the weights, if one is set."""
        return self.config.models.quantization_encoding or None

    def retrieve_chat_template(self) -> str | None:
        """The text of `chat_template`, or `None` where the model's own is used."""
        path = self.config.models.chat_template
        return Path(path).read_text("utf-8") if path else None

    def log_basic_config(self) -> None:
        """Log the options that are set."""
        _log.info("%r", self)

    def log_pipeline_info(self) -> None:
        """Log all options, and where each comes from."""
        for option, value, source in describe(self.resolved):
            _log.info("%s: %s (%s)", option.name, format_value(value), source)

    def configure_session(self, session: object) -> None:
        """Refused: there is no session of a compiler."""
        raise UnsupportedOption("Models are not compiled, so there is no session to configure.")


class AudioGenerationConfig(PipelineConfig):
    """The options of a speech model's engine: those of `PipelineConfig`, and its audio decoder's.

    `audio_decoder` is required, as it is where this object comes from; an empty text is the
    model's own decoder.
    """

    def __init__(self, audio_decoder: str, **options: Any) -> None:
        super().__init__(audio_decoder=audio_decoder or None, **options)

    @classmethod
    def from_flags(cls, audio_flags: Mapping[str, str], **config_flags: Any) -> Self:
        """Make a configuration from the texts of audio's flags, and from other fields.

        Raises `ConfigError`, also for a text that is no value.
        """
        read = {name: _value_of(name, text) for name, text in audio_flags.items()}
        return cls(**{"audio_decoder": "", **read, **config_flags})


def _value_of(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name}: invalid YAML ({reason}).") from error


def _unique(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one source by their options' names. Raises `ConfigError` if one is repeated."""
    found: dict[str, tuple[str, Any]] = {}
    for given, value in _flat(options):
        name = option_name(given)
        if name in found:
            earlier, _ = found[name]
            where = "in two groups" if earlier == given else f"as {earlier}, too"
            raise ConfigError(f"{given} is given twice ({where}): leave one of them out.")
        found[name] = given, value
    return dict(found.values())


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that are set; those of a group are fields themselves."""
    for name, value in options.items():
        if value is None or value in ((), [], {}):
            continue
        if name in _GROUPS and isinstance(value, Mapping):
            yield from _flat(value)
        else:
            is_object = isinstance(value, Mapping)
            yield name, msgspec.json.encode(value).decode() if is_object else value

"""Reads a `--config-file`: YAML with plain values, a size limit and no duplicate keys.

Knows no options.
"""

from __future__ import annotations

from typing import Any

import yaml

from triptych.core.errors import ConfigError

_MAX_FILE_BYTES = 2**20


def read_config_file(path: str, flag: str = "--config-file") -> dict[str, Any]:
    """Return the values by key of the file that `flag` names.

    Raises `ConfigError` with the file's name and the cause.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1).decode()
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{flag} {path}: larger than {_MAX_FILE_BYTES} bytes.")
        content = _UniqueKeys(text).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason}).") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {path}: invalid YAML ({reason}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path}: expected `option: value` lines.")
    return {str(key): value for key, value in content.items()}


class _UniqueKeys(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping. Raises `ConstructorError` for a duplicate key."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                msg = f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, msg, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

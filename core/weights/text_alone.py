"""Models of more than text whose text alone can be served.

Owns which these are, and the configuration of their language model. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

_PARTS = MappingProxyType({"gemma3n": ("timm", "Gemma3nForCausalLM")})
"""By type: the package without which its encoders cannot be made, and its language model."""


def missing_package(config: Mapping[str, Any]) -> str:
    """The package without which a `config.json` describes a language model alone; else empty."""
    package, _ = _PARTS.get(str(config.get("model_type")), ("", ""))
    has_text = isinstance(config.get("text_config"), dict)
    return package if package and has_text and find_spec(package) is None else ""


def text_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model where no more can be served; else `config`."""
    if not missing_package(config):
        return dict(config)
    _, architecture = _PARTS[config["model_type"]]
    return {**config, **config["text_config"], "architectures": [architecture]}

"""Whether a model sees, told by its `config.json` alone.

Imports nothing, so that every process can ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` has a vision encoder beside a language model."""
    return isinstance(config.get("vision_config"), dict)

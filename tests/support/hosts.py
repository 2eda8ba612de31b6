"""A service in the place of an engine with its models."""

from __future__ import annotations

from typing import Any

from triptych.core.process.loop_thread import LoopThread
from triptych.modalities.host import EngineHost


def hosted(service: Any, model: str) -> EngineHost:
    """A host that has the one service, on a loop of its own."""
    return EngineHost(LoopThread("test"), service.client, {model: service})

"""Triptych: one server for text, vision, speech and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.modalities.llm.pipeline import ChatPipeline

__all__ = ["ChatPipeline", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load pipelines on first use, so that `import triptych` costs nothing."""
    if name == "ChatPipeline":
        from triptych.modalities.llm.pipeline import ChatPipeline

        return ChatPipeline
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a notebook completes, loaded or not."""
    return sorted({*globals(), *__all__})

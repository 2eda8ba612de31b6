"""Triptych: one server for text, vision, speech and images."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
    from triptych.modalities.diffusion.api.pipeline import ImagePipeline
    from triptych.modalities.embedding.api.pipeline import EmbeddingPipeline
    from triptych.modalities.llm.api.pipeline import ChatPipeline
    from triptych.modalities.tts.api.pipeline import SpeechPipeline
    from triptych.modalities.vlm.api.pipeline import VisionPipeline

__all__ = [
    "ChatPipeline",
    "EmbeddingPipeline",
    "ImagePipeline",
    "SpeechPipeline",
    "TranscriptionPipeline",
    "VisionPipeline",
    "__version__",
]
__version__ = "0.2.0"
if "OMP_WAIT_POLICY" not in os.environ:
    # Spin iterations of torch's idle OpenMP threads: 50 to 100 us. GCC's runtime reads it when
    # torch is loaded; its default of 300,000 blocks all other work on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name: str) -> Any:
    """Load pipelines on first use, so that `import triptych` costs nothing."""
    if name.startswith("_"):
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    from triptych.modalities.registry import MODALITIES

    for modality in MODALITIES:
        if name in modality.pipelines:
            return getattr(importlib.import_module(modality.pipelines[name]), name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names for completion, loaded or not."""
    return sorted({*globals(), *__all__})

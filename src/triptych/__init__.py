"""Triptych: one server for text, vision, speech and images."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.core.engine_api.sampling_params import SamplingParams
    from triptych.core.errors import RequestError, SetupError, TriptychError
    from triptych.core.options.pipeline_config import AudioGenerationConfig, PipelineConfig
    from triptych.engine import Engine
    from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
    from triptych.modalities.diffusion.api.pipeline import ImagePipeline
    from triptych.modalities.diffusion.api.step_callback import ImageInProgress
    from triptych.modalities.embedding.api.pipeline import EmbeddingPipeline
    from triptych.modalities.llm.api.pipeline import ChatPipeline
    from triptych.modalities.tts.api.pipeline import SpeechPipeline
    from triptych.modalities.vlm.api.pipeline import VisionPipeline
    from triptych.server import Server

__all__ = [
    "AudioGenerationConfig",
    "ChatPipeline",
    "EmbeddingPipeline",
    "Engine",
    "ImageInProgress",
    "ImagePipeline",
    "PipelineConfig",
    "RequestError",
    "SamplingParams",
    "Server",
    "SetupError",
    "SpeechPipeline",
    "TranscriptionPipeline",
    "TriptychError",
    "VisionPipeline",
    "__version__",
]
_PLACES = {
    "AudioGenerationConfig": "triptych.core.options.pipeline_config",
    "Engine": "triptych.engine",
    "ImageInProgress": "triptych.modalities.diffusion.api.step_callback",
    "PipelineConfig": "triptych.core.options.pipeline_config",
    "RequestError": "triptych.core.errors",
    "SamplingParams": "triptych.core.engine_api.sampling_params",
    "Server": "triptych.server",
    "SetupError": "triptych.core.errors",
    "TriptychError": "triptych.core.errors",
}
"""The modules of the public names that are no pipelines."""
__version__ = "0.2.0"
if "OMP_WAIT_POLICY" not in os.environ:
    # Spin iterations of torch's idle OpenMP threads: 50 to 100 us. GCC's runtime reads it when
    # torch is loaded; its default of 300,000 blocks all other work on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `import triptych` costs nothing."""
    place = None if name.startswith("_") else _PLACES.get(name) or _pipelines().get(name)
    if place is None:
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    return getattr(importlib.import_module(place), name)


def _pipelines() -> dict[str, str]:
    """The module of each pipeline."""
    from triptych.modalities.registry import MODALITIES

    return {name: place for each in MODALITIES for name, place in each.pipelines.items()}


def __dir__() -> list[str]:
    """Return the public names for completion, loaded or not."""
    return sorted({*globals(), *__all__})

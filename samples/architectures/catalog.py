"""The architectures of the installed transformers and diffusers, by kind.

Owns which of their lists are read, and for which kind of model each type counts. A type that is
listed for chat is not listed again as an encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import transformers
from transformers.models.auto import modeling_auto as auto

from triptych.modalities.diffusion.spec import PIPELINES
from triptych.modalities.llm.engine.class_config import CAUSAL_CLASSES

_OF_VIDEO = frozenset({"num_frames", "video", "frames", "video_length", "num_videos_per_prompt"})
_NO_IMAGES = frozenset({
    "DiffusionGemmaPipeline",
    "LLaDA2Pipeline",
    "LTX2VideoDiffusionDecodePipeline",
    "RFD4ProteinaPipeline",
    "ShapEImg2ImgPipeline",
    "ShapEPipeline",
    "StableAudio3Pipeline",
})  # fmt: skip
"""Pipelines of texts, sounds, solids and proteins, whose arguments do not show it."""


def versions() -> dict[str, str]:
    """The installed versions."""
    return {"transformers": transformers.__version__, "diffusers": diffusers.__version__}


def catalog() -> dict[str, dict[str, str]]:
    """The name of the class of each type, by kind."""
    chat = _first_names(CAUSAL_CLASSES)
    encoders = _first_names(
        auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    return {
        "chat": chat,
        "vision": _first_names(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        "recognition": _first_names(
            auto.MODEL_FOR_CTC_MAPPING_NAMES,
            auto.MODEL_FOR_RNNT_MAPPING_NAMES,
            auto.MODEL_FOR_TDT_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
        "embedding": {name: kind for name, kind in encoders.items() if name not in chat},
        "speech": _first_names(
            auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES,
            auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
        ),
        "images": {name: name for name in _pipelines()},
    }


def _first_names(*lists: Mapping[str, Any]) -> dict[str, str]:
    """The types of some lists in alphabetical order; the first list's class counts."""
    merged = {name: kind for each in reversed(lists) for name, kind in each.items()}
    return {
        name: kind if isinstance(kind, str) else kind[0] for name, kind in sorted(merged.items())
    }


def _pipelines() -> list[str]:
    """The pipelines of diffusers that make or change still images."""
    names = {name for name in dir(diffusers) if name.endswith("Pipeline")} - _NO_IMAGES
    known = {name for name in names if _makes_images(getattr(diffusers, name))}
    return sorted(known | set(PIPELINES))


def _makes_images(kind: Any) -> bool:
    is_pipeline = isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)
    if not is_pipeline or kind is diffusers.DiffusionPipeline:
        return False
    arguments = inspect.signature(kind.__call__).parameters
    return _OF_VIDEO.isdisjoint(arguments) and not any("audio" in name for name in arguments)

"""The architectures of the installed transformers and diffusers, by kind.

Owns which of their lists are read, and for which kind of model each type counts. A type that is
listed for chat is not listed again as an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import transformers
from diffusers.pipelines import auto_pipeline
from transformers.models.auto import modeling_auto as auto

from triptych.modalities.diffusion.spec import PIPELINES


def versions() -> dict[str, str]:
    """The installed versions."""
    return {"transformers": transformers.__version__, "diffusers": diffusers.__version__}


def catalog() -> dict[str, dict[str, str]]:
    """The name of the class of each type, by kind."""
    chat = _first_names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
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
    """The pipelines of diffusers that make or change images."""
    lists = (
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    )
    known = {kind.__name__ for each in lists for kind in each.values()}
    return sorted(known | set(PIPELINES))

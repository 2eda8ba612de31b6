"""The classes of diffusers and transformers that a model_index.json may name.

Owns the list. A class that is not on it is never looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json
from triptych.core.weights.pipeline_index import PipelineComponent
from triptych.modalities.diffusion.engine.families.table import FAMILIES

_UNET = "UNet2DConditionModel"
_TRANSFORMERS = FAMILIES.keys() - {_UNET}
_AUTOENCODERS = frozenset({
    "AutoencoderDC",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLQwenImage",
    "AutoencoderKLQwenImage21",
    "AutoencoderKLWan",
    "AutoencoderTiny",
})  # fmt: skip
_TEXT_ENCODERS = frozenset({
    "BertModel",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "Gemma2ForCausalLM",
    "Gemma2Model",
    "GemmaForCausalLM",
    "GlmImageForConditionalGeneration",
    "LlamaForCausalLM",
    "LlamaModel",
    "Mistral3ForConditionalGeneration",
    "Mistral3Model",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen3VLForConditionalGeneration",
    "T5EncoderModel",
    "UMT5EncoderModel",
})  # fmt: skip
_TOKENIZERS: Mapping[str, str] = MappingProxyType({
    **{
        name + suffix: name
        for name in (
            "BertTokenizer",
            "CLIPTokenizer",
            "GemmaTokenizer",
            "LlamaTokenizer",
            "Qwen2Tokenizer",
            "T5Tokenizer",
        )
        for suffix in ("", "Fast")
    },
    "ByT5Tokenizer": "ByT5Tokenizer",
    # Processors of text and images: their tokenizer reads the text.
    **dict.fromkeys(
        ("PixtralProcessor", "PreTrainedTokenizerFast", "TokenizersBackend"),
        "PreTrainedTokenizerFast",
    ),
})  # fmt: skip
# Of processors of text, images and videos, only the image part: recipes format the text.
_PROCESSORS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(
        ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), "Qwen2VLImageProcessorPil"
    ),
    "GlmImageProcessor": "GlmImageProcessor",  # it lays out the image's tokens, too
})  # fmt: skip

_LIBRARIES: Mapping[str, str] = MappingProxyType({"glm_image": "transformers"})
"""Names by which diffusers saves libraries: of a part that its own pipeline's module shadows."""


def class_of(part: PipelineComponent) -> Any:
    """The class of a part. Raises `WeightsError` if the list does not allow it for this part."""
    known: Mapping[str, str] = _known(part)
    library = _library(part.name)
    if _LIBRARIES.get(part.library, part.library) != library or part.class_name not in known:
        raise WeightsError(
            f"model_index.json gives {part.name} the class {part.library}.{part.class_name}"[:160]
            + f"; known are {library}'s {', '.join(sorted(known))}."
        )
    if library == "diffusers":
        import diffusers as source
    else:
        import transformers as source
    return getattr(source, known[part.class_name])


def part_in(folder: Path, name: str, declared: PipelineComponent | None) -> PipelineComponent:
    """A part in another folder, of the class that its config.json names, else as declared."""
    config = folder / "config.json"
    fields = read_json(config) if config.is_file() else {}
    named = fields.get("_class_name") or next(iter(fields.get("architectures") or ()), None)
    if isinstance(named, str):
        return PipelineComponent(name, _library(name), named)
    if declared is None:
        raise WeightsError("The folder's config.json does not name the class of the part.")
    return declared


def _library(name: str) -> str:
    return "diffusers" if name in ("transformer", "unet", "vae") else "transformers"


def _known(part: PipelineComponent) -> Mapping[str, str]:
    """The class names allowed for a part, and the class that each means."""
    if part.name.startswith("tokenizer"):
        return _TOKENIZERS
    if part.name in ("processor", "text_processor"):
        return _PROCESSORS
    names = {"transformer": _TRANSFORMERS, "unet": {_UNET}, "vae": _AUTOENCODERS}.get(
        part.name, _TEXT_ENCODERS
    )
    return {name: name for name in names}

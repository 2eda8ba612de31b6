"""Which classes of diffusers and transformers a model_index.json may ask for.

Owns the list. A class that is not on it is never looked up, whatever a file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.pipeline_index import Part
from triptych.modalities.diffusion.families.table import FAMILIES

_AUTOENCODERS = frozenset({
    "AutoencoderDC",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLQwenImage",
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
    "LlamaForCausalLM",
    "LlamaModel",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3Model",
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
    # What also prepares pictures reads text with the tokenizer beside it.
    **dict.fromkeys(
        ("PixtralProcessor", "PreTrainedTokenizerFast", "TokenizersBackend"),
        "PreTrainedTokenizerFast",
    ),
})  # fmt: skip
_PROCESSORS = frozenset({"Qwen2VLProcessor", "Qwen2_5_VLProcessor"})


def class_of(part: Part) -> Any:
    """The class of a part. Raises `WeightsError` unless it is one that such a part may have."""
    known: Mapping[str, str] = _known(part)
    library = "diffusers" if part.name in ("transformer", "unet", "vae") else "transformers"
    if part.library != library or part.class_name not in known:
        raise WeightsError(
            f"model_index.json gives {part.name} the class {part.library}.{part.class_name}"[:160]
            + f"; those known are {library}'s {', '.join(sorted(known))}."
        )
    if library == "diffusers":
        import diffusers as source
    else:
        import transformers as source
    return getattr(source, known[part.class_name])


def _known(part: Part) -> Mapping[str, str]:
    """Names that a part's class may have, and which class each means."""
    if part.name.startswith("tokenizer"):
        return _TOKENIZERS
    names = {
        "transformer": FAMILIES,
        "unet": FAMILIES,
        "vae": _AUTOENCODERS,
        "processor": _PROCESSORS,
    }.get(part.name, _TEXT_ENCODERS)
    return {name: name for name in names}

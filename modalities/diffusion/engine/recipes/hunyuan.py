"""HunyuanImage 2.1: Qwen2.5-VL reads the prompt, and ByT5 the quoted words in it.

Owns the published facts of its pipeline. The recipe gives the results of diffusers' pipeline of the
same name; its second stage, the refiner, is another pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance, Projection
from triptych.modalities.diffusion.engine.recipes.recipe import EncodedText
from triptych.modalities.diffusion.engine.recipes.text import EvenFlow
from triptych.modalities.diffusion.spec import PipelineSpec
from triptych.modalities.diffusion.wire import ImageRequest

_QUOTES = (("'", "'"), ('"', '"'), ("\u2018", "\u2019"), ("\u201c", "\u201d"))
_GUIDER = "AdaptiveProjectedMixGuidance"
_UNSUPPORTED = {
    "enabled": True,
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
}


class HunyuanImage(EvenFlow):
    """HunyuanImage 2.1: guided by its `guider`, or if distilled by a scale as an argument."""

    _TEMPLATE = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
        "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>"
    )
    _NUM_TEMPLATE = 34
    _GLYPH_LENGTH = 128
    window = 1000

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        super().__init__(components, spec)
        for name in ("guider", "ocr_guider"):
            if name in components:
                _check_guider(name, components[name])

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        text = self.text_encoder().encode(
            self._TEMPLATE.format(prompt), length=self.window + self._NUM_TEMPLATE, layer=-3
        )
        glyphs, glyph_mask = self._glyphs(prompt)
        return {
            "encoder_hidden_states": text.hidden[self._NUM_TEMPLATE :],
            "encoder_attention_mask": text.mask[self._NUM_TEMPLATE :],
            "encoder_hidden_states_2": glyphs.to(text.hidden),
            "encoder_attention_mask_2": glyph_mask,
        }

    @override
    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        if self.model.config.guidance_embeds:
            scale = 1000 * self.guidance_scale(request)
            text = {**text, "guidance": text["encoder_hidden_states"].new_full((), scale)}
        return super().conditioning(text, request)

    @override
    def guidance_of(self, request: ImageRequest) -> Guidance:
        has_words = glyph_text(request.prompt) is not None
        guider = self.components.get("ocr_guider") if has_words else None
        guider = guider or self.components.get("guider")
        if guider is None or not self.spec.has_negative:
            return Guidance(scale=self.guidance_scale(request))
        own = guider.get("guidance_scale", self.spec.default_guidance)
        scale = own if request.guidance_scale is None else request.guidance_scale
        projection = Projection(
            scale=scale
            / own  # both scales of the guider change in proportion
            * guider.get("adaptive_projected_guidance_scale", 10.0),
            momentum=guider.get("adaptive_projected_guidance_momentum", -0.5) or 0.0,
            limit=guider.get("adaptive_projected_guidance_rescale", 10.0),
            parallel=guider.get("eta", 0.0),
            after_step=guider.get("adaptive_projected_guidance_start_step", 5),
        )
        return Guidance(scale=scale, projection=projection)

    def _glyphs(self, prompt: str) -> tuple[Tensor, Tensor]:
        """The encoded words to write `[T, C]`, and their mask; both are zero without any."""
        encoder, words = self.text_encoder(2), glyph_text(prompt)
        if words is None:
            length, device = self._GLYPH_LENGTH, self.device
            hidden = torch.zeros(length, encoder.module.config.d_model, device=device)
            return hidden, torch.zeros(length, dtype=torch.int64, device=device)
        text = encoder.encode(words, length=self._GLYPH_LENGTH)
        return text.hidden, text.mask


def glyph_text(prompt: str) -> str | None:
    """The quoted words of a prompt as ByT5 reads them; `None` without any."""
    lines = prompt.split("\n")
    words = [
        word for first, last in _QUOTES for line in lines for word in _between(line, first, last)
    ]
    return ". ".join(f'Text "{word}"' for word in words) + ". " if words else None


def _between(line: str, first: str, last: str) -> Iterator[str]:
    """The text in each pair of quotes, in time linear in the line's length."""
    start = line.find(first) + 1
    while start and (end := line.find(last, start)) >= 0:
        yield line[start:end]
        start = line.find(first, end + 1) + 1


def _check_guider(name: str, guider: Mapping[str, Any]) -> None:
    kind = guider.get("_class_name")
    changed = [key for key, plain in _UNSUPPORTED.items() if guider.get(key, plain) != plain]
    if kind != _GUIDER or changed:
        reason = f"{kind} with {changed[0]}" if changed else str(kind)
        raise WeightsError(f"{name} is {reason:.80}, which is not served; {_GUIDER} is.")

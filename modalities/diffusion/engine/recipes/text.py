"""Encoding of prompts by tokenizers and text encoders.

Owns the calls; recipes choose encoder, length and layer. A prompt is encoded alone, or with others
padded to the same length: its result never depends on the other prompts.

Legend: T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.samplers.registry import Spacing, dynamic_shift
from triptych.modalities.diffusion.wire import ImageRequest

_IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
_MAX_LIMIT = 2048  # many tokenizers state a huge limit, or none


@dataclass(frozen=True, slots=True)
class Encoded:
    """One prompt's hidden states `[T, C]`, mask of real tokens `[T]`, and pooled vector.

    `pooled` is empty if the encoder has none. `host_mask` is the mask on the host.
    """

    hidden: Tensor
    mask: Tensor
    pooled: Tensor
    host_mask: Tensor

    @property
    def real(self) -> Tensor:
        """The hidden states of the real tokens."""
        (places,) = self.host_mask.nonzero(as_tuple=True)
        return self.hidden.index_select(0, to_device(places, self.hidden.device))


@dataclass(frozen=True, slots=True)
class SeenImages:
    """Images as inputs of a vision-language encoder, and the number of tokens of each."""

    inputs: Mapping[str, Any]
    counts: Sequence[int]

    @classmethod
    def of(cls, processor: Any, images_3HW: Sequence[Tensor]) -> SeenImages:
        """Images in 0..1, already of the encoder's size; none is allowed."""
        if not images_3HW:
            return cls({}, ())
        rows = [(image * 255).round().byte().permute(1, 2, 0).numpy() for image in images_3HW]
        inputs = processor(images=rows, return_tensors="pt")
        counts = inputs["image_grid_thw"].prod(-1) // processor.merge_size**2
        return cls(inputs, counts.tolist())


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """A tokenizer and its text encoder."""

    tokenizer: Any
    module: Any

    @property
    def limit(self) -> int:
        """The number of tokens read of a prompt by a recipe without a window."""
        return min(int(self.tokenizer.model_max_length), _MAX_LIMIT)

    def cut(self, prompt: str, length: int) -> str:
        """The beginning of a prompt, of `length` tokens."""
        ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        if len(ids) <= length:
            return prompt
        beginning: str = self.tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)
        return beginning

    def encode(
        self,
        prompt: str,
        *,
        length: int = 0,
        pads: bool = True,
        masks: bool = True,
        layer: int | Sequence[int] | None = None,
    ) -> Encoded:
        """Encode a prompt, cut at `length` tokens (0: `limit`).

        `pads` fills up to `length`; `masks` hides the padding from the encoder. `layer` is an
        index into the hidden states (several are concatenated in channels); `None` is the
        encoder's output.
        """
        return self.read(self._tokens([prompt], length, pads=pads), masks=masks, layer=layer)

    def encode_all(self, prompts: Sequence[str], *, length: int = 0) -> list[Encoded]:
        """Encode prompts in one run, padded to `length`; the padding is not masked."""
        return self._read(self._tokens(list(prompts), length, pads=True), masks=False, layer=None)

    def _tokens(self, prompts: list[str], length: int, *, pads: bool) -> Mapping[str, Any]:
        tokens: Mapping[str, Any] = self.tokenizer(
            prompts,
            max_length=length or self.limit,
            padding="max_length" if pads else False,
            truncation=True,
            return_tensors="pt",
        )
        return tokens

    def read(
        self,
        tokens: Mapping[str, Any],
        *,
        masks: bool = True,
        layer: int | Sequence[int] | None = None,
    ) -> Encoded:
        """Encode one prompt's tokens: a tokenizer's or processor's output, a batch of one."""
        return self._read(tokens, masks=masks, layer=layer)[0]

    def read_all(self, tokens: Mapping[str, Any]) -> list[Encoded]:
        """Encode texts of one length, without padding."""
        return self._read(tokens, masks=True, layer=None)

    @torch.no_grad()
    def _read(
        self, tokens: Mapping[str, Any], *, masks: bool, layer: int | Sequence[int] | None
    ) -> list[Encoded]:
        device = next(self.module.parameters()).device
        mask = to_device(tokens["attention_mask"], device)
        output = self.module(
            input_ids=to_device(tokens["input_ids"], device),
            attention_mask=mask if masks else None,
            output_hidden_states=layer is not None,
            **{name: to_device(tokens[name], device) for name in _IMAGE_INPUTS if name in tokens},
        )
        if layer is None:
            hidden = output[0]
        elif isinstance(layer, int):
            hidden = output.hidden_states[layer]
        else:
            hidden = torch.cat([output.hidden_states[index] for index in layer], dim=-1)
        rows = zip(hidden, mask, _pooled_vectors(output), tokens["attention_mask"], strict=True)
        return [Encoded(*row) for row in rows]


@contextmanager
def before_final_norm(module: Any) -> Iterator[None]:
    """A context in which the last hidden states of a text encoder are not normed.

    So they came from transformers 4, with which some models were trained.
    """
    decoder = getattr(module, "model", None)  # absent from an outline
    if decoder is None:
        yield
        return
    norm = getattr(decoder, "language_model", decoder).norm
    hook = norm.register_forward_hook(lambda _, given, normed: given[0])
    try:
        yield
    finally:
        hook.remove()


def _pooled_vectors(output: Any) -> Tensor:
    """The projected vectors of a CLIP with projection, else the pooled ones of a plain CLIP."""
    for name in ("text_embeds", "pooler_output"):
        vectors = getattr(output, name, None)
        if isinstance(vectors, Tensor):
            return vectors
    hidden: Tensor = output[0]
    return hidden.new_empty(len(hidden), 0)


class TextRecipe(Recipe):
    """A recipe with text encoders numbered as in diffusers.

    `window`: the number of prompt tokens read by the encoder that reads most; 0: its `limit`.
    """

    window: ClassVar[int] = 0

    @property
    def reader(self) -> int:
        """The number of the text encoder that reads the most of a prompt."""
        return 1

    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        """The prompt as passed to the tokenizer of encoder `reader`."""
        return prompt

    @override
    def num_prompt_tokens(self, request: ImageRequest) -> int:
        tokenizer = self.text_encoder(self.reader).tokenizer
        num_tokens = len(tokenizer(request.prompt, verbose=False).input_ids)
        return max(0, num_tokens - self.num_cut_tokens(request.prompt, is_negative=False))

    @override
    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        encoder = self.text_encoder(self.reader)
        asked = self.format_prompt(prompt, is_negative=is_negative)
        num_tokens = len(encoder.tokenizer(asked, verbose=False).input_ids)
        return max(0, num_tokens - (self.window or encoder.limit))

    def text_encoder(self, number: int = 1) -> TextEncoder:
        """The tokenizer and encoder of this number; the first has no number in its name."""
        suffix = "" if number == 1 else f"_{number}"
        return TextEncoder(
            self.components[f"tokenizer{suffix}"], self.components[f"text_encoder{suffix}"]
        )


class EvenFlow(TextRecipe):
    """Even noise levels from 1 to 1/steps, shifted for the image's size."""

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        num_steps = self.num_steps(request)
        return Spacing(
            num_steps=num_steps,
            sigmas=tuple(float(level) for level in np.linspace(1, 1 / num_steps, num_steps)),
            mu=dynamic_shift(self.components["scheduler"], self.num_tokens(request)),
        )

    def num_tokens(self, request: ImageRequest) -> int:
        """The image's size, as the shift measures it."""
        _, height, width = self.latent_shape(request)
        return height * width // 4

"""GLM-Image: a language model writes tokens of the image, which a transformer then paints.

Owns the published facts of its pipeline. The recipe gives the results of diffusers' pipeline of the
same name, from a prompt: tokens and latents. ByT5 reads the quoted words alone.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.engine.denoise_row import GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.loading.components import WRITER
from triptych.modalities.diffusion.engine.prior import ImageTokenModel, ImageTokens
from triptych.modalities.diffusion.engine.recipes.latents import decode_latents
from triptych.modalities.diffusion.engine.recipes.recipe import (
    EncodedText,
    row_seed,
    seeded_generator,
)
from triptych.modalities.diffusion.engine.recipes.text import TextRecipe
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.spec import PipelineSpec
from triptych.modalities.diffusion.wire import ImageRequest

_QUOTED = (
    re.compile("'([^']*)'"),
    re.compile("\u201c([^\u201c\u201d]*)\u201d"),
    re.compile('"([^"]*)"'),
    re.compile("\u300c([^\u300c\u300d]*)\u300d"),
)
_TOKEN_PIXELS = 32
"""Pixels along the side of a token of the language model: of two of the transformer's."""
_CONTROLS = ("image_token", "grid_bos_token", "grid_eos_token", "bos_token")
_MOST_PREVIEW = 16 * 16
_LONGEST_TEMPLATE = 64  # tokens around a prompt: the chat template, and the sizes of both images


class GlmImage(TextRecipe):
    """GLM-Image: both branches have the tokens, which the negative one drops."""

    window = 2048

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        super().__init__(components, spec)
        self._writer = ImageTokenModel(
            components[WRITER],
            self.model.config.prior_vq_quantizer_codebook_size,
        )

    @property
    @override
    def token_side(self) -> int:
        return _TOKEN_PIXELS // 2

    @override
    def num_prompt_tokens(self, request: ImageRequest) -> int:
        ids = self.components["processor"].tokenizer(self._plain(request.prompt)).input_ids
        return len(ids)

    @override
    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        return max(0, sum(map(len, self._glyphs(prompt))) - self.window)

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        """The quoted words: each is read alone, as far as they fit the window together."""
        encoder, left = self.text_encoder(), self.window
        by_length: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for place, ids in enumerate(self._glyphs(prompt)):
            if read := ids[: max(0, left)]:
                by_length[len(read)].append((place, read))
            left -= len(ids)
        found: dict[int, Tensor] = {}
        for group in by_length.values():
            rows = torch.tensor([read for _, read in group])
            tokens = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
            for (place, _), text in zip(group, encoder.read_all(tokens), strict=True):
                found[place] = text.hidden
        return {"encoder_hidden_states": torch.cat([found[place] for place in sorted(found)])}

    @override
    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        hidden = text["encoder_hidden_states"]
        size = to_device_like(torch.tensor([request.height, request.width]), hidden)
        num_tokens = 4 * math.prod(_grid(request))
        rows = {
            **text,
            "target_size": size,
            "crop_coords": torch.zeros_like(size),
            "prior_token_id": torch.zeros(num_tokens, dtype=torch.int64, device=hidden.device),
        }
        return Conditioning(rows=rows)

    @override
    def add_references(
        self, branches: list[Conditioning], request: ImageRequest, generator: torch.Generator
    ) -> list[Conditioning]:
        """Keep the tokens from the second branch."""
        drops = (
            torch.full_like(branches[0].rows["prior_token_id"], i, dtype=torch.bool) for i in (0, 1)
        )
        return [
            replace(branch, rows={**branch.rows, "prior_token_drop": drop})
            for branch, drop in zip(branches, drops, strict=False)
        ]

    @override
    def image_tokens(
        self, request: ImageRequest, index: int, branches: Sequence[GuidanceBranch]
    ) -> ImageTokens:
        inputs = self._asked(request)
        module = self._writer.module.model
        positions_31T, _ = module.get_rope_index(**inputs)
        positions_3N = module._cached_decode_position_ids[0, :, :-1]  # without that of the end
        return ImageTokens(
            self._writer,
            {"input_ids": inputs["input_ids"], "position_ids": positions_31T},
            positions_3N,
            generator=seeded_generator(row_seed(request.seed or 0, index)),
            done=partial(_place_tokens, branches, _grid(request)),
        )

    @override
    def kept_bytes(self, request: ImageRequest) -> int:
        num_tokens = self.num_prompt_tokens(request) + _LONGEST_TEMPLATE
        num_tokens += math.prod(_grid(request)) + _MOST_PREVIEW
        return num_tokens * self._writer.token_bytes

    @property
    @override
    def live_bytes(self) -> int:
        return self._writer.live_bytes

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        """The model is shown the times of even steps, whatever the shift of the noise levels."""
        num_steps, config = self.num_steps(request), self.components["scheduler"]
        most = config.get("num_train_timesteps", 1000)
        times = np.linspace(most, 1.0, num_steps + 1)[:-1].astype(np.int64)
        base = config.get("base_image_seq_len", 256)
        length = math.sqrt(4 * math.prod(_grid(request)) / base)
        mu = length * config.get("max_shift", 0.75) + config.get("base_shift", 0.25)
        return Spacing(
            num_steps=num_steps,
            sigmas=tuple(float(time) for time in times.astype(np.float32) / most),
            timesteps=tuple(map(float, times)),
            mu=mu,
        )

    @override
    def image_sample(self, image_3HW: Tensor, generator: torch.Generator | None) -> Tensor:
        return super().image_sample(image_3HW, generator) / self._scale

    @override
    def decode_all(self, samples: Sequence[tuple[Tensor, ImageRequest]]) -> list[Tensor]:
        latents = torch.stack([sample for sample, _ in samples])
        return list(decode_latents(self.vae, latents * self._scale))

    @property
    def _scale(self) -> float:
        """The autoencoder's own factor, which this pipeline leaves out."""
        return float(self.vae.config.get("scaling_factor") or 1.0)

    def _asked(self, request: ImageRequest) -> dict[str, Tensor]:
        """The prompt and the sizes of the image and of the small one that is written first."""
        processor = self.components["processor"]
        content = [{"type": "text", "text": self._plain(request.prompt)}]
        asked = processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"target_h": request.height, "target_w": request.width},
        )
        names = ("input_ids", "image_grid_thw", "images_per_sample", "attention_mask")
        return {name: asked[name] for name in names}

    def _plain(self, prompt: str) -> str:
        """The prompt without the tokens that lay out images."""
        for name in _CONTROLS:
            if token := getattr(self.components["processor"], name, None):
                prompt = prompt.replace(token, "")
        return prompt

    def _glyphs(self, prompt: str) -> list[list[int]]:
        """The tokens of each quoted part of a prompt, in the order of the kinds of quotes."""
        tokenizer = self.text_encoder().tokenizer
        texts = _quoted(prompt) or [""]
        ids = tokenizer(texts, truncation=True, max_length=self.window).input_ids
        padding = [tokenizer.pad_token_id] * ((len(ids) + 1) % 2)
        return [padding + own for own in ids]


def _quoted(prompt: str) -> list[str]:
    """The parts of a prompt in quotes, those of one kind after another."""
    return [text for quoted in _QUOTED for text in quoted.findall(prompt)]


def _grid(request: ImageRequest) -> tuple[int, int]:
    """Rows and columns of the tokens that the language model writes of the image."""
    return request.height // _TOKEN_PIXELS, request.width // _TOKEN_PIXELS


def _place_tokens(
    branches: Sequence[GuidanceBranch], grid: tuple[int, int], tokens: Tensor
) -> None:
    """Give branches the image's tokens, each for 2 x 2 of the transformer's.

    Those of a small image, written before, have served their purpose.
    """
    rows, columns = grid
    own = tokens[-rows * columns :].view(grid).repeat_interleave(2, 0).repeat_interleave(2, 1)
    for branch in branches:
        like = branch.conditioning.rows["prior_token_id"]
        placed = to_device(own.flatten(), like.device)
        held = {**branch.conditioning.rows, "prior_token_id": placed}
        branch.conditioning = replace(branch.conditioning, rows=held)

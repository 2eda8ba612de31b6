"""ERNIE-Image: FLUX.2's autoencoder, and a text without padding after the image.

Owns the published facts of its pipeline. The recipe gives the results of diffusers' pipeline of the
same name without its prompt enhancer, a language model that this server does not load.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.recipes.flux2 import NormedPatches


class ErnieImage(NormedPatches):
    """ERNIE-Image: Mistral's last hidden states but one, and their number."""

    samples_sources = False

    @property
    @override
    def epsilon(self) -> float:
        return 1e-5  # as trained; the autoencoder's configuration states another

    @override
    def tokens_of(self, sample: Tensor) -> Tensor:
        return sample.flatten(1).T

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        ids = encoder.tokenizer(prompt, truncation=True, max_length=encoder.limit).input_ids
        ids = torch.tensor([ids or [encoder.tokenizer.bos_token_id or 0]])
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        hidden = encoder.read(tokens, layer=-2).hidden
        return {
            "text_bth": hidden,
            "text_lens": to_device(torch.tensor(len(hidden)), hidden.device),
        }

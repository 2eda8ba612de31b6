"""Alignment of the denoiser's hidden states with what another network sees in the clean image.

Owns the targets, `seen-NNNN.npy` beside each shard of the corpus (`[N, T, F]`, float16), and the
layers that lead from hidden states to them. The targets are an EfficientNet's features of what the
codec makes of the latents, along their main directions; each of T places is one of the model's
tokens. A hidden state that is to tell them from a noisy image and a caption must know which thing
is meant, and where it is (REPA: Yu et al. 2024, arXiv:2410.06940). Nothing here is exported.

Shapes: N images, B of a batch, T tokens, C channels, F directions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from corpus import seen_beside, shards_of, to_latents
from diffusers import AutoencoderDC
from rich.progress import track
from sight import Eye
from torch import Tensor, nn
from torch.nn import functional

NUM_DIRECTIONS = 64
_NUM_HIDDEN = 512
_BATCH = 32
_SOME = 1024  # images that directions are found in


class Aligner(nn.Module):
    """From hidden states to what is seen there."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_channels, _NUM_HIDDEN),
            nn.SiLU(),
            nn.Linear(_NUM_HIDDEN, NUM_DIRECTIONS),
        )

    def loss(self, hidden_BTC: Tensor, seen_BTF: Tensor) -> Tensor:
        """One less the mean cosine between what is told and what is seen."""
        told_BTF = self.layers(hidden_BTC).float()
        return 1 - functional.cosine_similarity(told_BTF, seen_BTF, dim=-1).mean()


def write_seen(folder: Path, codec: AutoencoderDC) -> None:
    """Write the targets of all shards that have none yet."""
    home = folder / "corpus"
    missing = [file for file in shards_of(home) if not seen_beside(file).exists()]
    if not missing:
        return
    looker = _Looker(folder, codec)
    if not looker.directions_file.exists():
        torch.save(looker.main_directions(shards_of(home)[0]), looker.directions_file)
    for file in missing:
        draft = home / "part.npy"
        np.save(draft, looker.targets(file).numpy())
        draft.replace(seen_beside(file))


class _Looker:
    """Decodes latents, and looks at the images."""

    def __init__(self, folder: Path, codec: AutoencoderDC) -> None:
        self._eye = Eye(folder)
        self._codec = codec.to(memory_format=torch.channels_last)
        self.directions_file = folder / "corpus" / "directions.pt"

    def main_directions(self, shard: Path) -> dict[str, Tensor]:
        """`mean` and `deviation` `[C]` of the features, and their main `directions` `[C, F]`."""
        seen = self._look(np.load(shard, mmap_mode="r")[:_SOME]).flatten(0, 1)
        mean, deviation = seen.mean(0), seen.std(0) + 1e-3
        inputs = (seen - mean) / deviation
        _, found = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
        directions = found[:, -NUM_DIRECTIONS:].contiguous()
        return {"mean": mean, "deviation": deviation, "directions": directions}

    def targets(self, shard: Path) -> Tensor:
        """What is seen in a shard's images, `[N, T, F]`, along the main directions."""
        kept = torch.load(self.directions_file, weights_only=True)
        latents = np.load(shard, mmap_mode="r")
        parts = [
            ((self._look(latents[first : first + _BATCH]) - kept["mean"]) / kept["deviation"])
            @ kept["directions"]
            for first in track(range(0, len(latents), _BATCH), f"Looking at {shard.stem}")
        ]
        return torch.cat(parts).half()

    @torch.inference_mode()
    def _look(self, tokens: np.ndarray) -> Tensor:
        """Features of the images of latents, `[B, T, C]`."""
        parts = []
        for first in range(0, len(tokens), _BATCH):
            part = torch.from_numpy(tokens[first : first + _BATCH].astype(np.float32))
            latents = to_latents(part).contiguous(memory_format=torch.channels_last)
            with torch.autocast(self._codec.device.type, torch.bfloat16):
                pixels = self._codec.decode(latents).sample
            parts.append(self._eye.map(pixels.float().clamp(-1, 1)))
        return torch.cat(parts)

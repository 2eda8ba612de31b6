"""Training of the codec: images to latents of an eighth of their size, and back.

Owns losses and loop. The codec is diffusers' `AutoencoderDC` with narrow layers, whose decoder
costs no more than a step of the model does. It is trained on crops of single sprites, with noise on
the latents, so that small errors of the model stay small. The encoder is trained on all
sprites equally; once it is final, the decoder is mostly trained on what the model will generate:
crops of arrangements.

Shapes: B pictures, C channels, H height, W width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import sample_trained, to_pixels
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from pictures.compositions import PICTURE_SIZE, Catalogue
from pictures.drawings import Drawings
from pictures.rendering import render
from pictures.sprites import STYLES, TINTS, Sprites
from PIL import Image
from precision import mixed_precision
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

LATENT_CHANNELS = 8
_CROP = 64
_SIZES = (46, 46, 58, 58, 72, 100)  # small ones are harder
_NOISE = 0.1
_TINT_SHARE = 0.15
_FLAT_SHARE = 0.25
_SUBJECT_SHARE = 0.8  # crops of arrangements, when the encoder is final


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraining:
    """Options of the codec's training."""

    minutes: float = 90.0
    encoder_minutes: float = 45.0
    """After these latents are final, and the model can be trained beside the codec's decoder."""
    num_rows: int = 8
    learning_rate: float = 2e-3
    seed: int = 0


def new_codec() -> AutoencoderDC:
    """An untrained codec, whose blocks start as the identity, so the rest is nearly linear."""
    codec = AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(16, 32, 64, 128),
        decoder_block_out_channels=(16, 32, 64, 128),
        encoder_layers_per_block=(0, 1, 2, 2),
        decoder_layers_per_block=(0, 2, 3, 3),
        encoder_qkv_multiscales=((),) * 4,
        decoder_qkv_multiscales=((),) * 4,
    )
    for name, parameter in codec.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.zeros_(parameter)
    return codec


class Crops:
    """Crops of sprites on plain grounds; `subject_share` of them of what the model generates."""

    def __init__(self, sprites: Sprites, catalogue: Catalogue, drawings: Drawings) -> None:
        self.subject_share = 0.0
        self._sprites, self._catalogue, self._drawings = sprites, catalogue, drawings

    def batches(self, options: CodecTraining, first: int) -> Iterator[Tensor]:
        """Crops in -1..1, `[B, 3, H, W]`, prepared a few batches ahead."""
        with ThreadPoolExecutor(1) as pool:
            rng = np.random.default_rng((options.seed, first))
            ahead = [pool.submit(self.draw, rng, options.num_rows) for _ in range(3)]
            while True:
                pixels = ahead.pop(0).result()
                ahead.append(pool.submit(self.draw, rng, options.num_rows))
                yield to_pixels(pixels)

    def draw(self, rng: np.random.Generator, num_rows: int) -> NDArray[np.uint8]:
        """Crops, `[B, H, W, 3]`."""
        return np.stack([self._crop(rng) for _ in range(num_rows)])

    def _crop(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        if rng.random() < self.subject_share:
            return self._crop_of_arrangement(rng)
        style = STYLES[int(rng.random() < _FLAT_SHARE)]
        tint = str(rng.choice(list(TINTS))) if rng.random() < _TINT_SHARE else None
        code = str(rng.choice(self._sprites.codes(style)))
        sprite = self._sprites.draw(style, code, tint, int(rng.choice(_SIZES)))
        ground = Image.new("RGB", (_CROP, _CROP), tuple(int(v) for v in _ground(rng)))
        left, top = (int(rng.integers(-side // 2, _CROP - side // 2 + 1)) for side in sprite.size)
        ground.paste(sprite, (left, top), sprite)
        return np.asarray(ground)

    def _crop_of_arrangement(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        shown = sample_trained(self._catalogue, self._drawings, rng)
        pixels = np.asarray(render(shown, self._catalogue, self._drawings, rng))
        left, top = rng.integers(0, PICTURE_SIZE - _CROP + 1, 2)
        return pixels[top : top + _CROP, left : left + _CROP]


def _ground(rng: np.random.Generator) -> NDArray[np.int64]:
    return np.array([255] * 3) if rng.random() < 0.3 else rng.integers(0, 256, 3)


class CodecTrainer:
    """Codec, optimiser and progress."""

    def __init__(self, folder: Path, options: CodecTraining) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.codec = new_codec().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), options.learning_rate, (0.9, 0.98), weight_decay=1e-3
        )
        self.path = folder / "codec.pt"
        self.num_iterations, self.spent_s, self.psnr = 0, 0.0, 0.0
        if self.path.exists():
            self._restore()

    @property
    def is_encoder_final(self) -> bool:
        """Whether only the decoder is trained now."""
        return self.spent_s >= self.options.encoder_minutes * 60

    def train(self, crops: Crops) -> None:
        """Train for the given minutes; a checkpoint every minute."""
        total_s, saved_s = self.options.minutes * 60, self.spent_s
        with Progress() as progress:
            task = progress.add_task("Codec", total=total_s)
            for pixels in crops.batches(self.options, self.num_iterations):
                crops.subject_share = _SUBJECT_SHARE if self.is_encoder_final else 0.0
                began_s = time.monotonic()
                losses = self.step(pixels.to(self.device))
                self.spent_s += time.monotonic() - began_s
                label = " ".join(f"{name} {value:.3f}" for name, value in losses.items())
                progress.update(
                    task, completed=self.spent_s, description=f"{self.num_iterations} {label}"
                )
                is_over = self.spent_s >= total_s
                if self.spent_s - saved_s > 60 or is_over:
                    progress.console.print(f"{self.num_iterations} {self.spent_s:.0f} s {label}")
                    self.save()
                    saved_s = self.spent_s
                if is_over:
                    return

    def step(self, pixels: Tensor) -> dict[str, float]:
        """One update."""
        share = min(self.spent_s / (self.options.minutes * 60), 1.0)
        warm = min(1.0, (self.num_iterations + 1) / 50)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * warm * (0.02 + 0.98 * (1 - share))
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with mixed_precision(self.device):
            with torch.set_grad_enabled(not self.is_encoder_final):
                latents = self.codec.encoder(pixels)
            made = self.codec.decoder(latents + _NOISE * torch.randn_like(latents)).float()
        losses = reconstruction_losses(made, pixels)
        spread = latents.float().std((0, 2, 3))
        mean = latents.float().mean((0, 2, 3))
        losses["scale"] = 0.05 * ((spread - 1).square() + mean.square()).mean()
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(self.codec.parameters(), 1.0)
        self.optimizer.step()
        self.num_iterations += 1
        error = (made.detach().clamp(-1, 1) - pixels).square().mean()
        shown = {name: value.item() for name, value in losses.items()}
        self.psnr += 0.02 * (10 * float(torch.log10(4 / error)) - self.psnr)
        return {**shown, "psnr": self.psnr}

    def save(self) -> None:
        """Write a checkpoint atomically."""
        state = {
            "codec": self.codec.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_iterations": self.num_iterations,
            "spent_s": self.spent_s,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.path)

    def _restore(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location=self.device)
        self.codec.load_state_dict(state["codec"])
        if "optimizer" not in state:  # adopted from an exported model
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_iterations, self.spent_s = state["num_iterations"], state["spent_s"]
        torch.manual_seed(self.options.seed + self.num_iterations)  # noise goes on, too


def reconstruction_losses(made: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    """L1 loss of pixels, and of edges at three scales: blur costs more than a shade."""
    edges = made.new_zeros(())
    difference = made - pixels
    pixel_loss = difference.abs().mean() + 0.5 * difference.square().mean()
    for scale in (1, 2, 4):
        coarse = functional.avg_pool2d(difference, scale) if scale > 1 else difference
        edges = edges + coarse.diff(dim=-1).abs().mean() + coarse.diff(dim=-2).abs().mean()
    return {"pixel": pixel_loss, "edges": 0.5 * edges}


def train_codec(folder: Path, crops: Crops, options: CodecTraining) -> None:
    """Train, or resume training, the codec in `folder`."""
    CodecTrainer(folder, options).train(crops)

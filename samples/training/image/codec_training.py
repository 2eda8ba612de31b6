"""Training of the codec: images to latents of an eighth of their size, and back.

Owns losses and loop. There is noise on the latents, so that small errors of the model stay small.
The encoder is trained on all sprites equally; once it is final, the decoder is mostly trained on
what the model will generate.

Shapes: B images, H height, W width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from codec import new_codec
from composites import to_pixels
from crops import Crops
from precision import mixed_precision
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

_NOISE = 0.1
_SUBJECT_SHARE = 0.8  # images as the model generates them, when the encoder is final
_LOGGED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraining:
    """Options of the codec's training."""

    minutes: float = 90.0
    encoder_minutes: float = 45.0
    """After these latents are final, and the model can be trained beside the codec's decoder."""
    num_rows: int = 2
    learning_rate: float = 2e-3
    seed: int = 0


class CodecTrainer:
    """Codec, optimizer and progress."""

    def __init__(self, folder: Path, options: CodecTraining) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.codec = new_codec().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), options.learning_rate, (0.9, 0.98), weight_decay=1e-3
        )
        self.path = folder / "codec.pt"
        self.num_iterations, self.spent_s = 0, 0.0
        self.psnr = torch.zeros((), device=self.device)
        if self.path.exists():
            self._restore()

    @property
    def is_encoder_final(self) -> bool:
        """Whether only the decoder is trained now."""
        return self.spent_s >= self.options.encoder_minutes * 60

    def train(self, crops: Crops) -> None:
        """Train for the given minutes; a checkpoint every minute."""
        total_s, saved_s = self.options.minutes * 60, self.spent_s
        seed = self.options.seed + self.num_iterations
        batches = crops.batches(seed, self.options.num_rows, self.device)
        with Progress() as progress:
            task = progress.add_task("Codec", total=total_s)
            while self.spent_s < total_s:
                crops.subject_share = _SUBJECT_SHARE if self.is_encoder_final else 0.0
                pixels = to_pixels(next(batches))
                began_s = time.monotonic()
                losses = self.step(pixels)
                self.spent_s += time.monotonic() - began_s
                is_over = self.spent_s >= total_s
                if self.num_iterations % _LOGGED == 0 or is_over:
                    label = self._label(losses)
                    progress.update(task, completed=self.spent_s, description=label)
                if self.spent_s - saved_s > 60 or is_over:
                    progress.console.print(f"{self._label(losses)} {self.spent_s:.0f} s")
                    self.save()
                    saved_s = self.spent_s

    def _label(self, losses: Mapping[str, Tensor]) -> str:
        told = " ".join(f"{name} {value:.3f}" for name, value in losses.items())
        return f"{self.num_iterations} {told}"

    def step(self, pixels: Tensor) -> Mapping[str, Tensor]:
        """One update by images `[B, 3, H, W]` in -1..1."""
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
        self.psnr.lerp_(10 * torch.log10(4 / error), 0.02)
        return {**losses, "psnr": self.psnr}

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

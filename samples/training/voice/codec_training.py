"""Training of the codec: the teacher's hidden states through 32 small codes and back.

Owns the encoder (which does not ship), the quantizer, the losses and the loop. Targets are the
teacher's frames: its hidden state, which the decoder's last layer imitates so that the teacher's
spectral head fits it, and the spectra that head computes from both. Training synthesizes no audio.

Shapes: B rows, T frames, C channels, Q codebooks, F steps, K bins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import STEP_FRAMES, Corpus, open_corpus
from precision import mixed_precision
from rich.progress import Progress
from teacher import Teacher
from torch import Tensor, nn
from torch.nn import functional

from triptych.modalities.tts.configs.voice import CodecConfig
from triptych.modalities.tts.engine.models.voice.codec import CausalBlock, VoiceCodec
from triptych.modalities.tts.engine.models.voice.synthesis import spectra_of

UNVOICED_HZ = 60.0
_COMPRESSION = 0.3
_JITTER = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraining:
    """Options of the codec's training."""

    minutes: float = 30.0
    encoder_minutes: float = 10.0
    """After these codes are final, and the acoustic model can train beside the codec's decoder."""
    num_rows: int = 12
    num_steps: int = 40
    learning_rate: float = 2e-3
    seed: int = 0


class SymmetricBlock(CausalBlock):
    """A block of the encoder, which need not be causal."""

    def __init__(self, dim: int, intermediate: int) -> None:
        super().__init__(dim, intermediate)
        self.dwconv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)


class Encoder(nn.Module):
    """Teacher frames (hidden state, pitch, voicing) to values in [-1, 1], [B, Q, F]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        dim = config.frame_dim
        stride = config.frames_per_step
        self.stem = nn.Conv1d(dim + 2, dim, 1)
        self.frame_blocks = nn.Sequential(*[SymmetricBlock(dim, 2 * dim) for _ in range(2)])
        self.down = nn.Conv1d(dim, config.step_dim, stride, stride)
        self.step_blocks = nn.Sequential(SymmetricBlock(config.step_dim, 2 * config.step_dim))
        self.out = nn.Conv1d(config.step_dim, config.num_codebooks, 1)

    def forward(self, frames_BCT: Tensor) -> Tensor:
        """Apply it."""
        x_BCF = self.step_blocks(self.down(self.frame_blocks(self.stem(frames_BCT))))
        values_BQF: Tensor = self.out(x_BCF).tanh()
        return values_BQF


def quantize(values_BQF: Tensor, num_levels: int) -> Tensor:
    """Finite scalar quantization: the nearest level, gradients passed straight through."""
    half = (num_levels - 1) / 2
    nearest = (values_BQF * half).round() / half
    return values_BQF + (nearest - values_BQF).detach()


def to_codes(values_BQF: Tensor, num_levels: int) -> Tensor:
    """Level numbers 0..n-1 of values in [-1, 1]."""
    half = (num_levels - 1) / 2
    return (values_BQF * half).round().long() + round(half)


@dataclass(frozen=True, slots=True)
class Frames:
    """Teacher frames: hidden [B, C, T]; pitch (log2 Hz at the frame's end) and voicing [B, T]."""

    hidden: Tensor
    pitch: Tensor
    is_voiced: Tensor

    def every_other(self, first: int) -> Frames:
        """Half of the frames."""
        kept = slice(first, None, 2)
        return Frames(self.hidden[..., kept], self.pitch[:, kept], self.is_voiced[:, kept])

    def features(self) -> Tensor:
        """What the encoder reads, [B, C + 2, T]."""
        voiced = self.is_voiced.float()
        pitch = (self.pitch - np.log2(200.0)) * 4 * voiced
        return torch.cat((self.hidden, pitch[:, None], voiced[:, None]), 1)


def frames_of(hidden_BTC: Tensor, f0_BT: Tensor) -> Frames:
    """The codec's targets; the pitch at a frame's end is between its own and the next one's."""
    is_voiced = f0_BT > UNVOICED_HZ
    after_BT = torch.cat((f0_BT[:, 1:], f0_BT[:, -1:]), 1)
    hz_BT = torch.where(after_BT > UNVOICED_HZ, (f0_BT + after_BT) / 2, f0_BT)
    return Frames(hidden_BTC.transpose(1, 2), hz_BT.clamp(min=UNVOICED_HZ).log2(), is_voiced)


class CodecTrainer:
    """Encoder, decoder, optimizer and progress."""

    def __init__(self, folder: Path, options: CodecTraining, config: CodecConfig) -> None:
        torch.manual_seed(options.seed)
        self.options, self.config = options, config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoder = Encoder(config).to(self.device)
        self.codec = VoiceCodec(config).to(self.device)
        weight, bias = _head_of_teacher(config)
        self.teacher_weight, self.teacher_bias = weight.to(self.device), bias.to(self.device)
        with torch.no_grad():
            self.codec.head.weight.copy_(weight[..., None])
            assert self.codec.head.bias is not None
            self.codec.head.bias.copy_(bias)
        parameters = [*self.encoder.parameters(), *self.codec.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, options.learning_rate, (0.9, 0.98))
        self.path = folder / "codec.pt"
        self.num_iterations, self.spent_s = 0, 0.0
        if self.path.exists():
            self._restore()

    def train(self, corpus: Corpus) -> None:
        """Train for the given minutes; a checkpoint every two."""
        rng = np.random.default_rng(self.options.seed + self.num_iterations)
        total_s = self.options.minutes * 60
        with Progress() as progress:
            task = progress.add_task("Codec", total=total_s)
            saved_s = self.spent_s
            while self.spent_s < total_s:
                began_s = time.monotonic()
                losses = self.step(sample_frames(corpus, rng, self.options))
                self.spent_s += time.monotonic() - began_s
                label = " ".join(f"{name} {value:.3f}" for name, value in losses.items())
                progress.update(
                    task, completed=self.spent_s, description=f"{self.num_iterations} {label}"
                )
                if self.spent_s - saved_s > 120 or self.spent_s >= total_s:
                    progress.console.print(f"{self.num_iterations} {self.spent_s:.0f} s {label}")
                    self.save()
                    saved_s = self.spent_s

    def step(self, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        """One update."""
        frames = frames_of(*(tensor.to(self.device) for tensor in batch))
        share = min(self.spent_s / (self.options.minutes * 60), 1.0)
        warm = min(1.0, (self.num_iterations + 1) / 100)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * warm * (0.02 + 0.98 * (1 - share) ** 1.5)
        with mixed_precision(self.device):
            with torch.set_grad_enabled(self.spent_s < self.options.encoder_minutes * 60):
                values = quantize(self.encoder(frames.features()), self.config.num_levels)
            values = self._jitter(values)
            hidden = self.codec.backbone(values)
            half = slice(self.num_iterations % 2, None, 2)
            spectrum, pitch = self.codec.head(hidden[..., half]), self.codec.pitch(values)
            raw = torch.cat((spectrum, pitch[..., half]), 1)
        losses = self._losses(hidden.float(), raw.float(), frames)
        loss = torch.stack(list(losses.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(
            [p for group in self.optimizer.param_groups for p in group["params"]], 1.0
        )
        self.optimizer.step()
        self.num_iterations += 1
        return {name: value.item() for name, value in losses.items()}

    def _jitter(self, values_BQF: Tensor) -> Tensor:
        """Some codes one level off, as an acoustic model's will be."""
        step = 2 / (self.config.num_levels - 1)
        is_off = torch.rand_like(values_BQF) < _JITTER
        sign = torch.randint_like(values_BQF, 2) * 2 - 1
        return (values_BQF + is_off * sign * step).clamp(-1, 1)

    def _losses(self, hidden: Tensor, raw: Tensor, frames: Frames) -> dict[str, Tensor]:
        """`raw` has every other frame of `hidden`: spectra cost more than the network."""
        hidden_loss = 0.3 * functional.mse_loss(hidden, frames.hidden)
        frames = frames.every_other(self.num_iterations % 2)
        with torch.no_grad(), mixed_precision(self.device):
            target_BTC = functional.linear(
                frames.hidden.transpose(1, 2), self.teacher_weight, self.teacher_bias
            )
        pad = target_BTC.new_zeros(*target_BTC.shape[:2], 2)
        target = spectra_of(torch.cat((target_BTC, pad), -1).transpose(1, 2).float())
        made = spectra_of(raw)
        voiced = frames.is_voiced
        ones = torch.ones_like(voiced)
        return {
            "hidden": hidden_loss,
            "harmonic": 2 * _magnitude_loss(made.harmonic, target.harmonic, voiced),
            "phase": _complex_loss(
                (made.harmonic, made.harmonic_phase),
                (target.harmonic, target.harmonic_phase),
                voiced,
            ),
            "residual": 2 * _magnitude_loss(made.residual, target.residual, ones),
            "texture": _complex_loss(
                (made.residual, made.residual_phase),
                (target.residual, target.residual_phase),
                voiced,
            ),
            "pitch": 3 * _mean((made.pitch - frames.pitch).abs(), voiced),
            "voicing": 0.2
            * functional.binary_cross_entropy_with_logits(made.voicing, voiced.float()),
        }

    def save(self) -> None:
        """Write a checkpoint atomically."""
        state = {
            "encoder": self.encoder.state_dict(),
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
        self.encoder.load_state_dict(state["encoder"])
        self.codec.load_state_dict(state["codec"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_iterations, self.spent_s = state["num_iterations"], state["spent_s"]


def sample_frames(
    corpus: Corpus, rng: np.random.Generator, options: CodecTraining
) -> tuple[Tensor, Tensor]:
    """Random spans of the corpus: hidden [B, T, C] and F0 in Hz [B, T].

    They cross sentence boundaries, as the corpus has silence there.
    """
    length = options.num_steps * STEP_FRAMES
    end = int(corpus.index[-1, 3])
    starts = rng.integers(0, end - length, options.num_rows)
    hidden = np.stack([corpus.hidden[s : s + length] for s in starts])
    f0 = np.stack([corpus.f0[s : s + length] for s in starts])
    return torch.from_numpy(hidden).float(), torch.from_numpy(f0)


def _head_of_teacher(config: CodecConfig) -> tuple[Tensor, Tensor]:
    """Its spectral head as [channels, hidden] and bias, without the unused noise."""
    weight, bias = (torch.from_numpy(array) for array in Teacher().head())
    bins = config.num_bins
    kept = torch.cat((torch.arange(2 * bins), torch.arange(3 * bins, 5 * bins)))
    return weight.T[kept].contiguous(), bias[kept].contiguous()


def _mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


def _magnitude_loss(made: Tensor, target: Tensor, mask_BT: Tensor) -> Tensor:
    difference = (_COMPRESSION * made.clamp(max=7)).exp() - (_COMPRESSION * target).exp()
    return _mean(difference.abs().mean(1), mask_BT)


def _complex_loss(
    made: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], mask_BT: Tensor
) -> Tensor:
    """L1 of compressed spectra on the complex plane."""
    made_size = (_COMPRESSION * made[0].clamp(max=7)).exp()
    target_size = (_COMPRESSION * target[0]).exp()
    along = 2 * made_size * target_size * (made[1] - target[1]).cos()
    distance = (made_size.square() + target_size.square() - along).clamp(min=1e-7).sqrt()
    return _mean(distance.mean(1), mask_BT)


def train_codec(folder: Path, options: CodecTraining) -> None:
    """Train, or resume training, the codec of the corpus in `folder`."""
    trainer = CodecTrainer(folder, options, CodecConfig())
    trainer.train(open_corpus(folder / "corpus"))

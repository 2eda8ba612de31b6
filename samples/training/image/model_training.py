"""Training of the denoiser: captions and noise to latents, along straight lines (flow matching).

Owns the model's size, loss and loop. One caption in ten is dropped, for classifier-free guidance.

Shapes: B pictures, T tokens, C channels.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from codec_training import LATENT_CHANNELS
from corpus import Corpus
from diffusers import FluxTransformer2DModel
from rich.progress import Progress
from text import MAX_TOKENS, POOLED_SIZE, WORDS_SIZE, Readers, choose_tokens, new_tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertTokenizer

_DROPPED = 0.1
_MOMENTUM = 0.985
_SHORTEST = 16  # tokens that a prompt is padded to
_LONG_SHARE = 0.12  # batches that are padded to MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraining:
    """Options of the denoiser's training."""

    minutes: float = 60.0
    num_rows: int = 96
    learning_rate: float = 5e-3
    seed: int = 0


class Model(nn.Module):
    """Text encoders and transformer, as FLUX combines them."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.readers = Readers(embeddings)
        self.transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=WORDS_SIZE,
            pooled_projection_dim=POOLED_SIZE,
            guidance_embeds=False,
            axes_dims_rope=(16, 24, 24),
        )
        for name, parameter in self.transformer.named_parameters():
            if is_modulation(name) or name.startswith("proj_out."):
                nn.init.zeros_(parameter)

    def forward(self, noisy: Tensor, level: Tensor, ids: Tensor) -> Tensor:
        """Velocities `[B, T, C]` at noise levels `[B]` in 0..1."""
        words, whole = self.readers(ids)
        side = round(noisy.shape[1] ** 0.5)
        places = noisy.new_zeros(side, side, 3)
        places[..., 1] = torch.arange(side)[:, None]
        places[..., 2] = torch.arange(side)[None]
        velocity: Tensor = self.transformer(
            noisy,
            encoder_hidden_states=words,
            pooled_projections=whole,
            timestep=level,
            img_ids=places.view(-1, 3),
            txt_ids=noisy.new_zeros(ids.shape[1], 3),
            return_dict=False,
        )[0]
        return velocity


def is_modulation(name: str) -> bool:
    """Whether a parameter of the transformer belongs to a modulation by time and text."""
    return (".norm" in name and ".linear." in name) or name.startswith("norm_out.")


@dataclass(frozen=True, slots=True)
class Batch:
    """Latents `[B, T, C]` and ids of captions `[B, L]`."""

    clean: Tensor
    ids: Tensor

    def split(self, num_parts: int) -> list[Batch]:
        """The batch in equal parts."""
        parts = (tensor.chunk(num_parts) for tensor in (self.clean, self.ids))
        return [Batch(*part) for part in zip(*parts, strict=True)]


class ModelTrainer:
    """Model, moving average of its weights, optimisers and progress."""

    def __init__(self, folder: Path, minilm: Path, options: ModelTraining) -> None:
        torch.manual_seed(options.seed)
        self.options, self.folder = options, folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus = Corpus(folder)
        tokens, embeddings = choose_tokens(minilm, self.corpus.captions())
        self.tokenizer = new_tokenizer(tokens)
        self.model = Model(embeddings).to(self.device)
        self.mean = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizers = _optimizers(self.model, options.learning_rate)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        # On a CPU, a thread for each part of a batch waits less than threads within each layer,
        # which synchronise thousands of times per step, and spin meanwhile.
        self._num_workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._num_workers, initializer=_work_alone)
        self.path = folder / "model.pt"
        self.num_iterations, self.spent_s, self.loss = 0, 0.0, 1.0
        if self.path.exists():
            self._restore()

    def train(self) -> None:
        """Train for the given minutes; a checkpoint every three."""
        total_s, saved_s = self.options.minutes * 60, self.spent_s
        with Progress() as progress:
            task = progress.add_task("Model", total=total_s)
            for batch in self._batches():
                began_s = time.monotonic()
                self.step(batch)
                self.spent_s += time.monotonic() - began_s
                label = f"{self.num_iterations} {self.loss:.4f}"
                progress.update(task, completed=self.spent_s, description=label)
                is_over = self.spent_s >= total_s
                if self.spent_s - saved_s > 180 or is_over:
                    self.save()
                    saved_s = self.spent_s
                    progress.console.print(f"{label} {self.spent_s:.0f} s")
                if is_over:
                    return

    def _batches(self) -> Iterator[Batch]:
        rng = np.random.default_rng((self.options.seed, self.num_iterations))
        while True:
            order = self.corpus.order(rng)
            while len(order) >= self.options.num_rows:
                numbers, order = np.split(order, [self.options.num_rows])
                clean, captions = self.corpus.batch(numbers, rng)
                captions = ["" if rng.random() < _DROPPED else said for said in captions]
                length = MAX_TOKENS if rng.random() < _LONG_SHARE else _SHORTEST
                ids = tokenize(self.tokenizer, captions, length)
                yield Batch(clean.to(self.device), ids.to(self.device))

    def step(self, batch: Batch) -> None:
        """One update."""
        self._set_rates()
        found = list(self._pool.map(self._gradients, batch.split(self._num_workers)))
        losses, gradients = zip(*found, strict=True)
        for parameter, parts in zip(self._trained, zip(*gradients, strict=True), strict=True):
            given = [part for part in parts if part is not None]
            parameter.grad = torch.stack(given).mean(0) if given else None
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        list(self._pool.map(_step, self.optimizers))
        self.num_iterations += 1
        self.loss += 0.02 * (sum(losses) / len(losses) - self.loss)
        self._update_mean()

    def _gradients(self, batch: Batch) -> tuple[float, tuple[Tensor | None, ...]]:
        """The loss of part of a batch, and the gradients of all trained parameters."""
        rows = len(batch.clean)
        noise = torch.randn_like(batch.clean)
        level = torch.randn(rows, device=self.device).sigmoid()
        share = level[:, None, None]
        noisy = (1 - share) * batch.clean + share * noise
        with torch.autocast(self.device.type, torch.bfloat16):
            velocity = self.model(noisy, level, batch.ids)
        loss = functional.mse_loss(velocity.float(), noise - batch.clean)
        return loss.item(), torch.autograd.grad(loss, self._trained, allow_unused=True)

    def _set_rates(self) -> None:
        rate = 1 - self.spent_s / (self.options.minutes * 60)
        warm = min(1.0, (self.num_iterations + 1) / 50)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate * warm * max(rate, 0.01)

    @torch.no_grad()
    def _update_mean(self) -> None:
        momentum = min(_MOMENTUM, self.num_iterations / (self.num_iterations + 10))
        for kept, new in zip(self.mean.parameters(), self.model.parameters(), strict=True):
            kept.lerp_(new, 1 - momentum)

    def save(self) -> None:
        """Write a checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "mean": self.mean.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "tokens": self.tokenizer.get_vocab(),
            "num_iterations": self.num_iterations,
            "spent_s": self.spent_s,
            "loss": self.loss,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.path)

    def _restore(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_iterations, self.spent_s = state["num_iterations"], state["spent_s"]
        self.loss = state["loss"]


def tokenize(tokenizer: BertTokenizer, prompts: list[str], shortest: int) -> Tensor:
    """Ids `[B, L]`, padded to the longest prompt's length, or `shortest` if that is more."""
    read = tokenizer(prompts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
    length = max(shortest, *map(len, read))
    padded = [row + [tokenizer.pad_token_id] * (length - len(row)) for row in read]
    return torch.tensor(padded)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _work_alone() -> None:
    torch.set_num_threads(1)


def _optimizers(model: Model, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for all else."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and not is_modulation(name.removeprefix("transformer."))
        and ("transformer_blocks" in name or "encoder.layer" in name)
    ]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    muons = [
        torch.optim.Muon(half, rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for half in (matrices[::2], matrices[1::2])  # stepped together
    ]
    return [*muons, torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.01)]


def train_model(folder: Path, minilm: Path, options: ModelTraining) -> None:
    """Train, or resume training, the model on the corpus in `folder`."""
    ModelTrainer(folder, minilm, options).train()

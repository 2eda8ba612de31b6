"""Training of the denoiser: captions and noise to latents, along straight lines (flow matching).

Owns the losses and the loop. One caption in ten is dropped, for classifier-free guidance. Hidden
states are aligned with what is drawn where (`alignment.py`).
The learning rate is constant until the last minutes, so that training can be stopped and continued.

Shapes: B pictures, T tokens, C channels.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from adoption import adopt
from alignment import LABEL_SIZE, PLAN_SIZE, Aligner
from codec_training import LATENT_CHANNELS
from corpus import NUM_PATCHES, Corpus
from cpu_forms import use_cpu_forms, use_float32_muon
from model import Model, ModelSize, is_modulation
from noise import coded_noise, noise_levels
from pictures.chances import CODE_SIZE
from precision import has_bfloat16, mixed_precision
from text import EMBEDDING_SIZE, MAX_TOKENS, choose_tokens, new_tokenizer, pieces_of
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertTokenizer

_DROPPED = 0.1
_ALIGNMENT, _READING, _PLANNING = 2.0, 2.0, 6.0  # of their losses
_MOMENTUM = 0.998
_SHORT = 16  # tokens, which 98 % of captions need
_LONG_SHARE = 0.12  # batches that are padded to MAX_TOKENS, as prompts are served
_PART = 16  # rows that a thread takes at a time
_PER_REFRESH = 100
_LOGGED = 20
_SAVED_S = 300.0
_NUM_ALIGNER_UPDATES = 60
"""Updates in which the aligner, which no export has, catches up with an exported model."""
_SWITCH_S = 1e-4  # a thread that is done with a product gets Python's lock soon, not after 5 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraining:
    """Options of the denoiser's training."""

    minutes: float = 480.0
    decay_minutes: float = 240.0
    """The learning rate falls to a hundredth over the last minutes."""
    num_rows: int = 128
    learning_rate: float = 3e-3
    seed: int = 0
    start: Path | None = None
    """An exported model to start from."""
    pause_file: Path | None = None
    """Training waits while this file exists."""
    compiles: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Latents `[B, T, C]`, captions' ids `[B, L]`, labels `[B, T, F]`, plans `[B, P]`, codes."""

    clean: Tensor
    ids: Tensor
    labels: Tensor
    plans: Tensor
    codes: Tensor

    def split(self, num_parts: int) -> list[Batch]:
        """The batch in equal parts."""
        wholes = self.clean, self.ids, self.labels, self.plans, self.codes
        parts = (whole.chunk(num_parts) for whole in wholes)
        return [Batch(*part) for part in zip(*parts, strict=True)]


class ModelTrainer:
    """Model, moving average of its weights, optimisers and progress."""

    def __init__(self, folder: Path, minilm: Path, options: ModelTraining, size: ModelSize) -> None:
        torch.manual_seed(options.seed)
        self.options, self.size = options, size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus = Corpus(folder)
        self.path = folder / "model.pt"
        self.num_iterations, self.spent_s = 0, 0.0
        self.losses = {"velocity": 1.0, "alignment": 1.0, "reading": 1.0, "planning": 1.0}
        is_cpu = self.device.type == "cpu"
        # On a CPU, threads that take small parts of a batch wait less than threads within layers,
        # which synchronise thousands of times per step, and spin meanwhile.
        self._num_workers = torch.get_num_threads() if is_cpu else 1
        torch.set_num_threads(1)
        _attend_in_products()
        if not has_bfloat16(self.device):
            use_float32_muon()
        self._pool = ThreadPoolExecutor(self._num_workers, initializer=_work_alone)
        sys.setswitchinterval(_SWITCH_S)
        self._num_parts = max(1, options.num_rows // _PART) if is_cpu else 1
        self._lock = Lock()
        self._is_stopped = False
        self._begin(minilm)

    def _begin(self, minilm: Path) -> None:
        """Make the model: anew, from an exported one, or from the checkpoint."""
        state, start = {}, self.options.start
        if self.path.exists():
            state = torch.load(self.path, weights_only=True, map_location=self.device)
            self.size = ModelSize(*state["size"])
            tokens = pieces_of(state["tokens"])
            self.model = Model(torch.randn(len(tokens), EMBEDDING_SIZE), self.size)
        elif start is not None:
            tokens, self.model = adopt(start, minilm, self.corpus.captions(), self.size)
        else:
            tokens, embeddings = choose_tokens(minilm, self.corpus.captions())
            self.model = Model(embeddings, self.size)
        self.tokenizer = new_tokenizer(tokens)
        self.model.to(self.device)
        self.mean = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.aligner = Aligner(64 * self.size.num_heads).to(self.device)
        rate = self.options.learning_rate
        self.optimizers = [
            *_optimizers(self.model, rate),
            torch.optim.AdamW(self.aligner.parameters(), rate, (0.9, 0.98), weight_decay=0.01),
        ]
        self._trained = [
            parameter
            for parameter in (*self.model.parameters(), *self.aligner.parameters())
            if parameter.requires_grad
        ]
        if state:
            self._restore(state)
            torch.manual_seed(self.options.seed + self.num_iterations)  # noise goes on, too
        if self.options.compiles:
            if self.device.type == "cpu":
                use_cpu_forms(self.model.transformer)
            # The matcher would put the fused attention back. Graphs that are C++ throughout run
            # without Python's lock, for which threads would wait a third of the time.
            options = {
                "pattern_matcher": False,
                "cpp_wrapper": self.device.type == "cpu",
                "guard_filter_fn": _only_of_words,
            }
            self.model.run = torch.compile(self.model.run, dynamic=False, options=options)
            # By a thread of those that train, whose state the compiler asks for, and alone: two
            # that compile at once may wait for each other for ever.
            for length in (_SHORT, MAX_TOKENS):
                self._pool.submit(self._gradients, self._blank(length)).result()
            # Once in a few hundred steps a guard that both threads ask fails without a cause.
            torch.compiler.set_stance("eager_on_recompile")

    def _blank(self, length: int) -> Batch:
        """A part of a batch, of nothing."""
        rows = self.options.num_rows // self._num_parts
        clean = torch.zeros(rows, NUM_PATCHES, 4 * LATENT_CHANNELS, device=self.device)
        ids = torch.zeros(rows, length, dtype=torch.long, device=self.device)
        labels = clean.new_zeros(rows, NUM_PATCHES, LABEL_SIZE)
        plans = clean.new_zeros(rows, PLAN_SIZE)
        return Batch(clean, ids, labels, plans, clean.new_zeros(rows, CODE_SIZE))

    def train(self) -> None:
        """Train for the given minutes, or until SIGTERM; a checkpoint every five."""
        signal.signal(signal.SIGTERM, self._stop)
        saved_s = self.spent_s
        for batch in self._batches():
            self._wait()
            began_s = time.monotonic()
            self.step(batch)
            self.spent_s += time.monotonic() - began_s
            is_over = self._is_stopped or self.spent_s >= self.options.minutes * 60
            if self.num_iterations % _LOGGED == 0 or is_over:
                losses = " ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
                print(f"{self.num_iterations} {losses} {self.spent_s:.0f} s", flush=True)
            if self.spent_s - saved_s > _SAVED_S or is_over:
                self.save()
                saved_s = self.spent_s
            if is_over:
                return

    def _stop(self, *_: object) -> None:
        self._is_stopped = True

    def _wait(self) -> None:
        """Wait while the pause file exists."""
        file = self.options.pause_file
        while file is not None and file.exists() and not self._is_stopped:
            time.sleep(1)

    def _batches(self) -> Iterator[Batch]:
        rng = np.random.default_rng((self.options.seed, self.num_iterations))
        while True:
            self.corpus.refresh()
            for _ in range(_PER_REFRESH):
                numbers = rng.choice(len(self.corpus), self.options.num_rows, replace=False)
                rows = self.corpus.batch(numbers, rng)
                captions = ["" if rng.random() < _DROPPED else said for said in rows.captions]
                length = MAX_TOKENS if rng.random() < _LONG_SHARE else _SHORT
                ids = tokenize(self.tokenizer, captions, length)
                parts = rows.clean, ids, rows.labels, rows.plans, rows.codes
                yield Batch(*(part.to(self.device) for part in parts))

    def step(self, batch: Batch) -> None:
        """One update."""
        self._set_rates()
        parts = batch.split(self._num_parts)
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        found = list(self._pool.map(self._add_gradients, parts))
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        list(self._pool.map(_step, self.optimizers))
        self.num_iterations += 1
        for name, losses in zip(self.losses, zip(*found, strict=True), strict=True):
            self.losses[name] += 0.02 * (sum(losses) / len(losses) - self.losses[name])
        self._update_mean()

    def _add_gradients(self, part: Batch) -> tuple[float, ...]:
        """The losses of part of a batch, whose share of the gradients is added to them."""
        losses, found = self._gradients(part)
        given = [
            (parameter.grad, gradient)
            for parameter, gradient in zip(self._trained, found, strict=True)
            if gradient is not None
        ]
        with self._lock:
            torch._foreach_add_(*map(list, zip(*given, strict=True)), alpha=1 / self._num_parts)
        return losses

    def _gradients(self, batch: Batch) -> tuple[tuple[float, ...], tuple[Tensor | None, ...]]:
        """The losses of part of a batch, and the gradients of all trained parameters."""
        rows = len(batch.clean)
        noise = coded_noise(batch.codes, batch.clean.shape[1])
        level = noise_levels(rows, self.device)
        share = level[:, None, None]
        noisy = (1 - share) * batch.clean + share * noise
        # The cache of casts is the process's: threads would wait for it with Python's lock in hand.
        with mixed_precision(self.device, keeps_casts=False):
            velocity, early, middle, hidden = self.model.look(noisy, level, batch.ids)
            error = functional.mse_loss(velocity.float(), noise - batch.clean)
            distance = self.aligner.loss(hidden, batch.labels)
            unread = self.aligner.reading_loss(early, noise, level)
            unplanned = self.aligner.planning_loss(middle, batch.plans)
            loss = error + _ALIGNMENT * distance + _READING * unread + _PLANNING * unplanned
            found = torch.autograd.grad(loss, self._trained, allow_unused=True)
        return (error.item(), distance.item(), unread.item(), unplanned.item()), found

    def _set_rates(self) -> None:
        left_s = self.options.minutes * 60 - self.spent_s
        rate = min(1.0, left_s / (self.options.decay_minutes * 60))
        num_waiting = _NUM_ALIGNER_UPDATES if self.options.start is not None else 0
        for optimizer in self.optimizers:
            num_before = 0 if optimizer is self.optimizers[-1] else num_waiting
            warm = min(1.0, max(0, self.num_iterations + 1 - num_before) / 50)
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
            "aligner": self.aligner.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "tokens": self.tokenizer.get_vocab(),
            "size": [self.size.num_heads, self.size.num_double, self.size.num_single],
            "num_iterations": self.num_iterations,
            "spent_s": self.spent_s,
            "losses": self.losses,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.path)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        self.aligner.load_state_dict(state["aligner"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_iterations, self.spent_s = state["num_iterations"], state["spent_s"]
        self.losses = state["losses"]


def tokenize(tokenizer: BertTokenizer, prompts: list[str], length: int) -> Tensor:
    """Ids `[B, L]`, cut and padded to a length."""
    read = tokenizer(prompts, truncation=True, max_length=length)["input_ids"]
    return torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in read])


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _only_of_words(guards: Sequence[Any]) -> list[bool]:
    """Have nothing but the words' length decide which graph runs."""
    return [guard.guard_type == "TENSOR_MATCH" and "words" in guard.name for guard in guards]


def _attend_in_products() -> None:
    """Have attention computed as two products and a softmax, by all threads.

    Of few tokens these cost a quarter of the fused kernel's backward pass. The settings are the
    process's, on CPUs too, so threads must not set them by turns, as a context would.
    """
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


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


def train_model(folder: Path, minilm: Path, options: ModelTraining, size: ModelSize) -> None:
    """Train, or resume training, the model on the corpus in `folder`."""
    ModelTrainer(folder, minilm, options, size).train()

"""Training of the denoiser: captions and noise to latents, along straight lines (flow matching).

Owns the losses and the loop. Hidden states are aligned with what is drawn where (`alignment.py`).
The learning rate is constant until the last minutes, so that training can be stopped and continued.

Shapes: B pictures, T tokens, C channels.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from adoption import adopt
from alignment import LABEL_SIZE, PLAN_SIZE, Aligner
from codec import LATENT_CHANNELS
from corpus import NUM_PATCHES, Corpus
from cpu_forms import use_cpu_forms
from examples import Batch, Examples
from model import Model, ModelSize, is_modulation
from muon import Muon
from noise import coded_noise, noise_levels
from pictures.chances import CODE_SIZE
from precision import has_bfloat16, mixed_precision
from text import EMBEDDING_SIZE, MAX_TOKENS, choose_tokens, new_tokenizer, pieces_of
from torch import Tensor, nn
from torch.nn import functional

_ALIGNMENT, _READING, _PLANNING = 2.0, 2.0, 6.0  # of their losses
_LOSSES = ("velocity", "alignment", "reading", "planning")
_MOMENTUM = 0.998
_SHORT = 16  # tokens, which 98 % of captions need
_LONG_SHARE = 0.12  # batches that are padded to MAX_TOKENS, as prompts are served
_FEWEST_SHARDS = 4  # whose captions tell the vocabulary
_PART = 16  # rows that a thread takes at a time
_PER_REFRESH = 100
_NOT_OF_NOISE = 1_000_000  # seeds of batches
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
    """Compile the layers, on a CPU."""


class ModelTrainer:
    """Model, moving average of its weights, optimizers and progress."""

    def __init__(self, folder: Path, minilm: Path, options: ModelTraining, size: ModelSize) -> None:
        torch.manual_seed(options.seed)
        self.options, self.size = options, size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus = Corpus(folder)
        self.corpus.wait(_FEWEST_SHARDS)
        self.path = folder / "model.pt"
        self.num_iterations, self.spent_s = 0, 0.0
        self.losses = torch.ones(len(_LOSSES), device=self.device)
        is_cpu = self.device.type == "cpu"
        # On a CPU, threads that take small parts of a batch wait less than threads within layers,
        # which synchronize thousands of times per step, and spin meanwhile.
        self._num_workers = torch.get_num_threads() if is_cpu else 1
        torch.set_num_threads(1)
        _attend_in_products()
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
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        if state:
            self._restore(state)
            torch.manual_seed(self.options.seed + self.num_iterations)  # noise goes on, too
        if self.options.compiles and self.device.type == "cpu":
            self._compile()

    def _compile(self) -> None:
        """Compile the layers, and run them once for either length of captions."""
        use_cpu_forms(self.model.transformer)
        # The matcher would put the fused attention back. Graphs that are C++ throughout run
        # without Python's lock, for which threads would wait a third of the time.
        options = {
            "pattern_matcher": False,
            "cpp_wrapper": True,
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
                told = zip(_LOSSES, self.losses.tolist(), strict=True)
                losses = " ".join(f"{name} {loss:.4f}" for name, loss in told)
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
        examples = Examples(self.corpus, self.tokenizer, self.device)
        generator = torch.Generator(self.device)
        seed = self.options.seed + self.num_iterations
        generator.manual_seed(seed + _NOT_OF_NOISE)
        lengths = random.Random(seed)
        while True:
            examples.refresh()
            for _ in range(_PER_REFRESH):
                length = MAX_TOKENS if lengths.random() < _LONG_SHARE else _SHORT
                yield examples.batch(self.options.num_rows, length, generator)

    def step(self, batch: Batch) -> None:
        """One update."""
        self._set_rates()
        parts = batch.split(self._num_parts)
        torch._foreach_zero_([parameter.grad for parameter in self._trained])
        found = list(self._pool.map(self._add_gradients, parts))
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        list(self._pool.map(_step, self.optimizers))
        self.num_iterations += 1
        self.losses.lerp_(torch.stack(found).mean(0), 0.02)
        self._update_mean()

    def _add_gradients(self, part: Batch) -> Tensor:
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

    def _gradients(self, batch: Batch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
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
        return torch.stack((error, distance, unread, unplanned)).detach(), found

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
        kept, new = (list(model.parameters()) for model in (self.mean, self.model))
        torch._foreach_lerp_(kept, new, 1 - momentum)

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
            "losses": self.losses.tolist(),
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
        self.losses = torch.tensor(state["losses"], device=self.device)


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
    dtype = torch.bfloat16 if has_bfloat16(matrices[0].device) else torch.float32
    muons = [
        Muon(half, rate, dtype=dtype)
        for half in (matrices[::2], matrices[1::2])  # stepped together
    ]
    return [*muons, torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.01)]


def train_model(folder: Path, minilm: Path, options: ModelTraining, size: ModelSize) -> None:
    """Train, or resume training, the model on the corpus in `folder`."""
    ModelTrainer(folder, minilm, options, size).train()

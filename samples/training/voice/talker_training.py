"""Training of the acoustic model: from a sentence's phonemes to the codes of its audio.

Owns the token corpus (codes by the trained encoder), batches, loss and loop. The stack of layers
is transformers' Llama on embedded positions; its names are those that the shared decoder loads.

Shapes: B rows, T positions, Q codebooks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from codec_training import Encoder, frames_of, to_codes
from corpus import STEP_FRAMES, STEP_UNITS, open_corpus
from numpy.typing import NDArray
from precision import mixed_precision
from rich.progress import Progress, track
from teacher import Reading
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig
from triptych.modalities.tts.engine.models.voice.acoustic import (
    AcousticInput,
    AcousticOutput,
    AcousticPositions,
    Kind,
    windows,
)

_JITTER = 0.15
_FORGET = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerTraining:
    """Options of the acoustic model's training."""

    minutes: float = 60.0
    positions_per_batch: int = 2400
    learning_rate: float = 2e-3
    num_held_out: int = 200
    seed: int = 0


class Talker(nn.Module):
    """Input, layers and output, over whole sequences."""

    def __init__(self, config: AcousticConfig, codec: CodecConfig) -> None:
        super().__init__()
        self.config, self.codec = config, codec
        self.input = AcousticInput(config, codec)
        self.stack = LlamaModel(llama_config(config))
        self.stack.embed_tokens = nn.Identity()
        self.output = AcousticOutput(config, codec)

    def hidden(self, positions: AcousticPositions) -> Tensor:
        """[B, T, C]; padding must be at the end, where causality hides it."""
        embedded = self.input(positions)
        states: Tensor = self.stack(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return states


def llama_config(config: AcousticConfig) -> LlamaConfig:
    """The stack as a transformers configuration."""
    return LlamaConfig(
        vocab_size=1,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",  # its backward pass is faster than the fused one's, on CPUs
    )


@dataclass(frozen=True, slots=True)
class Example:
    """One sentence: N symbols; for each of S steps its codes, the current symbol, how long held."""

    ids_N: NDArray[np.int64]
    codes_SQ: NDArray[np.int8]
    due_S: NDArray[np.int64]
    held_S: NDArray[np.int64]
    advance_S: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids_N) + len(self.due_S)


def walk(units_N: NDArray[np.int16], num_steps: int) -> tuple[NDArray[np.int64], ...]:
    """The current symbol at each step, how long it has been current, and the advance after it."""
    ends = np.cumsum(units_N)
    starts_S = np.arange(num_steps) * STEP_UNITS
    due_S = np.searchsorted(ends, starts_S, side="right")
    advance_S = np.diff(np.append(due_S, len(units_N)))
    is_new = np.append(True, advance_S[:-1] > 0)
    first_S = np.maximum.accumulate(np.where(is_new, np.arange(num_steps), 0))
    return due_S, np.arange(num_steps) - first_S, advance_S


def make_tokens(folder: Path, config: CodecConfig) -> None:
    """Encode the corpus with the codec in `folder`; writes `codes.npy`, all steps in order."""
    corpus = open_corpus(folder / "corpus")
    encoder = Encoder(config)
    state = torch.load(folder / "codec.pt", weights_only=True, map_location="cpu")
    encoder.load_state_dict(state["encoder"])
    codes = [
        encode(encoder, corpus.reading(number), config)
        for number in track(range(len(corpus)), "Encoding")
    ]
    np.save(folder / "codes.npy", np.concatenate(codes))


@torch.inference_mode()
def encode(encoder: Encoder, reading: Reading, config: CodecConfig) -> NDArray[np.int8]:
    """Codes [S, Q] of one sentence; its last frame is repeated to fill the last step."""
    missing = -len(reading.f0_F) % STEP_FRAMES
    hidden = np.pad(reading.hidden_FC.astype(np.float32), ((0, missing), (0, 0)), "edge")
    f0 = np.pad(reading.f0_F, (0, missing), "edge")
    frames = frames_of(torch.from_numpy(hidden)[None], torch.from_numpy(f0)[None])
    with mixed_precision(torch.device("cpu")):
        values_1QS = encoder(frames.features())
    return to_codes(values_1QS.float(), config.num_levels)[0].T.numpy().astype(np.int8)


class Examples:
    """The corpus as examples."""

    def __init__(self, folder: Path) -> None:
        self._corpus = open_corpus(folder / "corpus")
        self._codes = np.load(folder / "codes.npy", mmap_mode="r")
        ends = np.cumsum(self._corpus.num_steps())
        num_readings = int(np.searchsorted(ends, len(self._codes), side="right"))
        self._ends = ends[:num_readings]
        ids = self._corpus.index[:num_readings, 1] - self._corpus.index[:num_readings, 0]
        self.lengths = np.diff(self._ends, prepend=0) + ids

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Example:
        reading = self._corpus.reading(number)
        end = self._ends[number]
        first = self._ends[number - 1] if number else 0
        due, held, advance = walk(reading.units_N, int(end - first))
        codes = np.asarray(self._codes[first:end])
        return Example(reading.ids_N.astype(np.int64), codes, due, held, advance)


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows. Targets are -100 at positions without a loss."""

    positions: AcousticPositions
    codes: Tensor
    advance: Tensor

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        positions = AcousticPositions(*(tensor.to(device) for tensor in self.positions))
        return Batch(positions, self.codes.to(device), self.advance.to(device))


def collate(
    examples: list[Example],
    config: AcousticConfig,
    codec: CodecConfig,
    rng: np.random.Generator | None = None,
) -> Batch:
    """Collate examples; with `rng`, the input codes are perturbed as in `_blur`."""
    rows, length = len(examples), max(map(len, examples))
    num_codes, half = codec.num_codebooks, (codec.num_levels - 1) / 2
    widest = max(len(e.ids_N) for e in examples)
    before = config.num_symbols_before
    padded = np.full((rows, before + widest + config.num_symbols_after + 1), config.num_symbols)
    due, held, kinds = (np.zeros((rows, length), np.int64) for _ in range(3))
    values = np.zeros((rows, length, num_codes), np.float32)
    codes = np.full((rows, length, num_codes), -100)
    advance = np.full((rows, length), -100)
    for row, example in enumerate(examples):
        symbols, steps = len(example.ids_N), slice(len(example.ids_N), len(example))
        padded[row, before : before + symbols] = example.ids_N
        due[row, :symbols] = np.arange(symbols)
        due[row, steps], held[row, steps] = example.due_S, example.held_S.clip(max=config.max_held)
        kinds[row, steps] = Kind.STEP
        codes[row, steps], advance[row, steps] = example.codes_SQ, example.advance_S
        values[row, symbols + 1 : len(example)] = example.codes_SQ[:-1] / half - 1
        kinds[row, symbols] = Kind.START
    if rng is not None:
        values = _blur(values, rng, 1 / half)
    due_BT, padded_BP = torch.from_numpy(due), torch.from_numpy(padded)
    read = windows(padded_BP, due_BT, config)
    positions = AcousticPositions(
        read, torch.from_numpy(held), torch.from_numpy(values), torch.from_numpy(kinds)
    )
    return Batch(positions, torch.from_numpy(codes), torch.from_numpy(advance))


def _blur(
    values: NDArray[np.float32], rng: np.random.Generator, level: float
) -> NDArray[np.float32]:
    """Some codes a level off, some steps masked: for robustness to the model's own errors."""
    is_off = rng.random(values.shape) < _JITTER
    off = values + level * is_off * rng.choice([-1, 1], values.shape)
    is_kept = rng.random(values.shape[:2]) >= _FORGET
    blurred: NDArray[np.float32] = (off.clip(-1, 1) * is_kept[..., None]).astype(np.float32)
    return blurred


def batches(
    lengths: NDArray[np.int64], budget: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Example numbers in batches of similar length, `budget` positions each, in random order."""
    noise = rng.uniform(0.9, 1.1, len(lengths))
    order = np.argsort(lengths * noise)
    groups, first = [], 0
    for end in range(1, len(order) + 1):
        longest = lengths[order[first : end + 1]].max()
        if end == len(order) or longest * (end + 1 - first) > budget:
            groups.append(order[first:end])
            first = end
    for index in rng.permutation(len(groups)):
        yield groups[index]


class TalkerTrainer:
    """Model, optimizers and progress."""

    def __init__(
        self, folder: Path, options: TalkerTraining, config: AcousticConfig, codec: CodecConfig
    ) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.talker = Talker(config, codec).to(self.device)
        matrices = [p for p in self.talker.stack.layers.parameters() if p.dim() == 2]
        chosen = set(map(id, matrices))
        others = [p for p in self.talker.parameters() if id(p) not in chosen]
        rate = options.learning_rate
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.01),
        ]
        self.path = folder / "talker.pt"
        self.num_iterations, self.spent_s = 0, 0.0
        if self.path.exists():
            self._restore()

    def train(self, examples: Examples) -> None:
        """Train for the given minutes; a checkpoint and a validation every three."""
        total_s, saved_s = self.options.minutes * 60, self.spent_s
        held_out = [examples[number] for number in range(self.options.num_held_out)]
        with Progress() as progress:
            task = progress.add_task("Talker", total=total_s)
            for numbers in self._numbers(examples):
                began_s = time.monotonic()
                loss = self.step([examples[int(number)] for number in numbers])
                self.spent_s += time.monotonic() - began_s
                progress.update(
                    task, completed=self.spent_s, description=f"{self.num_iterations} {loss:.3f}"
                )
                is_over = self.spent_s >= total_s
                if self.spent_s - saved_s > 180 or is_over:
                    self.save()
                    saved_s = self.spent_s
                    progress.console.print(
                        f"{self.num_iterations} {self.spent_s:.0f} s {self.validate(held_out)}"
                    )
                if is_over:
                    return

    def _numbers(self, examples: Examples) -> Iterator[NDArray[np.int64]]:
        first = self.options.num_held_out
        rng = np.random.default_rng(self.options.seed + self.num_iterations)
        self._rng = rng
        while True:
            for group in batches(examples.lengths[first:], self.options.positions_per_batch, rng):
                yield group + first

    def step(self, examples: list[Example]) -> float:
        """One update."""
        share = min(self.spent_s / (self.options.minutes * 60), 1.0)
        warm = min(1.0, (self.num_iterations + 1) / 50)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate * warm * (0.01 + 0.99 * (1 - share))
            optimizer.zero_grad(set_to_none=True)
        batch = collate(examples, self.talker.config, self.talker.codec, self._rng)
        losses = self.losses(batch.to(self.device))
        (losses["codes"] + 0.5 * losses["advance"]).backward()
        nn.utils.clip_grad_norm_(self.talker.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_iterations += 1
        return float(losses["codes"].item())

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross entropies over the positions with a target."""
        with mixed_precision(self.device):
            hidden = self.talker.hidden(batch.positions)
            says = batch.advance >= 0
            scores = self.talker.output(hidden[says])
        codes, advance = batch.codes[says], batch.advance[says]
        return {
            "codes": functional.cross_entropy(scores.codes.float().flatten(0, 1), codes.flatten()),
            "advance": functional.cross_entropy(scores.advance.float(), advance),
        }

    @torch.no_grad()
    def validate(self, examples: list[Example]) -> str:
        """Losses on validation sentences, teacher-forced."""
        batch = collate(examples, self.talker.config, self.talker.codec).to(self.device)
        with mixed_precision(self.device):
            says = batch.advance >= 0
            scores = self.talker.output(self.talker.hidden(batch.positions)[says])
        codes, advance = batch.codes[says], batch.advance[says]
        off = (scores.codes.argmax(-1) - codes).abs().float()
        right = (scores.advance.argmax(-1) == advance).float().mean()
        loss = functional.cross_entropy(scores.codes.float().flatten(0, 1), codes.flatten())
        return (
            f"unseen: codes {loss:.3f}, levels off {off.mean():.3f}, exact"
            f" {(off == 0).float().mean():.3f}, advance right {right:.3f}"
        )

    def save(self) -> None:
        """Write a checkpoint atomically."""
        state = {
            "talker": self.talker.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "num_iterations": self.num_iterations,
            "spent_s": self.spent_s,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.path)

    def _restore(self) -> None:
        state = torch.load(self.path, weights_only=True, map_location=self.device)
        self.talker.load_state_dict(state["talker"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_iterations, self.spent_s = state["num_iterations"], state["spent_s"]


def train_talker(folder: Path, options: TalkerTraining) -> None:
    """Train, or resume training, the acoustic model on the codes in `folder`."""
    TalkerTrainer(folder, options, AcousticConfig(), CodecConfig()).train(Examples(folder))

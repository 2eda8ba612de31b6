"""Training of the slot head: the content of each slot, from the tower's maps.

Owns its loss and loop. No language model is needed: each slot is a choice among classes.

Shapes: B pictures, T places of a map, C channels, S slots, L letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from labels import BLANK, FIELDS, UNKNOWN
from numpy.typing import NDArray
from pace import Pace
from precision import has_bfloat16, mixed_precision
from torch import Tensor
from torch.nn import functional

from triptych.modalities.vlm.configs.slots import SlotVisionConfig
from triptych.modalities.vlm.engine.slots.model import SlotHead, SlotScores

_CPU = torch.device("cpu")
_NUM_TEST = 1024
_LOG_EVERY = 200
_BLANK_WEIGHT = 0.05
_DROPPED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTraining:
    """Options of the slot head's training."""

    minutes: float = 40.0
    num_rows: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0


class Maps:
    """The corpus so far; its last images are the test set."""

    def __init__(self, folder: Path) -> None:
        done = np.load(folder / "done.npy")
        labels = np.load(folder / "labels.npy", mmap_mode="r")
        ready = np.flatnonzero(np.repeat(done, len(labels) // len(done)))
        self._middle = np.load(folder / "middle.npy", mmap_mode="r")
        self._last = np.load(folder / "last.npy", mmap_mode="r")
        self._labels = labels
        num_test = min(_NUM_TEST, len(ready) // 8)
        self.test, self.training = ready[:num_test], ready[num_test:]

    def rows(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Both maps `[B, T, C]` and labels `[B, S + L]`."""
        order = np.sort(numbers)
        dtype = torch.bfloat16 if has_bfloat16(_CPU) else torch.float32
        middle, last = (
            torch.from_numpy(store[order]).to(dtype) for store in (self._middle, self._last)
        )
        return middle, last, torch.from_numpy(self._labels[order]).long()


def train_reader(folder: Path, config: SlotVisionConfig, options: SlotTraining) -> None:
    """Train for the given minutes; the checkpoint is `reader.pt`."""
    torch.manual_seed(options.seed)
    file, maps = folder / "reader.pt", Maps(folder)
    reader = SlotHead(config)
    optimizer = torch.optim.AdamW(
        reader.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    num_steps, spent_s = 0, 0.0
    if file.exists():
        state = torch.load(file, weights_only=True)
        reader.load_state_dict(state["reader"])
        optimizer.load_state_dict(state["optimizer"])
        num_steps, spent_s = state["num_steps"], state["spent_s"]
    pace = Pace(options.minutes, spent_s)
    for bar in pace.steps("Reading slots"):
        rng = np.random.default_rng((options.seed, num_steps))
        rows = maps.rows(rng.choice(maps.training, options.num_rows, replace=False))
        optimizer.param_groups[0]["lr"] = options.learning_rate * pace.rate
        loss = _step(reader, optimizer, rows)
        num_steps += 1
        if num_steps % _LOG_EVERY == 0 or num_steps == 1:
            bar.console.print(f"{num_steps} steps: loss {loss:.3f}, {_shown(test(reader, maps))}")
        if pace.is_time_to_save:
            _save(file, reader, optimizer, (num_steps, pace.spent_s))
    _save(file, reader, optimizer, (num_steps, pace.spent_s))


def _step(
    reader: SlotHead, optimizer: torch.optim.Optimizer, rows: tuple[Tensor, Tensor, Tensor]
) -> float:
    middle, last, labels = rows
    dropped = (functional.dropout1d(lines.mT, _DROPPED).mT for lines in (middle, last))
    with mixed_precision(_CPU):
        said = reader(*dropped)
    loss = loss_of(said, labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def loss_of(said: SlotScores, labels: Tensor) -> Tensor:
    """Cross entropies of the slots and the letters; letters of absent words have a lower weight."""
    fields = [
        functional.cross_entropy(scores.float(), labels[:, index], ignore_index=UNKNOWN)
        for index, scores in enumerate(said.fields)
        if (labels[:, index] != UNKNOWN).any()
    ]
    letters = labels[:, len(said.fields) :]
    is_word = letters[:, :1] != BLANK
    weights = torch.where(is_word, 1.0, _BLANK_WEIGHT).expand_as(letters)
    losses = functional.cross_entropy(
        said.letters_BLA.float().flatten(0, 1), letters.flatten(), reduction="none"
    )
    spelled = (losses * weights.flatten()).sum() / weights.sum()
    return torch.stack(fields).sum() + 4 * spelled


@torch.inference_mode()
def test(reader: SlotHead, maps: Maps) -> dict[str, float]:
    """Test accuracy of each slot, and of whole words."""
    *lines, labels = maps.rows(maps.test)
    with mixed_precision(_CPU):
        said = reader.eval()(*lines)
    reader.train()
    found = {}
    for index, ((_, slot), scores) in enumerate(zip(FIELDS, said.fields, strict=True)):
        wanted = labels[:, index]
        is_asked = wanted > 0
        found[slot] = (scores.argmax(-1) == wanted)[is_asked].float().mean().item()
    letters = labels[:, len(said.fields) :]
    is_word = letters[:, 0] != BLANK
    is_right = (said.letters_BLA.argmax(-1) == letters).all(1)
    return {**found, "word": is_right[is_word].float().mean().item()}


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{slot} {share:.0%}" for slot, share in shares.items())


def _save(
    file: Path, reader: SlotHead, optimizer: torch.optim.Optimizer, spent: Sequence[float]
) -> None:
    state = {
        "reader": reader.state_dict(),
        "optimizer": optimizer.state_dict(),
        "num_steps": spent[0],
        "spent_s": spent[1],
    }
    partial = file.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(file)

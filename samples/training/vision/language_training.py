"""Training of the slot projector: soft tokens that the frozen language model answers from.

Owns the conversations, the LoRA, the loss and the loop. No images are needed: slot probabilities
are generated from the scene itself, with the uncertainty and errors that the slot head has.

Shapes: B conversations, N tokens, P positions of a picture, C hidden, S classes, W known words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from labels import NUM_COLUMNS, UNKNOWN, labels
from pace import Pace
from pictures.compositions import Catalogue
from questions import Asker, Question
from scenes import Scene, sample_seen
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from triptych.modalities.vlm.engine.slots.model import SlotProjector

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
ALPHA = 16.0
_MOST_QUESTIONS = 5
_DOUBT, _MISTAKES = 0.15, 0.01
_LOG_EVERY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageTraining:
    """Options of the training; with rank 0 there is no LoRA."""

    minutes: float = 45.0
    num_rows: int = 8
    learning_rate: float = 1e-3
    rank: int = 8
    seed: int = 0


class Adapted(nn.Module):
    """A frozen projection with LoRA (arXiv:2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self._scale = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """The projection's output with the LoRA's added."""
        change = (x @ self.down.T.to(x.dtype)) @ self.up.T.to(x.dtype)
        changed: Tensor = self.linear(x) + self._scale * change
        return changed


def adapt(model: LlamaForCausalLM, rank: int) -> dict[str, Adapted]:
    """Add LoRA to the model's attention; returns the adapted layers by the matrices' names."""
    found: dict[str, Adapted] = {}
    for name, module in list(model.named_modules()):
        part = name.rpartition(".")
        if rank and part[2] in ADAPTED and isinstance(module, nn.Linear):
            found[f"{name}.weight"] = Adapted(module, rank)
            setattr(model.get_submodule(part[0]), part[2], found[f"{name}.weight"])
    return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """Ids with positions for the image, and which of them are answers."""

    scene: Scene
    ids: list[int]
    is_answer: list[bool]
    picture_at: int


class Talk:
    """Makes conversations in the chat template's format."""

    def __init__(self, tokenizer: Tokenizer, num_positions: int) -> None:
        self._tokenizer, self._num_positions = tokenizer, num_positions

    def conversation(self, scene: Scene, questions: Sequence[Question]) -> Conversation:
        """The questions and answers in order, the image before all."""
        opening = self._ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        ids = opening + [0] * self._num_positions
        is_answer = [False] * len(ids)
        for number, question in enumerate(questions):
            before = "\n" if number == 0 else "\n<|im_start|>user\n"
            asked = self._ids(f"{before}{question.text}<|im_end|>\n<|im_start|>assistant\n")
            answer = self._ids(f"{question.answer}<|im_end|>")
            ids += asked + answer
            is_answer += [False] * len(asked) + [True] * len(answer)
        return Conversation(scene, ids, is_answer, len(opening))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Telling:
    """Simulated outputs of the slot head for scenes."""

    def __init__(
        self, catalogue: Catalogue, classes: Mapping[str, Sequence[str]], words: Sequence[str]
    ) -> None:
        self._catalogue, self._classes = catalogue, classes
        self._words = {word: index for index, word in enumerate(words)}

    def shares(
        self, scenes: Sequence[Scene], sizes: Sequence[int], rng: np.random.Generator
    ) -> list[Tensor]:
        """Probabilities of each slot's classes `[B, S]`, of the known words last."""
        rows = np.stack([labels(one, self._catalogue, self._classes) for one in scenes])
        words = np.array([[self._words[one.word.lower()]] for one in scenes])
        numbers = np.concatenate((rows[:, : NUM_COLUMNS - 8], words), 1)
        return [self._column(numbers[:, i], size, rng) for i, size in enumerate(sizes)]

    def _column(self, numbers: np.ndarray, size: int, rng: np.random.Generator) -> Tensor:
        other = rng.integers(size, size=len(numbers))
        is_other = (numbers == UNKNOWN) | (rng.random(len(numbers)) < _MISTAKES)
        likely = torch.from_numpy(np.where(is_other, other, numbers)).long()
        doubt = torch.from_numpy(rng.random(len(numbers)) ** 3 * _DOUBT).float()[:, None]
        unlikely = torch.from_numpy(rng.integers(size, size=len(numbers))).long()
        return (1 - doubt) * functional.one_hot(likely, size) + doubt * functional.one_hot(
            unlikely, size
        )


class LanguageTrainer:
    """Projector, LoRA and progress."""

    def __init__(
        self, model: LlamaForCausalLM, teller: SlotProjector, talk: Talk, options: LanguageTraining
    ) -> None:
        torch.manual_seed(options.seed)
        self.options, self.model, self.teller, self.talk = options, model, teller, talk
        model.requires_grad_(False)
        self.changes = adapt(model, options.rank)
        changed = [p for one in self.changes.values() for p in (one.down, one.up)]
        self.parameters = [*teller.parameters(), *changed]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, weight_decay=0
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The trained weights, and the optimizer's state."""
        changes = {name: one.state_dict() for name, one in self.changes.items()}
        kept = {
            f"{name}.{part}": values[part]
            for name, values in changes.items()
            for part in ("down", "up")
        }
        return {"teller": self.teller.state_dict(), "changes": kept}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Resume from a state."""
        self.teller.load_state_dict(dict(state["teller"]))
        with torch.no_grad():
            for name, one in self.changes.items():
                one.down.copy_(state["changes"][f"{name}.down"])
                one.up.copy_(state["changes"][f"{name}.up"])

    def loss(self, conversations: Sequence[Conversation], shares: Sequence[Tensor]) -> Tensor:
        """Cross entropy of the answers' tokens."""
        soft_tokens = self.teller.tell(shares)
        length = max(len(one.ids) for one in conversations)
        ids = torch.zeros(len(conversations), length, dtype=torch.long)
        targets = torch.full_like(ids, -1)
        for row, one in enumerate(conversations):
            ids[row, : len(one.ids)] = torch.tensor(one.ids)
            wanted = torch.tensor(one.ids).where(torch.tensor(one.is_answer), -1)
            targets[row, : len(one.ids) - 1] = wanted[1:]
        embedded = self.model.get_input_embeddings()(ids)
        start = conversations[0].picture_at  # the same in all
        parts = (
            embedded[:, :start],
            soft_tokens.to(embedded.dtype),
            embedded[:, start + soft_tokens.shape[1] :],
        )
        hidden = self.model.model(inputs_embeds=torch.cat(parts, 1)).last_hidden_state
        is_wanted = targets >= 0
        scores = self.model.lm_head(hidden[is_wanted])
        return functional.cross_entropy(scores.float(), targets[is_wanted])

    def step(self, loss: Tensor, rate: float) -> None:
        """One update."""
        self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * rate
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def train_language(
    folder: Path,
    trainer: LanguageTrainer,
    telling: Telling,
    catalogue: Catalogue,
    words: Sequence[str],
) -> None:
    """Train for the given minutes; the checkpoint is `teller.pt`. `words` are the lexicon."""
    file, spent_s, num_steps = folder / "teller.pt", 0.0, 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        trainer.load(state)
        trainer.optimizer.load_state_dict(state["optimizer"])
        spent_s, num_steps = state["spent_s"], state["num_steps"]
    teller, options = trainer.teller, trainer.options
    sizes = [len(teller.kinds[kind]) for kind in teller.slot_kinds] + [len(teller.words)]
    pace = Pace(options.minutes, spent_s)
    losses: list[float] = []
    for bar in pace.steps("Learning to tell"):
        rng = np.random.default_rng((options.seed, num_steps))
        batch = list(_conversations(trainer.talk, catalogue, words, rng, options.num_rows))
        shares = telling.shares([one.scene for one in batch], sizes, rng)
        loss = trainer.loss(batch, shares)
        trainer.step(loss, pace.rate)
        num_steps += 1
        losses.append(loss.item())
        if num_steps % _LOG_EVERY == 0:
            bar.console.print(f"{num_steps} steps: loss {np.mean(losses[-_LOG_EVERY:]):.3f}")
        if pace.is_time_to_save:
            _save(file, trainer, (num_steps, pace.spent_s))
    _save(file, trainer, (num_steps, pace.spent_s))


def _save(file: Path, trainer: LanguageTrainer, spent: tuple[int, float]) -> None:
    kept = {**trainer.state(), "optimizer": trainer.optimizer.state_dict()}
    partial = file.with_suffix(".part")
    torch.save({**kept, "num_steps": spent[0], "spent_s": spent[1]}, partial)
    partial.replace(file)


def _conversations(
    talk: Talk, catalogue: Catalogue, words: Sequence[str], rng: np.random.Generator, number: int
) -> Iterator[Conversation]:
    asker = Asker(catalogue, rng)
    for _ in range(number):
        scene = sample_seen(catalogue, words, rng)
        yield talk.conversation(scene, asker.questions(scene)[:_MOST_QUESTIONS])

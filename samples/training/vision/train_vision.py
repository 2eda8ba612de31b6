"""Train the embedded vision encoder, from scratch to the folder that ships.

    pip install '.[recipes]'
    cd samples/training/vision
    python train_vision.py data     --folder RUN
    python train_vision.py features --folder RUN --processes 2
    python train_vision.py slots    --folder RUN --minutes 40
    python train_vision.py language --folder RUN --minutes 60
    python train_vision.py export   --folder RUN --out RUN/export
    python train_vision.py evaluate --folder RUN --model RUN/export

Each stage resumes; `language` needs only `data`, and can run beside `features` and `slots`. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `pictures` and `precision`

from labels import kinds
from looks import Looks, fetch_looks
from pictures.compositions import Catalogue, open_catalogue
from pictures.fetching import EFFICIENTNET, fetch_once
from sentence import encoder_config, first_words, known_words
from words import lexicon

from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, resolve
from triptych.modalities.vlm.configs.slots import SlotVisionConfig


@dataclass(frozen=True)
class Run:
    """A run's folder, and what all stages share."""

    folder: Path

    @cached_property
    def language(self) -> Path:
        """The embedded chat model's folder."""
        found = resolve(
            EMBEDDED_REFERENCE, name=None, options=ModelOptions(), progress=SilentProgress()
        )
        return Path(found.folder)

    @cached_property
    def tower(self) -> Path:
        """The released tower, fetched at the first call."""
        return fetch_once(self.folder, EFFICIENTNET)[0]

    @cached_property
    def catalogue(self) -> Catalogue:
        """The objects."""
        return open_catalogue()

    @cached_property
    def looks(self) -> Looks:
        """The emoji of all styles."""
        return fetch_looks(self.folder / "sprites", self.catalogue)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The language model's tokenizer."""
        return Tokenizer.from_file(str(self.language / "tokenizer.json"))

    @cached_property
    def lexicon(self) -> list[str]:
        """The words that can be read."""
        return lexicon(self.language / "tokenizer.json")

    @cached_property
    def classes(self) -> Mapping[str, Sequence[str]]:
        """The slots' classes."""
        return kinds(self.catalogue)

    @cached_property
    def config(self) -> SlotVisionConfig:
        """The vision encoder's configuration."""
        return encoder_config(self.classes, len(known_words(self.lexicon)), self.tokenizer)


def main() -> None:
    """Run one stage."""
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    _STAGES[options.stage](Run(options.folder), options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=tuple(_STAGES))
    parser.add_argument("--folder", type=Path, required=True, help="corpus and checkpoints")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--pictures", type=int, default=48_000, help="features: number of images")
    parser.add_argument("--processes", type=int, default=2, help="features: in parallel")
    parser.add_argument("--minutes", type=float, default=40.0, help="slots, language: total")
    parser.add_argument("--rows", type=int, default=0, help="slots, language: batch size")
    parser.add_argument("--rank", type=int, default=8, help="language: LoRA rank; 0: none")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak")
    parser.add_argument("--out", type=Path, help="export: folder to write")
    parser.add_argument("--model", type=Path, help="evaluate: an exported folder")
    parser.add_argument("--no-drawings", action="store_true", help="evaluate: skip imagine")
    return parser.parse_args()


def _data(run: Run, options: argparse.Namespace) -> None:
    from rich.console import Console

    num_emoji, num_words = len(run.looks.codes("3d")), len(run.lexicon)
    Console().print(f"{num_emoji} emoji, {num_words} words, {run.tower.name}")


def _features(run: Run, options: argparse.Namespace) -> None:
    from features import Setup, write_features

    tokenizer = run.language / "tokenizer.json"
    setup = Setup(folder=run.folder, tokenizer=tokenizer, tower=run.tower)
    _ = run.looks  # fetch once, before there are several processes
    write_features(setup, options.pictures, options.processes)


def _slots(run: Run, options: argparse.Namespace) -> None:
    from slot_training import SlotTraining, train_reader

    training = SlotTraining(
        minutes=options.minutes,
        num_rows=options.rows or 128,
        learning_rate=options.learning_rate,
    )
    train_reader(run.folder, run.config, training)


def _language(run: Run, options: argparse.Namespace) -> None:
    from language_training import LanguageTrainer, LanguageTraining, Talk, Telling, train_language
    from transformers import LlamaConfig, LlamaForCausalLM

    from triptych.core.runtime.tensors.checkpoint import Checkpoint
    from triptych.modalities.vlm.engine.slots.model import SlotProjector

    training = LanguageTraining(
        minutes=options.minutes,
        num_rows=options.rows or 8,
        learning_rate=options.learning_rate,
        rank=options.rank,
    )
    with Checkpoint.open(run.language) as checkpoint:  # its matrices are in blocks of integers
        state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    config = LlamaConfig.from_pretrained(run.language)
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.bfloat16
    )
    teller, words = SlotProjector(run.config, model.config.hidden_size), known_words(run.lexicon)
    embeddings = model.get_input_embeddings().weight.detach()
    first_words(teller, run.classes, words, run.tokenizer, embeddings)
    talk = Talk(run.tokenizer, run.config.num_positions)
    trainer = LanguageTrainer(model, teller, talk, training)
    telling = Telling(run.catalogue, run.classes, words)
    train_language(run.folder, trainer, telling, run.catalogue, run.lexicon)


def _export(run: Run, options: argparse.Namespace) -> None:
    from export import export

    export(run.folder, run.tower, run.config, options.out or run.folder / "export")


def _evaluate(run: Run, options: argparse.Namespace) -> None:
    from evaluation import evaluate, joined

    encoder = options.model or run.folder / "export"
    model = joined(encoder, run.language, run.folder / "joined")
    draws = not options.no_drawings
    evaluate(str(model), run.catalogue, run.looks, run.lexicon, draws=draws)


_STAGES: Mapping[str, Callable[[Run, argparse.Namespace], None]] = {
    "data": _data,
    "features": _features,
    "slots": _slots,
    "language": _language,
    "export": _export,
    "evaluate": _evaluate,
}

if __name__ == "__main__":
    main()

"""Train the embedded voice, from scratch to the folder that ships.

    pip install '.[recipes]'
    cd samples/training/voice
    python train_voice.py data     --folder RUN --wordnet /usr/share/wordnet
    python train_voice.py codec    --folder RUN --minutes 30
    python train_voice.py tokens   --folder RUN
    python train_voice.py talker   --folder RUN --minutes 60
    python train_voice.py export   --folder RUN --out RUN/export
    python train_voice.py evaluate --folder RUN --voice RUN/export --ceilings

Each stage resumes. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `precision`


def main() -> None:
    """Run one stage."""
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    stages = {
        "data": _data,
        "codec": _codec,
        "tokens": _tokens,
        "talker": _talker,
        "export": _export,
        "evaluate": _evaluate,
    }
    stages[options.stage](options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stage", choices=("data", "codec", "tokens", "talker", "export", "evaluate")
    )
    parser.add_argument("--folder", type=Path, required=True, help="corpus and checkpoints")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--wordnet", type=Path, help="data: the folder of WordNet's data.noun")
    parser.add_argument("--sentences", type=int, default=30_000, help="data: number of sentences")
    parser.add_argument("--minutes", type=float, default=60.0, help="codec, talker: total")
    parser.add_argument(
        "--encoder-minutes", type=float, default=10.0, help="codec: until codes are final"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="codec, talker: peak")
    parser.add_argument("--positions", type=int, default=2400, help="talker: batch size")
    parser.add_argument("--out", type=Path, help="export: folder to write")
    parser.add_argument("--voice", type=Path, help="evaluate: an exported folder")
    parser.add_argument("--ceilings", action="store_true", help="evaluate: codec and teacher too")
    parser.add_argument("--count", type=int, default=50, help="evaluate: number of sentences")
    parser.add_argument("--wavs", type=Path, help="evaluate: keep the audio here")
    return parser.parse_args()


def _data(options: argparse.Namespace) -> None:
    from corpus import read_sentences
    from sentences import training_sentences

    if options.wordnet is None:
        raise SystemExit("data needs --wordnet, the folder of WordNet's data.noun")
    sentences = training_sentences(options.wordnet, num_made=9000)
    read_sentences(options.folder / "corpus", sentences[: options.sentences])


def _codec(options: argparse.Namespace) -> None:
    from codec_training import CodecTraining, train_codec

    training = CodecTraining(
        minutes=options.minutes,
        encoder_minutes=options.encoder_minutes,
        learning_rate=options.learning_rate,
    )
    train_codec(options.folder, training)


def _tokens(options: argparse.Namespace) -> None:
    from talker_training import make_tokens

    make_tokens(options.folder, CodecConfig())


def _talker(options: argparse.Namespace) -> None:
    from talker_training import TalkerTraining, train_talker

    training = TalkerTraining(
        minutes=options.minutes,
        positions_per_batch=options.positions,
        learning_rate=options.learning_rate,
    )
    train_talker(options.folder, training)


def _export(options: argparse.Namespace) -> None:
    from export import export

    out = options.out or options.folder / "export"
    export(options.folder, out, AcousticConfig(), CodecConfig())


def _evaluate(options: argparse.Namespace) -> None:
    from evaluation import evaluate

    voice = options.voice or options.folder / "export"
    evaluate(voice, options.folder if options.ceilings else None, options.count, options.wavs)


if __name__ == "__main__":
    main()

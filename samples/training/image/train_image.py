"""Train the embedded image model, from scratch to the folder that ships.

    pip install 'triptych[recipes]'
    cd samples/training/image
    python train_image.py data     --folder RUN
    python train_image.py codec    --folder RUN --minutes 18
    python train_image.py latents  --folder RUN
    python train_image.py model    --folder RUN --minutes 60
    python train_image.py export   --folder RUN --out RUN/export
    python train_image.py evaluate --folder RUN --model RUN/export

Each stage resumes. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `pictures`


def main() -> None:
    """Run one stage."""
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    stages = {
        "data": _data,
        "codec": _codec,
        "latents": _latents,
        "model": _model,
        "export": _export,
        "evaluate": _evaluate,
    }
    stages[options.stage](options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stage", choices=("data", "codec", "latents", "model", "export", "evaluate")
    )
    parser.add_argument("--folder", type=Path, required=True, help="corpus and checkpoints")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--pictures", type=int, default=40_000, help="data: number of images")
    parser.add_argument("--minutes", type=float, default=18.0, help="codec, model: total")
    parser.add_argument(
        "--encoder-minutes", type=float, default=10.0, help="codec: until latents are final"
    )
    parser.add_argument("--rows", type=int, default=96, help="model: images per batch")
    parser.add_argument("--learning-rate", type=float, help="peak [codec: 2e-3, model: 5e-3]")
    parser.add_argument("--out", type=Path, help="export: folder to write")
    parser.add_argument("--model", type=Path, help="evaluate: an exported folder")
    parser.add_argument("--sheet", type=Path, help="evaluate: generate 64 prompts into this file")
    parser.add_argument("--guidance", type=float, default=3.0, help="evaluate: guidance scale")
    parser.add_argument("--steps", type=int, default=20, help="evaluate: steps per image")
    return parser.parse_args()


def _data(options: argparse.Namespace) -> None:
    from corpus import write_compositions
    from pictures.compositions import open_catalogue
    from pictures.sprites import fetch_sprites
    from text import fetch_minilm

    fetch_sprites(options.folder / "sprites")
    fetch_minilm(options.folder / "minilm")
    write_compositions(options.folder, open_catalogue(), options.pictures)


def _codec(options: argparse.Namespace) -> None:
    from codec_training import CodecTraining, Crops, train_codec
    from pictures.compositions import open_catalogue
    from pictures.sprites import fetch_sprites

    training = CodecTraining(
        minutes=options.minutes,
        encoder_minutes=options.encoder_minutes,
        **_rate(options),
    )
    crops = Crops(fetch_sprites(options.folder / "sprites"), open_catalogue())
    train_codec(options.folder, crops, training)


def _latents(options: argparse.Namespace) -> None:
    from corpus import write_latents
    from export import open_codec
    from pictures.compositions import open_catalogue
    from pictures.sprites import fetch_sprites

    sprites = fetch_sprites(options.folder / "sprites")
    write_latents(options.folder, open_codec(options.folder), open_catalogue(), sprites)


def _model(options: argparse.Namespace) -> None:
    from model_training import ModelTraining, train_model

    training = ModelTraining(
        minutes=options.minutes,
        num_rows=options.rows,
        **_rate(options),
    )
    train_model(options.folder, options.folder / "minilm", training)


def _rate(options: argparse.Namespace) -> dict[str, float]:
    """The learning rate as a keyword, if given."""
    return {"learning_rate": options.learning_rate} if options.learning_rate else {}


def _export(options: argparse.Namespace) -> None:
    from export import export
    from pictures.compositions import open_catalogue
    from pictures.sprites import fetch_sprites

    out = options.out or options.folder / "export"
    export(options.folder, out, open_catalogue(), fetch_sprites(options.folder / "sprites"))


def _evaluate(options: argparse.Namespace) -> None:
    from evaluation import Drawing, evaluate
    from pictures.compositions import open_catalogue
    from pictures.sprites import fetch_sprites

    drawing = Drawing(num_steps=options.steps, guidance=options.guidance)
    model = options.model or options.folder / "export"
    sprites = fetch_sprites(options.folder / "sprites")
    evaluate(options.folder, model, drawing, open_catalogue(), sprites, options.sheet)


if __name__ == "__main__":
    main()

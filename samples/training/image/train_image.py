"""Train the embedded image model, from scratch to the folder that ships.

    pip install '.[recipes]'
    cd samples/training/image
    python train_image.py data     --folder RUN
    python train_image.py codec    --folder RUN --minutes 90
    python train_image.py latents  --folder RUN
    python train_image.py model    --folder RUN --minutes 480
    python train_image.py export   --folder RUN --out RUN/export
    python train_image.py evaluate --folder RUN --model RUN/export

Each stage resumes. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `pictures` and `precision`


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
    parser.add_argument("--shards", type=_count, default=128, help="latents: of 1,024 images each")
    parser.add_argument("--workers", type=_count, help="processes that draw [codec: 1, latents: 2]")
    parser.add_argument("--minutes", type=float, help="total [codec: 90, model: 480]")
    parser.add_argument("--encoder-minutes", type=float, help="codec: until latents are final [45]")
    parser.add_argument(
        "--decay-minutes", type=float, help="model: of them with a falling rate [240]"
    )
    parser.add_argument(
        "--single-blocks", type=int, default=6, help="model: of them, when it begins"
    )
    parser.add_argument(
        "--rows", type=_count, help="images per batch [codec: 2, model: 128, a multiple of 16]"
    )
    parser.add_argument("--learning-rate", type=float, help="peak [codec: 2e-3, model: 3e-3]")
    parser.add_argument(
        "--start", type=Path, help="codec, latents, model: an exported model to start from"
    )
    parser.add_argument("--pause-file", type=Path, help="model: wait while this file exists")
    parser.add_argument(
        "--no-compile", action="store_true", help="model, on a CPU: run it as it is"
    )
    parser.add_argument("--out", type=Path, help="export: folder to write")
    parser.add_argument("--model", type=Path, help="evaluate: an exported folder")
    parser.add_argument("--sheets", type=Path, help="evaluate: generate both into this folder")
    parser.add_argument("--share", type=float, default=1.0, help="evaluate: part of the prompts")
    parser.add_argument("--guidance", type=float, help="evaluate: guidance scale [3]")
    parser.add_argument(
        "--steps", dest="num_steps", type=int, help="evaluate: steps per image [20]"
    )
    options = parser.parse_args()
    if options.stage == "latents" and options.threads:
        parser.error("latents has --workers of one thread each, no --threads.")
    if options.stage == "model" and (options.rows or 16) % 16:
        parser.error("--rows must be a multiple of 16, such as 128.")
    return options


def _count(text: str) -> int:
    """An argument of 1 or more."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def _data(options: argparse.Namespace) -> None:
    from pictures.compositions import open_catalogue
    from pictures.drawings import fetch_drawings
    from text import fetch_minilm

    fetch_drawings(options.folder, open_catalogue())
    fetch_minilm(options.folder / "minilm")


def _codec(options: argparse.Namespace) -> None:
    from adoption import adopt_codec
    from codec_training import CodecTraining, train_codec
    from crops import Crops

    if options.start is not None and not (options.folder / "codec.pt").exists():
        adopt_codec(options.folder, options.start)
    given = _given(options, "minutes", "encoder_minutes", "learning_rate", num_rows="rows")
    train_codec(options.folder, Crops(options.folder, options.workers or 1), CodecTraining(**given))


def _latents(options: argparse.Namespace) -> None:
    from adoption import adopt_codec, adopt_scale
    from composing import write_shards

    if options.start is not None and not (options.folder / "codec.pt").exists():
        adopt_codec(options.folder, options.start)
        adopt_scale(options.folder, options.start)
    write_shards(options.folder, options.shards, options.workers or 2)


def _model(options: argparse.Namespace) -> None:
    from model import ModelSize
    from model_training import ModelTraining, train_model

    training = ModelTraining(
        start=options.start,
        pause_file=options.pause_file,
        compiles=not options.no_compile,
        **_given(options, "minutes", "decay_minutes", "learning_rate", num_rows="rows"),
    )
    train_model(
        options.folder,
        options.folder / "minilm",
        training,
        ModelSize(num_single=options.single_blocks),
    )


def _given(options: argparse.Namespace, *same: str, **others: str) -> dict[str, Any]:
    """Those options that were given, as keywords; what is left out has its own default."""
    names = {**{name: name for name in same}, **others}
    given = {name: getattr(options, option) for name, option in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def _export(options: argparse.Namespace) -> None:
    from export import export

    export(options.folder, options.out or options.folder / "export", **_studio(options))


def _evaluate(options: argparse.Namespace) -> None:
    from evaluation import Drawing, Extent, Studio, evaluate

    drawing = Drawing(**_given(options, "num_steps", "guidance"))
    model = options.model or options.folder / "export"
    studio = Studio(**_studio(options), extent=Extent().share(options.share))
    evaluate(options.folder, model, drawing, studio, options.sheets)


def _studio(options: argparse.Namespace) -> dict[str, Any]:
    from pictures.compositions import open_catalogue
    from pictures.drawings import fetch_drawings

    catalogue = open_catalogue()
    return {"catalogue": catalogue, "drawings": fetch_drawings(options.folder, catalogue)}


if __name__ == "__main__":
    main()

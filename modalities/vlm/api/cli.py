"""`triptych see`, and `triptych chat` with vision models.

Owns how `see` reads its operands. The rest is the pipelines'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from triptych.core.errors import ConfigError
from triptych.modalities.llm.api import cli as chat
from triptych.modalities.llm.api.cli import add_chat_arguments
from triptych.modalities.vlm.api.pipeline import (
    ImageInput,
    VisionChatPipeline,
    VisionPipeline,
    image_source,
)

__all__ = ["add_chat_arguments", "add_see_arguments", "run_chat", "run_see"]

_STDIN = "-"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_QUESTION = "What is in this picture?"
_QUESTION_OF_SEVERAL = "What is in these pictures?"


def add_see_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych see`."""
    parser.add_argument(
        "operands",
        nargs="*",
        metavar="IMAGE ... [QUESTION]",
        help='PNG, JPEG or WebP files ("-" is stdin), then a question',
    )
    parser.add_argument("--system", help="system message before the question")
    chat.add_common(parser, "vision")


def run_see(args: argparse.Namespace) -> int:
    """Answer a question about images, and stream the answer."""
    images, question = _read_operands(args.operands)
    parts = [{"type": "image", "image": image} for image in images]
    messages = [
        *([{"role": "system", "content": args.system}] if args.system else []),
        {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
    ]
    with _open_pipeline(args) as pipeline:
        for piece in pipeline.stream(messages, **chat.call_options(args)):
            chat.show(piece)
    chat.show("\n")
    return 0


def run_chat(args: argparse.Namespace) -> int:
    """Chat in the terminal; initial images require a vision model."""
    pipeline = VisionPipeline if args.image else VisionChatPipeline
    return chat.run_chat(args, pipeline.from_arguments)


def _open_pipeline(args: argparse.Namespace) -> VisionPipeline:
    return VisionPipeline.from_arguments(args)


def _read_operands(operands: list[str]) -> tuple[list[ImageInput], str]:
    """Split the operands into images, which come first, and the question."""
    num_images = 0
    while num_images < len(operands) and _is_image(operands[num_images]):
        num_images += 1
    named, words = operands[:num_images], operands[num_images:]
    if not named and sys.stdin.isatty():
        raise ConfigError(
            'No image given: name a file, as in `triptych see cat.png "What is this?"`.'
        )
    images = [_image(name) for name in named or [_STDIN]]
    default = _QUESTION if len(images) == 1 else _QUESTION_OF_SEVERAL
    return images, " ".join(words) or default


def _is_image(operand: str) -> bool:
    if operand == _STDIN or (operand.lower().endswith(_SUFFIXES) and " " not in operand):
        return True
    try:
        return Path(operand).expanduser().is_file()
    except OSError:  # a question may exceed the maximum length of a file name
        return False


def _image(name: str) -> ImageInput:
    if name != _STDIN:
        file = image_source(Path(name)).file  # read now, before the model is loaded
        assert file is not None
        return bytes(file.data)
    data = sys.stdin.buffer.read()
    if not data:
        raise ConfigError("stdin is empty.")
    return data

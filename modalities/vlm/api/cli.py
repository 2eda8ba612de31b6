"""`triptych see`, and `triptych chat` and `run` with vision models.

Owns how `see` reads its operands. The rest is the work of the models, of a server or in this
process.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from triptych.core.client.choice import Wanted, open_model
from triptych.core.errors import ConfigError
from triptych.core.process.cli_io import read_file, show
from triptych.modalities.llm.api import cli as chat
from triptych.modalities.llm.api.chat_session import StreamsChat
from triptych.modalities.llm.api.cli import add_chat_arguments, add_run_arguments
from triptych.modalities.llm.modality import CHAT
from triptych.modalities.vlm.modality import VISION

__all__ = [
    "add_chat_arguments",
    "add_run_arguments",
    "add_see_arguments",
    "run_chat",
    "run_run",
    "run_see",
]

_STDIN = "-"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_QUESTION = "What is in this picture?"
_QUESTION_OF_SEVERAL = "What is in these pictures?"
_CHATS = Wanted(
    task=CHAT.task[0],
    default=CHAT.default,
    pipeline="triptych.modalities.vlm.api.pipeline:VisionChatPipeline",
    remote="triptych.modalities.llm.api.remote:RemoteChat",
)
_SEES = replace(
    _CHATS,
    default=VISION.default,
    pipeline="triptych.modalities.vlm.api.pipeline:VisionPipeline",
    has_images=True,
)


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
            show(piece)
    show("\n")
    return 0


def run_chat(args: argparse.Namespace) -> int:
    """Chat in the terminal; initial images require a vision model."""
    return chat.run_chat(args, _open_chat)


run_run = run_chat


def _open_chat(args: argparse.Namespace) -> AbstractContextManager[StreamsChat]:
    opened: AbstractContextManager[StreamsChat] = open_model(args, _SEES if args.image else _CHATS)
    return opened


def _open_pipeline(args: argparse.Namespace) -> AbstractContextManager[StreamsChat]:
    opened: AbstractContextManager[StreamsChat] = open_model(args, _SEES)
    return opened


def _read_operands(operands: list[str]) -> tuple[list[bytes], str]:
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


def _image(name: str) -> bytes:
    if name != _STDIN:
        return read_file(name, "image")  # read now, before the model is loaded
    data = sys.stdin.buffer.read()
    if not data:
        raise ConfigError("stdin is empty.")
    return data

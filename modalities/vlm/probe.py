"""What the API process needs to know of a model that sees, read by a process of its own.

Owns the question and its answer. transformers knows the defaults of every configuration, but loads
torch where it finds it, which the API process must not: `python -m triptych.modalities.vlm.probe`
reads folders' names as JSON, answers, and is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from triptych.core.context_length import context_length
from triptych.core.errors import WeightsError
from triptych.core.typed import decode_json
from triptych.core.weights.layout import read_json

_HIDDEN = ("torch", "torchvision", "torchaudio")
_TIMEOUT_S = 120.0
_FIELDS = ("vocab_size", "eos_token_id")


class VisionFacts(msgspec.Struct, frozen=True):
    """`placeholder` is what a chat template puts for a picture; `text` are fields of a config."""

    placeholder: str
    text: dict[str, Any]


class _FactsReply(msgspec.Struct, frozen=True):
    facts: tuple[VisionFacts, ...] = ()
    error: str = ""


def hide_torch() -> None:
    """From here on this process has no torch, whoever asks. For processes made for it alone."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    for name in _HIDDEN:
        sys.modules[name] = cast("Any", None)  # what the import system takes for "there is none"


def read_facts(folder: str) -> VisionFacts:
    """The facts of the model in `folder`. Raises `WeightsError` where it is not fit to see."""
    from triptych.modalities.vlm.config import read_config
    from triptych.modalities.vlm.processor import PictureProcessor

    processor = PictureProcessor.open(folder, model="")
    text = read_config(read_json(Path(folder) / "config.json")).get_text_config()
    fields = {name: getattr(text, name, None) for name in _FIELDS}
    known = {name: value for name, value in fields.items() if value is not None}
    known["max_position_embeddings"] = context_length(lambda name: getattr(text, name, None))
    return VisionFacts(processor.placeholder, known)


def ask_facts(folders: Sequence[str]) -> tuple[VisionFacts, ...]:
    """The facts of each folder, in order. Raises as `read_facts` does."""
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "triptych.modalities.vlm.probe"),
            input=msgspec.json.encode(folders),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError("A model that sees takes too long to be read.") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["no reason given"]
        raise WeightsError(f"A model that sees cannot be read: {lines[-1][-300:]}")
    answer = decode_json(done.stdout, _FactsReply)
    if answer.error:
        raise WeightsError(answer.error)
    return answer.facts


def main() -> None:
    """Answer the question on stdin."""
    hide_torch()
    folders = decode_json(sys.stdin.buffer.read(), list[str])
    try:
        answer = _FactsReply(tuple(map(read_facts, folders)))
    except WeightsError as error:
        answer = _FactsReply(error=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

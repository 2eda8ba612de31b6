"""Reads transformers' facts about a vision model, in a separate process.

Owns the answer to `api.preparation.probe_facts`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import decode_json
from triptych.core.text.context_length import context_length
from triptych.core.weights.layout import read_json
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.vlm.prepared import FactsReply, VisionFacts
from triptych.modalities.vlm.processing.libraries import choose_libraries

_FIELDS = ("vocab_size", "eos_token_id")


def read_facts(folder: str) -> VisionFacts:
    """The facts of the model in `folder`. Raises `WeightsError` if it is unfit."""
    from triptych.modalities.vlm.configs.config import read_config
    from triptych.modalities.vlm.processing.processor import ImageProcessor

    processor = ImageProcessor.open(folder, model="")
    with library_errors("The model's image processor does not run"):
        processor.try_samples()
    text = read_config(read_json(Path(folder) / "config.json")).get_text_config()
    fields = {name: getattr(text, name, None) for name in _FIELDS}
    known = {name: value for name, value in fields.items() if value is not None}
    known["max_position_embeddings"] = context_length(lambda name: getattr(text, name, None))
    return VisionFacts(processor.placeholder, known)


def main() -> None:
    """Answer the request on stdin."""
    folders = decode_json(sys.stdin.buffer.read(), list[str])
    try:
        choose_libraries(folders)
        answer = FactsReply(tuple(map(read_facts, folders)))
    except WeightsError as error:
        answer = FactsReply(error=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

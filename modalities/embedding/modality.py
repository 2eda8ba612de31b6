"""The embedding modality: models that turn texts into vectors.

Owns recognizing such a model, and the entry points of its API and engine. Loads neither.
"""

from __future__ import annotations

from triptych.core.options.command import Command
from triptych.modalities.embedding.kinds import is_embedding_model
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.embedding"
_COMMANDS = (
    Command(
        "embed",
        "Embed texts, or rank them by similarity.",
        f"{_HERE}.api.cli",
        (
            'triptych embed "a kitten" "a cat" -o vectors.npy',
            "triptych embed --similar-to 'a pet' < nouns.txt",
        ),
        operands="[TEXT ...]",
        is_named=True,
    ),
)

EMBEDDING = Modality(
    role="embedding",
    task=("embedding", "turns texts into vectors", "/v1/embeddings"),
    more_tasks=(("rerank", "scores pairs of texts", "/v1/rerank"),),
    matches=is_embedding_model,
    wire=(f"{_HERE}.wire:EmbedRequest", f"{_HERE}.wire:EmbedDelta"),
    api=f"{_HERE}.api.routes:open_api",
    engine=f"{_HERE}.engine.loader:open_embedding_loader",
    default="all-minilm-l6-v2",
    sources=(f"{_HERE}.source:MINILM",),
    pipelines={"EmbeddingPipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)

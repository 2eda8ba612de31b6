"""Vectors of a running server, as a pipeline of this process returns them.

Owns the fields of a request for a call's options, and reading the vectors of a reply.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from triptych.core.client.choice import RemoteModel
from triptych.core.client.parallel import in_order
from triptych.core.errors import TriptychError, UnknownModel

Floats: TypeAlias = npt.NDArray[np.float32]
_ROUTE = "/v1/embeddings"
_BATCH = 256
"""Texts of a request."""
_NUM_AT_ONCE = 8


class RemoteEmbedder(RemoteModel):
    """An embedding model of a server."""

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        on_progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Floats:
        """Return the vectors [N, D] of N texts, as `EmbeddingPipeline` does."""
        given = [texts] if isinstance(texts, str) else list(texts)
        found: list[Floats] = []
        for start in range(0, len(given), _BATCH):
            found += self._vectors(given[start : start + _BATCH], options)
            if on_progress is not None:
                on_progress(len(found))
        return np.stack(found)

    def map(
        self, entries: Sequence[Mapping[str, Any]], *, num_in_flight: int = _NUM_AT_ONCE
    ) -> Iterator[Floats | TriptychError]:
        """Return the vectors of many entries, as `EmbeddingPipeline.map` does."""
        return in_order(self._entry, entries, min(num_in_flight, _NUM_AT_ONCE))

    def _entry(self, entry: Mapping[str, Any]) -> Floats:
        if entry.get("model", self.name) != self.name:
            raise UnknownModel.among([self.name], str(entry["model"]))
        texts = entry["texts"]
        options = {name: each for name, each in entry.items() if name not in ("texts", "model")}
        return np.stack(self._vectors([texts] if isinstance(texts, str) else texts, options))

    def _vectors(self, texts: Sequence[str], options: Mapping[str, Any]) -> list[Floats]:
        body = {
            "model": self.name,
            "input": list(texts),
            "encoding_format": "base64",
            **{name: options[name] for name in ("dimensions", "prompt_name") if options.get(name)},
            "truncate_prompt_tokens": options.get("max_tokens", 0),
        }
        rows = sorted(self.connection.post(_ROUTE, body)["data"], key=lambda row: row["index"])
        return [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows]

"""Options of the store: what is kept of answers, where and for how long.

Owns the declarations; `core.store` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.declaration import COUNT, option


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What outlives the request that made it: responses, conversations, files, batches."""

    store: str = option(
        "memory",
        "Where responses, conversations, files and batches are kept: `memory`, until the server"
        " stops; a file, which the next start reads; or `off`, nothing is.",
        is_for_server=True,
    )
    store_mb: int = option(
        256,
        "MiB that the store may hold. Responses and conversations then give way, the oldest of the"
        " API key that holds the most first; files do not, and take at most an equal share for each"
        " key.",
        within=COUNT,
        is_for_server=True,
    )
    batch_concurrency: int = option(
        4,
        "Requests of batches (`/v1/batches`) and background responses that run at once, in the gaps"
        " between those that clients wait for.",
        within=COUNT,
        is_for_server=True,
    )
    store_ttl_s: int = option(
        30 * 86400,
        "How long a response or a conversation is kept after it was last used.",
        within=COUNT,
        is_for_server=True,
    )

"""Options of the store: what it keeps, where and for how long.

Owns the declarations; `core.store` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.options.declaration import COUNT, option


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Objects that outlive their request: responses, conversations, files, batches."""

    store: str = option(
        "memory",
        "Where responses, conversations, files and batches are kept: `memory` until the server"
        " stops, a file that the next start reads, or `off`.",
        is_for_server=True,
    )
    store_mb: int = option(
        256,
        "Maximum size of the store in MiB. When full, responses and conversations are evicted,"
        " oldest first, from the API key that holds most. Files stay, limited to an equal share"
        " per key.",
        within=COUNT,
        is_for_server=True,
    )
    batch_concurrency: int = option(
        4,
        "Maximum number of batch (`/v1/batches`) and background requests that run at once, when"
        " interactive requests leave room.",
        within=COUNT,
        is_for_server=True,
    )
    store_ttl_s: int = option(
        30 * 86400,
        "How long a response or conversation is kept after its last use.",
        within=COUNT,
        is_for_server=True,
    )

"""The keys of a whole prompt at once."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.kv.keys import page_key


def page_keys(root: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """The chained keys of every full page of `token_ids`; a partial last page has none."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        keys.append(page_key(keys[-1] if keys else root, token_ids[start : start + page_size]))
    return keys

"""Progress of downloads from the hub, as the hub library reports it to its bars.

Owns the bars, which show nothing and report bytes. Knows no repository.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from triptych.core.weights.progress import Progress

_BYTES = "huggingface_hub.snapshot_download"
"""The library's name of the bar that counts the bytes of all files on disk."""


def missing_bytes(download: Callable[..., Any]) -> int:
    """The bytes that `download`, a call of `snapshot_download`, would fetch; 0 if it would fail.

    It costs a request for each file.
    """
    try:
        files = download(dry_run=True, tqdm_class=_Silent)
    except (HTTPError, OSError):  # the download itself reports it
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


class _Silent(tqdm):
    """A bar that shows nothing."""

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
        self.counts_bytes = name == _BYTES


def bars_of(progress: Progress) -> type[_Silent]:
    """The class of bars that report to `progress`; they may run on several threads."""
    lock = threading.Lock()

    class Bar(_Silent):
        def update(self, n: float | None = 1) -> bool | None:
            if self.counts_bytes and n:
                with lock:
                    progress.advance(int(n))
            return None

    return Bar

"""The process that fetches one model: `python -m triptych.fetch_process`.

Owns the process around `core.weights.resolve`: the order on its standard input, progress and the
outcome as lines on its standard output. The API process starts and ends it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from triptych.core.errors import InternalError, TriptychError, WeightsError, to_info
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import die_with_parent
from triptych.core.weights.fetching import (
    FetchedModel,
    FetchFailed,
    FetchNote,
    FetchOrder,
    FetchProgress,
)
from triptych.core.weights.progress import Action
from triptych.core.weights.resolve import ResolvedModel, resolve
from triptych.modalities.registry import known_sources

_INTERVAL_S = 0.2
_log = logging.getLogger("triptych.fetch_process")


def main() -> None:
    """Fetch the model of the order."""
    die_with_parent()
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is not for the reader of the lines
    order = decode_json(sys.stdin.buffer.readline(), FetchOrder)
    _write(lines, _outcome(order, LineProgress(lines)))


def _outcome(order: FetchOrder, progress: LineProgress) -> FetchNote:
    try:
        model = resolve(
            order.reference,
            name=order.name,
            options=order.options,
            progress=progress,
            sources=known_sources(),
        )
        _check_stays(model)
        return FetchedModel(model)
    except TriptychError as error:
        return FetchFailed(to_info(error))
    except Exception:  # the boundary of the process
        _log.exception("%s cannot be fetched", order.name)
        return FetchFailed(
            to_info(InternalError(f"{order.name} cannot be fetched; the server's log says why."))
        )


def _check_stays(model: ResolvedModel) -> None:
    """Remove weights in a temporary folder, which ends with this process: `WeightsError`."""
    folder = Path(model.folder)
    if folder.name.startswith("triptych-weights-") and folder.parent in (
        Path(tempfile.gettempdir()),
        Path("/dev/shm"),  # noqa: S108 (only compared)
    ):
        shutil.rmtree(folder, ignore_errors=True)  # this process may be killed at its error
        raise WeightsError(
            f"There is no space for {model.name}: free some disk space, or start the server with"
            " --cache-dir on a larger disk."
        )


class LineProgress:
    """Writes the progress as lines, a few per second."""

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = lines
        self._action: Action | None = None
        self._num_bytes = self._total_bytes = 0
        self._due_s = 0.0

    def begin(self, model: str) -> None:
        """Do nothing: there is one model."""

    def start(self, action: Action, total_bytes: int) -> None:
        """Begin a task."""
        self.stop()
        self._action, self._num_bytes, self._total_bytes = action, 0, total_bytes
        self._report()

    def advance(self, num_bytes: int) -> None:
        """Add to the task."""
        self._num_bytes += num_bytes
        if time.monotonic() >= self._due_s:
            self._report()

    def stop(self) -> None:
        """End the task with its last count."""
        if self._action is not None:
            self._report()
        self._action = None

    def _report(self) -> None:
        if self._action is None:
            return
        self._due_s = time.monotonic() + _INTERVAL_S
        note = FetchProgress(
            action=self._action, num_bytes=self._num_bytes, total_bytes=self._total_bytes
        )
        _write(self._lines, note)


def _write(lines: BinaryIO, note: FetchNote) -> None:
    lines.write(msgspec.json.encode(note) + b"\n")


if __name__ == "__main__":
    main()

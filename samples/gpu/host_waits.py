"""Where the host waits for the device, as torch notices it; waits for events are not among them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from place import Place

NUM_SHOWN = 3


@dataclass(slots=True)
class Waits:
    """The number of waits at each line of source."""

    places: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counted(self, place: Place | None) -> Iterator[None]:
        """Count inside, where `place` is a GPU."""
        if place is None or not place.is_gpu:
            yield
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for each in caught:
            if "synchroniz" in str(each.message):
                self.places[f"{Path(each.filename).name}:{each.lineno}"] += 1

    def figures(self) -> dict[str, object]:
        """Their number, and the lines with the most."""
        found: dict[str, object] = {"host_waits": self.places.total()}
        if self.places:
            shown = (f"{line} {count} times" for line, count in self.places.most_common(NUM_SHOWN))
            found["host_waits_at"] = ", ".join(shown)
        return found

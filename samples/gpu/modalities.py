"""Each modality from end to end with random weights: the device against its machine's CPU.

Cases are small, and most of their time is that of the CPU and of compiling kernels: they run in
several processes at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from place import Place, Record
from workers import run_cases

MODULES = ("modality_text", "modality_sight", "modality_sound", "modality_images")


def run(place: Place) -> Iterator[Record]:
    """Yield a record of each case."""
    yield from run_cases(place, MODULES)

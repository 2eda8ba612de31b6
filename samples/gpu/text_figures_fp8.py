"""As `text_figures`, with the weights of the layers in float8."""

from __future__ import annotations

from collections.abc import Iterator

from place import Place, Record
from text_figures import figures


def run(place: Place) -> Iterator[Record]:
    """The figures with weights in float8."""
    return figures(place, is_float8=True)

"""Pronunciations in the text: where they are put back, and at what cost."""

# ruff: noqa: RUF001  # phonetic letters look like others

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.pronunciations import (
    Notation,
    extract_notations,
    restore_notations,
)

NORMALIZE = Normalizer()


class Counted(tuple[Notation, ...]):
    """Notations that count how often one of them is looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[Notation]:
        for notation in super().__iter__():
            self.num_looks += 1
            yield notation

    def __getitem__(self, place: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("piece", ["[a](/b/) ", "[a](/b/)", "[Dr.](/d/) 5 "])
def test_each_pronunciation_is_put_back_in_few_steps(piece: str) -> None:
    num = 500
    plain, found = extract_notations(piece * num)
    assert len(found) == num
    notations = Counted(found)
    restore_notations(NORMALIZE(plain), notations)
    assert notations.num_looks < 100 * num


def test_many_pronunciations_are_all_spoken_where_they_are_written() -> None:
    spoken = NORMALIZE("Say [one](/wˈʌn/) and [two](/tˈu/), then [three](/θɹˈi/) for $5.")
    assert [(spoken.text[slice(*word)], sounds) for word, sounds in spoken.pronunciations] == [
        ("one", "wˈʌn"),
        ("two", "tˈu"),
        ("three", "θɹˈi"),
    ]

"""The tokens of each chosen expert, for experts that run one after the other.

Owns the order, and the size of the parts. Knows no weights.

Shapes: T tokens, X chosen experts of a token, N tokens of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, where

_WHOLE_VALUES = 2**15
"""Up to this number of values torch computes on one thread, row by row; beyond it a row may be
split anywhere, and its last bits depend on where."""


def chosen_experts(experts_TX: Tensor, num_features: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The chosen experts in the order of their numbers, each with `tokens_N` and `places_N`.

    These are some of its tokens, and their places for it: as many as torch computes row by row, if
    each takes `num_features` values. Sums in this order do not depend on other tokens.
    """
    num_rows = max(1, _WHOLE_VALUES // num_features)
    for number in experts_TX.unique().tolist():
        tokens, places = where(experts_TX == number)
        for part in zip(tokens.split(num_rows), places.split(num_rows), strict=True):
            yield (number, *part)

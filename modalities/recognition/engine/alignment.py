"""When each token is heard: dynamic time warping through the decoder's cross-attention.

Owns the path and what it says of times, after OpenAI's `timing.py`. Shape suffixes: H attention
heads, T tokens, P encoder positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Matrix = npt.NDArray[np.float64]


def token_positions(
    attention_HTP: Tensor, spoken: slice, median_width: int
) -> npt.NDArray[np.int64]:
    """The position at which each row of `spoken` takes over.

    What a position is to one token is told apart from what it is to all T of them, the special
    ones before and behind the spoken included.
    """
    std_H1P, mean_H1P = torch.std_mean(attention_HTP, dim=1, keepdim=True, correction=0)
    scaled_HTP = (attention_HTP - mean_H1P) / std_H1P.clamp(min=1e-9)
    smooth_TP = median_filter(scaled_HTP, median_width).mean(0)[spoken]
    rows, positions = warp(-smooth_TP.double().cpu().numpy())
    is_first = np.diff(rows, prepend=-1).astype(bool)
    starts: npt.NDArray[np.int64] = positions[is_first]
    return starts


def median_filter(values_HTP: Tensor, width: int) -> Tensor:
    """The median of `width` neighbours along the last dimension, mirrored at its ends."""
    margin = width // 2
    if values_HTP.shape[-1] <= margin:
        return values_HTP
    padded = torch.nn.functional.pad(values_HTP, (margin, margin), mode="reflect")
    return padded.unfold(-1, width, 1).median(-1).values


def warp(cost_TP: Matrix) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the cheapest monotonic path from the first corner to the last.

    Whole anti-diagonals at a time. Ties go to the diagonal last, as in the reference.
    """
    num_rows, num_columns = cost_TP.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0.0
    origin = np.zeros((num_rows + 1, num_columns + 1), np.int8)
    for diagonal in range(2, num_rows + num_columns + 1):
        row = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = (
            total[row - 1, column - 1],
            total[row - 1, column],
            total[row, column - 1],
        )
        come_from = np.where(
            (both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2)
        )
        best = np.choose(come_from, (both, down, right))
        total[row, column] = cost_TP[row - 1, column - 1] + best
        origin[row, column] = come_from
    return _path(origin)


def _path(origin: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    origin[0, :], origin[:, 0] = 2, 1
    row, column = origin.shape[0] - 1, origin.shape[1] - 1
    path = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        come_from = origin[row, column]
        row -= come_from != 2
        column -= come_from != 1
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns

"""Alignment of the denoiser's hidden states with what is drawn at each place of the clean image.

Owns the labels, of which the corpus has one for each of the model's tokens, and the layers that
lead from hidden states to them, and from earlier ones to the code that the noise carries
(`noise.py`). A label says which thing is drawn there, from which set, how large, whether mirrored,
and which part of it. A hidden state that is to tell it from a noisy image and a caption must know
which thing is meant, and where it is. This is REPA (Yu et al. 2024,
arXiv:2410.06940), but with what is known of a composite in place of another network's features.
Nothing here is exported.

Shapes: B images, T tokens, C channels, F of a label, H height, W width, D drawings.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pictures.chances import CODE_SIZE
from pictures.compositions import Catalogue
from pictures.drawings import SETS
from pictures.rendering import TOKEN_SIDE, Drawn, Pose
from torch import Tensor, nn
from torch.nn import functional

_THING, _SET, _PART = 45, 8, 8
LABEL_SIZE = _THING + _SET + _PART + 3
"""Thing, set, part of the drawing, then its size, whether it is mirrored, and the ground."""
_SET_WEIGHT, _PART_WEIGHT, _POSE_WEIGHT = 0.6, 0.35, 0.4
_USUAL_SIZE = 72.0  # pixels
_LEAST_SHARE = 0.2  # of a token's pixels that a drawing must have
_NUM_HIDDEN = 512


class Aligner(nn.Module):
    """From hidden states to labels, and from earlier ones to the code of the noise."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_channels, _NUM_HIDDEN),
            nn.SiLU(),
            nn.Linear(_NUM_HIDDEN, LABEL_SIZE),
        )
        self.reader = nn.Linear(num_channels, CODE_SIZE)

    def reading_loss(self, hidden_BTC: Tensor, noise_BTC: Tensor, level_B: Tensor) -> Tensor:
        """The mean square error of the code that each token tells, by how much noise there is.

        Without it the code is found late: one token has an eighth of its noise's deviation of it.
        """
        code_BC = noise_BTC.mean(1) * noise_BTC.shape[1] ** 0.5
        error_BTC = self.reader(hidden_BTC).float() - code_BC[:, None]
        return (level_B * error_BTC.square().mean((1, 2))).mean()

    def loss(self, hidden_BTC: Tensor, labels_BTF: Tensor) -> Tensor:
        """One less the mean cosine between what is told and what is drawn."""
        told_BTF = self.layers(hidden_BTC).float()
        return 1 - functional.cosine_similarity(told_BTF, labels_BTF, dim=-1).mean()


class Labeller:
    """Makes the labels of composites."""

    def __init__(self, catalogue: Catalogue) -> None:
        rng = np.random.default_rng(0)
        self._things = {name: _direction(rng, _THING) for name in catalogue.names}
        self._sets = {name: _SET_WEIGHT * _direction(rng, _SET) for name in SETS}

    def labels(self, drawn: Drawn, names: list[str], set_name: str) -> NDArray[np.float16]:
        """The labels of an image `[T, F]`; `names` are the things', in the arrangement's order."""
        owners_HW = drawn.owners
        side = len(owners_HW) // TOKEN_SIDE
        tokens = (
            owners_HW.reshape(side, TOKEN_SIDE, side, TOKEN_SIDE)
            .swapaxes(1, 2)
            .reshape(side**2, -1)
        )
        shares_DT = [(tokens == number + 1).mean(1) for number in range(len(drawn.poses))]
        owner_T, share_T = np.argmax(shares_DT, 0), np.max(shares_DT, 0)
        labels = np.zeros((side**2, LABEL_SIZE), np.float16)
        for token, number in enumerate(owner_T.tolist()):
            if share_T[token] < _LEAST_SHARE:
                labels[token, -1] = 1
                continue
            pose = drawn.poses[number]
            y, x = divmod(token, side)
            labels[token, :-1] = np.concatenate(
                (self._things[names[pose.index]], self._sets[set_name], _part(pose, x, y))
            )
        return labels


def _direction(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """A random direction, of length 1."""
    values = rng.standard_normal(size)
    return values / np.linalg.norm(values)


def _part(pose: Pose, x: int, y: int) -> NDArray[np.float64]:
    """Which part of a drawing a token shows, how large the drawing is, and whether mirrored."""
    right = ((x + 0.5) * TOKEN_SIDE - pose.left) / pose.width
    down = ((y + 0.5) * TOKEN_SIDE - pose.top) / pose.height
    waves = np.pi * np.arange(1, _PART // 2 + 1)
    if pose.is_mirrored:
        right = 1 - right
    size = np.log2(max(pose.width, pose.height) / _USUAL_SIZE)
    turns = _PART_WEIGHT * np.concatenate((np.cos(waves * right), np.cos(waves * down)))
    sign = 1 if pose.is_mirrored else -1
    return np.append(turns, (_POSE_WEIGHT * size, _POSE_WEIGHT * sign))

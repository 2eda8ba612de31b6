"""Alignment of the denoiser's hidden states with what is drawn at each place of the clean image.

Owns the labels, of which the corpus has one for each of the model's tokens, and the layers that
lead from hidden states to them, and from earlier ones to the code that the noise carries
(`noise.py`), to a token's place and to the plan of the whole image. A label says which thing is
drawn there, from which set, how large, whether mirrored, which part of it, and in which colour. A
hidden state that is to tell it from a noisy image and a caption must know which thing is meant, and
where it is. This is REPA (Yu et al. 2024, arXiv:2410.06940), but with what is known of a composite
in place of another network's features.
Nothing here is exported.

Shapes: B images, T tokens, C channels, F of a label, P of a plan, H height, W width, D drawings.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from pictures.arrangements import COUNTS
from pictures.chances import CODE_SIZE
from pictures.compositions import Catalogue
from pictures.drawings import SETS
from pictures.rendering import TOKEN_SIDE, Drawn, Pose
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

_THING, _SET, _PART = 45, 8, 8
_GROUND = _THING + _SET + _PART + 2
LABEL_SIZE = _GROUND + 4
"""Thing, set, part of the drawing, its size, whether it is mirrored, the ground, and a colour."""
_SET_WEIGHT, _PART_WEIGHT, _POSE_WEIGHT, _COLOUR_WEIGHT = 0.6, 0.35, 0.4, 0.3
_NUM_SLOTS = max(COUNTS.values())
PLAN_SIZE = 5 * _NUM_SLOTS + len(SETS) + 3
"""Of each drawing whether there is one, its middle, size and side; then the set, and the ground."""
_USUAL_SIZE = 56.0  # pixels
_LEAST_SHARE = 0.2  # of a token's pixels that a drawing must have
_NUM_HIDDEN = 512


class Aligner(nn.Module):
    """From hidden states to labels, and from earlier ones to the noise's code and the places."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_channels, _NUM_HIDDEN),
            nn.SiLU(),
            nn.Linear(_NUM_HIDDEN, LABEL_SIZE),
        )
        self.reader = nn.Linear(num_channels, CODE_SIZE + _PART)
        self.planner = nn.Linear(num_channels, PLAN_SIZE)

    def reading_loss(self, hidden_BTC: Tensor, noise_BTC: Tensor, level_B: Tensor) -> Tensor:
        """The mean square errors of what each token tells of the code and of its own place.

        Left to itself the model finds both late: one token has an eighth of its noise's deviation
        of the code, and rotary embeddings tell distances, not places. An error of the code counts
        by how much noise there is.
        """
        told_BTC = self.reader(hidden_BTC).float()
        code_BC = noise_BTC.mean(1) * noise_BTC.shape[1] ** 0.5
        error_BTC = told_BTC[..., :CODE_SIZE] - code_BC[:, None]
        astray_BTC = told_BTC[..., CODE_SIZE:] - _places(told_BTC.shape[1], told_BTC.device)
        return (level_B * error_BTC.square().mean((1, 2))).mean() + astray_BTC.square().mean()

    def planning_loss(self, hidden_BTC: Tensor, plans_BP: Tensor) -> Tensor:
        """The mean square error of what each token tells of the whole image."""
        told_BTP = self.planner(hidden_BTC).float()
        return functional.mse_loss(told_BTP, plans_BP[:, None].expand_as(told_BTP))

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
        labels[:, _GROUND + 1 :] = _COLOUR_WEIGHT * _colours(drawn.image)
        for token, number in enumerate(owner_T.tolist()):
            if share_T[token] < _LEAST_SHARE:
                labels[token, _GROUND] = 1
                continue
            pose = drawn.poses[number]
            y, x = divmod(token, side)
            labels[token, :_GROUND] = np.concatenate(
                (self._things[names[pose.index]], self._sets[set_name], _part(pose, x, y))
            )
        return labels


def plan_of(drawn: Drawn, set_name: str) -> NDArray[np.float16]:
    """What is where in an image, as values `[P]` of about the same spread."""
    slots = np.zeros((_NUM_SLOTS, 5))
    for slot, pose in zip(slots, sorted(drawn.poses, key=lambda pose: pose.index), strict=False):
        middle = pose.left + pose.width / 2, pose.top + pose.height / 2
        size = np.log2(max(pose.width, pose.height) / _USUAL_SIZE)
        slot[:] = 1, *(np.array(middle) / 32 - 2), 2 * size, 1 if pose.is_mirrored else -1
    is_set = [2.0 * (name == set_name) for name in SETS]
    ground = np.asarray(drawn.image)[drawn.owners == 0].mean(0) / 64 - 2
    return np.concatenate((slots.flatten(), is_set, ground)).astype(np.float16)


def _colours(image: Image.Image) -> NDArray[np.float64]:
    """The mean colour of each token's pixels, `[T, 3]`, as values of about the same spread."""
    return np.asarray(image.reduce(TOKEN_SIDE)).reshape(-1, 3) / 64.0 - 2


def _direction(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """A random direction, of length 1."""
    values = rng.standard_normal(size)
    return values / np.linalg.norm(values)


def _part(pose: Pose, x: int, y: int) -> NDArray[np.float64]:
    """Which part of a drawing a token shows, how large the drawing is, and whether mirrored."""
    right = ((x + 0.5) * TOKEN_SIDE - pose.left) / pose.width
    down = ((y + 0.5) * TOKEN_SIDE - pose.top) / pose.height
    if pose.is_mirrored:
        right = 1 - right
    size = np.log2(max(pose.width, pose.height) / _USUAL_SIZE)
    sign = 1 if pose.is_mirrored else -1
    waves = _PART_WEIGHT * _waves(right, down)
    return np.append(waves, (_POSE_WEIGHT * size, _POSE_WEIGHT * sign))


def _waves(right: float, down: float) -> NDArray[np.float64]:
    """A point of a square, each of whose sides is 1, as cosines `[_PART]`."""
    waves = np.pi * np.arange(1, _PART // 2 + 1)
    return np.concatenate((np.cos(waves * right), np.cos(waves * down)))


@cache
def _places(num_tokens: int, device: torch.device) -> Tensor:
    """Where in an image each of its tokens lies, `[T, _PART]`."""
    side = round(num_tokens**0.5)
    middles = (np.arange(side) + 0.5) / side
    waves = np.stack([_waves(x, y) for y in middles for x in middles])
    return torch.from_numpy(waves).float().to(device)

"""The judge of things: what is shown somewhere in an image.

Owns the network and its training: the last blocks of one that nobody here trained (`sight.py`), and
two layers. Each place scores each name; an image's score of a name is the
soft maximum over its places, so a small thing in company counts like a large one alone. It learns
which names an image has, and which is at the middle of each thing.

Shapes: B images, P places, C channels, N names, K things of an image at most, H height, W width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from rich.progress import track
from sight import LastBlocks
from torch import Tensor, nn
from torch.nn import functional

_NUM_HIDDEN = 512
_BATCH = 64
_SOME = 2048  # images that channels are standardized by


class Namer(nn.Module):
    """Scores of names at each place, and of the image."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, last_blocks: LastBlocks, num_names: int) -> None:
        super().__init__()
        self.last_blocks = copy.deepcopy(last_blocks).float()
        num_channels = last_blocks.num_channels
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("deviation", torch.ones(num_channels))
        self.hidden = nn.Linear(num_channels, _NUM_HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.names = nn.Linear(_NUM_HIDDEN, num_names)

    def forward(self, early_BCHW: Tensor) -> Tensor:
        """Scores of places, `[B, P, N]`."""
        map_BPC = self.last_blocks(_wide(early_BCHW))
        hidden = functional.gelu(self.hidden((map_BPC - self.mean) / self.deviation))
        scores: Tensor = self.names(self.dropout(hidden))
        return scores

    def standardize(self, early_BCHW: Tensor) -> None:
        """Take mean and deviation of the map's channels from some images."""
        with torch.inference_mode():
            parts = early_BCHW.split(_BATCH)
            some = torch.cat([self.last_blocks(_wide(part)) for part in parts])
        self.mean.copy_(some.flatten(0, 1).mean(0))
        self.deviation.copy_(some.flatten(0, 1).std(0) + 1e-3)

    @torch.inference_mode()
    def scores(self, early_BCHW: Tensor) -> Tensor:
        """Scores `[B, N]` of any number of images."""
        self.eval()
        return torch.cat([self(part).logsumexp(1) for part in early_BCHW.split(_BATCH)])


def _wide(early_BCHW: Tensor) -> Tensor:
    """In single precision: the backward pass of thin convolutions is slow in half."""
    return early_BCHW.float().contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True)
class Labels:
    """What images show: their names as shares of 1, `[B, N]`, and the place and name of each thing.

    Those are `[B, K]`; a name of -1 is no thing.
    """

    names: Tensor
    thing_places: Tensor
    thing_names: Tensor

    def loss(self, scores_BPN: Tensor, rows: Tensor) -> Tensor:
        """Cross-entropy of images' names, and of the names at the things' middles."""
        image = functional.cross_entropy(scores_BPN.logsumexp(1), self.names[rows])
        places, names = self.thing_places[rows], self.thing_names[rows]
        index = places[..., None].expand(-1, -1, scores_BPN.shape[-1])
        middles_BKN = scores_BPN.gather(1, index)
        return image + functional.cross_entropy(
            middles_BKN.flatten(0, 1), names.flatten(), ignore_index=-1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamerTraining:
    """Options of the training."""

    num_passes: int = 4
    learning_rate: float = 1e-3
    blocks_learning_rate: float = 3e-4
    weight_decay: float = 0.1


def train_namer(namer: Namer, early_BCHW: Tensor, labels: Labels, options: NamerTraining) -> None:
    """Train a judge to give the names shown in an image their scores."""
    num_images = len(early_BCHW)
    namer.standardize(early_BCHW[torch.randperm(num_images)[:_SOME]])
    blocks = list(namer.last_blocks.requires_grad_().parameters())
    layers = [*namer.hidden.parameters(), *namer.names.parameters()]
    rates = [options.blocks_learning_rate, options.learning_rate]
    groups = [
        {"params": part, "lr": rate} for part, rate in zip((blocks, layers), rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay)
    num_steps = options.num_passes * (num_images // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, num_steps)
    namer.train()
    namer.last_blocks.eval()  # their norms stay as they are
    for _ in track(range(options.num_passes), "Learning the names"):
        order = torch.randperm(num_images)
        for rows in order[: num_images // _BATCH * _BATCH].view(-1, _BATCH):
            loss = labels.loss(namer(early_BCHW[rows]), rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

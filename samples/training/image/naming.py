"""The judge of things: what is shown somewhere in an image, from a map of features.

Owns the network and its training. Each place scores each name; an image's score of a name is the
soft maximum over its places, so a small thing in company counts like a large one alone. It learns
which names an image has, and which is at the middle of each thing.

Shapes: B images, P places, C channels, N names, K things of an image at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

_NUM_HIDDEN = 512
_BATCH = 64
_SOME = 2048  # images that channels are standardised by


class Namer(nn.Module):
    """Scores of names at each place, and of the image."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_channels: int, num_names: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("deviation", torch.ones(num_channels))
        self.hidden = nn.Linear(num_channels, _NUM_HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.names = nn.Linear(_NUM_HIDDEN, num_names)

    def forward(self, map_BPC: Tensor) -> Tensor:
        """Scores of places, `[B, P, N]`."""
        inputs = (map_BPC.float() - self.mean) / self.deviation
        hidden = self.dropout(functional.gelu(self.hidden(inputs)))
        scores: Tensor = self.names(hidden)
        return scores

    @torch.inference_mode()
    def scores(self, map_BPC: Tensor) -> Tensor:
        """Scores `[B, N]` of any number of images."""
        self.eval()
        return torch.cat([self(part).logsumexp(1) for part in map_BPC.split(_BATCH)])


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

    num_passes: int = 12
    learning_rate: float = 1e-3
    weight_decay: float = 0.1


def train_namer(map_BPC: Tensor, labels: Labels, options: NamerTraining) -> Namer:
    """A judge that gives the names shown in an image their scores."""
    namer = Namer(map_BPC.shape[-1], labels.names.shape[1])
    some = map_BPC[torch.randperm(len(map_BPC))[:_SOME]].float().flatten(0, 1)
    namer.mean.copy_(some.mean(0))
    namer.deviation.copy_(some.std(0) + 1e-3)
    num_steps = options.num_passes * (len(map_BPC) // _BATCH)
    optimizer = torch.optim.AdamW(
        namer.parameters(), options.learning_rate, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, num_steps)
    namer.train()
    for _ in track(range(options.num_passes), "Learning the names"):
        order = torch.randperm(len(map_BPC))
        for rows in order[: len(order) // _BATCH * _BATCH].view(-1, _BATCH):
            with torch.autocast("cpu", torch.bfloat16):
                scores_BPN = namer(map_BPC[rows])
            loss = labels.loss(scores_BPN.float(), rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return namer

"""The encoder of the embedded vision model: from pixels to slot scores, to soft tokens.

Owns both halves of the head, which are trained separately. Reader: slot scores. Projector: the
expected token embedding of each slot. A printed word is read letter by letter, and projected as a
mixture of the known words with that spelling. Also owns the low-rank changes to the language model
that come with the encoder: they are added in float32 as a tensor is read, so that no other module
handles them.

Shapes: B images, T places of a map, D hidden, Q queries, S classes of a slot, L letters, A of the
alphabet, W words, P positions, C hidden of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.configs.slots import SlotConfig, SlotVisionConfig
from triptych.modalities.vlm.engine.slots.tower import (
    LAST_CHANNELS,
    MIDDLE_CHANNELS,
    EfficientNetLite,
)

NUM_LETTERS = 27
"""The alphabet, and the blank after a word."""


@dataclass(frozen=True, slots=True)
class SlotScores:
    """Scores: `[B, S]` for each slot, and `[B, L, A]` for the letters."""

    fields: Sequence[Tensor]
    letters_BLA: Tensor


class SlotHead(nn.Module):
    """Scores each slot from both feature maps."""

    def __init__(self, config: SlotVisionConfig) -> None:
        super().__init__()
        size, side = config.reader_size, config.image_size
        self._kinds = list(config.fields or [])
        num_queries = len(self._kinds) + config.num_letters
        self.middle = nn.Sequential(nn.Linear(MIDDLE_CHANNELS, size), nn.LayerNorm(size))
        self.last = nn.Sequential(nn.Linear(LAST_CHANNELS, size), nn.LayerNorm(size))
        num_places = (side // 16) ** 2 + (side // 32) ** 2
        self.places = nn.Parameter(0.02 * torch.randn(num_places, size))
        self.queries = nn.Parameter(torch.randn(num_queries, size))
        self.looks = nn.ModuleList(
            SlotQueries(size, config.num_looks) for _ in range(config.num_hidden_layers)
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size,
                config.num_attention_heads,
                config.intermediate_size,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(size)
        self.heads = nn.ModuleDict(
            {kind: nn.Linear(size, sizes[0]) for kind, sizes in (config.kinds or {}).items()}
        )
        self.letters = nn.Linear(size, NUM_LETTERS)

    def forward(self, middle_BTC: Tensor, last_BTC: Tensor) -> SlotScores:
        """The scores of all slots."""
        memory_BTD = torch.cat((self.middle(middle_BTC), self.last(last_BTC)), 1) + self.places
        x_BQD = self.queries.expand(len(memory_BTD), -1, -1)
        for queries, layer in zip(self.looks, self.layers, strict=True):
            x_BQD = layer(queries(x_BQD, memory_BTD))
        x_BQD = self.norm(x_BQD)
        fields = [self.heads[kind](x_BQD[:, i]) for i, kind in enumerate(self._kinds)]
        return SlotScores(fields, self.letters(x_BQD[:, len(self._kinds) :]))


class SlotQueries(nn.Module):
    """Cross-attention that does not project the memory: few queries, many places.

    Queries are projected into the memory's own space, once per head, and the results are projected
    back. So the only work per place is the two products of attention.
    """

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.query = nn.Linear(size, num_heads * size)
        self.out = nn.Linear(num_heads * size, size)

    def forward(self, x_BQD: Tensor, memory_BTD: Tensor) -> Tensor:
        """Add the attention's result to `x`."""
        query = self.query(self.norm(x_BQD)).unflatten(-1, (-1, memory_BTD.shape[-1])).flatten(1, 2)
        scores = query @ memory_BTD.mT / memory_BTD.shape[-1] ** 0.5
        found = scores.softmax(-1).to(memory_BTD.dtype) @ memory_BTD
        added: Tensor = self.out(found.unflatten(1, (*x_BQD.shape[1:2], -1)).flatten(2))
        return x_BQD + added


class SlotProjector(nn.Module):
    """Projects slot scores to soft tokens."""

    spelling: Tensor

    def __init__(self, config: SlotVisionConfig, size: int) -> None:
        super().__init__()
        self.slot_kinds, self._sentence = list(config.fields or []), list(config.sentence or [])
        self.kinds = nn.ParameterDict(
            {
                kind: nn.Parameter(torch.zeros(num_classes, width, size))
                for kind, (num_classes, width) in (config.kinds or {}).items()
            }
        )
        self.words = nn.Parameter(torch.zeros(config.num_words, 1, size))
        self.fixed = nn.Parameter(torch.zeros(self._sentence.count(-1), size))
        spelling = torch.zeros(config.num_words, config.num_letters, dtype=torch.uint8)
        self.register_buffer("spelling", spelling)

    def forward(self, read: SlotScores) -> Tensor:
        """The soft tokens `[B, P, C]`."""
        shares = [scores.float().softmax(-1) for scores in read.fields]
        return self.project([*shares, self._word_shares(read.letters_BLA)])

    def project(self, shares: Sequence[Tensor]) -> Tensor:
        """`[B, P, C]` from each slot's class probabilities, `[B, S]`; the word's are last."""
        tables = [*(self.kinds[kind] for kind in self.slot_kinds), self.words]
        fixed = iter(self.fixed)
        parts = [
            next(fixed).expand(len(shares[0]), 1, -1)
            if part < 0
            else torch.einsum("bs,spc->bpc", shares[part].to(tables[part].dtype), tables[part])
            for part in self._sentence
        ]
        return torch.cat(parts, 1)

    def _word_shares(self, letters_BLA: Tensor) -> Tensor:
        """The probability of each known word, `[B, W]`."""
        scores_BLA = letters_BLA.float().log_softmax(-1)
        spelling_WL = self.spelling.long()
        places_L = torch.arange(spelling_WL.shape[1], device=spelling_WL.device)
        return scores_BLA[:, places_L, spelling_WL].sum(-1).softmax(-1)


class SlotModel(PreTrainedModel):  # type: ignore[misc]
    """Tower, reader and projector, without the language model."""

    config_class = SlotConfig
    main_input_name = "pixel_values"

    def __init__(self, config: SlotConfig) -> None:
        super().__init__(config)
        vision: Any = config.vision_config
        self.tower = EfficientNetLite()
        self.reader = SlotHead(vision)
        # Attributes with tensor names of the released weights: `looks`, `teller`.
        self.teller = SlotProjector(vision, config.get_text_config().hidden_size)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, return_dict: bool = True
    ) -> BaseModelOutputWithPooling:
        """Soft tokens `[B, P, C]` of images `[B, 3, H, W]` in -1..1, as `pooler_output`."""
        middle, last = (lines.flatten(2).mT for lines in self.tower(pixel_values))
        return BaseModelOutputWithPooling(pooler_output=self.teller(self.reader(middle, last)))


PREFIX = "adapter."
DOWN, UP = ".down", ".up"


class AdaptedCheckpoint(Checkpoint):
    """Adds the product of `adapter.NAME.down` and `adapter.NAME.up` to the matrix `NAME`.

    The adapters are LoRA's, arXiv:2106.09685.
    """

    def __init__(self, checkpoint: Checkpoint, scale: float) -> None:
        tensors = checkpoint.tensors.items()
        plain = {name: info for name, info in tensors if not name.startswith(PREFIX)}
        super().__init__(checkpoint.folder, plain, checkpoint.config)
        self._checkpoint = checkpoint
        self._scale = scale

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor with its adapter. Raises `WeightsError`."""
        tensor = self._checkpoint.read(name)
        if f"{PREFIX}{name}{UP}" not in self._checkpoint.tensors:
            return tensor
        up, down = (self._checkpoint.read(f"{PREFIX}{name}{part}") for part in (UP, DOWN))
        return (tensor.float() + self._scale * up.float() @ down.float()).to(tensor.dtype)

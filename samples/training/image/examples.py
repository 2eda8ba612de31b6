"""What the model is trained on: the corpus in the memory of its device, with captions as ids.

Owns taking in shards as they come, and batches. One caption in ten is dropped, for classifier-free
guidance.

Shapes: N images, B of a batch, T tokens, C channels, L ids of a caption, F of a label, P of a plan.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import torch
from corpus import NUM_CAPTIONS, Corpus, Shard
from text import MAX_TOKENS
from torch import Tensor
from transformers import BertTokenizer

_DROPPED = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """Latents `[B, T, C]`, captions' ids `[B, L]`, labels `[B, T, F]`, plans `[B, P]`, codes.

    In store, the ids are those of all captions, `[N, captions, L]`.
    """

    clean: Tensor
    ids: Tensor
    labels: Tensor
    plans: Tensor
    codes: Tensor

    def split(self, num_parts: int) -> list[Batch]:
        """The batch in equal parts."""
        parts = (whole.chunk(num_parts) for whole in self._wholes)
        return [Batch(*part) for part in zip(*parts, strict=True)]

    @staticmethod
    def join(parts: list[Batch]) -> Batch:
        """All of them in one."""
        return Batch(*map(torch.cat, zip(*(part._wholes for part in parts), strict=True)))

    @property
    def _wholes(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class Examples:
    """Batches of the corpus, whose new shards are read in the background."""

    def __init__(self, corpus: Corpus, tokenizer: BertTokenizer, device: torch.device) -> None:
        self._corpus, self._tokenizer, self._device = corpus, tokenizer, device
        self._mean, self._deviation = corpus.scale
        self._num_shards = 0
        self._pool = ThreadPoolExecutor(1)
        self._rows = Batch.join(self._read())
        self._reading = self._pool.submit(self._read)
        self._blank = tokenize(tokenizer, [""], MAX_TOKENS).to(device)

    def refresh(self) -> None:
        """Take in the shards that were read meanwhile."""
        if self._reading.done():
            if found := self._reading.result():
                self._rows = Batch.join([self._rows, *found])
            self._reading = self._pool.submit(self._read)

    def __len__(self) -> int:
        return len(self._rows.clean)

    def batch(self, num_rows: int, length: int, generator: torch.Generator) -> Batch:
        """Random images, each with one of its captions, cut or padded to a length."""

        def random(high: int) -> Tensor:
            return torch.randint(high, (num_rows,), generator=generator, device=self._device)

        rows, numbers = self._rows, random(len(self))
        ids = rows.ids[numbers, random(NUM_CAPTIONS)]
        is_dropped = torch.rand(num_rows, generator=generator, device=self._device) < _DROPPED
        ids = torch.where(is_dropped[:, None], self._blank, ids).long()
        clean = (rows.clean[numbers].float() - self._mean) / self._deviation
        labels, plans, codes = (
            part[numbers].float() for part in (rows.labels, rows.plans, rows.codes)
        )
        return Batch(clean, self._cut(ids, length), labels, plans, codes)

    def _cut(self, ids: Tensor, length: int) -> Tensor:
        """Ids cut to a length, as the tokenizer would: the last one is that of an end."""
        pad, end = self._tokenizer.pad_token_id, self._tokenizer.sep_token_id
        kept = ids[:, :length].clone()
        if length < ids.shape[1]:
            kept[:, -1] = torch.where(ids[:, length] == pad, kept[:, -1], end)
        return kept

    def _read(self) -> list[Batch]:
        """The shards that are done, and not read yet."""
        found = []
        while self._corpus.has(self._num_shards):
            found.append(self._placed(self._corpus.shard(self._num_shards)))
            self._num_shards += 1
        return found

    def _placed(self, shard: Shard) -> Batch:
        said = [caption for captions in shard.captions for caption in captions]
        ids = tokenize(self._tokenizer, said, MAX_TOKENS).unflatten(0, (-1, NUM_CAPTIONS))
        arrays = (shard.labels, shard.plans, shard.codes)
        parts = (torch.from_numpy(shard.latents), ids.short(), *map(torch.from_numpy, arrays))
        return Batch(*(part.to(self._device) for part in parts))


def tokenize(tokenizer: BertTokenizer, prompts: list[str], length: int) -> Tensor:
    """Ids `[B, L]`, cut and padded to a length."""
    read = tokenizer(prompts, truncation=True, max_length=length)["input_ids"]
    return torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in read])

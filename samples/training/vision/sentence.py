"""The sequence of soft tokens for an image: fixed words around the slots, and each class's words.

Owns the vision encoder's configuration and the projector's initial values: the language model's own
embeddings of each class's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from labels import FIELDS, NOTHING, spelled
from tokenizers import Tokenizer
from torch import Tensor
from words import LONGEST

from triptych.modalities.vlm.configs.slots import SlotVisionConfig
from triptych.modalities.vlm.engine.slots.model import SlotProjector

SENTENCE: tuple[str | int, ...] = (
    "Picture:", 0, 1, 2, 3, ",", 4, ";", 5, 6, ",", 7, "; background:", 8, "; text:", 9, ".",
)  # fmt: skip
"""Fixed words, and slots by number; the last is the printed word."""
_WIDTHS: Mapping[str, int] = {"name": 3, "ground": 2}
_SAID_OF_NOTHING: Mapping[str, str] = {"name": " nothing"}
_FILLER = " "


def encoder_config(
    classes: Mapping[str, Sequence[str]], num_words: int, tokenizer: Tokenizer
) -> SlotVisionConfig:
    """The vision encoder's configuration for these classes."""
    return SlotVisionConfig(
        kinds={kind: [len(names), _WIDTHS.get(kind, 1)] for kind, names in classes.items()},
        fields=[kind for kind, _ in FIELDS],
        sentence=[number for part in SENTENCE for number in _numbers(part, tokenizer)],
        num_letters=LONGEST,
        num_words=num_words,
    )


def first_words(
    teller: SlotProjector,
    classes: Mapping[str, Sequence[str]],
    words: Sequence[str],
    tokenizer: Tokenizer,
    embeddings_VC: Tensor,
) -> None:
    """Initialize the projector with the language model's embeddings; the first word is "none"."""

    def embedded(text: str, width: int) -> Tensor:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:width]
        filler = tokenizer.encode(_FILLER, add_special_tokens=False).ids[:1]
        return embeddings_VC[ids + filler * (width - len(ids))].float()

    with torch.no_grad():
        for kind, names in classes.items():
            width = _WIDTHS.get(kind, 1)
            nothing = _SAID_OF_NOTHING.get(kind, _FILLER)
            said = [f" {name.replace('-', ' ')}" if name else nothing for name in names]
            teller.kinds[kind].copy_(torch.stack([embedded(text, width) for text in said]))
        words_or_none = [f" {word}" if word else " none" for word in words]
        teller.words.copy_(torch.stack([embedded(text, 1) for text in words_or_none]))
        teller.spelling.copy_(torch.tensor([spelled(word) for word in words]))
        fixed = "\n".join(part for part in SENTENCE if isinstance(part, str)).split("\n")
        ids = [i for part in fixed for i in tokenizer.encode(part, add_special_tokens=False).ids]
        teller.fixed.copy_(embeddings_VC[ids].float())


def known_words(lexicon: Sequence[str]) -> list[str]:
    """The projector's words: none, then the lexicon's."""
    return [NOTHING, *lexicon]


def _numbers(part: str | int, tokenizer: Tokenizer) -> list[int]:
    if isinstance(part, int):
        return [part]
    return [-1] * len(tokenizer.encode(part, add_special_tokens=False).ids)

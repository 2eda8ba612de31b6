"""Tokenizing texts at a bounded cost.

Owns reading `tokenizer.json`, a lower bound of a text's tokens (from its length, before it is
tokenized), and tokenizing without blocking other threads. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from triptych.core.errors import WeightsError
from triptych.core.process.regular_file import check_regular
from triptych.core.text.byte_level import LETTERS
from triptych.core.text.byte_pairs import TEKKEN_FILE, read_tekken
from triptych.core.text.growth import check_growth, steps_of
from triptych.core.text.vocab_merges import VOCAB_FILE, read_vocab_merges

TOKENIZER_FILE = "tokenizer.json"
_PROBE = "A probe, 1."

_SHRINKAGE: Mapping[str, float] = MappingProxyType(
    {"NFC": 9, "NFKC": 12, "NFD": 3, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
)
"""The largest divisor of each normalizer on a text's bytes. A decomposing form divides those of a
character by at most 3, or by 4 if it may replace it; composing divides them by 3 again."""
_KEEPING = frozenset(
    {"ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
)
"""Pre-tokenizers that drop no text, unless they are set to remove their matches."""
_NOT_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def read_tokenizer(folder: Path, name: str) -> Tokenizer:
    """The tokenizer in a model's folder, without truncation and padding. Raises `WeightsError`.

    Mistral's `tekken.json`, or Qwen2's `vocab.json` and `merges.txt`, are read where there is no
    `tokenizer.json`.
    """
    readers: Mapping[str, Callable[[Path], Tokenizer]] = {
        TOKENIZER_FILE: lambda file: Tokenizer.from_file(str(file)),
        TEKKEN_FILE: read_tekken,
        VOCAB_FILE: lambda file: read_vocab_merges(file.parent),
    }
    present = (folder / file for file in readers if (folder / file).exists())
    file = next(present, folder / TOKENIZER_FILE)
    try:
        check_regular(file)
        tokenizer = readers[file.name](file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        check_growth(tokenizer)
        encode(tokenizer, [_PROBE])
    except FileNotFoundError as error:
        raise WeightsError(
            f"{name}: {TOKENIZER_FILE} is missing from the model's folder."
        ) from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except WeightsError as error:
        raise WeightsError(f"{name}: {file.name} is not usable: {error.message}.") from error
    except BaseException as error:  # the library raises `Exception`, and panics with other types
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise WeightsError(f"{name}: {file.name} cannot be read ({reason[:120]}).") from error
    return tokenizer


def literal_copy(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of a tokenizer that encodes the text of special tokens as plain characters."""
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True
    return literal


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[Encoding]:
    """Encode texts. Unlike `Tokenizer.encode` this releases the GIL."""
    encodings: list[Encoding] = tokenizer.encode_batch_fast(
        list(texts), add_special_tokens=add_special_tokens
    )
    return encodings


def decode(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Decode token ids. Like `encode` this releases the GIL."""
    (text,) = tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
    return str(text)


@dataclass(frozen=True, slots=True)
class MinTokens:
    """A lower bound of the number of tokens of a text.

    A token represents at most `bytes_per_token` of a text (infinity: unknown). Bytes in `lost` do
    not count, nor does white space if the tokenizer may drop it.
    """

    bytes_per_token: float
    lost: bytes = b""
    counts_space: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The bound for `tokenizer`."""
        added = tokenizer.get_added_tokens_decoder().values()
        normalizers, splitters = steps_of(tokenizer.normalizer), steps_of(tokenizer.pre_tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        shrinkage = math.prod(map(_shrinkage, normalizers))
        if any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters)):
            longest = max(map(len, vocabulary), default=1)  # a letter for each byte
            lost = bytes(byte for byte, letter in LETTERS.items() if letter not in vocabulary)
            is_known = type(tokenizer.model) is BPE  # other models emit one token for unknown text
            is_known &= shrinkage == 1 or not set(lost) - _NOT_IN_UTF8
        else:
            longest, lost = max((len(token.encode()) for token in vocabulary), default=1), b""
            is_known = getattr(tokenizer.model, "byte_fallback", False) is True
            is_known &= vocabulary.keys() >= _BYTE_TOKENS
        longest = max(longest, *(len(token.content.encode()) for token in added), 1)
        is_known &= all(map(_keeps, splitters))
        return cls(
            bytes_per_token=longest * shrinkage if is_known else math.inf,
            lost=lost,
            counts_space=not any(token.lstrip or token.rstrip for token in added),
        )

    def __call__(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`."""
        if self.bytes_per_token == math.inf:
            return 0
        counted = text if self.counts_space else "".join(text.split())
        data = counted.encode("utf-8", "replace").translate(None, self.lost)
        return math.ceil(len(data) / self.bytes_per_token)


def _shrinkage(normalizer: Mapping[str, Any]) -> float:
    if normalizer["type"] != "Replace":
        return _SHRINKAGE.get(normalizer["type"], math.inf)
    pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
    if not pattern or not content:
        return math.inf
    return max(1.0, len(pattern.encode()) / len(content.encode()))


def _keeps(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in _KEEPING and splitter.get("behavior") != "Removed"

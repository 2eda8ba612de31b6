"""Special tokens in text: which callers may spell them, and where they are.

Owns the rule that a caller's text never becomes a special token: spelled tokens are replaced by
stand-ins before a chat template runs, and read as plain characters afterwards. Searches for all
tokens at once and in slices of the text, so that no other thread waits for long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

# Characters of Unicode's private use area stand in for special tokens that a caller spelled out,
# and for the first of these characters where a caller wrote it.
_MARK = "\ue000"
_ESCAPE = _MARK + "{}\ue001"
_ESCAPED = re.compile(_ESCAPE.format(r"(\d+)"))
_STRETCH_CHARS = 2**18


class SpecialTokens:
    """The special tokens of one tokenizer. `ids` are keyed by spelling."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._escapable = (*sorted(self.ids), _MARK)
        self._stand_ins = {text: _ESCAPE.format(n) for n, text in enumerate(self._escapable)}
        self._find_escapable = _finder(self._escapable)
        self._find_special = _finder(self.ids)

    def escape(self, value: Any) -> Any:
        """`value` with stand-ins for all special tokens in it, at any depth."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(inner) for key, inner in value.items()}
        return list(map(self.escape, value)) if isinstance(value, list | tuple) else value

    def runs(self, rendered: str) -> Iterator[str | int]:
        """The special tokens of a rendered template, as ids, and the texts between them."""
        end = 0
        for match in self._find_special(rendered):
            yield from self._plain(rendered[end : match.start()])
            yield self.ids[match[0]]
            end = match.end()
        yield from self._plain(rendered[end:])

    def _escape_text(self, text: str) -> str:
        parts: list[str] = []
        end = 0
        for match in self._find_escapable(text):
            parts += text[end : match.start()], self._stand_ins[match[0]]
            end = match.end()
        return "".join((*parts, text[end:])) if parts else text

    def _plain(self, text: str) -> Iterator[str]:
        if text:
            yield _ESCAPED.sub(lambda match: self._escapable[int(match[1])], text)


def ensure_special(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Add the special tokens of `tokens` that `tokenizer` lacks."""
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    new = [AddedToken(token, special=True) for token in tokens if token not in known]
    tokenizer.add_special_tokens(new)


def _finder(texts: Iterable[str]) -> Callable[[str], Iterator[re.Match[str]]]:
    """Finds `texts` in a text; of those that begin at one position, the longest."""
    wanted = list(texts)
    pattern = re.compile(_any_pattern(wanted) or r"(?!)")
    overlap = max(map(len, wanted), default=1) - 1

    def find(text: str) -> Iterator[re.Match[str]]:
        start = 0
        while start < len(text):
            end = start + _STRETCH_CHARS
            match = pattern.search(text, start, end + overlap)
            if match is None or match.start() >= end:  # it may be cut off
                start = end
            else:
                yield match
                start = match.end()

    return find


def _any_pattern(texts: Sequence[str]) -> str:
    """A pattern that matches any of `texts` and tests each character of a text once."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text)
    branches = []
    for alike in rests.values():
        prefix = _common(min(alike), max(alike))
        branches.append(re.escape(prefix) + _any_pattern([text[len(prefix) :] for text in alike]))
    pattern = "|".join(branches)
    if "" in texts:
        return f"(?:{pattern})?" if branches else ""
    return f"(?:{pattern})" if len(branches) > 1 else pattern


def _common(first: str, last: str) -> str:
    """The common prefix of both, and so of all texts between them in order."""
    differ = (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differ, len(first))]

"""From token ids to text that is safe to show, one step at a time.

Owns incremental decoding and stop strings: never half a character, never the beginning of a stop
string that may still complete. Knows nothing of engines, HTTP or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from triptych.core.engine_api.tokens import TokenLogprob

PRIMING_TOKENS = 8
"""Enough of a prompt to decide whether the first new token keeps its leading space."""


Released = tuple[str, tuple[TokenLogprob, ...]]
"""Text that is safe to show, and the log-probabilities of its tokens."""


class StopFilter:
    """Holds back text that may be the beginning of a stop string.

    Finds the stop string that begins first; the text ends before it, or with it if it `is_shown`.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._is_shown = is_shown
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that is safe to show, and a complete stop string or `None`."""
        if not self._stops:
            return text, None
        pending = self._held + text
        found = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            self._held = ""
            return pending[: at + len(stop) * self._is_shown], stop
        keep = max(overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """Release the held text, which is not a stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)


class Detokenizer:
    """Decodes one row's tokens incrementally, up to a stop string (`stop`, once found).

    A token's log-probability is released with the last character of its text, so that tokens of a
    stop string, which are not shown, are not reported either.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(
            ids=list(prompt_ids[-PRIMING_TOKENS:]), skip_special_tokens=skip_special_tokens
        )
        self._filter = StopFilter(stops, is_shown=include_stop_str_in_output)
        self.stop: str | None = None
        self._num_decoded_chars = 0
        self._num_released_chars = 0
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()  # first char, end, entry

    def push(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprob]) -> Released:
        """Decode further tokens (with their log-probabilities, or none) into safe text."""
        text = ""
        begins: list[int] = []
        for token_id in token_ids:
            begins.append(self._num_decoded_chars)
            chunk = self._stream.step(self._tokenizer, token_id) or ""
            text += chunk
            self._num_decoded_chars += len(chunk)
        ends = [*begins[1:], self._num_decoded_chars]
        self._waiting.extend(zip(begins, ends, logprobs, strict=False))
        safe, self.stop = self._filter.push(text)
        return self._release(safe)

    def flush(self) -> Released:
        """Release everything held back. An incomplete character at the end is dropped."""
        text, logprobs = self._release(self._filter.flush())
        return text, logprobs + self.unshown()

    def unshown(self) -> tuple[TokenLogprob, ...]:
        """Release the pending log-probabilities, which after the end are those of a stop string."""
        rest = tuple(entry for _, _, entry in self._waiting)
        self._waiting.clear()
        return rest

    def _release(self, safe: str) -> Released:
        self._num_released_chars += len(safe)
        released = self._num_released_chars
        entries = []
        # A token cut by a stop string counts as shown if any of its text is shown.
        while self._waiting and (
            self._waiting[0][1] <= released if self.stop is None else self._waiting[0][0] < released
        ):
            entries.append(self._waiting.popleft()[2])
        return safe, tuple(entries)

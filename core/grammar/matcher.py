"""The grammar matcher of one row.

Owns the mask of allowed tokens and the forced tokens. Knows no requests, steps or threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest
from triptych.core.grammar.refusals import refusal
from triptych.core.grammar.vocabulary import GrammarVocabulary, Words

MAX_MASK_S: Final = 0.25
"""The limit of processor time per token; a slower grammar fails its row."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The permitted continuation of a row: `forced_ids`, then a token of the mask `allowed`.

    The mask has a bit per token, in little-endian 32-bit words; a row that `is_complete` ends.
    `elapsed_s` is the processor time taken.
    """

    forced_ids: tuple[int, ...] = ()
    allowed: bytes = b""
    is_complete: bool = False
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftMasks:
    """The mask after each draft that a grammar allows, in the order of the drafts."""

    masks: tuple[bytes, ...] = ()


class TokenMatcher:
    """Matches the tokens of one row. Used by one thread at a time.

    Stop tokens are allowed only where the text may end, and end a row even if they are text. With
    `is_jumping` forced tokens are appended without sampling (jump-forward decoding), except a row's
    first; otherwise each forced token is the only one allowed. Forced tokens that were begun are
    completed as they were found: a tokenizer may divide the rest of a text in another way.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        sampling: SamplingParams,
        *,
        is_jumping: bool,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._min_tokens = sampling.min_tokens
        self._is_jumping = is_jumping
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._stop_words = vocabulary.bits(self._stop_ids)
        self._text_words = vocabulary.text_words & ~self._stop_words
        self._found = np.zeros(vocabulary.num_library_words, "<u4")
        self._allowed = b""
        self._taken: list[int] = []
        self._forced_runs: list[tuple[int, list[int]]] = []
        """Tokens that may follow, of which those after the first `n` are forced, `(n, tokens)`."""

    def follow(self, token_ids: Sequence[int], num_outputs: int, num_left: int) -> TokenMask:
        """Consume `token_ids`, after which a row has `num_outputs` and may sample `num_left` more.

        Raises `RequestError` if the grammar takes too long, or allows no token.
        """
        started_s = time.thread_time()
        due = self._rest_of_run(token_ids)
        self._forced_runs.clear()
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise refusal(self._matcher.get_error())
        forced: list[int] = []
        while found := due or self._forced(num_left - len(forced)):
            if not self._is_jumping or not num_outputs:
                if num_outputs:  # the first mask may come from a cache, without this matcher
                    self._forced_runs.append((0, found))
                self._taken += token_ids
                self._allowed = self._vocabulary.bits(found[:1]).tobytes()
                return TokenMask(allowed=self._allowed, elapsed_s=time.thread_time() - started_s)
            due = []
            forced += found
            self._matcher.consume_tokens(found)
        self._taken += (*token_ids, *forced)
        self._allowed = allowed = self._mask(num_outputs + len(forced))
        elapsed_s = time.thread_time() - started_s
        if elapsed_s > MAX_MASK_S:
            raise InvalidRequest("The grammar, or schema, takes too long to follow: simplify it.")
        is_over = self._is_over(allowed)
        if is_over and not self._matcher.is_accepting():
            raise InvalidRequest(
                "The grammar, or schema, needs a token here that is special or a stop token."
            )
        return TokenMask(tuple(forced), b"" if is_over else allowed, is_over, elapsed_s)

    def follow_drafts(
        self, drafts: Sequence[int], num_outputs: int, num_left: int, most_s: float
    ) -> DraftMasks:
        """The masks after each of `drafts`, up to one that the grammar does not allow.

        It also ends before one that ends the row, which has to be sampled, and after `most_s`
        seconds. The state stays as it is; after a `RequestError` it is lost.
        """
        started_s = time.thread_time()
        allowed, masks, num_taken = self._allowed, list[bytes](), 0
        for draft in drafts:
            if draft in self._stop_ids or not _holds(allowed, draft):
                break
            if not self._matcher.consume_token(draft):
                raise refusal(self._matcher.get_error())
            num_taken += 1
            allowed = self._mask_after(drafts[:num_taken], num_outputs, num_left)
            if self._is_over(allowed) or time.thread_time() - started_s > most_s:
                break
            masks.append(allowed)
        self._matcher.rollback(num_taken)
        return DraftMasks(tuple(masks))

    def _mask_after(self, drafts: Sequence[int], num_outputs: int, num_left: int) -> bytes:
        """The mask after `drafts`, which were consumed."""
        forced = self._rest_of_run(drafts)
        if not forced and (forced := self._forced(num_left - len(drafts))):
            self._forced_runs.append((len(drafts), [*drafts, *forced]))
        if forced:
            return self._vocabulary.bits(forced[:1]).tobytes()
        return self._mask(num_outputs + len(drafts))

    def begin_again(self, matcher: LLMatcher) -> None:
        """Go on with a new matcher of the same grammar, in the state before the last drafts."""
        self._matcher = matcher
        self._forced_runs.clear()
        matcher.consume_tokens(self._taken)

    def _rest_of_run(self, token_ids: Sequence[int]) -> list[int]:
        """The rest of forced tokens, the first of which are the last of `token_ids`."""
        num = len(token_ids)
        for num_free, tokens in self._forced_runs:
            if num_free < num < len(tokens) and tokens[:num] == list(token_ids):
                return tokens[num:]
        return []

    def _is_over(self, allowed: bytes) -> bool:
        """Whether the row ends here."""
        return self._matcher.is_stopped() or allowed == self._vocabulary.no_tokens

    def _forced(self, num_left: int) -> list[int]:
        """The tokens that must come next, up to the first that would end the row."""
        if not self._vocabulary.is_canonical or num_left <= 0:
            return []
        found = self._matcher.compute_ff_tokens()[:num_left]
        ends = (n for n, token_id in enumerate(found) if token_id in self._stop_ids)
        found = found[: next(ends, len(found))]
        return found if self._matcher.validate_tokens(found) == len(found) else []

    def _mask(self, num_outputs: int) -> bytes:
        self._matcher.unsafe_compute_mask_ptr(self._found.ctypes.data, self._found.nbytes)
        if self._matcher.is_error():
            raise refusal(self._matcher.get_error())
        words: Words = self._found[: self._vocabulary.num_words] & self._text_words
        if num_outputs >= self._min_tokens and self._matcher.is_accepting():
            words |= self._stop_words
        return words.tobytes()


def _holds(mask: bytes, token_id: int) -> bool:
    """Whether a mask has a token."""
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)

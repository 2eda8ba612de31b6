"""How far answers of two devices are apart, and whether that is too far.

Owns the measures. An error is a share of the spread of the reference's own values, so that one
limit serves models of any scale: unrelated answers are about 1.4 apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from engines import Answer
from numpy.typing import NDArray

from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.tokens import TokenLogprob

Figures = dict[str, float]
Floats = NDArray[np.float64]


class Disagreement(Exception):
    """Two answers are further apart than their types explain."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a row, with what was asked for about them."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    num_cached: int
    num_preemptions: int
    num_cached_contents: int

    @classmethod
    def of(cls, answer: Answer) -> Tokens:
        """Join the deltas of a request."""
        return cls(
            ids=tuple(token for delta in answer for token in delta.token_ids),
            logprobs=tuple(entry for delta in answer for entry in delta.logprobs),
            prompt_logprobs=tuple(entry for delta in answer for entry in delta.prompt_logprobs),
            num_cached=max(delta.num_cached_tokens for delta in answer),
            num_preemptions=max(delta.num_preemptions for delta in answer),
            num_cached_contents=max(delta.num_cached_contents for delta in answer),
        )


def share_apart(got: Sequence[float] | Floats, wanted: Sequence[float] | Floats) -> float:
    """The root mean square error as a share of the spread of `wanted`."""
    ours, theirs = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if ours.shape != theirs.shape:
        raise Disagreement(f"{ours.shape} values in the place of {theirs.shape}")
    if not np.isfinite(ours).all():
        raise Disagreement(f"{int((~np.isfinite(ours)).sum())} of {ours.size} values not finite")
    spread = float(theirs.std())
    if not spread > 0:
        raise Disagreement("the reference says nothing: all its values are equal")
    return float(np.sqrt(np.mean((ours - theirs) ** 2))) / spread


def check(name: str, share: float, limit: float) -> Figures:
    """The error under a name. Raises `Disagreement` beyond the limit."""
    if not share <= limit:
        raise Disagreement(f"{name}: {share:.3g} of the spread, more than {limit:.3g}")
    return {name: share}


def same_tokens(got: Sequence[Answer], wanted: Sequence[Answer], limit: float) -> Figures:
    """Compare rows token by token.

    A row may part from the reference where that finds another token as likely, within `limit` of a
    log-probability; the rest of the row is not compared. Rows without `top_logprobs` are equal.
    """
    num_compared = num_parted = 0
    values: list[tuple[float, float]] = []
    for place, (ours, theirs) in enumerate(
        zip(map(Tokens.of, got), map(Tokens.of, wanted), strict=True)
    ):
        same = _num_same(ours.ids, theirs.ids)
        num_compared += same
        if same < max(len(ours.ids), len(theirs.ids)):
            _check_parted(place, same, ours, theirs, limit)
            num_parted += 1
        values += _pairs(ours.logprobs[:same], theirs.logprobs[:same])
        values += _pairs(ours.prompt_logprobs, theirs.prompt_logprobs)
    ours_V, theirs_V = np.array(values).T
    return {"tokens": num_compared, "parted": num_parted} | check(
        "logprobs", share_apart(ours_V, theirs_V), limit
    )


def apart_in_logprobs(got: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """The error of log-probabilities of rows whose tokens were forced."""
    values: list[tuple[float, float]] = []
    for ours, theirs in zip(map(Tokens.of, got), map(Tokens.of, wanted), strict=True):
        if ours.ids != theirs.ids:
            raise Disagreement(f"forced tokens differ: {ours.ids} and {theirs.ids}")
        values += _pairs(ours.logprobs, theirs.logprobs)
        values += _pairs(ours.prompt_logprobs, theirs.prompt_logprobs)
    ours_V, theirs_V = np.array(values).T
    return share_apart(ours_V, theirs_V)


def _num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _check_parted(place: int, same: int, ours: Tokens, theirs: Tokens, limit: float) -> None:
    """Raise `Disagreement` unless the reference finds both tokens as likely."""
    where = f"row {place}, token {same} of {len(theirs.ids)}"
    if same >= min(len(ours.ids), len(theirs.ids), len(theirs.logprobs)):
        raise Disagreement(f"{where}: {ours.ids[same:]} in the place of {theirs.ids[same:]}")
    likely = dict(theirs.logprobs[same].top)
    gap = theirs.logprobs[same].logprob - likely.get(ours.ids[same], -np.inf)
    if not abs(gap) <= limit:
        raise Disagreement(f"{where}: a token that is less likely by {gap:.3g}")


def _pairs(
    ours: Sequence[TokenLogprob], theirs: Sequence[TokenLogprob]
) -> list[tuple[float, float]]:
    """The log-probabilities of the same tokens at the same places."""
    found: list[tuple[float, float]] = []
    for one, other in zip(ours, theirs, strict=True):
        found.append((one.logprob, other.logprob))
        likely = dict(other.top)
        found += [(value, likely[token]) for token, value in one.top if token in likely]
    return found


def vectors(answers: Sequence[Answer], field: str) -> Floats:
    """The float32 values that deltas hold as bytes in a field, joined."""
    parts = [getattr(delta, field) for answer in answers for delta in answer]
    return np.frombuffer(b"".join(parts), "<f4").astype(np.float64)


def pictures(answers: Sequence[Answer]) -> Floats:
    """The finished images of all answers, from 0 to 255."""
    found = [delta.pixels for answer in answers for delta in answer if delta.partial_index < 0]
    images = [each for each in found if isinstance(each, Pixels)]
    return np.concatenate([np.frombuffer(each.rgb, np.uint8) for each in images]).astype(np.float64)

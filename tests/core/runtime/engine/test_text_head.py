"""What sampling tokens of text is reckoned to hold, and the results of rows with drafts."""

from __future__ import annotations

import pytest

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.engine.text_head import _verified

VOCAB_SIZE = 128_256


def test_steps_that_sample_nothing_hold_no_logits() -> None:
    """Captured steps end before the sample: their estimate would be gigabytes too large."""
    assert logits_bytes(0, VOCAB_SIZE) == 0
    assert 0 < logits_bytes(1, VOCAB_SIZE) < logits_bytes(64, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((5, 6, 7), ((5, 6, 7), True)),
        ((5, 9, None), ((5, 9), True)),
        ((4, None, 7), ((4,), True)),
        ((5, None, 7), ((5,), False)),
        ((None, 6, 7), ((), False)),
    ],
)
def test_what_follows_a_wrong_draft_does_not_count(
    found: tuple[int | None, ...], expected: tuple[tuple[int, ...], bool]
) -> None:
    """`None` where logits are not finite."""
    row = TokenRow(
        job_id="a",
        slot=0,
        start=2,
        num_tokens=3,
        token_ids=(1, 5, 6),
        is_sampled=True,
        num_drafts=2,
    )
    results = [
        TokenDelta(is_finite=False) if token is None else TokenDelta(token_ids=(token,))
        for token in found
    ]
    result = _verified(row, results)
    assert (result.token_ids, result.is_finite) == expected


def test_an_accepted_draft_counts_as_not_finite_where_its_logits_are() -> None:
    row = TokenRow(job_id="a", slot=0, start=2, num_tokens=2, token_ids=(1, 5), num_drafts=1)
    results = [TokenDelta(token_ids=(5,), is_finite=False), TokenDelta(token_ids=(6,))]
    assert not _verified(row, results).is_finite

"""What sampling tokens of text is reckoned to hold."""

from __future__ import annotations

from triptych.core.runtime.decoders.causal_model import logits_bytes

VOCAB_SIZE = 128_256


def test_steps_that_sample_nothing_hold_no_logits() -> None:
    """Captured steps end before the sample: their estimate would be gigabytes too large."""
    assert logits_bytes(0, VOCAB_SIZE) == 0
    assert 0 < logits_bytes(1, VOCAB_SIZE) < logits_bytes(64, VOCAB_SIZE)

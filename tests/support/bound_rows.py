"""Rows that take a slot, for tests of what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams


def bound_row(
    slot: int, sampling: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> TokenRow:
    """A row of these parameters, with a prompt and what was sampled before."""
    return TokenRow(
        job_id="",
        slot=slot,
        start=0,
        num_tokens=0,
        sampling=sampling,
        history_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
    )

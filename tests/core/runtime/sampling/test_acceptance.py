"""Lossy rules for drafts: what counts, and what keeps the exact rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.bound_rows import bound_row
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.sampling.acceptance import LossyRules
from triptych.core.runtime.sampling.sampler import Sampler

LIKELY, NEAR, FAR = 2, 5, 7
LOGITS_V = torch.tensor([-9.0, -9.0, 2.0, -9.0, -9.0, 1.5, -9.0, -1.0])
PROBS = torch.softmax(LOGITS_V, -1)
NUM_ROWS = 400


def sampled(rules: LossyRules | None, draft: int, relaxed: bool = False, **given: object) -> float:
    """The part of rows whose token is the draft."""
    sampler = Sampler(vocab_size=8, max_batch_size=1, device=torch.device("cpu"), lossy=rules)
    sampler.bind(bound_row(0, SamplingParams(seed=3, **given)))  # type: ignore[arg-type]
    num = NUM_ROWS if given.get("temperature", 1.0) else 2
    found = sampler.sample(
        LOGITS_V.expand(num, -1),
        [0] * num,
        list(range(1, num + 1)),
        (),
        [draft] * (num - 1) + [-1],
        [relaxed] * num if relaxed else (),
    )
    return float((found.token_ids_B[:-1] == draft).double().mean())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_relaxed_rule_takes_what_is_near_the_likeliest(temperature: float) -> None:
    rules, given = LossyRules(relaxed_topk=2, relaxed_delta=0.4), {"temperature": temperature}
    assert PROBS[LIKELY] - PROBS[NEAR] < 0.4 < PROBS[LIKELY] - PROBS[FAR]
    assert sampled(rules, NEAR, relaxed=True, **given) == 1.0
    assert sampled(rules, FAR, relaxed=True, **given) < 0.1
    narrow = LossyRules(relaxed_topk=1, relaxed_delta=0.4)
    exact = sampled(None, NEAR, **given)
    assert sampled(narrow, NEAR, relaxed=True, **given) == exact < 0.6
    assert sampled(rules, NEAR, **given) == exact  # the answer after the reasoning


@pytest.mark.parametrize(
    "edited",
    [
        {"logit_bias": ((NEAR, -100.0),)},
        {"presence_penalty": 1e-6},
        {"min_tokens": 10**6, "stop_token_ids": (NEAR,)},
    ],
)
def test_rows_with_edited_logits_keep_the_exact_rule(edited: dict[str, object]) -> None:
    rules = LossyRules(relaxed_delta=1.0, single=0.01, acc=0.01)
    assert sampled(rules, NEAR, relaxed=True, temperature=0.9, **edited) < 0.6


def test_thresholds_raise_the_part_of_drafts_that_count() -> None:
    own = float(PROBS[NEAR])
    exact = sampled(None, NEAR)
    assert exact == pytest.approx(own, abs=0.07)
    assert sampled(LossyRules(), NEAR) == exact
    assert sampled(LossyRules(acc=0.5), NEAR) == pytest.approx(own / 0.5, abs=0.07)
    assert sampled(LossyRules(acc=0.1), NEAR) == 1.0
    assert sampled(LossyRules(single=own - 0.01), NEAR) == 1.0
    assert sampled(LossyRules(single=own + 0.01), NEAR) == exact
    assert sampled(LossyRules(single=own - 0.01), FAR) < 0.1
    assert sampled(LossyRules(single=0.5), LIKELY, top_k=1) == 1.0  # greedy: the exact rule
    # Of two tokens that a filter keeps, the probability is that among them.
    kept = own / float(PROBS[NEAR] + PROBS[LIKELY])
    assert sampled(LossyRules(single=kept - 0.001), NEAR, top_k=2) == 1.0
    assert sampled(LossyRules(single=kept + 0.001), NEAR, top_k=2) < 0.6


def test_rows_with_masks_keep_the_exact_rule_under_thresholds() -> None:
    sampler = Sampler(
        vocab_size=8, max_batch_size=1, device=torch.device("cpu"), lossy=LossyRules(single=0.01)
    )
    sampler.bind(bound_row(0, SamplingParams(seed=3)))
    mask = np.packbits(np.arange(32) == LIKELY, bitorder="little").tobytes()
    found = sampler.sample(LOGITS_V.expand(2, -1), [0, 0], [1, 2], [mask, mask], [NEAR, -1])
    assert found.token_ids_B.tolist() == [LIKELY, LIKELY]

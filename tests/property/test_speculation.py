"""Drafts change no token: answers are those of plain decoding, whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from property.test_batch_invariance import SAMPLING, decoder_config

from support.batch_driver import MAX_LENGTH, BatchDriver, random_decoder
from support.eagle import agreeing_tensors, eagle_config, join_head, random_tensors
from support.token_driver import (
    drive,
    random_drafting_world,
    random_model_drafting_world,
)
from support.token_world import World
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.runtime.decoders.heads.eagle import EagleHead
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.schedulers.tokens.prompt_lookup import LookupRule

MakeWorld = Callable[[random.Random], World]
RULE = LookupRule(min_match=1, max_match=4, max_drafts=7)
LOOP = (5, 6, 7, 8)


WORLDS = (random_drafting_world, random_model_drafting_world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(24))
def test_answers_are_right_and_nothing_is_lost(seed: int, world: MakeWorld) -> None:
    """The shadow model: right and wrong drafts beside cancelled, preempted and paused jobs."""
    drive(seed, 400, world)


@pytest.mark.parametrize("world", WORLDS)
def test_the_worlds_accept_and_reject_drafts(world: MakeWorld) -> None:
    totals = [drive(seed, 400, world).scheduler.stats().counters for seed in range(9)]
    drafted = sum(each["draft_tokens_total"] for each in totals)
    accepted = sum(each["accepted_draft_tokens_total"] for each in totals)
    assert 0 < accepted < drafted


def answers(
    decoder: Decoder,
    native: NativeKernels,
    depth: int,
    rule: LookupRule | None = None,
    draft: Decoder | EagleHead | None = None,
) -> tuple[list[TokenDelta], float]:
    """All deltas of jobs with every kind of sampling, and the tokens that were accepted."""
    layout = decoder.config.kv_layout(4, torch.bfloat16)
    driver = BatchDriver(
        decoder,
        layout,
        native,
        num_pages=-(-MAX_LENGTH // 4) + 20,
        depth=depth,
        lookup_rule=rule,
        draft=draft,
        max_batch_size=8,
        max_batch_input_tokens=40,
    )
    for index, kind in enumerate(SAMPLING):
        sampling = msgspec.structs.replace(kind, max_tokens=40, stop_token_ids=(11,))
        request = TokenRequest(prompt_ids=LOOP * 5 + (index,) + LOOP, sampling=sampling)
        driver.submit(str(index), request)
    driver.run()
    found = [delta for job_id in driver.jobs for delta in driver.deltas(job_id)]
    return found, driver.scheduler.stats().counters["accepted_draft_tokens_total"]


def whole(deltas: list[TokenDelta]) -> list[object]:
    """The tokens, scores and ends of jobs, however they were divided."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    scores = [entry for delta in deltas for entry in (*delta.prompt_logprobs, *delta.logprobs)]
    ends = [(d.finish_reason, d.stop_token_id) for d in deltas if d.finish_reason]
    return [tokens, scores, ends]


@pytest.mark.parametrize(
    ("depth", "drafts"),
    [(1, "lookup"), (2, "lookup"), (1, "the model itself"), (2, "another model")],
)
def test_tokens_and_scores_are_those_of_plain_decoding(
    kernels: NativeKernels, depth: int, drafts: str
) -> None:
    """Greedy and seeded rows, with log-probabilities, penalties and stop tokens."""
    config = decoder_config(64, (4, 2, 32), 112, vocab_size=101)
    config = replace(config, has_tied_embeddings=True)
    decoder = random_decoder(config, torch.bfloat16, kernels)
    others = {
        "lookup": None,
        "the model itself": decoder,
        "another model": random_decoder(config, torch.float32, None),
    }
    rule = RULE if drafts == "lookup" else None
    plain, _ = answers(decoder, kernels, depth)
    drafted, num_accepted = answers(decoder, kernels, depth, rule, others[drafts])
    assert whole(drafted) == whole(plain)
    assert num_accepted > 0
    assert len(drafted) < len(plain)


@pytest.mark.parametrize(("depth", "agrees"), [(1, True), (2, True), (2, False)])
def test_a_head_changes_no_token(native: NativeKernels, depth: int, agrees: bool) -> None:
    """As above. A head that agrees drafts for a model whose layers add little."""
    decoder = random_decoder(
        decoder_config(64, (2, 2, 32), 112, vocab_size=101),
        torch.bfloat16,
        native,
        0.05 if agrees else 1.0,
    )
    plain, _ = answers(decoder, native, depth)
    config = eagle_config(decoder, vocab_size=0 if agrees else 60)
    tensors = agreeing_tensors(config) if agrees else random_tensors(config, 101)
    if agrees:
        tensors["norm.weight"] = decoder.norm.weight_C
    head = join_head(config, tensors, decoder, (0, 1, 2), native)
    drafted, num_accepted = answers(decoder, native, depth, draft=head)
    assert whole(drafted) == whole(plain)
    num_tokens = sum(len(delta.token_ids) for delta in plain)
    assert num_accepted > (num_tokens / 3 if agrees else 0)

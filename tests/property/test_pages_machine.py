"""No page is lost, shared wrongly or freed early, whatever happens in whatever order.

Two searches over the same world (`token_world`): a Hypothesis state machine, which shrinks what
it finds, and a seeded driver, which supplies the bulk of the steps. After every action all
accounts are audited; every step checks that each row reads exactly its own past.
"""

import sys
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.tiers import first
from support.token_driver import drive, random_world
from support.token_world import World, token_request
from triptych.core.errors import InternalError, OutOfMemory

_WORLDS = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from((5, 8, 12, 30)),
        "page_size": st.sampled_from((2, 4)),
        "depth": st.sampled_from((1, 2)),
        "max_length": st.just(24),
        "max_batch_size": st.sampled_from((1, 2, 5)),
        "max_batch_input_tokens": st.sampled_from((2, 5, 16)),
        "max_batch_total_tokens": st.sampled_from((0, 24)),
        "enable_chunked_prefill": st.booleans(),
        "enable_in_flight_batching": st.booleans(),
        "kvcache_ce_watermark": st.sampled_from((0.5, 1.0)),
        "max_preemptions": st.sampled_from((0, 1, 3)),
        "schedule_policy": st.sampled_from(("fcfs", "lpm", "priority")),
    }
)


class PagesMachine(RuleBasedStateMachine):
    """Admit, chunk, decode, preempt, cancel, pause, finish, fail; one or two plans in flight."""

    world: World
    num_jobs = 0

    @initialize(options=_WORLDS)
    def start(self, options: dict[str, Any]) -> None:
        self.world = World(**options)

    @rule(
        length=st.integers(1, 20),
        num_shared=st.integers(0, 20),
        max_tokens=st.sampled_from((1, 3, 8, 16)),
        tenant=st.sampled_from(("", "x")),
        priority=st.integers(0, 1),
        is_scored=st.booleans(),
    )
    def admit(
        self,
        *,
        length: int,
        num_shared: int,
        max_tokens: int,
        tenant: str,
        priority: int,
        is_scored: bool,
    ) -> None:
        prompt = tuple(0 if i < num_shared else 1 + self.num_jobs % 2 for i in range(length))
        request = token_request(
            prompt,
            max_tokens=max_tokens,
            tenant=tenant,
            priority=priority,
            prompt_logprobs=is_scored,
            stop_token_ids=(1, 2, 3) if length % 2 else (),
        )
        self.world.submit(f"{self.num_jobs}", request)
        self.num_jobs += 1

    @rule(times=st.integers(1, 12))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.world.turn()
            self.world.check()

    @rule()
    def book(self) -> None:
        self.world.book()

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(job=st.integers(0, 30))
    def cancel(self, job: int) -> None:
        self.world.scheduler.cancel(f"{job}")

    @rule(job=st.integers(0, 30), is_paused=st.booleans())
    def pause(self, job: int, *, is_paused: bool) -> None:
        self.world.scheduler.set_paused(f"{job}", is_paused)

    @rule(job=st.integers(0, 30))
    def spoil(self, job: int) -> None:
        self.world.runner.bad_jobs.add(f"{job}")

    @rule(is_memory=st.booleans())
    def fail(self, *, is_memory: bool) -> None:
        self.world.fail(OutOfMemory("full") if is_memory else InternalError("broken"))

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_all()


PagesMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestPagesMachine = PagesMachine.TestCase


@pytest.mark.parametrize("block", first(range(4)))
def test_twenty_thousand_steps_lose_no_page(block: int) -> None:
    """Each block is a share of the steps, in worlds of its own."""
    drive_many(block, 5000)


def drive_many(block: int, num_steps: int) -> None:
    """As many steps, in as many worlds as they take."""
    num_done = 0
    for seed in count(10_000 * block):
        if num_done >= num_steps:
            return
        num_done += drive(seed, 600, random_world).num_steps


def test_the_same_calls_give_the_same_answers() -> None:
    lives = [drive(77, 400, random_world) for _ in range(2)]
    assert lives[0].outputs.outputs == lives[1].outputs.outputs
    assert lives[0].scheduler.stats() == lives[1].scheduler.stats()
    assert lives[0].num_steps > 50


def test_the_driver_goes_everywhere() -> None:
    """The search is of no use where it never preempts, shares, evicts or fails."""
    totals: dict[str, float] = {}
    codes: set[str] = set()
    for seed in range(80):
        world = drive(seed, 300, random_world)
        for name, total in world.scheduler.stats().counters.items():
            totals[name] = totals.get(name, 0) + total
        finals = [outputs[-1] for outputs in world.outputs.outputs.values()]
        codes |= {final.error.code for final in finals if final.error is not None}
        codes |= {final.payload.finish_reason for final in finals if final.payload is not None}
    assert min(total for name, total in totals.items() if "draft" not in name) > 20, totals
    assert codes >= {"stop", "length", "cancelled", "non_finite", "internal_error", "out_of_memory"}


if __name__ == "__main__":
    drive_many(0, int(sys.argv[1]))

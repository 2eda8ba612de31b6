"""Random prompts, long and short: what a prompt waits for, and that every prompt goes on.

Counts steps, not seconds. There is room for every prompt, and every answer is one token, so that
only the order of prompts decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from support.token_world import World, token_request
from triptych.core.engine_api.plan import TokenPlan
from triptych.schedulers.tokens.state import SequenceState

LONGEST = 180
SHORTEST_LONG = 50
LONGEST_SHORT = 15


@dataclass(frozen=True)
class Arrival:
    """A prompt that is submitted before the step of that number."""

    step: int
    length: int
    priority: int = 0
    client: str = "a"


@dataclass
class Load:
    """Prompts on their way through a world; `plans` are the steps, in order."""

    world: World
    arrivals: list[Arrival]
    plans: list[TokenPlan] = field(default_factory=list)
    booked: list[dict[str, int]] = field(default_factory=list)
    """The tokens of each prompt still to be booked, before each step."""

    def run(self) -> Iterator[TokenPlan]:
        """Submit and step until every prompt is answered; yield each plan once it is booked."""
        waiting = dict(enumerate(self.arrivals))
        while waiting or self.world.in_flight or self._left():
            due = [i for i, arrival in waiting.items() if arrival.step <= len(self.plans)]
            for index in due or list(waiting)[: not self._left()]:
                self._submit(index, waiting.pop(index))
            left = self._left()
            plan = self.world.book()
            if plan is not None:
                assert isinstance(plan, TokenPlan)
                self.plans.append(plan)
                self.booked.append(left)
                yield plan
            if plan is None or len(self.world.in_flight) >= self.world.depth:
                self.world.commit()
        self.world.finish_all()

    def first_token_step(self, name: str) -> int:
        """The number of the step that completes a prompt."""
        for number, plan in enumerate(self.plans):
            if any(row.job_id == name and row.is_sampled for row in plan.rows):
                return number
        raise AssertionError(f"{name} was never completed")

    def begun(self) -> list[SequenceState]:
        """Prompts begun and not completed."""
        running = self.world.scheduler.tokens.state.running
        return [row for row in running if not row.is_decoding]

    def _left(self) -> dict[str, int]:
        rows = self.world.scheduler.tokens.state.rows
        return {row.name: row.num_remaining for row in rows if not row.is_decoding}

    def _submit(self, index: int, arrival: Arrival) -> None:
        prompt = tuple((index * 1009 + 31 * i) % 4999 for i in range(arrival.length))
        request = token_request(prompt, max_tokens=1, priority=arrival.priority)
        self.world.submit(f"{index}", request, client=arrival.client)


def tokens_of(plan: TokenPlan) -> dict[str, int]:
    return {row.job_id: row.num_tokens for row in plan.rows}


def load_of(
    arrivals: list[Arrival],
    budget: int,
    depth: int = 1,
    options: Mapping[str, object] | None = None,
) -> Load:
    world = World(
        num_pages=512,
        page_size=8,
        max_length=LONGEST + 8,
        depth=depth,
        max_batch_size=32,
        max_batch_input_tokens=budget,
        **(options or {}),
    )
    return Load(world, sorted(arrivals, key=lambda arrival: arrival.step))


FAST = settings(max_examples=50, deadline=None)
steps = st.integers(0, 30)
lengths = st.one_of(st.integers(1, LONGEST_SHORT), st.integers(LONGEST_SHORT, LONGEST))
budgets = st.sampled_from([32, 40, 64])
depths = st.integers(1, 2)
loads = st.lists(st.builds(Arrival, step=steps, length=lengths), min_size=1, max_size=14)
shared_loads = st.lists(
    st.builds(Arrival, step=steps, length=lengths, client=st.sampled_from("abc")),
    min_size=1,
    max_size=14,
)


@FAST
@given(arrivals=shared_loads, budget=budgets, depth=depths)
def test_every_step_is_full_while_prompts_wait(
    arrivals: list[Arrival], budget: int, depth: int
) -> None:
    """No order of prompts costs a step, whichever clients sent them."""
    load = load_of(arrivals, budget, depth)
    for plan in load.run():
        tokens = tokens_of(plan)
        left = load.booked[-1]
        is_full = plan.num_tokens == budget
        assert is_full or all(tokens.get(name, 0) == count for name, count in left.items())


@FAST
@given(arrivals=loads, budget=budgets, depth=depths)
def test_the_first_prompt_begun_gets_half_of_every_step(
    arrivals: list[Arrival], budget: int, depth: int
) -> None:
    """So it is over after twice the steps that it takes alone, and then the next is the first."""
    load = load_of(arrivals, budget, depth)
    begun: dict[str, int] = {}
    for plan in load.run():
        tokens, left = tokens_of(plan), load.booked[-1]
        oldest = min((name for name in begun if name in left), key=int, default=None)
        if oldest is not None:
            assert tokens.get(oldest, 0) >= min(left[oldest], budget // 2)
        begun |= tokens


@FAST
@given(
    longs=st.lists(st.integers(SHORTEST_LONG, LONGEST), min_size=1, max_size=10),
    shorts=st.lists(
        st.builds(Arrival, step=steps, length=st.integers(1, LONGEST_SHORT)), max_size=8
    ),
    budget=budgets,
    depth=depths,
)
def test_short_prompts_wait_for_short_ones_however_many_long_ones_are_ahead(
    longs: list[int], shorts: list[Arrival], budget: int, depth: int
) -> None:
    """Half of each step is theirs. A long prompt is ahead of them only for what is left of it when
    that is less than twice theirs or fits half of a step, and one at a time is so near its end.
    """
    arrivals = [Arrival(0, length) for length in longs]
    load = load_of([*arrivals, *shorts], budget, depth)
    for _ in load.run():
        pass
    half = budget - budget // 2
    for index, own in enumerate(load.arrivals):
        if own.length >= SHORTEST_LONG:
            continue
        arrived = next(i for i, left in enumerate(load.booked) if f"{index}" in left)
        near_its_end = max(2 * own.length, budget // 2)
        ends = sum(
            left for left in load.booked[arrived].values() if LONGEST_SHORT < left < near_its_end
        )
        ahead = sum(a.length for a in load.arrivals if a.length < SHORTEST_LONG) + ends
        most = -(-ahead // half)
        assert load.first_token_step(f"{index}") - arrived < most + 1


@FAST
@given(
    length=st.integers(1, LONGEST),
    count=st.integers(1, 10),
    budget=budgets,
    depth=depths,
    data=st.data(),
)
def test_equal_prompts_are_answered_as_they_came(
    length: int, count: int, budget: int, depth: int, data: st.DataObject
) -> None:
    arrivals = [Arrival(data.draw(steps), length) for _ in range(count)]
    load = load_of(arrivals, budget, depth)
    num_begun = [len(load.begun()) for _ in load.run()]
    order = [load.first_token_step(f"{index}") for index in range(count)]
    assert order == sorted(order)
    assert max(num_begun) <= 2, "one after the other"


@FAST
@given(arrivals=loads, budget=budgets, depth=depths)
def test_few_prompts_are_begun_at_once(arrivals: list[Arrival], budget: int, depth: int) -> None:
    """About one for each doubling of the length."""
    load = load_of(arrivals, budget, depth)
    num_begun = [len(load.begun()) for _ in load.run()]
    assert max(num_begun) <= LONGEST.bit_length() + 1


@FAST
@given(
    arrivals=st.lists(
        st.builds(Arrival, step=steps, length=lengths, priority=st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    budget=budgets,
    depth=depths,
)
def test_no_prompt_begins_before_one_of_higher_priority(
    arrivals: list[Arrival], budget: int, depth: int
) -> None:
    load = load_of(arrivals, budget, depth, {"schedule_policy": "priority"})
    begun: set[str] = set()
    for plan in load.run():
        tokens, left = tokens_of(plan), load.booked[-1]
        ranks = {name: load.world.requests[name].priority for name in left}
        new = [ranks[name] for name in tokens if name not in begun]
        unfinished = [ranks[name] for name in left if tokens.get(name, 0) < left[name]]
        held_up = [rank for rank in unfinished if any(rank > other for other in new)]
        assert not held_up
        begun |= tokens.keys()


@FAST
@given(arrivals=loads, budget=budgets, threshold=st.integers(1, 40), depth=depths)
def test_no_prompt_takes_more_than_the_threshold(
    arrivals: list[Arrival], budget: int, threshold: int, depth: int
) -> None:
    load = load_of(arrivals, budget, depth, {"long_prefill_token_threshold": threshold})
    for plan in load.run():
        assert max(tokens_of(plan).values()) <= threshold


@FAST
@given(arrivals=shared_loads, budget=budgets, most=st.integers(1, 3), depth=depths)
def test_no_more_prompts_are_partly_computed_than_allowed(
    arrivals: list[Arrival], budget: int, most: int, depth: int
) -> None:
    load = load_of(arrivals, budget, depth, {"max_num_partial_prefills": most})
    for _ in load.run():
        assert len(load.begun()) <= most

"""Clients of one model: turns, places, pages and seconds; long prompts beside short ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tiers import first
from support.token_driver import drive, random_world
from support.token_world import World, token_request
from triptych.schedulers.cost import CostModel
from triptych.schedulers.shares import ServiceShares, round_robin
from triptych.schedulers.tokens.state import SequenceState
from triptych.schedulers.tokens.step_shares import StepShares, StepTurn


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7 + i) % 40 for i in range(length))


def rows_of(world: World) -> list[tuple[str, int]]:
    """Launch one step and end it; its rows."""
    plan = world.book()
    assert plan is not None
    world.commit()
    world.check()
    return [(row.job_id, row.num_tokens) for row in plan.rows]  # type: ignore[attr-defined]


def steps_to_first_token(world: World, job_id: str) -> int:
    for number in range(1, 200):
        world.step()
        world.check()
        if world.output_ids(job_id):
            return number
    raise AssertionError("it never has a token")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [24, 200])
def test_a_crowd_delays_another_client_by_two_steps(depth: int, num_pages: int) -> None:
    world = World(num_pages=num_pages, max_batch_size=4, max_batch_input_tokens=64, depth=depth)
    for index in range(64):
        world.submit(f"a{index}", token_request(prompt(8, index), max_tokens=30), client="a")
    for _ in range(10):
        world.step()
    world.submit("b", token_request(prompt(6, 3), max_tokens=3), client="b")
    assert steps_to_first_token(world, "b") <= 2 + depth
    world.finish_all()  # checks that the answers of rows that gave way are the same
    assert world.scheduler.stats().counters["preemptions_total"] >= 1


def test_waiting_jobs_are_not_put_in_order_where_none_can_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_pages=40, max_batch_size=2, max_batch_input_tokens=64)
    for index in range(6):
        request = token_request(prompt(6, index), max_tokens=9)
        world.submit(f"{index}", request, client=f"{index}")
    world.step()

    def ordered(_shares: ServiceShares, rows: Iterable[SequenceState]) -> Iterator[SequenceState]:
        assert not list(rows), "thousands may wait, at every step"
        return iter(())

    with monkeypatch.context() as patched:
        patched.setattr(ServiceShares, "in_turn", ordered)
        for _ in range(4):
            assert len(rows_of(world)) == 2
    world.finish_all()


class Streams:
    """Clients that always have so many requests under way; they come as others end."""

    def __init__(self, world: World, **requests: tuple[int, int]) -> None:
        self.world, self._num_submitted = world, 0
        self.requests = requests
        """By client: how many, and of how many tokens."""

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for client, (num_requests, num_tokens) in self.requests.items():
                while self._num_live(client) < num_requests:
                    self._num_submitted += 1
                    name = f"{client}{self._num_submitted}"
                    length = num_tokens + self._num_submitted * 5 % 7  # so that not all end at once
                    request = token_request(prompt(6, self._num_submitted), max_tokens=length)
                    self.world.submit(name, request, client=client)
            self.world.step()
            self.world.check()

    def num_tokens(self, client: str) -> int:
        jobs = [job_id for job_id, job in self.world.jobs.items() if job.client == client]
        return sum(len(self.world.output_ids(job_id)) for job_id in jobs)

    def _num_live(self, client: str) -> int:
        jobs = self.world.jobs.items()
        return sum(
            job.client == client and not (job.state.is_final or job_id.startswith("big"))
            for job_id, job in jobs
        )


def crowded(num_places: int, **requests: tuple[int, int]) -> Streams:
    """A pool in which many requests leave no room for a large one."""
    world = World(
        num_pages=40, max_length=160, max_batch_size=num_places, max_batch_input_tokens=64
    )
    streams = Streams(world, **requests)
    streams.run(20)
    world.submit("big", token_request(prompt(130, 5), max_tokens=2), client="a")
    return streams


@pytest.mark.parametrize("requests", [{"a": (3, 8), "b": (9, 8)}, {"a": (0, 8), "b": (9, 8)}])
def test_a_large_prompt_is_not_passed_for_ever(requests: dict[str, tuple[int, int]]) -> None:
    streams = crowded(10, **requests)
    streams.run(150)
    assert streams.world.output_ids("big")


def test_a_large_prompt_of_one_client_is_not_in_the_way_of_another() -> None:
    streams = crowded(4, b=(6, 80))
    streams.world.submit("c", token_request(prompt(6, 3), max_tokens=3), client="c")
    assert steps_to_first_token(streams.world, "c") <= 3


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_do_not_give_way_for_pages_that_others_hold_too(depth: int) -> None:
    world = World(num_pages=14, max_length=60, max_batch_size=8, depth=depth)
    shared = prompt(32)
    for index in range(4):
        world.submit(f"a{index}", token_request(shared, max_tokens=12), client="a")
    for _ in range(4):
        world.step()
    world.submit("b", token_request(prompt(20, 3), max_tokens=3), client="b")
    world.finish_all()
    assert world.scheduler.stats().counters["preemptions_total"] <= 4


def test_pages_that_prompts_leave_free_do_not_keep_a_client_out() -> None:
    world = World(
        num_pages=60, max_length=160, max_batch_size=40, max_batch_input_tokens=128,
        kvcache_ce_watermark=0.9,
    )  # fmt: skip
    for index in range(40):
        world.submit(f"a{index}", token_request(prompt(8, index), max_tokens=100), client="a")
    for _ in range(2):
        world.step()
    world.submit("b", token_request(prompt(8, 50), max_tokens=3), client="b")
    assert steps_to_first_token(world, "b") <= 3


def test_what_others_did_not_ask_for_holds_up_no_client() -> None:
    """Little asked for all the time is no credit, neither for that client nor for a newcomer."""
    world = World(num_pages=4000, max_length=200, max_batch_size=12, max_batch_input_tokens=64)
    streams = Streams(world, light=(3, 30), old=(20, 20))
    streams.run(1500)
    streams.requests["new"] = (20, 20)
    before = streams.num_tokens("old")
    streams.run(400)
    assert streams.num_tokens("old") - before > 0.6 * streams.num_tokens("new")


def test_a_client_alone_gives_way_to_none_of_its_own() -> None:
    world = World(num_pages=200, max_batch_size=4, max_batch_input_tokens=64)
    for index in range(12):
        world.submit(f"{index}", token_request(prompt(8, index), max_tokens=9), client="a")
    world.run()
    assert world.scheduler.stats().counters["preemptions_total"] == 0


def test_waiting_rows_of_clients_take_turns() -> None:
    world = World(num_pages=200, max_batch_size=1, max_batch_input_tokens=64)
    for index in range(4):
        world.submit(f"a{index}", token_request(prompt(8, index), max_tokens=1), client="a")
    for index in range(2):
        world.submit(f"b{index}", token_request(prompt(8, 9 + index), max_tokens=1), client="b")
    order = [rows_of(world)[0][0] for _ in range(6)]
    assert order[:4] == ["a0", "b0", "a1", "b1"]
    assert order[4:] == ["a2", "a3"]


def test_a_long_prompt_leaves_half_of_its_steps_to_shorter_ones() -> None:
    world = World(num_pages=60, max_length=120, max_batch_input_tokens=8)
    world.submit("long", token_request(prompt(80), max_tokens=1))
    world.submit("other", token_request(prompt(60, 1), max_tokens=1))
    assert rows_of(world) == [("long", 8)]
    world.submit("short", token_request(prompt(3, 2), max_tokens=1))
    assert rows_of(world) == [("long", 5), ("short", 3)]
    assert rows_of(world) == [("long", 8)]
    world.finish_all()


def test_short_prompts_without_end_do_not_stop_a_long_one() -> None:
    world = World(num_pages=60, max_length=120, max_batch_input_tokens=8)
    world.submit("long", token_request(prompt(80), max_tokens=1))
    for index in range(40):
        world.submit(f"{index}", token_request(prompt(4, 1 + index), max_tokens=1))
        world.step()
    assert world.output_ids("long")


def timed_world(rng: random.Random) -> World:
    """One whose steps take time, so that clients share it."""
    world = random_world(rng)
    world.runner.step_s = step_s
    return world


@pytest.mark.parametrize("world_of", [random_world, timed_world])
@pytest.mark.parametrize("seed", first([1110, 1263, 1426, *range(60)], 23))
def test_nothing_is_lost_among_clients(seed: int, world_of: Callable[..., World]) -> None:
    drive(seed, 250, world_of, clients=("a", "b", "b", "b", "c"))


def step_s(num_rows: int) -> float:
    """A step reads all weights; a row alone has kernels of its own."""
    return 0.006 if num_rows == 1 else 0.011 + 0.0005 * num_rows


class Seconds:
    """Seconds that pass while clients are answered without end, and what each of them has of it."""

    def __init__(self, depth: int, **rows: int) -> None:
        self.world = World(
            num_pages=20000, max_length=1000, max_batch_size=64, max_batch_input_tokens=4096,
            depth=depth,
        )  # fmt: skip
        self.world.runner.step_s = step_s
        for client, num_rows in rows.items():
            for index in range(num_rows):
                name, request = f"{client}{index}", token_request(prompt(4), max_tokens=900)
                self.world.submit(name, request, client=client)

    def run(self, num_steps: int) -> dict[str, float]:
        """Take steps; the mean seconds from token to token of each client's first row."""
        elapsed_s, before = 0.0, self._counts()
        self.steps: list[set[str]] = []
        for _ in range(num_steps):
            plan = self.world.book()
            if plan is not None:
                rows = plan.rows  # type: ignore[attr-defined]
                elapsed_s += step_s(len(rows))
                self.steps.append({row.job_id.rstrip("0123456789") for row in rows})
            while len(self.world.in_flight) >= (self.world.depth if plan else 1):
                self.world.commit()
                if plan is None:
                    break
        self.elapsed_s = elapsed_s
        after = self._counts()
        return {name: elapsed_s / max(1, after[name] - before[name]) for name in after}

    def _counts(self) -> dict[str, int]:
        return {name: len(self.world.output_ids(name)) for name in self.world.requests}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_busy_client_takes_half_of_the_time_of_another(depth: int) -> None:
    world = Seconds(depth, loud=31, light=1)
    world.run(100)
    gaps_s = world.run(400)
    assert 1.4 * step_s(1) < gaps_s["light0"] < 1.7 * step_s(1), "some is left for the host"
    num_without = sum("loud" not in names for names in world.steps)
    assert num_without > len(world.steps) / 2, "most gaps are as if it were alone"
    assert all("light" in names for names in world.steps)
    assert gaps_s["loud0"] < 6 * step_s(32), "it takes its share in full steps"


@pytest.mark.parametrize("depth", [1, 2])
def test_of_several_the_busiest_takes_its_share(depth: int) -> None:
    world = Seconds(depth, loud=40, some=4, light=1)
    world.run(100)
    gaps_s = world.run(400)
    assert gaps_s["light0"] < 1.55 * step_s(5)
    assert gaps_s["some0"] < 1.55 * step_s(5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_others", [4, 5, 12])
def test_among_many_clients_the_busiest_goes_on(num_others: int, depth: int) -> None:
    others = dict.fromkeys("abcdefghijkl"[:num_others], 1)
    world = Seconds(depth, loud=20, **others)
    world.run(100)
    gaps_s = world.run(400)
    alone_s = step_s(num_others)
    assert gaps_s["a0"] < (1 + 1 / num_others) * alone_s
    paid_s = (step_s(num_others + 20) - alone_s) * num_others / 0.6
    assert gaps_s["loud0"] < 1.5 * paid_s, "its steps are paid by its share of the others' time"


@pytest.mark.parametrize("rows", [{"a": 8, "b": 8}, {"a": 1, "b": 1}, {"a": 4, "b": 3, "c": 4}])
def test_clients_that_ask_for_as_much_share_every_step(rows: dict[str, int]) -> None:
    world = Seconds(1, **rows)
    world.run(60)
    world.run(200)
    shared = sum(names == set(rows) for names in world.steps)
    assert shared > 0.9 * len(world.steps)


def test_a_client_alone_is_never_held_up() -> None:
    world = Seconds(1, loud=31)
    world.run(5)
    world.run(100)
    assert world.elapsed_s == pytest.approx(100 * step_s(31))


def book(shares: StepShares, rows: list[SequenceState], num_steps: int) -> StepTurn:
    """Book steps of `rows` out of turn; whose turn it is afterwards."""
    for _ in range(num_steps):
        shares.book(shares.turn(rows), [row for row in rows if row.client == "loud"])
    turn = shares.turn(rows)
    assert turn is not None
    return turn


def answering(**rows: int) -> list[SequenceState]:
    world = World(num_pages=2000, max_batch_size=64, max_batch_input_tokens=4096)
    for client, num_rows in rows.items():
        for index in range(num_rows):
            world.submit(f"{client}{index}", token_request(prompt(4), max_tokens=40), client=client)
    return [world.scheduler.row_of(job_id) for job_id in world.jobs]


def test_time_in_which_others_could_not_go_on_is_not_paid_back() -> None:
    shares, rows = StepShares(CostModel()), answering(loud=31, light=1)
    for num_rows in (1, 1, 1, 31, 31, 32, 32):
        shares.observe(num_rows, step_s(num_rows))
    assert book(shares, rows, 500).stays_out
    own_steps = [row for row in rows if row.client == "light"]
    num_out = 0
    while (turn := shares.turn(rows)) is not None and turn.stays_out:
        shares.book(turn, own_steps)
        num_out += 1
    assert 1 <= num_out <= 2 * step_s(31) / step_s(1)


def test_a_client_stays_out_for_none_of_lower_priority() -> None:
    shares, rows = StepShares(CostModel()), answering(loud=20, light=4)
    for num_rows in (4, 4, 4, 24, 24):
        shares.observe(num_rows, step_s(num_rows))
    assert shares.turn(rows) is not None
    for row in rows:
        row.rank = (row.client == "light", row.rank[1])
    assert shares.turn(rows) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 3.0)), max_size=300))
def test_service_goes_to_who_received_the_least(wishes: list[tuple[str, float]]) -> None:
    """Clients that always have work are never further apart than the longest piece."""
    shares = ServiceShares()
    for client in "abc":
        shares.join(client)
    for _, amount in wishes:
        shares.charge(min("abc", key=shares.service_of), amount)
        received = [shares.service_of(client) for client in "abc"]
        assert max(received) - min(received) <= 3.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 900), min_size=1))))
def test_pieces_charged_at_once_count_as_one_after_the_other(
    charges: list[tuple[str, list[int]]],
) -> None:
    together, one_by_one = ServiceShares(), ServiceShares()
    for client in "abc":
        together.join(client)
        one_by_one.join(client)
    for client, amounts in charges:
        together.charge(client, *amounts)
        for amount in amounts:
            one_by_one.charge(client, amount)
        assert [*map(together.service_of, "abc")] == [*map(one_by_one.service_of, "abc")]


def test_idling_brings_no_credit_and_leaving_no_forgiveness() -> None:
    shares = ServiceShares()
    shares.join("a")
    shares.join("b")
    shares.charge("a", 50.0)
    shares.leave("a")
    shares.charge("b", 10.0)
    shares.join("a")
    assert shares.service_of("a") == 50.0
    shares.join("late")
    assert shares.service_of("late") == 10.0


def test_names_of_clients_that_left_do_not_pile_up() -> None:
    shares = ServiceShares()
    shares.join("stays")
    for index in range(5000):
        shares.join(f"{index}")
        shares.charge("stays", 1.0)
        shares.leave(f"{index}")
    assert len(shares._service) <= 1024


class Ranked:
    """A row in a queue."""

    def __init__(self, client: str, place: int, num_tokens: int) -> None:
        self.client, self.rank, self.num_tokens = client, (0, place), num_tokens


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9)), max_size=40))
def test_turns_keep_the_order_within_a_client(rows: list[tuple[str, int]]) -> None:
    shares = ServiceShares()
    for client in "abcd":
        shares.join(client)
    queue = [Ranked(client, place, size) for place, (client, size) in enumerate(rows)]
    found = list(shares.in_turn(queue))
    assert sorted(row.rank for row in found) == [row.rank for row in queue]
    for client in "abcd":
        own = [row.rank for row in found if row.client == client]
        assert own == sorted(own)


def test_rows_of_a_step_are_spread_over_clients() -> None:
    rng = random.Random(1)
    rows = [Ranked(rng.choice("aaaab"), place, 1) for place in range(40)]
    chosen = round_robin(rows, 6)
    assert sorted(row.client for row in chosen) == list("aaabbb")

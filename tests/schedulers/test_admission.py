"""Admission: bounds for all and for each key, and when to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest, Overloaded, RateLimited
from triptych.core.options.batch_limits import with_batch_limits
from triptych.core.options.config import ScheduleOptions
from triptych.schedulers.admission import Admission, Ticket


class Clock:
    """Time that passes on command."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(clock: Clock | None = None, num_keys: int = 1, **options: int) -> Admission:
    base = {"max_batch_size": 1, "max_queue_size": 9} | options
    return Admission(options=ScheduleOptions(**base), num_keys=num_keys, clock=clock or Clock())


def fill(gate: Admission, key: str) -> list[Ticket]:
    """As many calls as a key is let in with."""
    tickets: list[Ticket] = []
    try:
        while True:
            tickets.append(admit(gate, key=key))
    except (RateLimited, Overloaded):
        return tickets


def admit(gate: Admission, num_jobs: int = 1, num_tokens: int = 1, key: str = "k") -> Ticket:
    return gate.admit(key=key, num_jobs=num_jobs, num_tokens=num_tokens)


def test_what_runs_comes_on_top_of_what_waits() -> None:
    gate = admission()
    tickets = [admit(gate) for _ in range(10)]
    with pytest.raises(Overloaded, match="10 jobs in progress, of 10") as refusal:
        admit(gate)
    assert refusal.value.retry_after_s == 1.0
    tickets[0].release()
    admit(gate)


@pytest.mark.parametrize(("is_cpu", "left_gib"), [(True, 0), (False, 1), (False, 80)])
@pytest.mark.parametrize("rows", [0, 7])
def test_an_engine_that_chooses_its_rows_holds_what_is_admitted(
    rows: int, is_cpu: bool, left_gib: int
) -> None:
    options = ScheduleOptions(max_batch_size=rows)
    chosen = with_batch_limits(options, is_cpu=is_cpu, left_bytes=left_gib << 30)
    held = chosen.max_queue_size + chosen.max_batch_size
    assert Admission(options=options).max_jobs <= held


def test_tokens_are_bounded_for_all() -> None:
    gate = admission(max_queue_tokens=100)
    with admit(gate, num_tokens=60):
        with pytest.raises(Overloaded, match="60 tokens"):
            admit(gate, num_tokens=41)
        admit(gate, num_tokens=40).release()
    admit(gate, num_tokens=100)
    assert (gate.num_jobs, gate.num_tokens) == (1, 100)


@pytest.mark.parametrize(
    ("options", "amounts"),
    [({"max_jobs_per_key": 2}, (2, 1)), ({"max_tokens_per_key": 50}, (1, 50))],
)
def test_a_key_is_bounded_without_harm_to_others(
    options: dict[str, int], amounts: tuple[int, int]
) -> None:
    gate = admission(**options)
    ticket = admit(gate, *amounts)
    with pytest.raises(RateLimited, match="Your key"):
        admit(gate)
    admit(gate, *amounts, key="other")
    for _ in range(3):
        admit(gate, key="")
    ticket.release()
    admit(gate, *amounts)


def test_what_never_fits_is_the_callers_mistake() -> None:
    gate = admission(max_jobs_per_key=4, max_queue_tokens=70)
    for amounts in ((5, 1), (11, 1), (1, 71)):
        with pytest.raises(InvalidRequest, match="at most"):
            admit(gate, *amounts)
    assert gate.num_jobs == 0


def test_a_ticket_is_released_once() -> None:
    gate = admission()
    ticket = admit(gate)
    with ticket:
        ticket.release()
    with pytest.raises(AssertionError, match="exactly once"):
        ticket.release()
    with pytest.raises(KeyError), admit(gate):
        raise KeyError
    assert gate.num_jobs == 0


def test_the_retry_time_follows_the_measured_drain() -> None:
    clock = Clock()
    gate = admission(clock, max_queue_tokens=1000)
    for _ in range(40):  # 50 tokens a second
        ticket = admit(gate, num_tokens=100)
        clock.now_s += 2.0
        ticket.release()
    admit(gate, num_tokens=1000)
    with pytest.raises(Overloaded) as refusal:
        admit(gate, num_tokens=500)
    assert refusal.value.retry_after_s == pytest.approx(10.0, rel=0.1)


def test_the_retry_time_of_a_young_server_is_not_too_long() -> None:
    clock = Clock()
    gate = admission(clock, max_queue_tokens=1000)
    ticket = admit(gate, num_tokens=100)
    clock.now_s += 2.0
    ticket.release()
    admit(gate, num_tokens=1000)
    with pytest.raises(Overloaded) as refusal:
        admit(gate, num_tokens=200)
    assert refusal.value.retry_after_s == pytest.approx(4.0, rel=0.1)


def test_the_retry_time_is_bounded() -> None:
    clock = Clock()
    gate = admission(clock)
    admit(gate).release()
    clock.now_s += 500.0
    for _ in range(10):
        admit(gate)
    with pytest.raises(Overloaded) as refusal:
        admit(gate)
    assert refusal.value.retry_after_s == 60.0


def test_one_key_of_several_leaves_a_quarter_to_others() -> None:
    gate = admission(max_queue_size=99, num_keys=2)
    loud = fill(gate, "loud")
    assert len(loud) == 75
    assert len(fill(gate, "light")) == 18
    with pytest.raises(RateLimited, match="Your key has 75 jobs"):
        admit(gate, key="loud")
    for ticket in loud[:50]:
        ticket.release()
    assert len(fill(gate, "light")) == 38
    assert gate.num_jobs == 25 + 18 + 38


def test_tokens_are_shared_as_jobs_are() -> None:
    gate = admission(max_queue_size=99, max_queue_tokens=1000, num_keys=2)
    admit(gate, num_tokens=700, key="loud")
    with pytest.raises(RateLimited, match="700 tokens"):
        admit(gate, num_tokens=100, key="loud")
    admit(gate, num_tokens=300, key="light")


def test_a_call_that_fits_alone_is_let_in_alone() -> None:
    gate = admission(num_keys=2)
    admit(gate, 10, key="loud").release()
    admit(gate, 10, key="loud").release()


def test_one_key_alone_and_callers_without_one_may_fill_the_queue() -> None:
    for gate, key in ((admission(), "k"), (admission(num_keys=2), "")):
        for _ in range(10):
            admit(gate, key=key)
        with pytest.raises(Overloaded):
            admit(gate, key=key)


@given(st.integers(2, 12), st.integers(40, 600))
def test_what_becomes_free_is_for_those_who_have_little(num_loud: int, queue_size: int) -> None:
    gate = admission(max_queue_size=queue_size, num_keys=num_loud + 1)
    tickets = [fill(gate, f"loud{name}") for name in range(num_loud)]
    tickets[0].pop().release()
    with pytest.raises(RateLimited):
        admit(gate, key="loud0")
    admit(gate, key="light")


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 40)), max_size=40)
)
def test_bounds_hold_and_all_is_given_back(calls: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    gate = admission(clock, max_queue_tokens=90, max_jobs_per_key=6, max_tokens_per_key=60)
    tickets: list[Ticket] = []
    waits_s: list[float | None] = []
    for key, num_jobs, num_tokens in calls:
        clock.now_s += 0.5
        try:
            tickets.append(admit(gate, num_jobs, num_tokens, key))
        except (RateLimited, Overloaded) as refusal:
            waits_s.append(refusal.retry_after_s)
            if tickets:
                tickets.pop(0).release()
        assert gate.num_jobs <= 10
        assert gate.num_tokens <= 90
    assert all(wait_s is not None and 1.0 <= wait_s <= 60.0 for wait_s in waits_s)
    for ticket in tickets:
        ticket.release()
    assert (gate.num_jobs, gate.num_tokens, gate._by_key) == (0, 0, {})

"""The memory budget balances for all its owners."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import MemoryBudgetExceeded, ModelTooLarge
from triptych.core.ledger import Ledger, Reservation

MIB = 2**20


def test_reservations_draw_on_one_budget() -> None:
    ledger = Ledger(100)
    weights = ledger.reserve("chat/weights", 60)
    pages = ledger.reserve("chat/kv", 30)
    assert ledger.available_bytes == 10
    assert list(ledger.by_owner().items()) == [("chat/weights", 60), ("chat/kv", 30)]
    weights.release()
    assert ledger.available_bytes == 70
    pages.release()
    assert ledger.by_owner() == {}
    ledger.check()


def test_a_refusal_names_the_owners_and_changes_nothing() -> None:
    ledger = Ledger(10 * MIB)
    ledger.reserve("chat/weights", 6 * MIB)
    ledger.reserve("speech/weights", 3 * MIB)
    with pytest.raises(MemoryBudgetExceeded) as refused:
        ledger.reserve("image/weights", 2 * MIB)
    for part in ("image/weights needs 2.0 MiB", "1.0 MiB of 10.0 MiB", "chat/weights 6.0 MiB"):
        assert part in refused.value.message
    assert ledger.available_bytes == MIB
    ledger.check()


def test_what_does_not_fit_even_alone_is_said_so() -> None:
    ledger = Ledger(10 * MIB)
    ledger.reserve("chat/weights", 6 * MIB)
    ledger.reserve("org/image/weights", 3 * MIB)
    assert ledger.most_bytes("org/image") == 7 * MIB
    with pytest.raises(MemoryBudgetExceeded) as refused:
        ledger.reserve("org/image/kv", 7 * MIB)
    assert not isinstance(refused.value, ModelTooLarge)
    with pytest.raises(ModelTooLarge, match=r"org/image can never fit: it needs 11\.0 MiB"):
        ledger.reserve("org/image/kv", 8 * MIB)
    ledger.check()


def test_resize_grows_shrinks_and_refuses_whole() -> None:
    ledger = Ledger(100)
    pages = ledger.reserve("kv", 10)
    pages.resize(100)
    pages.resize(20)
    ledger.reserve("weights", 70)
    with pytest.raises(MemoryBudgetExceeded):
        pages.resize(31)
    assert (pages.num_bytes, ledger.available_bytes) == (20, 10)


def test_commit_says_that_memory_stands_behind_the_promise() -> None:
    reservation = Ledger(10).reserve("weights", 10)
    assert not reservation.is_committed
    reservation.commit()
    assert reservation.is_committed
    reservation.release()
    assert not reservation.is_committed


def test_a_reservation_is_released_exactly_once() -> None:
    ledger = Ledger(10)
    with ledger.reserve("activations", 10) as reservation:
        assert ledger.available_bytes == 0
    assert ledger.available_bytes == 10
    with pytest.raises(AssertionError, match="released twice"):
        reservation.release()


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        Ledger(-1)
    with pytest.raises(ValueError, match="num_bytes"):
        Ledger(1).reserve("weights", -1)


def test_loader_threads_never_overdraw() -> None:
    ledger = Ledger(64)
    refused = 0
    lock = threading.Lock()

    def draw(owner: str) -> None:
        nonlocal refused
        for _ in range(500):
            try:
                with ledger.reserve(owner, 24):
                    ledger.check()
            except MemoryBudgetExceeded:
                with lock:
                    refused += 1

    threads = [threading.Thread(target=draw, args=(f"model-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.available_bytes == 64
    ledger.check()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "resize", "release"]), st.integers(0, 60)),
        max_size=40,
    )
)
def test_the_books_balance_through_any_sequence(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger(100)
    held: list[Reservation] = []
    for action, size in steps:
        try:
            if action == "reserve":
                held.append(ledger.reserve(f"owner-{size % 3}", size))
            elif held and action == "resize":
                held[size % len(held)].resize(size)
            elif held:
                held.pop(size % len(held)).release()
        except MemoryBudgetExceeded:
            pass
        ledger.check()
        assert ledger.available_bytes == 100 - sum(r.num_bytes for r in held)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 600)), max_size=12),
)
def test_too_large_means_that_it_does_not_fit_without_the_others(
    capacity: int, reservations: list[tuple[str, int]]
) -> None:
    ledger = Ledger(capacity)
    own = {"a": 0, "b": 0}
    for model, num_bytes in reservations:
        found: type[MemoryBudgetExceeded] | None = None
        try:
            ledger.reserve(f"{model}/part", num_bytes)
        except MemoryBudgetExceeded as error:
            found = type(error)
        else:
            own[model] += num_bytes
        assert (found is ModelTooLarge) == (found is not None and own[model] + num_bytes > capacity)

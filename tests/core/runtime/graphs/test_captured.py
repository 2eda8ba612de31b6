"""Replay, verification and the way back to eager, on the CPU's backend and on one that records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.runtime.graphs.backend import Call, Captured, NativeCalls, Tensors
from triptych.core.runtime.graphs.captured import CapturedSteps, ReplayDiffers
from triptych.core.runtime.graphs.trial import Trial

CPU = torch.device("cpu")


class FakeTrial(Trial):
    def __init__(self, gains: bool) -> None:
        self._gains, self.num_runs = gains, 0

    def run(self, call: Call) -> Tensors:
        self.num_runs += 1
        return call()

    def gains(self) -> bool | None:
        return None if self.num_runs < 2 else self._gains


class Recording:
    """Replays what a capture ran: with the tensors of that time, into the outputs of that time.

    A step takes `num_bytes` beside its inputs; with `is_pool` that goes back with the last alone.
    With `gains`, steps are timed, and two runs later they are known to gain, or not.
    """

    def __init__(
        self,
        error: Exception | None = None,
        num_bytes: int = 0,
        *,
        is_pool: bool = False,
        gains: bool | None = None,
    ) -> None:
        self.error, self.gains = error, gains
        self.num_bytes = num_bytes
        self.num_captures = self.num_live = self.held_bytes = 0
        self.is_pool = is_pool

    def trial(self) -> Trial | None:
        return None if self.gains is None else FakeTrial(self.gains)

    def another(self) -> Recording:
        return Recording(self.error, self.num_bytes, is_pool=self.is_pool, gains=self.gains)

    def release(self) -> None:
        self.num_live -= 1
        self.held_bytes -= 0 if self.is_pool else self.num_bytes
        self.held_bytes *= self.num_live > 0

    def capture(self, run: Call) -> Captured:
        self.num_captures += 1
        if self.error is not None:
            raise self.error
        outputs = run()
        self.num_live += 1
        self.held_bytes += self.num_bytes

        def replay() -> Tensors:
            for output, fresh in zip(outputs, run(), strict=True):
                output.copy_(fresh)
            return outputs

        return Captured(replay, self.release)


def steps(
    backend: Recording | NativeCalls | None = None, *, budget: int = 10**6, verifies: bool = False
) -> CapturedSteps:
    return CapturedSteps("m", CPU, budget_bytes=budget, verifies=verifies, backend=backend)


def doubled(inputs: Tensors) -> Tensors:
    return [2 * inputs[0]]


def ones(size: int = 4) -> torch.Tensor:
    return torch.ones(size)


@pytest.mark.parametrize("backend", [NativeCalls(), Recording()])
@pytest.mark.parametrize("verifies", [False, True])
def test_a_replay_computes_with_the_inputs_of_its_call(
    backend: Recording | NativeCalls, verifies: bool
) -> None:
    captured = steps(backend, verifies=verifies)
    for value in range(5):
        outputs = captured.run("k", doubled, [value * ones()])
        assert outputs is not None
        assert torch.equal(outputs[0], 2 * value * ones())
    assert captured.num_captured == 1


@pytest.mark.parametrize("gains", [False, True])
def test_a_step_is_captured_once_it_is_known_to_gain(gains: bool) -> None:
    """Runs before that are the steps themselves, in memory of their own."""
    state = torch.zeros(4)
    backend = Recording(gains=gains)
    captured = steps(backend)
    given, kept = ones(), []
    for count in range(1, 3):
        outputs = captured.run("k", counting(state), [given], [state])
        assert outputs is not None
        kept.append(outputs[0])
        assert torch.equal(state, count * ones())
    assert backend.num_captures == 0
    for _ in range(3):
        outputs = captured.run("k", counting(state), [given], [state])
        assert (outputs is None) is not gains
    assert backend.num_captures == captured.num_captured == gains
    assert [each[0].item() for each in kept] == [1, 2]


def test_steps_ahead_and_verified_ones_are_not_timed() -> None:
    captured = steps(Recording(gains=False), verifies=True)
    assert captured.run("k", doubled, [ones()]) is not None
    assert captured.num_captured == 1
    captured = steps(Recording(gains=False))
    with captured.ahead():
        captured.run("k", doubled, [ones()])
    assert captured.num_captured == 1


def test_each_key_is_captured_once() -> None:
    backend = Recording()
    captured = steps(backend)
    for size in (4, 8, 4, 8, 8):
        captured.run(size, doubled, [ones(size)])
    assert backend.num_captures == captured.num_captured == 2


def test_bytes_are_those_of_inputs_and_of_what_is_held_in_addition() -> None:
    captured = steps(Recording(num_bytes=100))
    assert captured.num_bytes == 0
    captured.run("a", doubled, [ones(8)])
    assert captured.num_bytes == 32 + 100
    native = steps(NativeCalls())
    native.run("a", doubled, [ones(8)])
    assert native.num_bytes == 32 + 32


def test_what_a_body_writes_to_its_inputs_is_written_again_before_the_next_replay() -> None:
    def body(inputs: Tensors) -> Tensors:
        inputs[0][0] += 1
        return [inputs[0].clone()]

    captured = steps(verifies=True)
    given = ones()
    for _ in range(3):
        outputs = captured.run("k", body, [given])
        assert outputs is not None
        assert outputs[0].tolist() == [2, 1, 1, 1]
    assert torch.equal(given, ones())


def counting(state: torch.Tensor) -> Callable[[Tensors], Tensors]:
    def body(inputs: Tensors) -> Tensors:
        state.add_(inputs[0])
        return [state.clone()]

    return body


@pytest.mark.parametrize("backend", [NativeCalls(), Recording()])
@pytest.mark.parametrize("verifies", [False, True])
def test_state_moves_on_once_a_step(backend: Recording | NativeCalls, verifies: bool) -> None:
    state = torch.zeros(4)
    captured = steps(backend, verifies=verifies)
    for count in range(1, 4):
        outputs = captured.run("k", counting(state), [ones()], [state])
        assert outputs is not None
        assert torch.equal(outputs[0], count * ones())
        assert torch.equal(state, count * ones())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "no memory is left"),
        (RuntimeError("CUDA error: out of memory"), "no memory is left"),
        (RuntimeError("operation not permitted when stream is capturing"), "cannot be captured"),
    ],
)
def test_a_step_that_cannot_be_captured_runs_eagerly(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Recording(error)
    captured = steps(backend)
    assert captured.run("k", doubled, [ones()]) is None
    assert captured.run("k", doubled, [ones()]) is None
    assert backend.num_captures == 1
    assert captured.num_bytes == captured.num_captured == 0
    (line,) = caplog.messages
    assert "m: the step of k runs eagerly" in line
    assert said in line


def test_want_of_memory_is_one_steps_own() -> None:
    backend = Recording(torch.OutOfMemoryError("no"))
    captured = steps(backend)
    assert captured.run("large", doubled, [ones(400)]) is None
    backend.error = None
    assert captured.run("small", doubled, [ones()]) is not None


def test_what_cannot_be_recorded_is_not_tried_for_every_size() -> None:
    backend = Recording(RuntimeError("it waits for the device"))
    captured = steps(backend)
    assert captured.run("a", doubled, [ones()]) is None
    assert captured.run("b", doubled, [ones()]) is None
    assert backend.num_captures == 1


@pytest.mark.parametrize(("budget", "num_bytes"), [(15, 0), (100, 90)])
def test_steps_beyond_what_is_reserved_run_eagerly(
    budget: int, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    captured = steps(Recording(num_bytes=num_bytes), budget=budget)
    assert captured.run("k", doubled, [ones()]) is None
    assert captured.num_bytes == 0
    assert f"{budget} are reserved" in caplog.text


def test_once_many_found_no_room_others_are_tried_where_they_come_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Recording(num_bytes=200)
    captured = steps(backend, budget=130)
    for key in range(100):
        assert captured.run(key, doubled, [ones()]) is None
    assert backend.num_captures == 8
    assert len(caplog.messages) == 8
    assert "further steps are not logged" in caplog.messages[-1]
    backend.num_bytes = 90
    answers = [captured.run("small", doubled, [ones()]) for _ in range(40)]
    assert answers[0] is None
    assert answers[-1] is not None
    assert captured.num_captured == 1


def run_all(captured: CapturedSteps, *keys: object, times: int = 1) -> list[object]:
    """The keys that are replayed, of those given in turn."""
    found = []
    for key in keys * times:
        outputs = captured.run(key, doubled, [ones()])
        found += [] if outputs is None else [key]
    return found


def test_the_least_recently_used_gives_way_to_what_comes_often() -> None:
    backend = Recording(num_bytes=84)  # 100 with its inputs
    captured = steps(backend, budget=300)
    assert run_all(captured, "a", "b", "c") == ["a", "b", "c"]
    assert run_all(captured, "d") == ["d"], "the first that finds no room drops one at once"
    assert captured.num_captured == 3
    assert run_all(captured, "b", "c", "d", "b") == ["b", "c", "d", "b"]
    assert "e" in run_all(captured, "e", times=40)
    assert run_all(captured, "d", "b", "e") == ["d", "b", "e"], "c was used before the others"
    assert captured.num_bytes == 300
    assert backend.num_live == 3


def test_sizes_that_take_turns_beyond_the_room_are_not_captured_each_time() -> None:
    backend = Recording(num_bytes=84)
    captured = steps(backend, budget=300)
    keys = tuple(range(10))
    run_all(captured, *keys, times=40)
    assert backend.num_captures <= 3 + 1 + len(keys) * 40 // 15


def test_a_pool_that_does_not_shrink_is_begun_anew_for_a_step_that_fits_by_itself() -> None:
    backend = Recording(num_bytes=84, is_pool=True)
    captured = steps(backend, budget=250)
    assert run_all(captured, "a", "b", "c") == ["a", "b", "c"]
    assert captured.num_captured == 1
    assert captured.num_bytes == 100
    for _ in range(40):
        assert captured.run("d", doubled, [ones(400)]) is None
    assert run_all(captured, "c") == ["c"], "nothing gave way to what fits nowhere"


def test_want_of_memory_is_met_with_that_of_others() -> None:
    backend = Recording(num_bytes=84)
    captured = steps(backend)

    def body(inputs: Tensors) -> Tensors:
        if captured.num_captured > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return doubled(inputs)

    run_all(captured, "a", "b")
    assert captured.run("c", body, [ones()]) is not None
    assert captured.num_captured == 1


def test_steps_captured_ahead_stay_and_are_accounted_for_as_measured() -> None:
    accounts: list[int] = []

    def resize(num_bytes: int) -> bool:
        accounts.append(num_bytes)
        return num_bytes <= 500

    captured = CapturedSteps(
        "m", CPU, budget_bytes=150, backend=Recording(num_bytes=84), resize=resize
    )
    with captured.ahead(spare_bytes=120):
        assert run_all(captured, *"abc") == [*"abc"]
    assert accounts == [200, 300, 420]
    assert run_all(captured, 1, 2, times=20) != [], "there is room for one of them at a time"
    assert captured.num_captured == 4
    assert captured.num_bytes == 400
    assert run_all(captured, *"abc") == [*"abc"]


def test_steps_ahead_that_find_no_room_leave_those_before_them() -> None:
    captured = CapturedSteps(
        "m", CPU, budget_bytes=150, backend=Recording(num_bytes=84), resize=lambda n: n <= 300
    )
    with captured.ahead():
        assert run_all(captured, *"abcde") == [*"abc"]
    assert captured.num_captured == 3
    assert captured.num_bytes == 300


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60)), min_size=1, max_size=200),
    new_backend=st.sampled_from(
        [NativeCalls, *(partial(Recording, num_bytes=40, is_pool=pool) for pool in (False, True))]
    ),
    num_ahead=st.integers(0, 4),
)
def test_whatever_comes_what_is_held_stays_within_what_is_reserved(
    sizes: list[tuple[int, int]],
    new_backend: Callable[[], Recording | NativeCalls],
    num_ahead: int,
) -> None:
    """Ahead and as they come; every answer that is replayed is right."""
    captured = steps(new_backend(), budget=1000)
    with captured.ahead(spare_bytes=0):
        for key in range(num_ahead):
            assert captured.run(("ahead", key), doubled, [ones()]) is not None
    for key, size in sizes:
        outputs = captured.run((key, size), doubled, [torch.full((size,), float(key))])
        assert captured.num_bytes <= 1000
        if outputs is not None:
            assert torch.equal(outputs[0], torch.full((size,), 2.0 * key))
    for key in range(num_ahead):
        assert captured.run(("ahead", key), doubled, [ones()]) is not None


def test_a_failed_capture_leaves_the_state_as_it_was() -> None:
    state = torch.zeros(4)

    def body(inputs: Tensors) -> Tensors:
        state.add_(inputs[0])
        raise torch.OutOfMemoryError("half way")

    assert steps().run("k", body, [ones()], [state]) is None
    assert torch.equal(state, torch.zeros(4))


def test_a_replay_that_reads_another_tensor_than_eager_is_found_and_named() -> None:
    weights = [ones()]

    def body(inputs: Tensors) -> Tensors:
        return [inputs[0] * weights[0]]

    class Stale(NativeCalls):
        """Computes with what `weights` held when it was captured, as a graph would."""

        def capture(self, run: Call) -> Captured:
            held = weights[0]

            def replay() -> Tensors:
                now, weights[0] = weights[0], held
                outputs = run()
                weights[0] = now
                return outputs

            return Captured(replay, lambda: None)

    captured = CapturedSteps("m", CPU, budget_bytes=10**6, verifies=True, backend=Stale())
    assert captured.run("4 rows", body, [ones()]) is not None
    weights[0] = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2.0**-23])  # another tensor, one bit away
    with pytest.raises(ReplayDiffers, match=r"m: the replayed step of 4 rows .* in 1 of 4 values"):
        captured.run("4 rows", body, [ones()])


def test_state_that_a_replay_leaves_otherwise_is_found() -> None:
    state = torch.zeros(4)

    class Forgetful(NativeCalls):
        """Its replays give the right answer, and change nothing."""

        def capture(self, run: Call) -> Captured:
            def replay() -> Tensors:
                before = state.clone()
                outputs = run()
                state.copy_(before)
                return outputs

            return Captured(replay, lambda: None)

    captured = CapturedSteps("m", CPU, budget_bytes=10**6, verifies=True, backend=Forgetful())
    with pytest.raises(ReplayDiffers, match="state"):
        captured.run("k", counting(state), [ones()], [state])


@pytest.mark.parametrize(
    ("wanted", "given"),
    [(float("nan"), float("nan")), (0.0, -0.0), (1.0, float("nan"))],
)
def test_bits_are_compared_not_numbers(wanted: float, given: float) -> None:
    answers = iter([wanted, wanted, given])  # capture, eager, replay

    def body(inputs: Tensors) -> Tensors:
        return [torch.full((), next(answers))]

    captured = steps(verifies=True)
    if repr(wanted) == repr(given):
        assert captured.run("k", body, [ones()]) is not None
    else:
        with pytest.raises(ReplayDiffers):
            captured.run("k", body, [ones()])

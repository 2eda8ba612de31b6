"""Replay, verification and the way back to eager, on the CPU's backend and on one that records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triptych.core.graphs.backend import Call, Captured, NativeCalls, Tensors
from triptych.core.graphs.captured import CapturedSteps, ReplayDiffers

CPU = torch.device("cpu")


class Recording:
    """Replays what a capture ran: with the tensors of that time, into the outputs of that time."""

    def __init__(self, error: Exception | None = None, num_bytes: int = 0) -> None:
        self.error = error
        self.num_bytes = num_bytes
        self.num_captures = 0

    def capture(self, run: Call) -> Captured:
        self.num_captures += 1
        if self.error is not None:
            raise self.error
        outputs = run()

        def replay() -> Tensors:
            for output, fresh in zip(outputs, run(), strict=True):
                output.copy_(fresh)
            return outputs

        return Captured(replay, self.num_bytes)


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


def test_each_key_is_captured_once() -> None:
    backend = Recording()
    captured = steps(backend)
    for size in (4, 8, 4, 8, 8):
        captured.run(size, doubled, [ones(size)])
    assert backend.num_captures == captured.num_captured == 2


def test_bytes_are_those_of_inputs_and_of_what_is_held_beside() -> None:
    captured = steps(Recording(num_bytes=100))
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


def test_no_more_is_tried_once_many_found_no_room(caplog: pytest.LogCaptureFixture) -> None:
    backend = Recording(num_bytes=90)
    captured = steps(backend, budget=130)
    assert captured.run("first", doubled, [ones()]) is not None
    for key in range(100):
        assert captured.run(key, doubled, [ones()]) is None
    assert backend.num_captures < 20
    assert caplog.text.count("no others will be tried") == 1
    assert captured.run("first", doubled, [ones()]) is not None


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

    class Stale:
        """Computes with what `weights` held when it was captured, as a graph would."""

        def capture(self, run: Call) -> Captured:
            held = weights[0]

            def replay() -> Tensors:
                now, weights[0] = weights[0], held
                outputs = run()
                weights[0] = now
                return outputs

            return Captured(replay, 0)

    captured = CapturedSteps("m", CPU, budget_bytes=10**6, verifies=True, backend=Stale())
    assert captured.run("4 rows", body, [ones()]) is not None
    weights[0] = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2.0**-23])  # another tensor, one bit away
    with pytest.raises(ReplayDiffers, match=r"m: the replayed step of 4 rows .* in 1 of 4 values"):
        captured.run("4 rows", body, [ones()])


def test_state_that_a_replay_leaves_otherwise_is_found() -> None:
    state = torch.zeros(4)

    class Forgetful:
        """Its replays give the right answer, and change nothing."""

        def capture(self, run: Call) -> Captured:
            def replay() -> Tensors:
                before = state.clone()
                outputs = run()
                state.copy_(before)
                return outputs

            return Captured(replay, 0)

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

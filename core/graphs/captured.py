"""Steps over static buffers: captured once for each bucket, replayed after.

Owns the static inputs, the count of their bytes, the way back to eager where there is no room, and
the comparison of a replay with the same step run eagerly. Knows nothing of what a step computes:
a *body* is called with the inputs of its bucket and returns its outputs. It may write to its
inputs, and to memory of its model; what it would find changed when it is run a second time is its
`state`. Rows that only fill a bucket up must be harmless, and which they are is the caller's.

What a replay returns is overwritten by the next one of the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch

from triptych.core.graphs.backend import Captured, GraphBackend, Tensors, open_backend

Body = Callable[[Tensors], Tensors]

_MAX_REFUSED = 8
"""Sizes for which there was no room, after which new ones are no longer tried."""

_log = logging.getLogger(__name__)


class ReplayDiffers(RuntimeError):
    """A replay gave other bits than the same step run eagerly; the message names the step."""


class _OverBudget(torch.OutOfMemoryError):
    """What is reserved for captured steps is used up."""


@dataclass(frozen=True, slots=True)
class _StaticStep:
    """A captured step and the buffers it reads; `body` keeps alive what else it does."""

    inputs: Tensors
    captured: Captured
    body: Body


class CapturedSteps:
    """The captured steps of one model, by bucket (or whatever else tells their shapes apart).

    They may take `budget_bytes` in all, which the caller has in the ledger. With `verifies` each
    replay is compared with eager, bit by bit.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        budget_bytes: int,
        verifies: bool = False,
        backend: GraphBackend | None = None,
    ) -> None:
        self._name = name
        self._device = device
        self._budget_bytes = budget_bytes
        self._verifies = verifies
        self._backend = open_backend(device) if backend is None else backend
        self._steps: dict[Hashable, _StaticStep | None] = {}  # none: not to be captured
        self._num_bytes = 0
        self._num_refused = 0
        self._is_off = False

    @property
    def num_bytes(self) -> int:
        """What the captured steps hold."""
        return self._num_bytes

    @property
    def num_captured(self) -> int:
        """Steps that are replayed from now on."""
        return sum(step is not None for step in self._steps.values())

    def run(
        self, key: Hashable, body: Body, inputs: Tensors, state: Tensors = ()
    ) -> Tensors | None:
        """Replay the step of `key`; `None`, with nothing done, where it has to be run eagerly.

        Captures it the first time. For one key, bodies do the same, and inputs are of one shape.
        Inputs may be on the host, pinned. Raises `ReplayDiffers`.
        """
        if key not in self._steps and not self._is_off:
            self._steps[key] = self._open(key, body, inputs, state)
        step = self._steps.get(key)
        if step is None:
            return None
        for static, given in zip(step.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        if self._verifies:
            return self._verified(key, step, body, state)
        return step.captured.replay()

    def _open(
        self, key: Hashable, body: Body, inputs: Tensors, state: Tensors
    ) -> _StaticStep | None:
        """The step of a key from now on; on the way to eager, a line in the log says why."""
        before = _clones(state)
        try:
            return self._capture(body, inputs)
        except _OverBudget as error:
            reason = str(error)
        except RuntimeError as error:
            reason = "no memory is left for it"
            if not _is_out_of_memory(error):  # it waits for the device, say: so will others
                self._is_off = True
                reason = f"it cannot be captured, nor can others be: {error}"
        finally:
            _restore(state, before)
        self._num_refused += 1
        if self._num_refused >= _MAX_REFUSED:  # each try warms up and records, for nothing
            self._is_off = True
            reason += "; no others will be tried"
        _log.warning("%s: the step of %s runs eagerly: %s", self._name, key, reason)
        return None

    def _capture(self, body: Body, inputs: Tensors) -> _StaticStep:
        num_bytes = self._num_bytes + sum(tensor.nbytes for tensor in inputs)
        self._check(num_bytes)
        statics = [torch.empty_like(given, device=self._device) for given in inputs]
        for static, given in zip(statics, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        captured = self._backend.capture(partial(body, statics))
        num_bytes += captured.num_bytes
        self._check(num_bytes)
        self._num_bytes = num_bytes
        return _StaticStep(statics, captured, body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._budget_bytes:
            raise _OverBudget(
                f"captured steps would take {num_bytes} bytes, and {self._budget_bytes} are"
                " reserved for them"
            )

    def _verified(self, key: Hashable, step: _StaticStep, body: Body, state: Tensors) -> Tensors:
        """The outputs of a replay, once they and the state are what eager leaves behind."""
        before = _clones(state)
        expected = _clones([*body(_clones(step.inputs)), *state])
        _restore(state, before)
        outputs = step.captured.replay()
        for place, (wanted, given) in enumerate(zip(expected, [*outputs, *state], strict=True)):
            if count := _num_different(wanted, given):
                part = f"output {place}" if place < len(outputs) else "the state it leaves"
                raise ReplayDiffers(
                    f"{self._name}: the replayed step of {key} differs from eager: {part}, in"
                    f" {count} of {wanted.numel()} values."
                )
        return outputs


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what it began with: to end a capture may then fail, too."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def _clones(tensors: Tensors) -> Tensors:
    return [tensor.clone() for tensor in tensors]


def _restore(tensors: Tensors, before: Tensors) -> None:
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)


def _num_different(wanted: torch.Tensor, given: torch.Tensor) -> int:
    """Values whose bits differ; all of them where the shapes do."""
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return max(wanted.numel(), 1)
    bits = [x.contiguous().view(wanted.numel(), 1).view(torch.uint8) for x in (wanted, given)]
    return int((bits[0] != bits[1]).any(1).sum())

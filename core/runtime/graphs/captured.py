"""Steps over static buffers: captured once for each bucket, then replayed.

Owns the static inputs, the count of bytes, the eviction of steps, the return to eager execution
where memory is short, and the comparison of a replay with the same step run eagerly. Knows nothing
of the computation of a step: a *body* is called with the inputs of its bucket and returns its
outputs. It may write to its inputs, and to memory of its model; what a second run would find
changed is its `state`. The caller chooses the rows that pad a bucket; they must be harmless.

The outputs of a replay are overwritten by the next replay of the same step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from triptych.core.runtime.graphs.backend import Captured, GraphBackend, Tensors, open_backend
from triptych.core.runtime.graphs.trial import Trial

Body = Callable[[Tensors], Tensors]
AnyNote = TypeVar("AnyNote")

_MAX_STEPS = 128
"""Limit of steps captured at their first run; each also has a graph on the host."""
_NUM_TRIES = 16
"""How often a step must have run eagerly before others are evicted for it. A capture takes as long
as a few eager steps: so much is lost at most where more sizes take turns than fit."""
_MAX_NOTED = 256
"""Steps that are counted so, that are timed, and that are known not to fit or to gain nothing."""
_MAX_REFUSED = 8
"""Steps that do not fit even alone, after which new ones have to wait before they are captured."""

_log = logging.getLogger(__name__)


class ReplayDiffers(RuntimeError):
    """A replay gave other bits than the same step run eagerly; the message names the step."""


class _OverBudget(torch.OutOfMemoryError):
    """The memory reserved for captured steps is used up."""


@dataclass(frozen=True, slots=True)
class _StaticStep:
    """A captured step and the buffers it reads; `body` keeps its other tensors alive."""

    inputs: Tensors
    captured: Captured
    body: Body
    num_bytes: int


class CapturedSteps:
    """The captured steps of one model, by bucket (or any other key of their shapes).

    They may take `budget_bytes` in all, which the caller has in the ledger; `resize` asks the
    ledger for more or less, and returns whether it could. Steps captured `ahead` are kept. Others
    are captured once a few eager runs show a gain, where the backend measures one, else at their
    first run; the least recently used of them are evicted. With `verifies` each step is captured,
    and each replay is compared with eager execution, bit by bit.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        budget_bytes: int,
        verifies: bool = False,
        backend: GraphBackend | None = None,
        resize: Callable[[int], bool] = lambda num_bytes: False,
    ) -> None:
        self._name = name
        self._device = device
        self._budget_bytes = budget_bytes
        self._verifies = verifies
        self._backend = open_backend(device) if backend is None else backend
        self._resize = resize
        self._kept: dict[Hashable, _StaticStep] = {}
        self._kept_bytes = 0
        self._steps: OrderedDict[Hashable, _StaticStep] = OrderedDict()  # the last used is the last
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()  # how often each ran eagerly
        self._trials: OrderedDict[Hashable, Trial] = OrderedDict()
        self._refused: OrderedDict[Hashable, None] = OrderedDict()
        self._num_refused = 0
        self._is_ahead = False
        self._is_full = False
        self._is_off = False

    @property
    def num_bytes(self) -> int:
        """The memory of the captured steps: inputs, and what was measured in addition."""
        inputs = sum(step.num_bytes for step in self._steps.values())
        return self._kept_bytes + inputs + self._backend.held_bytes

    @property
    def num_captured(self) -> int:
        """The number of captured steps."""
        return len(self._kept) + len(self._steps)

    @contextmanager
    def ahead(self, *, spare_bytes: int = 0) -> Iterator[None]:
        """Steps captured inside are kept, and may take all memory that is left.

        Afterwards their measured memory is reserved, and `spare_bytes` for other steps.
        """
        self._is_ahead = True
        try:
            yield
        finally:
            self._is_ahead = False
            self._kept_bytes = self.num_bytes
            self._kept |= self._steps
            self._steps.clear()
            self._backend = self._backend.another()
            if self._resize(self._kept_bytes + spare_bytes):
                self._budget_bytes = self._kept_bytes + spare_bytes

    def run(
        self, key: Hashable, body: Body, inputs: Tensors, state: Tensors = ()
    ) -> Tensors | None:
        """Replay the step of `key`; `None`, with nothing done, where it has to run eagerly.

        Captures it when it is due, and may run it eagerly until then. For one key, bodies do the
        same, and inputs have one shape. Inputs may be on the host, pinned. Raises `ReplayDiffers`.
        """
        step = self._kept.get(key) or self._steps.get(key)
        if step is None and self._is_due(key):
            if (trial := self._trial(key)) is not None:
                return trial.run(partial(body, self._copies(inputs)))
            if key not in self._refused:
                step = self._open(key, body, inputs, state)
        if step is None:
            return None
        if key in self._steps:
            self._steps.move_to_end(key)
        for static, given in zip(step.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        if self._verifies:
            return self._verified(key, step, body, state)
        return step.captured.replay()

    def _is_due(self, key: Hashable) -> bool:
        """Whether to capture a step now: at once while there is room, else once it pays off."""
        if self._is_off or key in self._refused:
            return False
        if not self._is_full or key in self._trials:
            return True
        count = self._waiting.pop(key, 0) + 1
        if count >= _NUM_TRIES:
            return True
        _note(self._waiting, key, count)
        return False

    def _trial(self, key: Hashable) -> Trial | None:
        """The measurement of a step that is not known yet to gain; one that does not is refused."""
        if self._is_ahead or self._verifies:
            return None
        trial = self._trials.get(key) or self._backend.trial()
        if trial is None:
            return None
        if (gains := trial.gains()) is None:
            _note(self._trials, key, trial)
            return trial
        self._trials.pop(key, None)
        if not gains:
            _note(self._refused, key, None)
            _log.info("%s: the step of %s runs eagerly: its kernels take longer", self._name, key)
        return None

    def _open(
        self, key: Hashable, body: Body, inputs: Tensors, state: Tensors
    ) -> _StaticStep | None:
        """Capture the step of a key, or log why it will run eagerly."""
        before = _clones(state)
        try:
            step = self._steps[key] = self._capture_in_room(body, inputs)
        except _OverBudget as error:
            reason = str(error)
        except RuntimeError as error:
            reason = "no memory is left for it"
            if not _is_out_of_memory(error):  # say, the body waits: all steps will
                self._is_off = True
                reason = f"it cannot be captured, nor can other steps: {error}"
        else:
            return step
        finally:
            _restore(state, before)
        _note(self._refused, key, None)
        self._num_refused += 1
        if self._num_refused == _MAX_REFUSED:  # each try costs a warm-up and a recording, in vain
            self._is_full = True
            reason += "; further steps are not logged"
        if self._num_refused <= _MAX_REFUSED:
            _log.warning("%s: the step of %s runs eagerly: %s", self._name, key, reason)
        return None

    def _capture_in_room(self, body: Body, inputs: Tensors) -> _StaticStep:
        """As `_capture`, and again if steps were evicted, since their memory may still be held."""
        has_others = bool(self._steps) and not self._is_ahead
        num_bytes = sum(tensor.nbytes for tensor in inputs)
        self._check(self._kept_bytes + num_bytes)
        try:
            return self._capture(body, inputs, num_bytes)
        except RuntimeError as error:
            if not has_others or not _is_out_of_memory(error):
                raise
        self._is_full = True
        while self._steps:
            self._drop_oldest()
        return self._capture(body, inputs, num_bytes)

    def _capture(self, body: Body, inputs: Tensors, num_bytes: int) -> _StaticStep:
        """Capture a step; `num_bytes` is the size of its inputs."""
        statics = self._copies(inputs)
        captured = self._backend.capture(partial(body, statics))
        while self._must_drop(num_bytes):
            self._is_full = True
            self._drop_oldest()
        try:
            self._check(self.num_bytes + num_bytes)
        except _OverBudget:
            captured.release()
            raise
        return _StaticStep(statics, captured, body, num_bytes)

    def _copies(self, inputs: Tensors) -> Tensors:
        """The inputs on the device, in memory of their own."""
        copies = [torch.empty_like(given, device=self._device) for given in inputs]
        for copied, given in zip(copies, inputs, strict=True):
            copied.copy_(given, non_blocking=True)
        return copies

    def _must_drop(self, num_bytes: int) -> bool:
        """Whether a step must be evicted for one with inputs of `num_bytes`."""
        if self._is_ahead or not self._steps:
            return False
        return len(self._steps) >= _MAX_STEPS or not self._fits(self.num_bytes + num_bytes)

    def _drop_oldest(self) -> None:
        """Evict the least recently used step, which then runs eagerly again."""
        _, step = self._steps.popitem(last=False)
        step.captured.release()

    def _fits(self, num_bytes: int) -> bool:
        if num_bytes > self._budget_bytes and self._is_ahead and self._resize(num_bytes):
            self._budget_bytes = num_bytes
        return num_bytes <= self._budget_bytes

    def _check(self, num_bytes: int) -> None:
        if not self._fits(num_bytes):
            raise _OverBudget(
                f"captured steps would take {num_bytes} bytes, and {self._budget_bytes} are"
                " reserved for them"
            )

    def _verified(self, key: Hashable, step: _StaticStep, body: Body, state: Tensors) -> Tensors:
        """The outputs of a replay, once they and the state equal those of eager execution."""
        before = _clones(state)
        expected = _clones([*body(_clones(step.inputs)), *state])
        _restore(state, before)
        outputs = step.captured.replay()
        for place, (wanted, given) in enumerate(zip(expected, [*outputs, *state], strict=True)):
            if count := _num_different(wanted, given):
                part = f"output {place}" if place < len(outputs) else "the state after it"
                raise ReplayDiffers(
                    f"{self._name}: the replayed step of {key} differs from eager: {part}, in"
                    f" {count} of {wanted.numel()} values."
                )
        return outputs


def _note(noted: OrderedDict[Hashable, AnyNote], key: Hashable, value: AnyNote) -> None:
    """Note a step; beyond a limit, the oldest notes are forgotten."""
    noted[key] = value
    if len(noted) > _MAX_NOTED:
        noted.popitem(last=False)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error began as lack of memory: ending the capture may then also fail.

    The driver's own lack of memory, for an executable graph, is another type of error.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__context__
    return False


def _clones(tensors: Tensors) -> Tensors:
    return [tensor.clone() for tensor in tensors]


def _restore(tensors: Tensors, before: Tensors) -> None:
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)


def _num_different(wanted: torch.Tensor, given: torch.Tensor) -> int:
    """Count the values whose bits differ; all of them where the shapes do."""
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return max(wanted.numel(), 1)
    bits = [x.contiguous().view(wanted.numel(), 1).view(torch.uint8) for x in (wanted, given)]
    return int((bits[0] != bits[1]).any(1).sum())

"""Captured steps on a CPU, each replay of which is verified and counted."""

from __future__ import annotations

import torch

from triptych.core.runtime.graphs.backend import Call, Captured, NativeCalls, Tensors
from triptych.core.runtime.graphs.captured import CapturedSteps

CPU = torch.device("cpu")


class CountingCalls(NativeCalls):
    num_replays = 0

    def capture(self, run: Call) -> Captured:
        captured = super().capture(run)

        def replay() -> Tensors:
            self.num_replays += 1
            return captured.replay()

        return Captured(replay, captured.release)


def verified_steps(budget_bytes: int = 2**26) -> tuple[CapturedSteps, CountingCalls]:
    backend = CountingCalls()
    steps = CapturedSteps("m", CPU, budget_bytes=budget_bytes, verifies=True, backend=backend)
    return steps, backend

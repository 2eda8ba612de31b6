"""Every job sounds as it would alone, whatever happens to the others, in whatever order.

A Hypothesis state machine over `speech_world`: after every action all accounts are audited, and in
the end every sound is compared with what the model gives for the request alone.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.schedules import schedule_of
from support.speech_world import CLIP, ENDLESS, SpeechWorld, segment, speech_model, speech_request
from support.tiers import first
from triptych.core.errors import InternalError, OutOfMemory

_MODELS = st.fixed_dictionaries(
    {
        "steps_per_frame": st.sampled_from((1, 1, 3)),
        "delay_steps": st.sampled_from((0, 0, 2)),
        "lookahead_frames": st.sampled_from((0, 0, 2)),
        "num_context_steps": st.sampled_from((0, 3, 50)),
    }
)
_SCHEDULES = st.fixed_dictionaries(
    {
        "max_batch_size": st.sampled_from((1, 2, 6)),
        "max_batch_input_tokens": st.sampled_from((4, 32)),
        "enable_chunked_prefill": st.booleans(),
        "enable_in_flight_batching": st.booleans(),
    }
)
_OPTIONS = st.fixed_dictionaries(
    {
        "max_streams": st.sampled_from((1, 3, 8)),
        "chunk_size": st.sampled_from(((), (1,), (2, 5))),
        "prepend_prompt_speech_tokens": st.sampled_from(("never", "once")),
        "ce_delay_ms": st.sampled_from((0.0, 50.0)),
        "enable_prioritize_first_decode": st.booleans(),
        "min_batch_size_tg": st.sampled_from((0, 3)),
        "max_queue_size_tg": st.sampled_from((0, 2)),
        "max_lead_s": st.sampled_from((0.0, 0.5)),
    }
)


class SpeechMachine(RuleBasedStateMachine):
    """Submit, step, cancel, pause, fail, spoil; one or two plans in flight."""

    world: SpeechWorld
    num_jobs = 0

    @initialize(
        model=_MODELS,
        schedule=_SCHEDULES,
        options=_OPTIONS,
        depth=st.sampled_from((1, 2)),
        num_pages=st.sampled_from((60, 200)),
    )
    def start(
        self,
        *,
        model: dict[str, int],
        schedule: dict[str, Any],
        options: dict[str, Any],
        depth: int,
        num_pages: int,
    ) -> None:
        self.world = SpeechWorld(
            model=speech_model(**model),
            schedule=schedule_of(**schedule),
            depth=depth,
            num_pages=num_pages,
            **options,
        )

    @rule(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
        max_steps=st.sampled_from((1, 7, 30)),
        voice=st.sampled_from(("", "ann", "clip")),
        is_live=st.booleans(),
        is_endless=st.booleans(),
        pause_s=st.sampled_from((0.0, 0.3)),
    )
    def submit(
        self,
        *,
        lengths: list[int],
        max_steps: int,
        voice: str,
        is_live: bool,
        is_endless: bool,
        pause_s: float,
    ) -> None:
        segments = [
            segment(*range(length), *([ENDLESS] * is_endless), max_steps=max_steps, pause_s=pause_s)
            for length in lengths
        ]
        request = speech_request(
            *segments,
            voice="" if voice == "clip" else voice,
            clip=CLIP if voice == "clip" else None,
            is_live=is_live,
            seed=self.num_jobs,
        )
        self.world.submit(f"{self.num_jobs}", request)
        self.num_jobs += 1

    @rule(times=st.integers(1, 30))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.world.turn()

    @rule(seconds=st.sampled_from((0.05, 1.0, 30.0)))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(is_memory=st.booleans())
    def fail(self, *, is_memory: bool) -> None:
        self.world.fail_next(OutOfMemory("full") if is_memory else InternalError("broken"))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if live := self._live():
            self.world.scheduler.cancel(data.draw(st.sampled_from(live)))

    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, *, is_paused: bool) -> None:
        if live := self._live():
            self.world.scheduler.set_paused(data.draw(st.sampled_from(live)), is_paused)

    @rule(data=st.data(), is_sound=st.booleans())
    def spoil(self, data: st.DataObject, *, is_sound: bool) -> None:
        if live := self._live():
            bad = self.world.runner.bad_sound if is_sound else self.world.runner.bad_logits
            bad.add(data.draw(st.sampled_from(live)))

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_all()

    def _live(self) -> list[str]:
        return [name for name, job in self.world.jobs.items() if not job.state.is_final]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_examples", first([40, 120]))
def test_speech_machine(num_examples: int) -> None:
    machine = SpeechMachine.TestCase
    machine.settings = settings(max_examples=num_examples, stateful_step_count=25, deadline=None)
    machine().runTest()

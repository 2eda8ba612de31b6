"""What the speech scheduler learns of its steps."""

import random

import pytest

from triptych.modalities.tts.plan import FrameClock
from triptych.modalities.tts.scheduling.policy import SpeechCosts, audio_work, token_work
from triptych.schedulers.cost import CostModel


class Learner(SpeechCosts):
    """What steps take, learned as the scheduler does."""

    def observe_tokens(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        self._costs.observe("decode", token_work(num_rows, num_prompt_tokens), seconds)
        self.forget_rounds()

    def observe_audio(self, num_rows: int, num_frames: int, seconds: float) -> None:
        self._costs.observe("audio", audio_work(num_rows, num_frames), seconds)
        self.forget_rounds()


def _costs(lookahead_frames: int = 0) -> Learner:
    clock = FrameClock(frame_s=0.08, lookahead_frames=lookahead_frames)
    return Learner(clock, CostModel())


def _token_s(num_rows: int, num_prompt: int) -> float:
    return 0.004 + 0.0006 * num_rows + 0.00015 * num_prompt


def test_what_a_prompt_costs_is_learned_after_hours_without_one() -> None:
    costs, rng = _costs(), random.Random(1)
    for _ in range(2000):
        costs.observe_tokens(1, 0, _token_s(1, 0))
    for _ in range(20):
        num_rows, num_prompt = rng.randrange(1, 30), rng.choice((0, 50, 240))
        costs.observe_tokens(num_rows, num_prompt, _token_s(num_rows, num_prompt))
    assert costs.token_s(20, 300) == pytest.approx(_token_s(20, 300), rel=0.05)
    assert costs.token_s(5) == pytest.approx(_token_s(5, 0), rel=0.05)


def test_one_slow_step_changes_little() -> None:
    costs = _costs()
    for _ in range(200):
        costs.observe_tokens(8, 0, 0.01)
    costs.observe_tokens(8, 0, 1.0)
    assert costs.token_s(8) < 0.02


def test_chunks_are_longer_where_a_step_is_dear_and_frames_cheap() -> None:
    dear, cheap = _costs(), _costs()
    for num_rows in (1, 2, 4, 8) * 8:
        for frames in (1, 3, 9):
            dear.observe_audio(num_rows, num_rows * frames, 0.02 + 1e-5 * num_rows * frames)
            cheap.observe_audio(num_rows, num_rows * frames, 1e-5 + 0.002 * num_rows * frames)
    assert dear.round(4).best_frames == 8, "the longest of at most a second"
    assert cheap.round(4).best_frames == cheap.round(4).first_frames


def test_the_first_chunk_outlasts_three_rounds_and_fills_the_lookahead() -> None:
    slow = _costs(lookahead_frames=3)
    for num_rows in (1, 4, 2, 3) * 8:
        slow.observe_tokens(num_rows, 0, 0.06)
        slow.observe_audio(num_rows, num_rows, 0.04)
    assert slow.round(4).first_frames == 4 + 3, "three rounds of 100 ms are four frames of 80 ms"


def test_waits_are_remembered_for_a_while() -> None:
    costs = _costs()
    costs.observe_wait(0.1)
    costs.observe_wait(-1.0)
    assert 0.09 < costs.wait_s < 0.1
    for _ in range(2000):
        costs.observe_wait(0.0)
    assert costs.wait_s < 1e-3

"""How long the steps of one speech model take, learned from those that are over.

Owns the predictions that the deadlines of speech are counted back with. Knows no policy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from triptych.modalities.tts.plan import FrameClock
from triptych.schedulers.cost import CostModel

CUSHION_ROUNDS = 3.0
"""Rounds of a full token step and a full audio step that a stream's first chunk must last, beside
the wait for others."""

_LONGEST_CHUNK_S = 1.0
_WORTHWHILE = 0.97  # doubling a chunk must lower the price of a frame to this
_FADE = 0.005  # of the longest wait per step: it is forgotten after some 200 steps


class SpeechRound(NamedTuple):
    """The time to give every stream a step and a frame, and the chunks that follow from it.

    `first_frames` are the fewest with which a stream can begin, and not run dry before its turn
    comes again; `best_frames` those beyond which a longer chunk makes a frame hardly cheaper.
    """

    token_s: float
    audio_s: float
    first_frames: int
    best_frames: int


class SpeechCosts:
    """Seconds of token and audio steps, as `costs` has them, and the wait for a turn."""

    def __init__(self, clock: FrameClock, costs: CostModel) -> None:
        self._costs = costs
        self._clock = clock
        self._rounds: dict[int, SpeechRound] = {}
        self.wait_s = 0.0
        """How much longer than predicted it took lately, at worst, until a booked step was over:
        most of it is the wait for steps before it."""

    def round(self, num_rows: int) -> SpeechRound:
        """A round of `num_rows` streams."""
        if num_rows not in self._rounds:
            token_s, audio_s = self.token_s(num_rows), self.audio_s(num_rows, num_rows)
            cushion_s = CUSHION_ROUNDS * (token_s + audio_s) + self.wait_s
            first_frames = math.ceil(cushion_s / self._clock.frame_s)
            first_frames = max(1, first_frames) + self._clock.lookahead_frames
            best_frames = max(first_frames, self._efficient_frames(max(1, num_rows)))
            self._rounds[num_rows] = SpeechRound(token_s, audio_s, first_frames, best_frames)
        return self._rounds[num_rows]

    def token_s(self, num_rows: int, num_prompt_tokens: int = 0) -> float:
        """A token step: rows that go on, and tokens of prompts."""
        return self._costs.trend("decode", token_work(num_rows, num_prompt_tokens))

    def audio_s(self, num_rows: int, num_frames: int) -> float:
        """An audio step; `num_frames` is the sum over its rows."""
        return self._costs.trend("audio", audio_work(num_rows, num_frames))

    def _efficient_frames(self, num_rows: int) -> int:
        frames = 1
        while 2 * frames * self._clock.frame_s <= _LONGEST_CHUNK_S:
            longer_s = self.audio_s(num_rows, 2 * frames * num_rows)
            if longer_s > 2 * _WORTHWHILE * self.audio_s(num_rows, frames * num_rows):
                break
            frames *= 2
        return frames

    def forget_rounds(self) -> None:
        """A step was observed."""
        self._rounds.clear()

    def observe_wait(self, seconds: float) -> None:
        """Learn how much later than predicted a step was over."""
        self.wait_s = max(seconds, (1 - _FADE) * self.wait_s)


def token_work(num_rows: int, num_prompt_tokens: int) -> dict[str, float]:
    """What a token step is predicted from."""
    return {"rows": num_rows, "prompt_tokens": num_prompt_tokens}


def audio_work(num_rows: int, num_frames: int) -> dict[str, float]:
    """What an audio step is predicted from."""
    return {"rows": num_rows, "frames": num_frames}

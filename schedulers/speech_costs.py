"""How long the steps of one speech model take, learned from those that are over.

Owns the predictions that the deadlines of speech are counted back with. Knows no policy.
"""

from __future__ import annotations

from triptych.schedulers.cost import CostModel

_MODEL = ""
_LONGEST_CHUNK_S = 1.0
_WORTHWHILE = 0.9  # doubling a chunk must lower the price of a frame to this
_FADE = 0.02  # of the longest wait per step: after some 50 steps it is forgotten


class SpeechCosts:
    """Predicts seconds of token and audio steps, and how long a step waits for its turn."""

    def __init__(self, frame_s: float) -> None:
        self._costs = CostModel()
        self._max_frames = max(1, round(_LONGEST_CHUNK_S / frame_s))
        self.wait_s = 0.0
        """What a booked step had to wait lately for steps before it, at worst."""

    def token_s(self, num_rows: int, num_prompt_tokens: int = 0) -> float:
        """A token step: rows that go on, and tokens of prompts."""
        return self._costs.predict(_MODEL, "token", _token_work(num_rows, num_prompt_tokens))

    def audio_s(self, num_rows: int, num_frames: int) -> float:
        """An audio step; `num_frames` is the sum over its rows."""
        return self._costs.predict(_MODEL, "audio", _audio_work(num_rows, num_frames))

    def efficient_frames(self, num_rows: int) -> int:
        """The chunk beyond which larger ones make a frame hardly cheaper."""
        frames = 1
        while 2 * frames <= self._max_frames:
            longer_s = self.audio_s(num_rows, 2 * frames * num_rows)
            if longer_s > 2 * _WORTHWHILE * self.audio_s(num_rows, frames * num_rows):
                break
            frames *= 2
        return frames

    def observe_tokens(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a token step."""
        self._costs.observe(_MODEL, "token", _token_work(num_rows, num_prompt_tokens), seconds)

    def observe_audio(self, num_rows: int, num_frames: int, seconds: float) -> None:
        """Learn from an audio step."""
        self._costs.observe(_MODEL, "audio", _audio_work(num_rows, num_frames), seconds)

    def observe_wait(self, seconds: float) -> None:
        """Learn how long a step waited between being booked and being run."""
        self.wait_s = max(seconds, (1 - _FADE) * self.wait_s)


def _token_work(num_rows: int, num_prompt_tokens: int) -> dict[str, float]:
    return {"rows": num_rows, "prompt_tokens": num_prompt_tokens}


def _audio_work(num_rows: int, num_frames: int) -> dict[str, float]:
    return {"rows": num_rows, "frames": num_frames}

"""The echo of an answer in what the microphone hears, which differs from the user by its level.

Owns how loud the user is. Knows neither models of speech nor turns. Levels are root mean squares.
"""

from __future__ import annotations

import math

ECHO_SHARE = 10 ** (-15 / 20)
"""While an answer is played, sound below this share of the user's level may be its echo."""
DECAY = 0.7
"""The share of the user's level that a softer turn leaves: it may have been an echo itself."""


class EchoGate:
    """The level of the user, learned from each turn."""

    def __init__(self) -> None:
        self._user_level = 0.0
        self._power, self._num_frames = 0.0, 0  # of the present turn

    def may_be_echo(self, level: float) -> bool:
        """Whether a frame during an answer is too soft for the user; not before the first turn."""
        return level < self._user_level * ECHO_SHARE

    def hear(self, level: float) -> None:
        """Take a frame of the user's speech."""
        self._power += float(level) ** 2
        self._num_frames += 1

    def end_turn(self) -> None:
        """Learn from the frames since the last turn."""
        if self._num_frames:
            mean = math.sqrt(self._power / self._num_frames)
            self._user_level = max(mean, DECAY * self._user_level)
        self._power, self._num_frames = 0.0, 0

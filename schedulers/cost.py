"""How long a step will take, learned from the steps before it.

Owns the prediction of seconds from a proposal's `work`, per model and kind of step. Feeds the
timeline (who can still go first) and the stall budget (when is a step stuck). Knows nothing of
what the work units mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

UNKNOWN_COST_S = 0.02
"""What a step of a kind never seen counts for."""

_DRIFT = 0.0025  # keeps the gain at 5 %: what was learned fades over some 20 steps
_NUM_TRUSTED = 8
_MAX_SURPRISE = 4.0
_PRIOR_VARIANCE = 1e3
_NUM_RECENT = 512
_NUM_BETWEEN_SORTS = 32


class _LinearCost:
    """Seconds as a linear function of the work counts, by recursive least squares.

    The usual filter (Ljung, System Identification, 11.2) with three guards: features are scaled
    by the first work seen; once trusted, a surprise of more than `_MAX_SURPRISE` times the
    prediction counts as noise, unless the work is unlike any before; the covariance is let drift
    only along the work just seen, since exponential forgetting would blow it up in the directions
    that a steady load does not excite.
    """

    def __init__(self, work: Mapping[str, float]) -> None:
        self._scale = {name: max(abs(value), 1.0) for name, value in work.items()}
        self._num_seen = 0
        self._start()

    def _start(self) -> None:
        size = len(self._scale) + 1
        self._weights = [0.0] * size
        self._covariance = [
            [_PRIOR_VARIANCE if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._fastest_s = float("inf")

    def predict(self, work: Mapping[str, float]) -> float:
        return max(_dot(self._weights, self._features(work)), self._fastest_s / 4)

    def observe(self, work: Mapping[str, float], seconds: float) -> None:
        if self._num_seen == 1:  # the first step compiled and paged in: it says little
            self._start()
        features = self._features(work)
        error = seconds - _dot(self._weights, features)
        noise = 1.0
        if self._num_seen >= _NUM_TRUSTED:
            noise = max(1.0, abs(error) / (_MAX_SURPRISE * self.predict(work)))
        spread = [_dot(row, features) for row in self._covariance]
        norm = noise + _dot(features, spread)
        drift = _DRIFT / _dot(features, features) ** 2
        for i, row in enumerate(self._covariance):
            self._weights[i] += spread[i] / norm * error
            for j, feature in enumerate(features):
                row[j] += drift * features[i] * feature - spread[i] * spread[j] / norm
        self._fastest_s = min(self._fastest_s, seconds)
        self._num_seen += 1

    def _features(self, work: Mapping[str, float]) -> list[float]:
        return [1.0, *(work[name] / scale for name, scale in self._scale.items())]


class CostModel:
    """Predicts the seconds of steps and remembers how long the slow ones took."""

    def __init__(self) -> None:
        self._fits: dict[tuple[str, ...], _LinearCost] = {}
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_observed = 0
        self._p99_s = 0.0

    def is_known(self, model: str, kind: str, work: Mapping[str, float]) -> bool:
        """Whether a step of this kind was seen before."""
        return (model, kind, *work) in self._fits

    def predict(self, model: str, kind: str, work: Mapping[str, float]) -> float:
        """Seconds this step will take; `UNKNOWN_COST_S` for a kind never seen."""
        fit = self._fits.get((model, kind, *work))
        return UNKNOWN_COST_S if fit is None else fit.predict(work)

    def observe(self, model: str, kind: str, work: Mapping[str, float], seconds: float) -> None:
        """Learn from a finished step."""
        key = (model, kind, *work)
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = _LinearCost(work)
        fit.observe(work, seconds)
        self._recent.append(seconds)
        self._num_observed += 1
        if self._num_observed % _NUM_BETWEEN_SORTS == 1 or seconds > self._p99_s:
            ordered = sorted(self._recent)
            self._p99_s = ordered[int(0.99 * (len(ordered) - 1))]

    @property
    def p99_step_s(self) -> float:
        """The 99th percentile of recent steps of any kind; 0 before the first."""
        return self._p99_s


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))

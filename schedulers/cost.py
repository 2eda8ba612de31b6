"""How long a step will take, learned from the steps before it.

Owns the one estimate of seconds. A model's scheduler cuts its steps by it, and the timeline orders
the steps of all models by it. Knows nothing of what the counts of a step's work mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from statistics import median_low

UNKNOWN_COST_S = 0.02
"""What a step of work never seen counts for."""

_DRIFT = 0.0025  # keeps the gain at 5 %: what was learned fades over some 20 steps
_NUM_TRUSTED = 8
_MAX_SURPRISE = 4.0
_PRIOR_VARIANCE = 1e3
_PRIOR_VARIANCE_OF_NONE = 1e1  # of no work at all: at first seconds are taken to be the work's
_NUM_RECENT = 512
_NUM_BETWEEN_SORTS = 32
_NUM_LATEST = 5
_NUM_MEASURED = 2  # the first step of a shape compiles and pages in: alone it says nothing
_MEMORY = 256  # steps after which a work not seen again is forgotten
_FIRST_COUNT = 128  # tokens or patches of a step that is cut by time, before anything is known
_LEAST_COUNT = 32  # fewer would read all weights for next to nothing, and show little


class _WorkCost:
    """Seconds of works with the same names.

    What was measured lately is known. For anything else seconds are a linear function of the
    counts, by recursive least squares: the usual filter (Ljung, System Identification, 11.2) with
    three guards. Counts are scaled by the first work seen. Once trusted, a surprise of more than
    `_MAX_SURPRISE` times the prediction counts as noise, unless the work is unlike any before.
    The covariance drifts only along the work just seen, since exponential forgetting would blow it
    up in the directions that a steady load does not excite.

    Beyond the works seen one line fits as well as another. Where work is a single count, seconds
    are taken to be in proportion to it there.
    """

    def __init__(self, work: Mapping[str, float]) -> None:
        self._scale = [max(abs(value), 1.0) for value in work.values()]
        self._num_seen = 0
        self._latest: OrderedDict[tuple[float, ...], tuple[int, deque[float]]] = OrderedDict()
        self._start()

    def _start(self) -> None:
        size = len(self._scale) + 1
        self._weights = [0.0] * size
        variances = [_PRIOR_VARIANCE_OF_NONE, *[_PRIOR_VARIANCE] * (size - 1)]
        self._covariance = [
            [variance if row == column else 0.0 for column in range(size)]
            for row, variance in enumerate(variances)
        ]
        self._fastest_s = float("inf")
        self._least, self._most = float("inf"), 0.0

    def measured(self, work: Mapping[str, float]) -> float | None:
        """The median of the latest such steps.

        The shortest would promise too little to those who wait: gaps between tokens would be
        overrun as often as not.
        """
        found = self._latest.get(tuple(work.values()))
        return median_low(found[1]) if found and len(found[1]) >= _NUM_MEASURED else None

    def trend(self, work: Mapping[str, float]) -> float:
        features, ratio = self._features(work), 1.0
        if len(features) == 2:
            nearest = min(max(features[1], self._least), self._most)
            ratio, features[1] = features[1] / nearest if nearest else 1.0, nearest
        return max(ratio * _dot(self._weights, features), self._fastest_s / 4)

    def observe(self, work: Mapping[str, float], seconds: float) -> None:
        if self._num_seen == 1:  # the first step compiled and paged in: it says little
            self._start()
        features = self._features(work)
        expected_s = _dot(self._weights, features)
        error, noise = seconds - expected_s, 1.0
        if self._num_seen >= _NUM_TRUSTED:
            expected_s = max(expected_s, self._fastest_s / 4)
            noise = max(1.0, abs(error) / (_MAX_SURPRISE * expected_s))
        spread = [_dot(row, features) for row in self._covariance]
        norm = noise + _dot(features, spread)
        drift = _DRIFT / _dot(features, features) ** 2
        for i, row in enumerate(self._covariance):
            self._weights[i] += spread[i] / norm * error
            for j, feature in enumerate(features):
                row[j] += drift * features[i] * feature - spread[i] * spread[j] / norm
        self._fastest_s = min(self._fastest_s, seconds)
        self._least = min(self._least, features[-1])
        self._most = max(self._most, features[-1])
        self._num_seen += 1
        self._remember(tuple(work.values()), seconds)

    def _remember(self, counts: tuple[float, ...], seconds: float) -> None:
        _, latest = self._latest.pop(counts, (0, deque[float](maxlen=_NUM_LATEST)))
        latest.append(seconds)
        self._latest[counts] = (self._num_seen, latest)
        while next(iter(self._latest.values()))[0] <= self._num_seen - _MEMORY:
            self._latest.popitem(last=False)

    def _features(self, work: Mapping[str, float]) -> list[float]:
        values = zip(work.values(), self._scale, strict=True)
        return [1.0, *(value / scale for value, scale in values)]


class CostModel:
    """Predicts the seconds of one model's steps. Names of a work come in the same order always.

    Kinds of `alike` are one quantity, whatever a step has of each.
    """

    def __init__(self, alike: frozenset[str] = frozenset()) -> None:
        self._alike = alike
        self._kinds: set[str] = set()
        self._costs: dict[tuple[str, ...], _WorkCost] = {}

    def is_known(self, kind: str) -> bool:
        """Whether a step of this kind was seen before."""
        return kind in self._kinds

    def resume(self, other: CostModel) -> None:
        """Go on from what was learned of the same model before it was unloaded."""
        self._kinds, self._costs = other._kinds, other._costs

    def predict(self, kind: str, work: Mapping[str, float]) -> float:
        """Seconds that such work will take; `UNKNOWN_COST_S` where nothing like it was timed."""
        measured_s = self.measured(kind, work)
        return self.trend(kind, work) if measured_s is None else measured_s

    def trend(self, kind: str, work: Mapping[str, float]) -> float:
        """The same by the line alone, which is smooth: for sums and differences of seconds."""
        cost = self._costs.get(self._key(kind, work))
        return UNKNOWN_COST_S if cost is None else cost.trend(work)

    def measured(self, kind: str, work: Mapping[str, float]) -> float | None:
        """Seconds that just this work took lately; `None` where it was not done, or only once."""
        cost = self._costs.get(self._key(kind, work))
        return None if cost is None else cost.measured(work)

    def is_timed(self, kind: str, work: Mapping[str, float]) -> bool:
        """Whether work of this kind with these names was timed."""
        return self._key(kind, work) in self._costs

    def fitting(self, kind: str, name: str, budget_s: float, limit: int) -> int:
        """How much work of one name a step of `budget_s` should have, up to `limit`."""
        if not self.is_timed(kind, {name: 0}):
            return min(_FIRST_COUNT, limit)
        budget_s *= 1 + 1e-9  # what was just so long fits
        seconds = partial(self._seconds_of_more, kind, name)
        return max(_LEAST_COUNT, bisect_right(range(limit), budget_s, key=seconds))

    def observe(self, kind: str, work: Mapping[str, float], seconds: float) -> None:
        """Learn from a finished step; one that was not timed says nothing."""
        self._kinds.add(kind)
        if seconds <= 0:
            return
        key = self._key(kind, work)
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = _WorkCost(work)
        cost.observe(work, seconds)

    def _seconds_of_more(self, kind: str, name: str, less: int) -> float:
        return self.trend(kind, {name: less + 1})

    def _key(self, kind: str, work: Mapping[str, float]) -> tuple[str, ...]:
        return ("" if kind in self._alike else kind, *work)


class RecentSteps:
    """How long the slow ones of recent steps took, of any model and kind."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_observed = 0
        self.p99_s = 0.0
        """The 99th percentile; 0 before the first."""

    def observe(self, seconds: float) -> None:
        """Note a finished step."""
        self._recent.append(seconds)
        self._num_observed += 1
        if self._num_observed % _NUM_BETWEEN_SORTS == 1 or seconds > self.p99_s:
            ordered = sorted(self._recent)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))

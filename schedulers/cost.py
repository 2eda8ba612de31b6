"""How long a step will take, learned from earlier steps.

Owns the only estimate of seconds, of steps and of whole jobs. A model's scheduler cuts its steps
by it, and the timeline orders the steps of all models by it. Knows nothing of the meaning of the
counts of a step's work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from functools import partial
from operator import mul, truediv

UNKNOWN_COST_S = 0.02
"""The assumed seconds of a step whose kind of work was never timed."""

_DRIFT = 0.0025  # keeps the gain at 5 %: what was learned fades over some 20 steps
_NUM_TRUSTED = 8
_MAX_SURPRISE = 4.0
_PRIOR_VARIANCE = 1e3
_PRIOR_VARIANCE_OF_NONE = 1e1  # of the constant: at first seconds are attributed to the work
_NUM_RECENT = 512
_NUM_BETWEEN_SORTS = 32
_NUM_LATEST = 5
_NUM_MEASURED = 2  # the first step of a shape compiles and pages in: it does not count alone
_MEMORY = 256  # steps after which a work that did not recur is forgotten
_FIRST_COUNT = 128  # tokens or patches of a step cut by time, before any was timed
_KEPT_OF_JOBS = 0.95  # what was learned of jobs fades over some twenty of them
_LEAST_COUNT = 32  # fewer would read all weights for little work, and teach little


class _WorkCost:
    """Seconds of works with the same names.

    Recently measured works are predicted by their measurement. For all others seconds are a linear
    function of the counts, by recursive least squares: the usual filter (Ljung, System
    Identification, 11.2) with three guards. Counts are scaled by the first work. Once trusted, an
    error of more than `_MAX_SURPRISE` times the prediction counts as noise, unless the work is
    unlike any before. The covariance drifts only along the latest work, since exponential
    forgetting would blow it up in directions that a steady load does not excite.

    Outside the range of seen works the line is arbitrary. Where work is a single count, seconds are
    taken to be proportional to it there.
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

    def measured_s(self, work: Mapping[str, float]) -> float | None:
        """The median of the latest such steps.

        The minimum would be too optimistic: gaps between tokens would often be overrun.
        """
        found = self._latest.get(tuple(work.values()))
        if found is None or len(found[1]) < _NUM_MEASURED:
            return None
        latest = sorted(found[1])
        return latest[(len(latest) - 1) // 2]  # the lower one of an even number

    def trend(self, work: Mapping[str, float]) -> float:
        features, ratio = self._features(work), 1.0
        if len(features) == 2:
            nearest = min(max(features[1], self._least), self._most)
            ratio, features[1] = features[1] / nearest if nearest else 1.0, nearest
        return max(ratio * _dot(self._weights, features), self._fastest_s / 4)

    def observe(self, work: Mapping[str, float], seconds: float) -> None:
        if self._num_seen == 1:  # the first step compiled and paged in: it is not representative
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
        places = list(zip(features, spread, strict=True))
        for i, (feature, change) in enumerate(places):
            self._weights[i] += change / norm * error
            drifted, row = drift * feature, self._covariance[i]
            self._covariance[i] = [
                value + (drifted * other - change * others_change / norm)
                for value, (other, others_change) in zip(row, places, strict=True)
            ]
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
        return [1.0, *map(truediv, work.values(), self._scale)]


class CostModel:
    """Predicts the seconds of one model's steps. Names of a work always come in the same order.

    All kinds in `same_kinds` share one estimate.
    """

    def __init__(self, same_kinds: frozenset[str] = frozenset()) -> None:
        self._same_kinds = same_kinds
        self._kinds: set[str] = set()
        self._costs: dict[tuple[str, ...], _WorkCost] = {}

    def is_known(self, kind: str) -> bool:
        """Whether a step of this kind was observed."""
        return kind in self._kinds

    def resume(self, other: CostModel) -> None:
        """Take over what was learned of the same model before it was unloaded."""
        self._kinds, self._costs = other._kinds, other._costs

    def predict(self, kind: str, work: Mapping[str, float]) -> float:
        """Seconds that such work will take; `UNKNOWN_COST_S` if none of its kind was timed."""
        measured_s = self.measured_s(kind, work)
        return self.trend(kind, work) if measured_s is None else measured_s

    def trend(self, kind: str, work: Mapping[str, float]) -> float:
        """The prediction by the linear model alone: smooth, for sums and differences."""
        cost = self._costs.get(self._key(kind, work))
        return UNKNOWN_COST_S if cost is None else cost.trend(work)

    def measured_s(self, kind: str, work: Mapping[str, float]) -> float | None:
        """Recent seconds of exactly this work; `None` if it ran less than twice."""
        cost = self._costs.get(self._key(kind, work))
        return None if cost is None else cost.measured_s(work)

    def is_timed(self, kind: str, work: Mapping[str, float]) -> bool:
        """Whether work of this kind and these names was timed."""
        return self._key(kind, work) in self._costs

    def work_within(self, kind: str, name: str, budget_s: float, limit: int) -> int:
        """How much work of one name a step of `budget_s` should have, up to `limit`."""
        if not self.is_timed(kind, {name: 0}):
            return min(_FIRST_COUNT, limit)
        budget_s *= 1 + 1e-9  # work that takes exactly the budget fits
        seconds = partial(self._seconds_of_more, kind, name)
        return max(_LEAST_COUNT, bisect_right(range(limit), budget_s, key=seconds))

    def observe(self, kind: str, work: Mapping[str, float], seconds: float) -> None:
        """Learn from a finished step; one that was not timed only makes its kind known."""
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
        return ("" if kind in self._same_kinds else kind, *work)


class RecentSteps:
    """The durations of recent steps, of any model and kind."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_observed = 0
        self.p99_s = 0.0
        """The 99th percentile; 0 before the first step."""

    def observe(self, seconds: float) -> None:
        """Record a finished step."""
        self._recent.append(seconds)
        self._num_observed += 1
        if self._num_observed % _NUM_BETWEEN_SORTS == 1 or seconds > self.p99_s:
            ordered = sorted(self._recent)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]


class JobSeconds:
    """Device seconds of a job: a decaying mean of the seconds of steps per ended job."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._num_ended = 0.0

    def spend(self, seconds: float) -> None:
        """Add the seconds of a step."""
        self._spent_s += seconds

    def end(self) -> None:
        """Count a job that ended."""
        self._spent_s *= _KEPT_OF_JOBS
        self._num_ended = (self._num_ended + 1) * _KEPT_OF_JOBS

    @property
    def mean_s(self) -> float:
        """The seconds of a job; `UNKNOWN_COST_S` before the first has ended."""
        return self._spent_s / self._num_ended if self._num_ended else UNKNOWN_COST_S

    def left_s(self, *, num_waiting: int, num_running: int) -> float:
        """Seconds of work left in these jobs; running jobs count as half done."""
        return self.mean_s * (num_waiting + num_running / 2)


def _dot(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    products: Iterable[float] = map(mul, left, right)
    return sum(products)

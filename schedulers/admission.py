"""Admission: bounds on the work in the server, for all callers and for each key.

Owns the counts of jobs and tokens admitted and not yet released, and the estimate of when room will
be free. Runs in the API process, so that overload is refused before it costs anything. Not
thread-safe: one event loop calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from triptych.core.errors import InvalidRequest, Overloaded, RateLimited, Unavailable
from triptych.core.options.batch_limits import LEAST_ROWS
from triptych.core.options.config import ScheduleOptions

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_MEMORY_S = 20.0
_SHARE = 3
"""Multiple of the remaining free room that one key may hold."""


class _Meter:
    """An admitted amount, its limit (0: none), and how fast it drains.

    The rate is an exponentially decaying sum over about the last `_MEMORY_S` seconds, divided by
    the time observed so far while the meter is young.
    """

    def __init__(self, unit: str, limit: int, now_s: float) -> None:
        self.unit = unit
        self.limit = limit
        self.inside = 0
        self._drained = 0.0
        self._seen_s = 0.0
        self._last_s = now_s

    def drain(self, amount: int, now_s: float) -> None:
        """Remove an amount that was released."""
        self._forget(now_s)
        self.inside -= amount
        self._drained += amount

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until `amount` more is released; the minimum before any measurement."""
        self._forget(now_s)
        if not self._drained:
            return MIN_RETRY_S
        return min(max(amount * self._seen_s / self._drained, MIN_RETRY_S), MAX_RETRY_S)

    def _forget(self, now_s: float) -> None:
        kept = math.exp((self._last_s - now_s) / _MEMORY_S)
        self._drained *= kept
        self._seen_s = _MEMORY_S * (1 - kept) + self._seen_s * kept
        self._last_s = now_s


class _Account:
    """Jobs and tokens of one key, or of all keys together."""

    def __init__(self, *, max_jobs: int, max_tokens: int, now_s: float) -> None:
        self.jobs = _Meter("jobs", max_jobs, now_s)
        self.tokens = _Meter("tokens", max_tokens, now_s)

    def check(
        self, num_jobs: int, num_tokens: int, refusal: type[Unavailable], now_s: float
    ) -> None:
        """Raise `refusal` if the amounts do not fit now, InvalidRequest if they never can."""
        for meter, amount in ((self.jobs, num_jobs), (self.tokens, num_tokens)):
            excess = meter.inside + amount - meter.limit
            if not meter.limit or excess <= 0:
                continue
            if amount > meter.limit:
                raise InvalidRequest(
                    f"The request asks for {amount} {meter.unit}; at most {meter.limit} are"
                    " admitted at once."
                )
            whose = "Your key has" if refusal is RateLimited else "The server has"
            raise refusal(
                f"{whose} {meter.inside} {meter.unit} in progress, of {meter.limit} at most; try"
                " again later.",
                retry_after_s=meter.wait_s(excess, now_s),
            )

    def enter(self, num_jobs: int, num_tokens: int) -> None:
        """Add admitted amounts."""
        self.jobs.inside += num_jobs
        self.tokens.inside += num_tokens

    def leave(self, num_jobs: int, num_tokens: int, now_s: float) -> None:
        """Remove released amounts."""
        self.jobs.drain(num_jobs, now_s)
        self.tokens.drain(num_tokens, now_s)


class Ticket:
    """Admitted work. Release it exactly once: `release`, or leave the `with` block."""

    __slots__ = ("_is_released", "_on_release")

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._on_release = on_release
        self._is_released = False

    def release(self) -> None:
        """Release the work, whether it succeeded or failed."""
        assert not self._is_released, "a ticket is released exactly once"
        self._is_released = True
        self._on_release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_released:
            self.release()


class Admission:
    """Keeps admitted work within the bounds of `options`.

    All keys together: `max_queue_size` jobs in addition to the `max_batch_size` that run, and
    `max_queue_tokens`. If the engine chooses the batch, its smallest choice counts here: no engine
    then refuses what was admitted, and the shares of keys are parts of what it really holds. Each
    key: `max_jobs_per_key` and `max_tokens_per_key`; the empty key stands for no caller and has no
    bounds. With several keys none can fill the server (dynamic thresholds: Choudhury and Hahne,
    1998): beyond its first call a key may hold `_SHARE` times what it leaves free.
    """

    def __init__(
        self,
        *,
        options: ScheduleOptions,
        num_keys: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._is_shared = num_keys > 1
        self._clock = clock
        self._by_key: dict[str, _Account] = {}
        self._total = _Account(
            max_jobs=options.max_queue_size + (options.max_batch_size or LEAST_ROWS),
            max_tokens=options.max_queue_tokens,
            now_s=clock(),
        )

    @property
    def max_jobs(self) -> int:
        """The bound of jobs admitted at once: a call for more is never admitted."""
        return self._total.jobs.limit

    @property
    def num_jobs(self) -> int:
        """The number of jobs admitted and not released."""
        return self._total.jobs.inside

    @property
    def num_tokens(self) -> int:
        """The number of tokens admitted and not released."""
        return self._total.tokens.inside

    def admit(self, *, key: str, num_jobs: int, num_tokens: int) -> Ticket:
        """Admit `num_jobs` jobs that take `num_tokens` tokens together.

        Raises RateLimited if the key's work exceeds its bounds, Overloaded if that of all keys
        does, both with the time to retry after; InvalidRequest if the call would not even fit
        alone.
        """
        now_s = self._clock()
        account = self._by_key.get(key) or self._open(key, now_s)
        account.check(num_jobs, num_tokens, RateLimited, now_s)
        if key and self._is_shared:
            self._check_share(account, num_jobs, num_tokens, now_s)
        self._total.check(num_jobs, num_tokens, Overloaded, now_s)
        self._by_key[key] = account
        account.enter(num_jobs, num_tokens)
        self._total.enter(num_jobs, num_tokens)
        return Ticket(lambda: self._release(key, num_jobs, num_tokens))

    def _check_share(self, account: _Account, num_jobs: int, num_tokens: int, now_s: float) -> None:
        """Raise `RateLimited` if other keys had too little room; a first call is admitted."""
        for own, total, amount in (
            (account.jobs, self._total.jobs, num_jobs),
            (account.tokens, self._total.tokens, num_tokens),
        ):
            free = total.limit - total.inside - amount
            excess = own.inside + amount - _SHARE * free
            if total.limit and own.inside and excess > 0:
                raise RateLimited(
                    f"Your key has {own.inside} {own.unit} in progress, and all keys together"
                    f" {total.inside} of {total.limit}: the rest is shared with other keys. Try"
                    " again later.",
                    retry_after_s=own.wait_s(math.ceil(excess / (_SHARE + 1)), now_s),
                )

    def _open(self, key: str, now_s: float) -> _Account:
        options = self._options
        return _Account(
            max_jobs=options.max_jobs_per_key if key else 0,
            max_tokens=options.max_tokens_per_key if key else 0,
            now_s=now_s,
        )

    def _release(self, key: str, num_jobs: int, num_tokens: int) -> None:
        now_s = self._clock()
        account = self._by_key[key]
        account.leave(num_jobs, num_tokens, now_s)
        self._total.leave(num_jobs, num_tokens, now_s)
        if not account.jobs.inside:
            del self._by_key[key]  # an idle key costs no memory

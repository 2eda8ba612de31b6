"""Who is let in: bounds on admitted work, for all callers and for each key.

Owns the account of jobs and tokens admitted and not yet released, and the estimate of when room
will come free. Lives where requests arrive, so that overload is refused before it costs anything.
Not thread-safe: one event loop calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from triptych.core.config import ScheduleOptions
from triptych.core.errors import InvalidRequest, Overloaded, RateLimited, Unavailable

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_MEMORY_S = 20.0


class _DrainRate:
    """Amount released per second, over about the last `_MEMORY_S` seconds.

    An exponentially decaying sum; while the account is young it is divided by the time it has
    really seen, not by the time it could.
    """

    def __init__(self, now_s: float) -> None:
        self._sum = 0.0
        self._seen_s = 0.0
        self._last_s = now_s

    def add(self, amount: float, now_s: float) -> None:
        self._advance(now_s)
        self._sum += amount

    def per_second(self, now_s: float) -> float:
        self._advance(now_s)
        return self._sum / max(self._seen_s, 1e-3)

    def _advance(self, now_s: float) -> None:
        decay = math.exp(-(now_s - self._last_s) / _MEMORY_S)
        self._sum *= decay
        self._seen_s = _MEMORY_S * (1 - decay) + self._seen_s * decay
        self._last_s = now_s


@dataclass(slots=True)
class _Account:
    """Jobs and tokens inside, and how fast each leaves."""

    num_jobs: int = 0
    num_tokens: int = 0
    job_rate: _DrainRate = field(kw_only=True)
    token_rate: _DrainRate = field(kw_only=True)


class Ticket:
    """Admitted work. Give it back exactly once: `release`, or leave the `with` block."""

    __slots__ = ("_admission", "_is_released", "key", "num_jobs", "num_tokens")

    def __init__(self, admission: Admission, *, key: str, num_jobs: int, num_tokens: int) -> None:
        self._admission = admission
        self._is_released = False
        self.key = key
        self.num_jobs = num_jobs
        self.num_tokens = num_tokens

    def release(self) -> None:
        """The work is over, well or not."""
        assert not self._is_released, "a ticket is released exactly once"
        self._is_released = True
        self._admission._release(self)

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
    """Admits work within `max_queue_size` (beside what runs), `max_queue_tokens`,
    `max_jobs_per_key` and `max_tokens_per_key`. The empty key is nobody's and has no bound of its
    own.
    """  # noqa: D205

    def __init__(
        self, *, options: ScheduleOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._max_jobs = options.max_queue_size + options.max_batch_size
        self._max_tokens = options.max_queue_tokens
        self._max_key_jobs = options.max_jobs_per_key
        self._max_key_tokens = options.max_tokens_per_key
        self._total = self._open()
        self._by_key: dict[str, _Account] = {}

    @property
    def num_jobs(self) -> int:
        """Jobs admitted and not released."""
        return self._total.num_jobs

    @property
    def num_tokens(self) -> int:
        """Tokens admitted and not released."""
        return self._total.num_tokens

    def admit(self, *, key: str, num_jobs: int, num_tokens: int) -> Ticket:
        """Let `num_jobs` jobs in that take `num_tokens` tokens together.

        Raises RateLimited where the key has too much inside, Overloaded where all keys together
        have, both saying when enough will have left; InvalidRequest where the call would not even
        fit alone.
        """
        account = self._by_key.get(key) or self._open()
        if key:
            self._fit(account, num_jobs, self._max_key_jobs, "jobs", RateLimited)
            self._fit(account, num_tokens, self._max_key_tokens, "tokens", RateLimited)
        self._fit(self._total, num_jobs, self._max_jobs, "jobs", Overloaded)
        self._fit(self._total, num_tokens, self._max_tokens, "tokens", Overloaded)
        self._by_key[key] = account
        for one in (account, self._total):
            one.num_jobs += num_jobs
            one.num_tokens += num_tokens
        return Ticket(self, key=key, num_jobs=num_jobs, num_tokens=num_tokens)

    def _fit(
        self, account: _Account, amount: int, limit: int, unit: str, refusal: type[Unavailable]
    ) -> None:
        """Raise unless `amount` more `unit` stay within `limit` (0: none)."""
        if not limit:
            return
        if amount > limit:
            raise InvalidRequest(
                f"The request asks for {amount} {unit}; at most {limit} are admitted at once."
            )
        inside, rate = (
            (account.num_jobs, account.job_rate)
            if unit == "jobs"
            else (account.num_tokens, account.token_rate)
        )
        excess = inside + amount - limit
        if excess > 0:
            whose = "Your key has" if refusal is RateLimited else "The server has"
            raise refusal(
                f"{whose} {inside} {unit} in progress, of {limit} at most; try again later.",
                retry_after_s=self._retry_after_s(excess, rate),
            )

    def _retry_after_s(self, excess: int, rate: _DrainRate) -> float:
        """Seconds until `excess` has drained; the least where nothing has been measured yet."""
        per_second = rate.per_second(self._clock())
        if not per_second:
            return MIN_RETRY_S
        return min(max(excess / per_second, MIN_RETRY_S), MAX_RETRY_S)

    def _release(self, ticket: Ticket) -> None:
        now_s = self._clock()
        for account in (self._by_key[ticket.key], self._total):
            account.num_jobs -= ticket.num_jobs
            account.num_tokens -= ticket.num_tokens
            account.job_rate.add(ticket.num_jobs, now_s)
            account.token_rate.add(ticket.num_tokens, now_s)
        if not self._by_key[ticket.key].num_jobs:
            del self._by_key[ticket.key]  # a key that is idle costs no memory

    def _open(self) -> _Account:
        now_s = self._clock()
        return _Account(job_rate=_DrainRate(now_s), token_rate=_DrainRate(now_s))

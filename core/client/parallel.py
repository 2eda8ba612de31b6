"""Several requests to a server at once, with results in order.

Owns the threads. They are daemons: after Ctrl-C the process ends at once, which closes their
connections and so cancels their requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from triptych.core.errors import TriptychError

Entry = TypeVar("Entry")
Answer = TypeVar("Answer")


def in_order(
    answer: Callable[[Entry], Answer], entries: Sequence[Entry], num_at_once: int
) -> Iterator[Answer | TriptychError]:
    """Yield `answer` of each entry, or the error that it raised.

    Leaving the loop early starts no further ones.
    """
    results: list[Future[Answer | TriptychError]] = [Future() for _ in entries]
    places = count()
    is_left = threading.Event()

    def work() -> None:
        # `next` of a counter is atomic, so no two threads take one entry.
        while not is_left.is_set() and (place := next(places)) < len(entries):
            try:
                results[place].set_result(answer(entries[place]))
            except TriptychError as error:
                results[place].set_result(error)
            except BaseException as error:
                results[place].set_exception(error)

    for _ in range(min(num_at_once, len(entries))):
        threading.Thread(target=work, name="triptych-request", daemon=True).start()
    try:
        for result in results:
            yield result.result()
    finally:
        is_left.set()

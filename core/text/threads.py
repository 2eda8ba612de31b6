"""Threads for work on texts: tokenizing, and what is around it.

Owns how much of it runs at once. A long text never has more than one thread, so that others are
neither kept waiting behind it nor left without a processor; what must wait takes no thread. What a
long text took of memory goes back to the system.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from triptych.core.process.heap import trim_heap

_LONG = 2**16
"""Characters or tokens; a shorter text takes milliseconds."""
_BRIEF = 2**13
"""Characters or tokens; a shorter text takes no longer than the way to a thread and back."""
_NUM_SHORT = 2

Given = ParamSpec("Given")
Result = TypeVar("Result")

_short = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="triptych-text")
_long = ThreadPoolExecutor(1, thread_name_prefix="triptych-long-text")


async def on_text_thread(
    length: int, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """What `work` returns or raises. `length` is that of its text."""
    call = partial(contextvars.copy_context().run, work, *args, **kwargs)
    loop = asyncio.get_running_loop()
    if length <= _LONG:
        return await loop.run_in_executor(_short, call)
    try:
        return await loop.run_in_executor(_long, call)
    finally:
        # A tokenizer leaves a hundred bytes for each token of a text to its thread's heap.
        _long.submit(trim_heap)


async def on_text_thread_if_long(
    length: int, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """As `on_text_thread`, or at once where that takes no longer."""
    if length <= _BRIEF:
        return work(*args, **kwargs)
    return await on_text_thread(length, work, *args, **kwargs)

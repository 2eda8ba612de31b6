"""Threads for work on texts, such as tokenizing.

Owns how much runs at once. Long texts share one thread, so that short texts neither wait for them
nor lack a processor; waiting work occupies no thread. Memory used for a long text is returned to
the system.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from triptych.core.process.heap import trim_heap

_LONG_CHARS = 2**16
"""Characters or tokens; shorter texts take milliseconds."""
_SHORT_CHARS = 2**13
"""Characters or tokens; shorter texts take less time than a switch to a thread and back."""
_NUM_SHORT = 2

Given = ParamSpec("Given")
Result = TypeVar("Result")

_short = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="triptych-text")
_long = ThreadPoolExecutor(1, thread_name_prefix="triptych-long-text")


async def on_text_thread(
    length: int, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Run `work` on a text of `length` characters or tokens, on a thread."""
    call = partial(contextvars.copy_context().run, work, *args, **kwargs)
    loop = asyncio.get_running_loop()
    if length <= _LONG_CHARS:
        return await loop.run_in_executor(_short, call)
    try:
        return await loop.run_in_executor(_long, call)
    finally:
        # A tokenizer leaves about a hundred bytes per token in its thread's heap.
        _long.submit(trim_heap)


async def on_text_thread_if_long(
    length: int, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Like `on_text_thread`, but run short texts at once on this thread."""
    if length <= _SHORT_CHARS:
        return work(*args, **kwargs)
    return await on_text_thread(length, work, *args, **kwargs)

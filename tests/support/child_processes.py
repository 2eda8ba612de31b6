"""The children of this process: what decodes files, runs chat templates, checks grammars; ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import psutil

from triptych.modalities.llm.api import grammar_child, template_child

WORKER = "triptych.modalities.vlm.processing.worker"
"""Prepares images for chats; a parity test keeps some, since they start slowly."""


def _workers() -> list[tuple[psutil.Process, list[str]]]:
    gc.collect()  # those of earlier tests go with what they belonged to
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended, and perhaps was not waited for yet
            found.append((child, child.cmdline()))
    return [(child, line) for child, line in found if "triptych.core.media.worker" in line]


def workers(module: str = "") -> list[psutil.Process]:
    """Those that run still, or those of them that were given `module`."""
    return [child for child, line in _workers() if not module or module in line]


def decoders() -> list[psutil.Process]:
    """Those that decode files, but for those that prepare images for chats."""
    others = {template_child.__name__, grammar_child.__name__, WORKER}
    return [child for child, line in _workers() if others.isdisjoint(line)]


def preparers() -> list[psutil.Process]:
    """Those that prepare images for chats."""
    return workers(WORKER)


def renderers() -> list[psutil.Process]:
    """Those that run chat templates; other tests' may not have been collected yet."""
    return workers(template_child.__name__)


def grammar_checkers() -> list[psutil.Process]:
    """Those that check grammars; other tests' may not have been collected yet."""
    return workers(grammar_child.__name__)


def renderers_from_now() -> Callable[[], list[psutil.Process]]:
    """A function that lists the children started since this call."""
    before = renderers()
    return lambda: [child for child in renderers() if child not in before]


def ranks_of(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of ranks that a process has started."""
    return [child for child in (process or psutil.Process()).children() if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "triptych.rank_process" in process.cmdline()
    except psutil.NoSuchProcess:  # it has ended
        return False

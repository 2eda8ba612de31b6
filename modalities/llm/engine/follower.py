"""A rank other than 0 of a divided model, before it is loaded.

Owns nothing but the parts that the loaders of text and vision models exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.engine_api.plan import Plan, Runner, TokenPlan
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.layers.attention import KvLayout


def _itself(runner: TokenRunner) -> Runner:
    return runner


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank other than 0: its part of the model, its loading, and its plan runner."""

    blueprint: NativeBlueprint
    reserve: Callable[[], KvLayout]
    build: Callable[[], TextHead]
    runner: Callable[[TokenRunner], Runner] = _itself
    plans: type[Plan] = TokenPlan


def ignore_progress(share: float) -> None:
    """Ignore the progress of a rank: rank 0 reports it for all."""

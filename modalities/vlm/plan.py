"""Plan and result of reading pictures. Plain data, no tensors.

Owns the hand-over between the scheduler and the runners of vision models. Features stay on
the device, in a cache by digest that both sides know: a step that encodes leaves them there,
referenced once for the plan, and the scheduler passes that reference on to the jobs that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.plan import Plan
from triptych.core.prompt_content import PromptContent


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodePlan(Plan):
    """Features of some pictures, all different, none of which is in the cache.

    Its result has a row for each: the error that kept its features out of the cache, or `None` for
    those that are there now, with a reference to them.
    """

    pictures: tuple[PromptContent, ...]

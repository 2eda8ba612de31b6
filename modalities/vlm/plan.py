"""The plan and result of encoding images. Plain data, no tensors.

Owns the hand-over between the scheduler and the runners of vision models. Features stay on the
device, in a cache by digest that scheduler and runner share: an encoding step inserts them with one
reference for the plan, and the scheduler passes that reference on to the waiting jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.core.engine_api.prompt_content import PromptContent


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodePlan(Plan):
    """A step that encodes images, all different, none of which is in the cache.

    The result has a row per image: the error that kept its features out of the cache, or `None` for
    features in the cache, with a reference to them.
    """

    images: tuple[PromptContent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan(TokenPlan):
    """The form in which the ranks of a divided model receive a plan of either kind.

    Images come without their data, which rank 0 broadcasts as they are encoded.
    """

    images: tuple[PromptContent, ...] = ()

    @classmethod
    def of(cls, plan: EncodePlan) -> SharedPlan:
        """Convert an `EncodePlan` to be sent."""
        return cls(
            step_id=plan.step_id,
            model=plan.model,
            kind=plan.kind,
            rows=(),
            images=tuple(_without_data(image) for image in plan.images),
        )

    def received(self) -> TokenPlan | EncodePlan:
        """Convert back to the plan to run."""
        if not self.images:
            return self
        return EncodePlan(
            step_id=self.step_id, model=self.model, kind=self.kind, images=self.images
        )


def _without_data(image: PromptContent) -> PromptContent:
    inputs = {name: structs.replace(each, data=b"") for name, each in image.inputs.items()}
    return structs.replace(image, inputs=inputs)

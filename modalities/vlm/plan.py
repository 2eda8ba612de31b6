"""Plan and result of reading images. Plain data, no tensors.

Owns the hand-over between the scheduler and the runners of vision models. Features stay on
the device, in a cache by digest that both sides know: a step that encodes leaves them there,
referenced once for the plan, and the scheduler passes that reference on to the jobs that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.core.engine_api.prompt_content import PromptContent


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodePlan(Plan):
    """Features of some images, all different, none of which is in the cache.

    Its result has a row for each: the error that kept its features out of the cache, or `None` for
    those that are there now, with a reference to them.
    """

    images: tuple[PromptContent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan(TokenPlan):
    """What the ranks of a divided model are told of a plan of either kind.

    Images come without their numbers, which rank 0 hands round as they are encoded.
    """

    images: tuple[PromptContent, ...] = ()

    @classmethod
    def of(cls, plan: EncodePlan) -> SharedPlan:
        """To be told."""
        return cls(
            step_id=plan.step_id,
            model=plan.model,
            kind=plan.kind,
            rows=(),
            images=tuple(_without_data(image) for image in plan.images),
        )

    def received(self) -> TokenPlan | EncodePlan:
        """To be run."""
        if not self.images:
            return self
        return EncodePlan(
            step_id=self.step_id, model=self.model, kind=self.kind, images=self.images
        )


def _without_data(image: PromptContent) -> PromptContent:
    inputs = {name: structs.replace(each, data=b"") for name, each in image.inputs.items()}
    return structs.replace(image, inputs=inputs)

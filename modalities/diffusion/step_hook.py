"""A function that an image's job has called after each of its steps, in the engine's process.

Owns the types that both halves share. Loads no torch: tensors cross as they are, since a hook never
crosses a socket. `engine.step_end` calls it, `api.step_callback` makes one of a caller's callback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from triptych.modalities.diffusion.wire import ImageRequest

TENSOR_NAMES = ("latents",)
"""The tensors that a hook may read and replace."""


class StepEnd(Protocol):
    """The end of one step of one image, valid during the call of a hook."""

    @property
    def image(self) -> int:
        """The number of the image in its request."""

    @property
    def step(self) -> int:
        """The number of steps before this one, counted from the image's first."""

    @property
    def timestep(self) -> float:
        """The scheduler's time of this step."""

    @property
    def num_steps(self) -> int:
        """The number of steps that the image takes in all."""

    def tensors(self, names: Collection[str]) -> dict[str, Any]:
        """Copies of the tensors of these names, each with a batch dimension of 1."""

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Continue with other tensors. Raises `InvalidRequest` for another name, type or shape."""

    def interrupt(self) -> None:
        """Take no further step of this image: it is decoded as it is."""


StepHook: TypeAlias = Callable[[StepEnd], None]
"""Called on the engine's thread, which waits for it. Must not raise."""


class HookedRequest(ImageRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A request with a hook. No codec knows this type: it exists in the engine's process alone."""

    on_step_end: StepHook

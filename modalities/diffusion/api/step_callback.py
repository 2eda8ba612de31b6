"""`callback_on_step_end` of the Python pipeline, as diffusers has it.

Owns the call of a caller's function: its arguments, what it returns, and the error that it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.step_hook import TENSOR_NAMES, StepEnd


class ImageInProgress:
    """One image of a call, the `index`-th, that takes `num_timesteps` steps.

    The first argument of a callback, where diffusers passes its pipeline.
    """

    def __init__(self, index: int, num_timesteps: int) -> None:
        self.index = index
        self.num_timesteps = num_timesteps
        self.interrupt = False
        """Set it to take no further step of this image, and decode it as it is."""

    @property
    def _interrupt(self) -> bool:
        """The name that callbacks written for diffusers set."""
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool) -> None:
        self.interrupt = value


Callback: TypeAlias = Callable[
    [ImageInProgress, int, float, dict[str, Any]], Mapping[str, Any] | None
]
"""`callback(image, step, timestep, tensors)`; returns the tensors to continue with."""


class StepCallback:
    """Implements `step_hook.StepHook` with a caller's function.

    Once the function has raised, `error` is set, and every image of the call takes no more steps.
    """

    def __init__(self, callback: Callback, tensor_names: Sequence[str] = TENSOR_NAMES) -> None:
        """Raise `InvalidRequest` for tensors that a callback cannot have."""
        unknown = [name for name in tensor_names if name not in TENSOR_NAMES]
        if isinstance(tensor_names, str) or unknown or not callable(callback):
            raise InvalidRequest(
                "callback_on_step_end is a function, and callback_on_step_end_tensor_inputs a list"
                f" of {', '.join(TENSOR_NAMES)}: embeddings of prompts are shared between images.",
                param="callback_on_step_end_tensor_inputs",
            )
        self._callback, self._names = callback, tuple(tensor_names)
        self.error: Exception | None = None

    def __call__(self, end: StepEnd) -> None:
        """Call the function after a step, and do what it asks for."""
        image = ImageInProgress(end.image, end.num_steps)
        try:
            if self.error is None:
                tensors = end.tensors(self._names)
                found = self._callback(image, end.step, end.timestep, tensors)
                end.replace({} if found is None else found)
        except Exception as error:  # the caller's, who gets it from the call
            self.error = error
        except BaseException as error:  # as of sys.exit, which would end the engine's thread
            self.error = RuntimeError(f"callback_on_step_end raised {error!r}")
            self.error.__cause__ = error
        if image.interrupt or self.error is not None:
            end.interrupt()

    def check(self) -> None:
        """Raise what the function raised."""
        if self.error is not None:
            raise self.error

"""Opening a model's files, where whatever a reader raises must end in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from triptych.core.errors import TriptychError, WeightsError
from triptych.core.weights.resolve import ResolvedModel

Options = ParamSpec("Options")
Opened = TypeVar("Opened")


def opening(
    model: ResolvedModel,
    open_model: Callable[Concatenate[ResolvedModel, Options], Opened],
    *args: Options.args,
    **kwargs: Options.kwargs,
) -> Opened:
    """What `open_model` makes of `model`. Whatever it raises ends the start in one line."""
    try:
        return open_model(model, *args, **kwargs)
    except TriptychError:
        raise
    except Exception as error:  # a damaged file may have any reader raise anything
        reason = " ".join(str(error).split())[:120]
        raise WeightsError(
            f"{model.name} cannot be read, its files may be damaged"
            f" ({type(error).__name__}: {reason})."
        ) from error

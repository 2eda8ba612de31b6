"""Where a run has its kernels: interpreted, or on a device with `pytest -m gpu`.

`TRITON_INTERPRET` says which; `tests/conftest.py` sets it before anything imports Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

DEVICE = "cuda"
_INTERPRETS = "TRITON_INTERPRET"


def choose_kernels(*, on_device: bool) -> None:
    """Decide for this process and its children; before anything imports Triton."""
    if on_device:
        os.environ.pop(_INTERPRETS, None)
        return
    os.environ[_INTERPRETS] = "1"
    _mend_interpreter()


def is_interpreted() -> bool:
    """Whether kernels are interpreted here."""
    return os.environ.get(_INTERPRETS) == "1"


def kernel_device() -> torch.device:
    """The device that kernels of this run take tensors of."""
    import torch

    return torch.device("cpu") if is_interpreted() else torch.device(DEVICE, 0)


def each_type() -> tuple[torch.dtype, ...]:
    """The types that kernels are tried in wherever a test has no reason for one.

    The interpreter computes in float32 whatever a type says, and casts in its own way.
    """
    import torch

    if is_interpreted():
        return (torch.float32,)
    return torch.float32, torch.bfloat16, torch.float16


def on_device(launch: Callable[P, R]) -> Callable[P, R]:
    """`launch` for tensors of the host, on the device if there is one to this run.

    Tensors there have the same storages, places and strides: slices remain slices. What a kernel
    wrote to its arguments comes back with its results.
    """

    @wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_interpreted():
            return launch(*args, **kwargs)
        crossing = _Crossing()
        result = launch(*crossing.there(args), **crossing.there(kwargs))
        crossing.bring_back()
        return _mapped(result, lambda tensor: tensor.cpu())

    return launched


class _Crossing:
    """Storages of the host, each with its copy on the device."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def there(self, value: Any) -> Any:
        return _mapped(value, self._tensor)

    def bring_back(self) -> None:
        for host, copy in self._copies.values():
            host.copy_(copy)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        storage = tensor.untyped_storage()
        if storage._cdata not in self._copies:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._copies[storage._cdata] = host, torch.empty_like(host, device=DEVICE).copy_(host)
        copy = self._copies[storage._cdata][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def _mapped(value: Any, of_tensor: Callable[[Any], Any]) -> Any:
    """The value, with other tensors in it."""
    import torch

    def mapped(each: Any) -> Any:
        return _mapped(each, of_tensor)

    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, dict):
        return {name: mapped(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        has_names = hasattr(value, "_fields")
        return type(value)(*map(mapped, value)) if has_names else type(value)(map(mapped, value))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: mapped(getattr(value, each.name)) for each in fields(value)}
        return replace(value, **changed)
    return value


def _mend_interpreter() -> None:
    """Mend what Triton's interpreter does wrong with numpy 2.4, and what it does too often."""
    try:
        release = tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return
    from triton.runtime import interpreter

    if release < (3, 8):
        _take_numbers_of_arrays(interpreter)
    _patch_language_once(interpreter)


def _take_numbers_of_arrays(interpreter: Any) -> None:
    """It takes arrays of one number for numbers, and numpy 2.4 refuses that."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once(interpreter: Any) -> None:
    """It exchanges all of `triton.language` at each call of a function: a third of its time.

    Nothing is compiled in a process that interprets, so what is exchanged may stay.
    """
    patch = interpreter._patch_lang

    @cache
    def patch_all() -> None:
        modules = {"tl": interpreter.tl, "core": interpreter.tl.core}
        patch(SimpleNamespace(__globals__=modules))

    def patch_lang(fn: object) -> Any:
        patch_all()
        return interpreter._LangPatchScope()  # of no changes

    interpreter._patch_lang = patch_lang

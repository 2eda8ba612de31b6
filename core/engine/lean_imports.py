"""transformers and diffusers, imported without torch's compiler.

Owns what is left out. Both mark functions for `torch.compile`, and the marks alone import the
compiler, its back ends and Triton: a third of transformers' import, of which a server has no use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Of `torch.compiler`, which imports the compiler to make them, and of the compiler itself."""
_find_packages = functools.cache(importlib.metadata.packages_distributions)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Marks are left off what is imported inside, unless the compiler is there already.

    The packages that are installed are looked up once for all libraries, each of which asks.
    """
    with ExitStack() as patches:
        enter = patches.enter_context
        enter(_patched(vars(importlib.metadata), "packages_distributions", _find_packages))
        if _COMPILER not in sys.modules:
            for mark in _MARKS:
                enter(_patched(vars(torch.compiler), mark, _leave_unmarked))
            compiler = _Compiler()
            enter(_patched(vars(torch), "_dynamo", compiler))
            enter(_patched(sys.modules, _COMPILER, compiler))
        yield


def import_transformers() -> None:
    """Import what models of transformers' need; nothing where it has been imported."""
    with lean_imports():
        for name in ("modeling_utils", "generation.utils"):
            importlib.import_module(f"transformers.{name}")


class _Compiler(ModuleType):
    """Stands for the compiler's package, which is imported for anything but marks and modules."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [str(Path(folder) / "_dynamo") for folder in torch.__path__]

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _leave_unmarked
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def _leave_unmarked(
    function: Callable[..., Any] | None = None, *_: object, **__: object
) -> Callable[..., Any]:
    """A decorator, with its options or without, that changes nothing."""
    return _leave_unmarked if function is None else function


@contextmanager
def _patched(names: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """`name` means `value` inside, unless something else puts itself there."""
    is_there, before = name in names, names.get(name)
    names[name] = value
    try:
        yield
    finally:
        if names.get(name) is value:
            del names[name]
            if is_there:
                names[name] = before

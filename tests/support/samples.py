"""The modules of samples/, for the tests that import them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

SAMPLES = Path(__file__).parents[2] / "samples"
_INSIDE = f"{SAMPLES}{os.sep}"


@contextmanager
def importing_samples(*folders: Path) -> Iterator[None]:
    """Modules in `folders` can be imported; nothing of any other sample is known.

    Afterwards all is as it was. Other folders have modules of the same names, and a package that
    outlives its modules in `sys.modules`, or they it, is found without them.
    """
    before, path, environ = _take_samples(), list(sys.path), dict(os.environ)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)  # some samples set variables for their own process
        sys.path[:] = path
        _take_samples()
        sys.modules.update(before)


def _take_samples() -> dict[str, ModuleType]:
    """The modules of samples/ that are imported; they are forgotten."""
    names = [name for name, module in sys.modules.items() if _is_sample(module)]
    return {name: sys.modules.pop(name) for name in names}


def _is_sample(module: ModuleType) -> bool:
    place = getattr(module, "__file__", None)
    return isinstance(place, str) and place.startswith(_INSIDE)

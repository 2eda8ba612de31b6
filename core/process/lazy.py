"""Objects by the name of their place, imported when they are first needed.

Owns the notation, `package.module:name`. It may refer to modules that an import statement may
not: such a name loads neither the module nor what the module imports.
"""

from __future__ import annotations

import importlib
from typing import Any


def load(place: str) -> Any:
    """The object at `place`; its module is imported now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

"""Objects referenced by name, imported on first use.

Owns the notation, `package.module:name`. A reference may cross an import contract, because writing
it down imports nothing.
"""

from __future__ import annotations

import importlib
from typing import Any


def load(place: str) -> Any:
    """Import the module in `place` and return the named object."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

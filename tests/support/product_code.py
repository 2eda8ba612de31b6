"""The product's code as syntax trees, for tests that read all of it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, parsed once for all tests of a process; it may not be changed."""
    return ast.parse(path.read_text("utf-8"))

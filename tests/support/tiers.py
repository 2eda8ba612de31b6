"""The two tiers of the suite: the tests of each run, and those that only a whole run adds.

Every behavior, family, route and option has a test in the default tier. What is marked `nightly`
repeats such a test in another combination.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def nightly(*values: Any, id: str | None = None) -> ParameterSet:  # noqa: A002
    """Values of parameters that are tested in a whole run alone."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


def first(values: Iterable[Any], num: int = 1) -> list[Any]:
    """Values of which the first belong to the default tier."""
    return [value if at < num else _later(value) for at, value in enumerate(values)]


def among(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Values of which some belong to the default tier; all of those must be there."""
    found = list(values)
    assert all(value in found for value in default)
    return [value if value in default else _later(value) for value in found]


def _later(value: Any) -> ParameterSet:
    """A tuple has the values of several parameters."""
    if isinstance(value, ParameterSet):
        return value._replace(marks=[*value.marks, pytest.mark.nightly])
    return nightly(*value) if isinstance(value, tuple) else nightly(value)

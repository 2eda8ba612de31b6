"""The versions that CI uses are within the bounds that the package declares."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_each_dependency_is_pinned_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(name): version for name, version in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    requirements = [each for each in map(Requirement, declared) if _applies(each)]
    assert len(requirements) > 20
    for each in requirements:
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), each


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()

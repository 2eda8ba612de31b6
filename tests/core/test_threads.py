"""How many cores there are to compute on."""

from __future__ import annotations

import pytest

from triptych.core.threads import num_usable_cores


@pytest.mark.parametrize(
    ("quota", "most"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 1024)]
)
def test_a_container_quota_bounds_the_count(tmp_path, quota, most):
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert 1 <= num_usable_cores(file) <= most


def test_without_a_quota_there_is_at_least_one(tmp_path):
    assert num_usable_cores(tmp_path / "absent") >= 1

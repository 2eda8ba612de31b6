from __future__ import annotations

import pytest

from triptych.core.runtime.kernels.triton.compile import CompileTarget


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("cuda:80", False),
        ("cuda:89", True),
        ("cuda:100", True),
        ("hip:gfx942", False),
        ("hip:gfx950", True),
    ],
)
def test_which_targets_multiply_float8(target: str, expected: bool) -> None:
    assert CompileTarget.parse(target).multiplies_float8 is expected

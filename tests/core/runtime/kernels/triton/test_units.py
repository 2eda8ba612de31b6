from __future__ import annotations

import pytest

from triptych.core.runtime.kernels.triton.compile import CompileTarget
from triptych.core.runtime.kernels.triton.units import matrix_units


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


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("cuda:80", "mma"),
        ("cuda:89", "mma"),
        ("cuda:90", "wgmma"),
        ("cuda:100", "wgmma"),
        ("cuda:120", "mma"),
        ("hip:gfx942", "mfma"),
    ],
)
def test_which_units_targets_have(target: str, expected: str) -> None:
    parsed = CompileTarget.parse(target)
    assert matrix_units(parsed.backend, parsed.arch) == expected

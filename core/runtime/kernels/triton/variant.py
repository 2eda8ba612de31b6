"""One specialization of a kernel, for compilation ahead of time.

Owns the description only. Knows nothing of compilers or of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.core.runtime.kernels.triton.units import MatrixUnits


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A specialization: `kernel` is a function decorated by `triton.jit`.

    `signature` names the type of every argument in order, as Triton writes them: `*bf16`, `i32`,
    `fp32`, and `constexpr` for those in `constants`. `divisible` are the arguments that are
    multiples of 16, as aligned pointers and most strides are. A variant that `multiplies_float8` is
    not for devices without units for that. One with `matrix_units` is for devices with these only.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    multiplies_float8: bool = False
    matrix_units: MatrixUnits | None = None

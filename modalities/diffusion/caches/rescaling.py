"""TeaCache's polynomials: those its authors published, by model class, and how to fit another.

A polynomial turns the distance of two inputs into the distance of the outputs it leads to. It holds
for the model it was fitted on and for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

# From the TeaCache repository, highest power first. Wan: the 1.3B text-to-video model's.
_PUBLISHED: MappingProxyType[str, tuple[float, ...]] = MappingProxyType(
    {
        "FluxTransformer2DModel": (
            4.98651651e02,
            -2.83781631e02,
            5.58554382e01,
            -3.82021401e00,
            2.64230861e-01,
        ),
        "HiDreamImageTransformer2DModel": (
            -3.13605009e04,
            -7.12425503e02,
            4.91363285e01,
            8.26515490e00,
            1.08053901e-01,
        ),
        "Lumina2Transformer2DModel": (
            393.76566581,
            -603.50993606,
            209.10239044,
            -23.00726601,
            0.86377344,
        ),
        "WanTransformer3DModel": (
            2396.76752,
            -1311.10545,
            201.331979,
            -8.29855975,
            0.137887774,
        ),
    }
)
_THRESHOLDS: MappingProxyType[str, float] = MappingProxyType(
    {
        "FluxTransformer2DModel": 0.4,
        "HiDreamImageTransformer2DModel": 0.3,
        "WanTransformer3DModel": 0.07,
    }
)


def threshold_of(model_class: str) -> float:
    """At which sum the published polynomial of a class skips about as its authors recommend.

    For any other polynomial, fitted ones too: an estimated change of a fifth.
    """
    return _THRESHOLDS.get(model_class, 0.2)


def rescaling_of(model_class: str) -> tuple[float, ...]:
    """The published polynomial of a transformer class; empty if there is none."""
    return _PUBLISHED.get(model_class, ())


def fit_rescaling(
    input_distances: Sequence[float], output_distances: Sequence[float], degree: int = 4
) -> tuple[float, ...]:
    """The polynomial that maps input to output distances best, in least squares.

    Distances of neighbouring steps of uncached runs, from `calibration.Calibration`. Raises
    `ValueError` for fewer different inputs than coefficients.
    """
    if len(set(input_distances)) <= degree:
        raise ValueError(f"{degree + 1} different distances are needed for degree {degree}.")
    return tuple(float(c) for c in np.polyfit(input_distances, output_distances, degree))

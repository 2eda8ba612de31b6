"""The activations of encoders, by their names in configurations.

Owns the functions; `embedding.architecture` lists the supported names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional

_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "relu": functional.relu,
        "silu": functional.silu,
    }
)

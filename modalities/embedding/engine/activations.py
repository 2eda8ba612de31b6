"""The activations of encoders, by the names that configurations give them.

Owns the functions; which names are known is said by `embedding.architecture`.
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

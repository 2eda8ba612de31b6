"""The operators of torch through which kernels are launched.

Owns their registration. As operators, launches are seen by torch's compiler, by dry runs without a
device and by profilers. `torch.library.custom_op` would do the same, but its checks and its layer
for gradients take two to five microseconds a call; steps run in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

Fake = TypeVar("Fake", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("triptych", "FRAGMENT")


def define_operator(
    name: str, launch: Callable[..., Any], *, mutates: Collection[str] = ()
) -> torch._ops.OpOverload[..., Any]:
    """Define the operator `triptych::name`, which calls `launch` for tensors on a GPU.

    `mutates` are the arguments that it writes to. No result may share memory with an argument.
    """
    schema = torch.library.infer_schema(launch, mutates_args=tuple(mutates))
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, launch, "CUDA")
    operator: torch._ops.OpOverload[..., Any] = getattr(torch.ops.triptych, name).default
    return operator


def fake_of(operator: torch._ops.OpOverload[..., Any]) -> Callable[[Fake], Fake]:
    """Register the decorated function as the operator without work: it makes empty results."""
    register: Callable[[Fake], Fake] = torch.library.register_fake(operator, lib=_LIBRARY)
    return register

"""The kernels that paged attention may use on a GPU, and the choice for a model.

Owns the table of what each holds, and the refusal of one that cannot serve a model. Our Triton
kernels hold everything; others take prompt chunks where they can, and our kernels the rest: decode
rows, chunks with blocks of tokens that see each other, and chunks with too many keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.errors import ConfigError

TRITON, FLASH = "triton", "flash"
AUTO = TRITON
"""The backend that `auto` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """The prompt chunks that a backend holds.

    All read pages of any size, cells of any type, grouped heads and windows. `takes_all_rules`:
    also soft caps, sinks and scales of the whole cache. `is_deterministic`: known not to let a
    token's result depend on other rows. `capability` is the lowest of NVIDIA's devices; `None`: any
    GPU.
    """

    dtypes: frozenset[torch.dtype]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    takes_all_rules: bool = False
    is_deterministic: bool = False
    capability: tuple[int, int] | None = None


BACKENDS = {
    TRITON: AttentionBackend(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        takes_all_rules=True,
        is_deterministic=True,
    ),
    FLASH: AttentionBackend(
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        head_dim_multiple=8,
        capability=(8, 0),
    ),
}


def choose_backend(
    wanted: str, dtype: torch.dtype, head_dim: int, device: torch.device, *, is_deterministic: bool
) -> str:
    """The backend for a model on our decoder, whose rules all have scale and window only.

    Raises `ConfigError` naming what the wanted one lacks.
    """
    if wanted == "auto":
        return AUTO if lacks(AUTO, dtype, head_dim, device, is_deterministic) is None else TRITON
    if device.type != "cuda":
        raise ConfigError(f"--attention-backend {wanted}: that is for GPUs; leave it out.")
    missing = lacks(wanted, dtype, head_dim, device, is_deterministic)
    if missing is not None:
        raise ConfigError(f"--attention-backend {wanted}: {missing}; leave it out.")
    return wanted


def lacks(
    name: str, dtype: torch.dtype, head_dim: int, device: torch.device, is_deterministic: bool
) -> str | None:
    """The reason why a backend cannot serve a model, if any."""
    backend = BACKENDS[name]
    if dtype not in backend.dtypes:
        return f"it does not compute in {str(dtype).removeprefix('torch.')}"
    is_too_wide = backend.max_head_dim is not None and head_dim > backend.max_head_dim
    if is_too_wide or head_dim % backend.head_dim_multiple:
        return f"it does not take heads of {head_dim} values"
    if is_deterministic and not backend.is_deterministic:
        return "--enable-deterministic-inference needs sums whose order is known"
    if backend.capability is None:
        return None
    if torch.version.hip or torch.cuda.get_device_capability(device) < backend.capability:
        major, minor = backend.capability
        return f"it needs a CUDA device of compute capability {major}.{minor} or more"
    return None

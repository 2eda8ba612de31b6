"""What FLUX.1 does at 1024 x 1024: attention by each backend of torch, norms, and step caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from diffusers.models.embeddings import apply_rotary_emb
from kernel_case import Case, randn
from place import Place
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def cases(place: Place) -> Iterator[Case]:
    """Attention, then the norms of a block, then what step caches compute."""
    num_tokens, num_heads, head_dim = (4608, 24, 128) if place.is_gpu else (16, 2, 32)
    yield _attention(place, num_tokens, num_heads, head_dim)
    yield from _norms(place, num_tokens, num_heads * head_dim)
    yield _rotation(place, num_tokens, num_heads, head_dim)
    yield from _step_caches(place, num_tokens, num_heads * head_dim)


def _attention(place: Place, num_tokens: int, num_heads: int, head_dim: int) -> Case:
    q, k, v = (randn(place, 1, num_tokens, num_heads, head_dim).transpose(1, 2) for _ in range(3))
    attend = partial(scaled_dot_product_attention, q, k, v)

    def by(backend: SDPBackend) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend()

        return call

    peers = {name: by(backend) for name, backend in BACKENDS.items()} if place.is_gpu else {}
    flops = 4 * num_heads * head_dim * num_tokens**2
    name = f"attention of {num_tokens} tokens x {num_heads} x {head_dim}, torch's choice"
    return Case(name, attend, peers, 4 * q.nbytes, flops)


def _norms(place: Place, num_tokens: int, width: int) -> Iterator[Case]:
    from triptych.core.runtime.kernels.triton import adaln

    x, y = (randn(place, 1, num_tokens, width) for _ in range(2))
    gate, scale, shift = (randn(place, 1, width) for _ in range(3))

    def modulated(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    yield Case(
        f"modulated norm, {num_tokens} x {width}",
        partial(adaln.launch_modulated_norm, x, scale, shift, 1e-6, False),
        {"torch": lambda: modulated(x)},
        2 * x.nbytes,
    )
    yield Case(
        f"gated residual and modulated norm, {num_tokens} x {width}",
        lambda: adaln.launch_gated_modulated_norm(x, y, gate, scale, shift, 1e-6, False)[0],
        {"torch": lambda: modulated(x + gate[:, None] * y)},
        4 * x.nbytes,
    )


def _rotation(place: Place, num_tokens: int, num_heads: int, head_dim: int) -> Case:
    from triptych.core.runtime.kernels.triton import norm_rotary

    x, weight = randn(place, 1, num_tokens, 3, num_heads, head_dim)[:, :, 0], randn(place, head_dim)
    angles_TD = randn(place, num_tokens, head_dim).float()

    def ours() -> torch.Tensor:
        out = x.new_empty(x.shape)
        norm_rotary.launch(x, weight, angles_TD, angles_TD, out, 1e-6)
        return out

    def theirs() -> torch.Tensor:
        normed = rms_norm(x, (head_dim,), weight, 1e-6)
        return apply_rotary_emb(normed, (angles_TD, angles_TD), sequence_dim=1)

    name = f"norm and rotation, {num_tokens} x {num_heads} x {head_dim}"
    return Case(name, ours, {"diffusers": theirs}, 4 * x.numel())


def _step_caches(place: Place, num_tokens: int, width: int) -> Iterator[Case]:
    """The distance of two steps, and the sum that stands for a step."""
    from triptych.core.runtime.kernels.triton import cache_metrics

    values_RN, cells_MN = (randn(place, rows, num_tokens * width) for rows in (1, 3))
    cells_R = torch.zeros(1, dtype=torch.int64, device=place.device)

    def distances() -> torch.Tensor:
        return (values_RN - cells_MN[:1]).abs().mean(1) / cells_MN[:1].abs().mean(1)

    yield Case(
        f"distance of step caches, {num_tokens} x {width}",
        partial(cache_metrics.launch_distances, values_RN, cells_MN, cells_R),
        {"torch": distances},
        2 * values_RN.nbytes,
    )
    cells_K1 = torch.arange(3, device=place.device)[:, None]
    weights_K1 = torch.tensor([[3.0], [-3.0], [1.0]], device=place.device)
    yield Case(
        f"extrapolation of step caches, {num_tokens} x {width}",
        partial(cache_metrics.launch_weighted, cells_MN, cells_K1, weights_K1),
        {"torch": lambda: (cells_MN.float() * weights_K1).sum(0, keepdim=True)},
        cells_MN.nbytes + 4 * num_tokens * width,
    )

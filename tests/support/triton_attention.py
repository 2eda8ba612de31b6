"""Launches of paged attention at the shape of Llama 3 8B."""

from __future__ import annotations

import torch

from support.latent_case import LatentSizes, make_latents
from support.paged_case import PagedShape, make_case
from support.triton_launches import key_of_variant, keys_of_launches
from triptych.core.runtime.kernels.triton.compile import CompileTarget
from triptych.core.runtime.kernels.triton.units import matrix_units

_SCALE = 128**-0.5


def attention_keys(target: CompileTarget) -> dict[str, tuple[str, str]]:
    """Of each kernel: the key of a launch, and that of the variant that is compiled ahead."""
    from triptych.core.runtime.kernels.triton import attention_tiles, paged_decode, paged_prefill

    attention_tiles._units_of = lambda device: matrix_units(target.backend, target.arch)
    case = make_case([(1, 40)] * 2, PagedShape(32, 8, 128, 32), (torch.bfloat16,) * 2, 0)
    pages, batch = case.pages, case.batch
    table, lengths, starts = map(
        _at_odd_place, (batch.page_table_BM, batch.context_lengths_B, batch.query_starts_B)
    )
    out_THD = torch.empty(case.q_THD.shape, dtype=torch.bfloat16)

    def decode() -> None:
        paged_decode.launch_paged_decode(
            case.q_THD, *pages, table, lengths, out_THD, None, _SCALE, None, None, 1.0, False
        )

    def prefill() -> None:
        paged_prefill.launch_paged_prefill(
            *(case.q_THD, *pages, table, lengths, starts, 0, out_THD),
            *(None, None, _SCALE, None, None, 1.0),
        )

    modules = (*paged_decode.variants(), *paged_prefill.variants())
    ahead = {each.name: key_of_variant(each, target) for each in modules if target.takes(each)}
    split, join = keys_of_launches(decode, target)
    (causal,) = keys_of_launches(prefill, target)
    launched = {"split": split, "join": join, "causal": causal}
    return {name: (key, ahead[name]) for name, key in launched.items()}


def latent_keys(target: CompileTarget) -> dict[str, tuple[str, str]]:
    """The same of the kernels over latents, at the shape of GLM-4.7-Flash."""
    from triptych.core.runtime.kernels.triton import (
        attention_tiles,
        latent_decode,
        latent_prefill,
        latent_write,
    )

    attention_tiles._units_of = lambda device: matrix_units(target.backend, target.arch)
    case = make_latents([(1, 40)] * 2, LatentSizes(20, 576, 512, 32), (torch.bfloat16,) * 2)
    cached, batch = (case.pages.k_NPKD, None), case.batch
    table, lengths, starts, slots = map(
        _at_odd_place,
        (batch.page_table_BM, batch.context_lengths_B, batch.query_starts_B, torch.arange(2)),
    )
    out_THV, cos_T1R = (torch.empty(2, n, d).bfloat16() for n, d in ((20, 512), (1, 64)))
    rows_TD = torch.empty(2, 768 + 576).bfloat16()[:, 768:]
    launches = (
        lambda: latent_decode.launch(case.q_THD, *cached, table, lengths, out_THV, 0.1, False),
        lambda: latent_prefill.launch(case.q_THD, *cached, table, lengths, starts, 0, out_THV, 0.1),
        lambda: latent_write.launch(
            rows_TD, out_THV[0, 0], 1e-6, cos_T1R, cos_T1R, True, *cached, slots
        ),
    )
    modules = (latent_decode, latent_prefill, latent_write)
    every = [each for module in modules for each in module.variants()]
    ahead = {each.name: key_of_variant(each, target) for each in every if target.takes(each)}
    (split, _), (causal,), (row,) = (keys_of_launches(each, target) for each in launches)
    launched = {"split_20": split, "causal_20": causal, "row": row}
    found = {name: (key, ahead[name]) for name, key in launched.items()}
    return {f"latent {name}": keys for name, keys in found.items()}


def _at_odd_place(numbers: torch.Tensor) -> torch.Tensor:
    """The same, eight bytes behind a multiple of 16, as all of a step's arrays may come over."""
    return torch.cat((numbers.new_zeros(1), numbers.flatten()))[1:].view(numbers.shape)

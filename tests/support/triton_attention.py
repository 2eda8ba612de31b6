"""Launches of paged attention at the shape of Llama 3 8B."""

from __future__ import annotations

import torch

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


def _at_odd_place(numbers: torch.Tensor) -> torch.Tensor:
    """The same, eight bytes behind a multiple of 16, as all of a step's arrays may come over."""
    return torch.cat((numbers.new_zeros(1), numbers.flatten()))[1:].view(numbers.shape)

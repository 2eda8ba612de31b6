"""The kernels of the choice of keys against the torch reference, which they equal exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.index_case import IndexCase, chosen_slots, make_index
from support.kernel_device import each_type, is_interpreted, on_device
from support.latent_case import LatentSizes
from triptych.core.runtime.kernels import key_index as operation
from triptych.core.runtime.kernels.paged_attention import AttentionBatch

pytest.importorskip("triton")

from triptych.core.runtime.kernels.triton import key_index

pytestmark = pytest.mark.gpu
FLOAT, BFLOAT = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are for CUDA alone; their launchers run where Triton interprets."""
    if is_interpreted():
        monkeypatch.setattr(key_index, "score_keys", key_index.launch_scores)
        monkeypatch.setattr(key_index, "choose_slots", key_index.launch_choice)


def run(case: IndexCase) -> list[list[int]]:
    given = case.q_THD, case.weights_TH, case.pages, case.latents.batch, case.rule
    slots_TC, lengths_T = on_device(operation._on_gpu)(*given)
    batch: AttentionBatch = replace(
        case.latents.batch, page_table_BM=slots_TC, context_lengths_B=lengths_T
    )
    return chosen_slots(batch)


@pytest.mark.parametrize("dtype", each_type())
@pytest.mark.parametrize("num_chosen", [1, 30])
def test_choice_of_decode_rows_and_chunks(num_chosen: int, dtype: torch.dtype) -> None:
    case = make_index([(1, 1), (1, 130), (3, 3), (5, 33)], num_chosen, (dtype, dtype))
    assert run(case) == chosen_slots(case.choose())


@pytest.mark.parametrize("index", [(1, 1), (7, 33), (33, 40)])
@pytest.mark.parametrize("cells", [FLOAT, torch.float8_e4m3fn, torch.int8])
def test_sizes_and_cells(index: tuple[int, int], cells: torch.dtype) -> None:
    """No power of two anywhere; an int8 cell has the row's scale."""
    case = make_index(
        [(1, 40), (3, 50)], 11, (each_type()[0], cells), index, LatentSizes(2, 9, 5, 7)
    )
    assert run(case) == chosen_slots(case.choose())


def test_more_scores_than_a_block_and_than_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_BLOCK_SCORES", 64)
    monkeypatch.setattr(operation, "MAX_SCORES", 2 * 320)
    case = make_index([(1, 300), (3, 140)], 100)
    assert run(case) == chosen_slots(case.choose())


def test_negative_scores_and_strided_inputs() -> None:
    """Queries and weights may be parts of wider rows."""
    case = make_index([(1, 90), (3, 77)], 20)
    wide, heads = torch.zeros(4, 4, 24), torch.zeros(4, 9)
    wide[..., 8:16], heads[:, 2:6] = case.q_THD, -case.weights_TH.abs()
    case.q_THD, case.weights_TH = wide[..., 8:16], heads[:, 2:6]
    assert run(case) == chosen_slots(case.choose())

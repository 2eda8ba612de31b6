"""The choice of keys in torch: the highest scores, the earlier ones of equal scores."""

from __future__ import annotations

import pytest
import torch

from support.index_case import chosen_slots, make_index
from triptych.core.runtime.kernels import key_index
from triptych.core.runtime.kernels.key_index import ChoiceRule, attend_chosen, choose_keys
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionRule

CPU = torch.device("cpu")


def test_equal_scores_choose_the_earlier_keys(native: NativeKernels) -> None:
    """Of two heads a key counts where its product is positive; weights may be negative."""
    case = make_index([(1, 6)], 3, index=(2, 4))
    keys = torch.zeros(6, 4)
    keys[:, 1] = torch.tensor([-1.0, 2.0, -2.0, 0.0, 2.0, 1.0])
    slots = case.latents.batch.page_table_BM[0, 0] * 16 + torch.arange(6)
    case.pages.k_NPKD.view(-1, 4)[slots] = keys
    case.q_THD = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]]])
    first = int(slots[0])
    for weights, chosen in (
        ([1.0, 0.0], [1, 4, 5]),
        ([1.0, 1.0], [1, 2, 4]),
        ([0.0, 0.0], [0, 1, 2]),
        ([-1.0, -0.0], [0, 2, 3]),
        ([-1.0, -1.0], [0, 3, 5]),
    ):
        case.weights_TH = torch.tensor([weights])
        for kernels in (None, native):
            assert chosen_slots(case.choose(kernels)) == [[first + at for at in chosen]]


def test_no_more_keys_than_are_chosen_attend_as_without_an_index(native: NativeKernels) -> None:
    """Bit by bit with our kernels, whether a prompt's tokens share products or not."""
    rule = AttentionRule(scale=0.25)
    for kernels in (None, native):
        case = make_index([(1, 33), (20, 40)], 40)
        latents = case.latents
        assert not case.rule.is_needed(latents.batch)
        assert ChoiceRule(39, 1.0).is_needed(latents.batch)
        found = attend_chosen(latents.q_THD, latents.pages, case.choose(kernels), rule)
        expected = latents.run(kernels)
        if kernels is None:
            torch.testing.assert_close(found, expected)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("most", [1, 2**24])
def test_attention_is_over_chosen_keys_alone(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where torch holds few values at a time."""
    monkeypatch.setattr(key_index, "MAX_SCORES", most)
    case = make_index([(1, 90), (7, 50)], 20)
    latents, rule = case.latents, AttentionRule(scale=0.25)
    chosen = case.choose()
    rows = [latents.pages.k_NPKD.view(-1, 24)[slots] for slots in chosen_slots(chosen)]
    wanted = [
        ((q_HD @ row_CD.t() * 0.25).softmax(1) @ row_CD[:, :16])
        for q_HD, row_CD in zip(latents.q_THD, rows, strict=True)
    ]
    for kernels in (None, native):
        found = attend_chosen(latents.q_THD, latents.pages, case.choose(kernels), rule)
        torch.testing.assert_close(found, torch.stack(wanted))


def test_a_score_that_is_not_a_number_chooses_as_many_keys(native: NativeKernels) -> None:
    """Of its row, and no other row's choice changes."""
    case = make_index([(1, 60), (1, 60)], 7)
    for kernels in (None, native):
        expected = chosen_slots(case.choose(kernels))
        broken = make_index([(1, 60), (1, 60)], 7)
        broken.q_THD[0] = torch.nan
        broken.weights_TH[0] = torch.nan
        first, second = chosen_slots(broken.choose(kernels))
        assert second == expected[1]
        assert len(set(first)) == 7


def test_pages_of_single_rows_are_the_same_memory() -> None:
    for dtype in (torch.float32, torch.int8):
        pages = LatentPages.of_rows((3, 4, 12), 8, dtype, CPU)
        single = pages.single_rows()
        single.check()
        assert single.k_NPKD.shape == (12, 1, 1, 12)
        assert single.v_NPKD.shape == (12, 1, 1, 8)
        assert [each.data_ptr() for each in single.tensors] == [
            each.data_ptr() for each in pages.tensors
        ]


def test_an_index_is_causal() -> None:
    case = make_index([(2, 6)], 3)
    case.latents.batch.blocks_2T = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(AssertionError, match="causal"):
        choose_keys(case.q_THD, case.weights_TH, case.pages, case.latents.batch, case.rule)

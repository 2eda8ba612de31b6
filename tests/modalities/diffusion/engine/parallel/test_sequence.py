"""Ulysses attention: that of all tokens, whatever divides evenly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from support.rank_threads import on_ranks
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.modalities.diffusion.engine.parallel.sequence import IMAGE, TEXT, SequenceParallel

ROWS, WIDTH = 2, 4


def attend(text_BTC: Tensor, image_BTC: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
    """What the image's tokens get of all, by attention of tokens to themselves."""
    x_BTC = torch.cat([text_BTC, image_BTC], dim=1)
    x_BHTD = x_BTC.unflatten(-1, (num_heads, WIDTH)).transpose(1, 2)
    y_BHTD = scaled_dot_product_attention(x_BHTD, 2 * x_BHTD, x_BHTD + 1, attn_mask=mask)
    return y_BHTD.transpose(1, 2).flatten(2)[:, text_BTC.shape[1] :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "num_text", "num_image"),
    [(2, 2, 4, 6), (3, 5, 7, 11), (3, 4, 2, 1), (2, 3, 5, 9)],
)
def test_attention_over_ranks_is_that_of_one(
    num_ranks: int, num_heads: int, num_text: int, num_image: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    text, image = (
        torch.randn(ROWS, count, num_heads * WIDTH, dtype=dtype) for count in (num_text, num_image)
    )
    num_tokens = num_text + num_image
    mask = torch.randn(ROWS, 1, num_tokens, num_tokens, dtype=dtype)

    def work(group: RankGroup) -> list[Tensor]:
        sequence = SequenceParallel(group, {"a": TEXT, "b": IMAGE})
        part = sequence.split({"a": text, "b": image, "c": 3})
        assert part["c"] == 3
        assert part["b"].shape[1] < num_image or num_image == 1
        with sequence.attending():
            found = [attend(part["a"], part["b"], num_heads, each) for each in (None, mask)]
        return [sequence.gather(each) for each in found]

    expected = [attend(text, image, num_heads, each) for each in (None, mask)]
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for found in on_ranks(num_ranks, work):
        torch.testing.assert_close(found, expected, **close)

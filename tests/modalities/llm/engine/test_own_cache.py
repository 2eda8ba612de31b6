"""The cache object of a class, taken apart: what grows, what stays, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from triptych.core.errors import WeightsError
from triptych.modalities.llm.engine.own_cache import find_own_cache, parts_of, with_parts


class Body(torch.nn.Module):
    """Keeps what `grow` makes of a number of tokens, in a cache of transformers."""

    def __init__(self, grow: Any) -> None:
        super().__init__()
        self._grow = grow

    def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool = False) -> Any:
        kept = DynamicCache()
        kept.kept, kept.count = self._grow(input_ids.shape[1]), input_ids.shape[1]
        return {"cache": kept}


def entries(num_entries: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(1, num_entries, 6, dtype=dtype, device="meta")


def test_tensors_that_grow_go_to_pages_and_others_are_a_state() -> None:
    def grow(num_tokens: int) -> dict[str, torch.Tensor]:
        blocks, window = entries(num_tokens // 4), entries(min(num_tokens, 7))
        positions = entries(num_tokens, torch.int64)
        return {"blocks": blocks, "window": window, "same": window, "positions": positions}

    own = find_own_cache(Body(grow), 8, torch.float32)
    assert {each.paths[0][-1]: each.rate for each in own.grown} == {"blocks": 4, "positions": 1}
    assert [(len(each.paths), each.shape) for each in own.states] == [(2, (1, 7, 6))]
    shapes = own.shapes(16, torch.bfloat16)
    assert [shape.head_dim for shape in shapes] == [2, 6 * 4]  # of an entry 4 cells have a share
    assert own.longest_block == 4


@pytest.mark.parametrize(
    ("grow", "reason"),
    [
        (lambda num_tokens: {"kept": entries(num_tokens - 1)}, "whole blocks"),
        (lambda num_tokens: {"kept": entries(num_tokens)[..., :num_tokens]}, "several axes"),
        (lambda num_tokens: {str(num_tokens): entries(1)}, "changes its form"),
    ],
)
def test_a_cache_that_cannot_be_taken_apart_is_refused(grow: Any, reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        find_own_cache(Body(grow), 8, torch.float32)


def test_a_copy_of_a_cache_has_other_parts() -> None:
    cache = Body(lambda num_tokens: [torch.ones(2), {"flag": True}])(torch.zeros(1, 3))["cache"]
    parts = parts_of(cache)
    assert parts[("kept", 1, "flag")] is True
    assert parts[("count",)] == 3
    twin = with_parts(cache, parts | {("kept", 1, "flag"): False})
    assert not twin.kept[1]["flag"]
    assert cache.kept[1]["flag"]
    assert twin.kept[0] is cache.kept[0]

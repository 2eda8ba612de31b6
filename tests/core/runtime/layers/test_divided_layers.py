"""Modules of other libraries, divided over ranks: what each has, computes and gives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from support.rank_threads import on_ranks
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.layers.divided_layers import DividedInputs, divide_layers
from triptych.core.runtime.layers.shards import PLAIN_UNIT

WIDTH, HEADS, FEATURES, TOKENS = 24, 4, 40, 7


class Attention(nn.Module):
    """Of one row; `qkv` as Qwen has it, or three projections as most have."""

    def __init__(self, *, is_fused: bool, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.num_heads = HEADS
        if is_fused:
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        else:
            self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.v_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = norm or nn.Identity()
        self.is_fused = is_fused

    def forward(self, x_TC: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.is_fused:
            q, k, v = self.qkv(x_TC).reshape(len(x_TC), 3, HEADS, -1).permute(1, 2, 0, 3).unbind(0)
        else:
            parts = self.q_norm(self.q_proj(x_TC)), self.k_proj(x_TC), self.v_proj(x_TC)
            q, k, v = (each.unflatten(1, (HEADS, -1)).transpose(0, 1) for each in parts)
        y_HTD = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        y_TC = y_HTD.transpose(0, 1).flatten(1)
        out: Tensor = (self.proj if self.is_fused else self.out_proj)(y_TC)
        return out


class Block(nn.Module):
    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.attention = Attention(**attention)
        self.fc1, self.fc2 = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x_TC: Tensor, mask: Tensor | None = None) -> Tensor:
        x_TC = x_TC + self.attention(x_TC, mask)
        return x_TC + self.fc2(gelu(self.fc1(x_TC)))


class CountedHeads(TorchFunctionMode):
    """Notes how many heads attend."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            self.counts.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


def run(block: Block, group: RankGroup, *given: Tensor | None) -> tuple[Tensor, list[int], Block]:
    part = copy.deepcopy(block)
    assert divide_layers(part, group, PLAIN_UNIT) == 2
    with CountedHeads() as heads:
        return part(*given), heads.counts, part


@pytest.mark.parametrize("mask", [None, torch.randn(1, HEADS, TOKENS, TOKENS)])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("num_ranks", "heads"), [(2, [2, 2]), (3, [2, 1, 1])])
def test_ranks_together_give_what_the_whole_gives(
    num_ranks: int, heads: list[int], is_fused: bool, mask: Tensor | None
) -> None:
    torch.manual_seed(3)
    block = Block(is_fused=is_fused).eval().requires_grad_(False)
    x_TC = torch.randn(TOKENS, WIDTH)
    expected = block(x_TC, mask)
    found = on_ranks(num_ranks, lambda group: run(block, group, x_TC, mask))
    for y_TC, _, _ in found:
        torch.testing.assert_close(y_TC, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(y_TC, found[0][0])
    assert [counts for _, counts, _ in found] == [[each] for each in heads]
    matrices = [[p for p in part.parameters() if p.dim() == 2] for _, _, part in found]
    whole = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert sum(p.numel() for each in matrices for p in each) == whole
    assert all(p.untyped_storage().nbytes() == p.nbytes for each in matrices for p in each)


def test_blocks_with_norms_over_all_heads_stay_whole() -> None:
    """InternViT-6B has such norms."""
    torch.manual_seed(3)
    block = Block(is_fused=False, norm=nn.LayerNorm(WIDTH)).eval().requires_grad_(False)
    x_TC = torch.randn(TOKENS, WIDTH)
    for y_TC, counts, _ in on_ranks(2, lambda group: run(block, group, x_TC)):
        torch.testing.assert_close(y_TC, block(x_TC), atol=1e-6, rtol=1e-5)
        assert counts == [2]


def test_fewer_heads_than_ranks_stay_whole() -> None:
    def work(group: RankGroup) -> list[type[nn.Module]]:
        part = Block(is_fused=True)
        divide_layers(part, group, PLAIN_UNIT)
        return [type(part.attention.proj), type(part.fc2)]

    assert on_ranks(5, work) == [[nn.Linear, DividedInputs]] * 5

"""Adapters of mixed rows by the operation of a GPU against one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.gpu_rehearsal import rehearse_gpu
from triptych.core.runtime.kernels.triton import lora
from triptych.modalities.diffusion.engine.adapters.branches import (
    AdapterBranch,
    apply_branches,
    make_share,
    stack_branches,
)

pytestmark = pytest.mark.gpu
NUM_PARTS, WIDTH = 3, 40
SCALES = {
    "a": [2.0, 0.0, 0.0, -1.0],
    "b": [0.0, 0.5, 0.0, 3.0],  # beside the first on the last row
    "of another rank": [0.0, 1.0, 0.0, 0.0],
    "of all rows": [0.7] * 4,
}
RANKS = (4, 4, 6, 4)


def adapted(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    branches = [
        AdapterBranch(
            layer,
            (torch.randn(rank, WIDTH, generator=generator) * 0.1).to(x.device),
            (torch.randn(24, rank, generator=generator) * 0.1).to(x.device),
        )
        for rank in RANKS
    ]
    shares = [make_share(scales, x.device) for scales in SCALES.values()]
    beside = [{layer: branch} for branch in stack_branches(branches)]
    with apply_branches(list(zip(beside, shares, strict=True))):
        y: torch.Tensor = layer(x)
    return y


@torch.inference_mode()
def test_rows_with_different_adapters_share_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, 24)
    x = torch.randn(4 * NUM_PARTS, 5, WIDTH)  # each row folded into the batch in parts
    expected = adapted(layer, x)
    device = rehearse_gpu(monkeypatch)
    layer, x = layer.to(device), x.to(device)
    calls: list[int] = []
    launch = lora.lora_add

    def counted(*given: torch.Tensor) -> None:
        calls.append(len(given[2]))
        launch(*given)

    monkeypatch.setattr(lora, "lora_add", counted)
    torch.testing.assert_close(adapted(layer, x).cpu(), expected, rtol=1e-4, atol=1e-4)
    assert calls == [3, 3, 1], "two of one rank that meet on a row, and one of another"
    assert not torch.equal(expected, layer(x).cpu())

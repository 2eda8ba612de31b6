"""Stacked adapters: by torch, and by the operation of a GPU."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.triton.lora import launch_lora_add
from triptych.core.runtime.layers import adapters
from triptych.core.runtime.layers.adapters import AdapterRows, ModuleChange, StackedAdapters
from triptych.core.runtime.layers.linear import Linear

pytestmark = pytest.mark.gpu
OUTPUTS = {"q": [(0, slice(0, 24))], "k": [(24, slice(0, 8)), (32, slice(8, 16))]}
SLOTS = torch.tensor([0, -1, 2, 2, 0, 1, -1])


def changes(rank: int) -> list[ModuleChange]:
    sizes = {"q": 24, "k": 16}
    return [
        ModuleChange(module, torch.randn(rank, 48), torch.randn(size, rank), ())
        for module, size in sizes.items()
    ]


def test_the_operation_of_a_gpu_adds_what_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    device = torch.device("cpu")
    projection = Linear(48, 40, has_bias=False, dtype=torch.float32, device=device)
    rows = AdapterRows()
    stacked = StackedAdapters(rows, 3, 16, OUTPUTS, projection)
    small, large = changes(5), changes(9)
    stacked.put(1, large)
    stacked.put(1, ())
    stacked.put(0, small)
    stacked.put(2, large)
    rows.select(SLOTS)
    x_TI, start_TO = torch.randn(7, 48), torch.randn(7, 40)
    by_torch, by_kernel = start_TO.clone(), start_TO.clone()
    stacked.add(x_TI, by_torch)
    for row, slot in enumerate(SLOTS.tolist()):
        own = {0: small, 2: large}.get(slot, [])
        added = [change.up_OR @ (change.down_RI @ x_TI[row]) for change in own]
        wanted = start_TO[row] + (torch.cat(added) if added else 0.0)
        torch.testing.assert_close(by_torch[row], wanted, atol=1e-4, rtol=1e-4)

    def launch(*tensors: torch.Tensor) -> None:
        *others, slots_T = tensors
        on_device(launch_lora_add)(*others, torch.ones(len(slots_T)), slots_T)

    monkeypatch.setattr(adapters, "_add_by_torch", launch)
    stacked.add(x_TI, by_kernel)
    torch.testing.assert_close(by_kernel, by_torch, atol=1e-4, rtol=1e-4)

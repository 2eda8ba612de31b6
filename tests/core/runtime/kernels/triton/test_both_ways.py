"""Launches of tensors of the host on a device, which is here the host's other memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from support import kernel_device
from support.kernel_device import on_device


class Sums(NamedTuple):
    total: torch.Tensor
    of: str


@pytest.fixture(autouse=True)
def _another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_device, "is_interpreted", lambda: False)
    monkeypatch.setattr(kernel_device, "DEVICE", "cpu")


def test_slices_stay_slices_of_one_storage() -> None:
    wide = torch.arange(40.0).view(4, 10)
    seen: list[tuple[torch.Tensor, ...]] = []
    on_device(lambda *given: seen.append(given))(wide[1:, 2:5], wide.t(), torch.ones(0))
    part, turned, empty = seen[0]
    assert (part.stride(), part.storage_offset()) == ((10, 1), 12)
    assert torch.equal(part, wide[1:, 2:5])
    assert torch.equal(turned, wide.t())
    assert part.untyped_storage()._cdata == turned.untyped_storage()._cdata
    assert part.data_ptr() != wide[1:, 2:5].data_ptr()
    assert empty.shape == (0,)


def test_what_is_written_comes_back_with_the_results() -> None:
    wide, numbers = torch.zeros(4, 10), torch.ones(3)

    def launch(parts: list[torch.Tensor], *, numbers: torch.Tensor) -> Sums:
        parts[0] += 1
        return Sums(numbers + parts[1][0, :3], "numbers")

    found = on_device(launch)([wide[:, 2:4], wide[:, 2:]], numbers=numbers)
    assert found.of == "numbers"
    assert found.total.tolist() == [2, 2, 1]
    assert wide.sum(0).tolist() == [0, 0, 4, 4] + [0] * 6

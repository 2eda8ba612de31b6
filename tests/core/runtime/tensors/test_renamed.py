"""Tensors by other names than those of their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.renamed import StoredNames, renamed

NAMES = StoredNames(
    renamed={r"\.old\.": ".new."}, joined={"conv.weight": ("q_conv.weight", "k_conv.weight")}
)


def test_tensors_are_renamed_and_joined(tmp_path: Path) -> None:
    """However many rows each has; a part alone stays what it is."""
    q, k, scale = torch.randn(3, 1, 4), torch.randn(5, 1, 4), torch.tensor(2.0)
    tensors = {"a.q_conv.weight": q, "a.k_conv.weight": k, "b.q_conv.weight": q.clone()}
    save_file({**tensors, "a.old.scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as stored:
        assert renamed(stored, None) is stored
        found = renamed(stored, NAMES)
        shapes = {name: info.shape for name, info in found.tensors.items()}
        assert shapes == {
            "a.conv.weight": (8, 1, 4),
            "b.q_conv.weight": (3, 1, 4),
            "a.new.scale": (),
        }
        assert torch.equal(found.read("a.conv.weight"), torch.cat((q, k)))
        assert torch.equal(found.read("a.new.scale"), scale)
        assert found.num_bytes == stored.num_bytes


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"q_conv.weight": (3, 1, 4), "k_conv.weight": (3, 1, 3)}, "differ in type or shape"),
        ({"q_conv.weight": (), "k_conv.weight": ()}, "are no parts of one"),
        ({"old.scale": (3,), "new.scale": (2,)}, "are two names of one"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    made = {f"a.{name}": torch.zeros(shape) for name, shape in tensors.items()}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as stored, pytest.raises(WeightsError, match=message):
        renamed(stored, NAMES)

"""The modules of adapters against those of a decoder, and the limits of ranks."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.adapters import MAX_RANK, AdaptableModules, AdapterRoom
from triptych.core.runtime.layers.linear import Linear
from triptych.core.weights.layout import TensorInfo
from triptych.core.weights.peft import PeftConfig, TextAdapter

LAYER = "layers.0.self_attn"
OUTPUTS = {f"{LAYER}.q_proj": [(0, slice(0, 8))], f"{LAYER}.k_proj": [(8, slice(0, 8))]}


def modules(*, is_native: bool) -> AdaptableModules:
    linear = Linear(8, 16, has_bias=False, dtype=torch.float32, device=torch.device("cpu"))
    vocabulary = (32, 8) if is_native else None
    return AdaptableModules({linear: OUTPUTS}, dict.fromkeys(OUTPUTS, (8, 8)), vocabulary)


def adapter(rank: int, *names: str) -> TextAdapter:
    pairs = {name: (f"{name}.A", f"{name}.B") for name in names}
    shapes = {f"{name}.A": (rank, 8) for name in names} | {f"{name}.B": (8, rank) for name in names}
    tensors = {name: TensorInfo(name, shape, "F32", "a") for name, shape in shapes.items()}
    config = PeftConfig(MappingProxyType({}))
    return TextAdapter(Path("a"), config, tensors, pairs, set(), {})


Q, K = f"model.{LAYER}.q_proj", f"model.{LAYER}.k_proj"


@pytest.mark.parametrize(
    ("is_native", "rank", "names", "message"),
    [
        (True, MAX_RANK, (Q,), ""),
        (True, MAX_RANK + 1, (Q,), f"takes {MAX_RANK}"),
        (True, MAX_RANK // 2 + 1, (Q, K), f"{MAX_RANK} are offered"),
        (False, 16, (Q, K), ""),
        (False, 17, (Q,), r"rank is 17; this server takes 16 \(--max-lora-rank\)"),
        (True, 4, (Q, f"{LAYER}.q_proj"), "are one module"),
        (True, 4, (f"model.{LAYER}.forget_gate.q_proj",), ""),
        (True, 4, (f"vision_tower.{LAYER}.q_proj",), "no module of this model"),
    ],
)
def test_what_a_room_takes(
    is_native: bool, rank: int, names: tuple[str, ...], message: str
) -> None:
    found, room = adapter(rank, *names), AdapterRoom(num_slots=1, stacked_rank=16)
    if not message:
        modules(is_native=is_native).check(found, room)
        return
    with pytest.raises(WeightsError, match=message):
        modules(is_native=is_native).check(found, room)

"""LoRA adapters of tiny text models, made and merged by PEFT."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from triptych.core.options.config import ModelOptions
from triptych.core.runtime.decoders.adapters import AdapterRoom
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.peft import TextAdapter

MLP = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def save_adapter(folder: Path, model: Any, seed: int = 0, **config: Any) -> Any:
    """Save a random adapter of `model`; returns the merged model."""
    fields = {"r": 5, "lora_alpha": 9, "task_type": "CAUSAL_LM", "target_modules": ATTENTION}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about training, and about vocabularies
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**fields | config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.15, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
        return adapted.merge_and_unload().eval()


def adapted_decoder(
    folder: Path,
    adapters: list[Path],
    *,
    dtype: torch.dtype = torch.float32,
    native: NativeKernels | None = None,
    max_length: int = 0,
) -> Decoder:
    """The decoder in `folder`, with an adapter in each slot."""
    with Checkpoint.open(folder) as checkpoint:
        device = torch.device("cpu")
        blueprint = NativeBlueprint(
            checkpoint.config, max_length=max_length, dtype=dtype, device=device, native=native
        )
        blueprint.adapter_room = room_for(adapters)
        decoder = blueprint.build(checkpoint, lambda share: None)
    put_adapters(blueprint, adapters)
    return decoder


def room_for(adapters: Sequence[Path]) -> AdapterRoom:
    return AdapterRoom(num_slots=len(adapters), stacked_rank=12)


def put_adapters(blueprint: NativeBlueprint, adapters: Sequence[Path]) -> None:
    """Put an adapter into each slot of a model that is built."""
    assert blueprint.adapters is not None
    for slot, place in enumerate(adapters):
        adapter = TextAdapter.read(str(place), ModelOptions())
        blueprint.adapters.modules.check(adapter, blueprint.adapters.room)
        with Checkpoint.open_file(adapter.file, {}) as file:
            blueprint.adapters.put(slot, adapter, file.read)

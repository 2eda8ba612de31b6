"""A tiny model for tests of the language models' loader: written to a folder, and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ScheduleOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine.loader import LlmLoader

MIB = 2**20
Save = Callable[..., Path]


def save_llama(folder: Path, edits: dict[str, torch.Tensor | None]) -> Path:
    """A tiny llama; `edits` replace tensors (dots as double underscores) or remove them."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in edits.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def loader(folder: Path, ledger: Ledger, config: Config | None = None) -> LlmLoader:
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="00")
    return LlmLoader(resolved, config or Config(), Device.open("cpu"), ledger)


def config(**sections: Any) -> Config:
    return replace(Config(schedule=ScheduleOptions(max_batch_size=4)), **sections)

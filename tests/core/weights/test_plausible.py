"""A configuration that its weights cannot have is refused before anything is built by it.

Which fields size something is found out by building models, without memory, with each one doubled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import save_file

from support import (
    asr,
    decoder_families,
    denoiser_families,
    embedding_models,
    vision_models,
)
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import TensorInfo
from triptych.core.weights.plausible import check_plausible

HUGE = 2**24
OF_POSITIONS = {"max_position_embeddings", "decoder_sparse_step"}
"""Lengths, which may be any with rotary positions; and how few layers have experts."""

Fields = dict[str, Any]
Build = Callable[[Fields], torch.nn.Module]


def _decoder(name: str) -> tuple[Fields, Build]:
    family, extra = decoder_families.FAMILIES[name]
    kind = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")
    return kind(**decoder_families.TINY | extra).to_dict(), lambda f: model(kind.from_dict(f))


def _encoder(name: str) -> tuple[Fields, Build]:
    model = embedding_models.FAMILIES[name]()
    kind = type(model.config)
    return model.config.to_dict(), lambda f: type(model)(kind.from_dict(f))


def _seeing(name: str) -> tuple[Fields, Build]:
    config, _ = vision_models.MODELS[name]()
    model = transformers.AutoModelForImageTextToText
    return config.to_dict(), lambda f: model.from_config(type(config).from_dict(f))


def _denoiser(name: str) -> tuple[Fields, Build]:
    return denoiser_families.TINY[name].config, lambda f: getattr(diffusers, name)(**f)


def _whisper(name: str) -> tuple[Fields, Build]:
    kind, model = transformers.WhisperConfig, transformers.WhisperForConditionalGeneration
    return asr.CONFIG, lambda f: model(kind.from_dict(f))


def _gpt2(name: str) -> tuple[Fields, Build]:
    kind, model = transformers.GPT2Config, transformers.GPT2LMHeadModel
    config = kind(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return config.to_dict(), lambda f: model(kind.from_dict(f))


KINDS: dict[str, Callable[[str], tuple[Fields, Build]]] = {
    **dict.fromkeys(("llama", "smollm3", "qwen3", "mixtral", "qwen3-moe"), _decoder),
    **dict.fromkeys(("bert", "distilbert", "modernbert", "mpnet"), _encoder),
    **dict.fromkeys(("llava", "idefics3", "gemma3", "paligemma", "qwen3_vl"), _seeing),
    **dict.fromkeys(denoiser_families.TINY, _denoiser),
    "whisper": _whisper,
    "gpt2": _gpt2,
}


def tensors_of(build: Build, fields: Fields) -> dict[str, TensorInfo]:
    with torch.device("meta"):
        state = build(copy.deepcopy(fields)).state_dict()
    return {
        name: TensorInfo(name, tuple(tensor.shape), "F32", "model.safetensors")
        for name, tensor in state.items()
    }


def numbers(fields: Fields, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where whole numbers are."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, name))
        elif type(value) is int and value > 0:
            yield (*path, name)


def edited(fields: Fields, path: tuple[str, ...], edit: Callable[[int], int]) -> Fields:
    fields = inner = copy.deepcopy(fields)
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = edit(inner[path[-1]])
    return fields


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", KINDS)
def test_every_field_that_sizes_something_is_held_against_the_weights(name: str) -> None:
    config, build = KINDS[name](name)
    config = json.loads(json.dumps(config))
    tensors = tensors_of(build, config)
    check_plausible(config, tensors)
    sizing = 0
    for path in numbers(config):
        try:
            has_effect = tensors_of(build, edited(config, path, lambda n: 2 * n)) != tensors
        except Exception:  # twice as much does not go with the rest
            continue
        if not has_effect or path[-1] in OF_POSITIONS:
            continue
        sizing += 1
        with pytest.raises(WeightsError) as caught:
            check_plausible(edited(config, path, lambda _: HUGE), tensors)
        message = caught.value.message
        assert message.startswith(f"config.json: {'.'.join(path)} is {HUGE}, but ")
        assert "\n" not in message
    assert sizing >= 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 65),
        ("num_hidden_layers", 10**9),
        ("num_local_experts", HUGE),
        ("hidden_size", 1e12),
        ("num_hidden_layers", float("inf")),
        ("block_out_channels", [8, HUGE]),
    ],
)
def test_a_checkpoint_is_not_opened(tmp_path: Path, field: str, value: object) -> None:
    save_file({"a": torch.zeros(4, 4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"part": {field: value}}))
    with pytest.raises(WeightsError, match=rf"config\.json: part\.{field} is "):
        Checkpoint.open(tmp_path)
    with pytest.raises(WeightsError, match=rf"config\.json: {field} is "):
        Checkpoint.open_file(tmp_path / "model.safetensors", {field: value})


def test_layers_and_experts_together_are_as_many_as_there_are_tensors_for() -> None:
    tensors = {f"t{n}": TensorInfo(f"t{n}", (64, 64), "F32", "f") for n in range(48 * 128 * 3)}
    check_plausible({"num_hidden_layers": 48, "num_experts": 128}, tensors)
    with pytest.raises(WeightsError, match="num_experts is 16384"):
        check_plausible({"num_hidden_layers": 48, "num_experts": 16384}, tensors)
    fused = {f"t{n}": TensorInfo(f"t{n}", (128, 64, 64), "F32", "f") for n in range(48 * 2)}
    check_plausible({"num_hidden_layers": 48, "num_experts": 128}, fused)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 10_485_760, "original_max_position_embeddings": 10**7},
        {"sliding_window": HUGE, "attention_chunk_size": HUGE, "window_size": HUGE},
        {"vocab_size": 257_152, "num_hidden_layers": 32, "bos_token_id": HUGE},
        {"num_hidden_layers": float("nan"), "hidden_size": float("-inf"), "num_experts": -1},
        {"embed_dim_per_stage": [96, 768], "hidden_per_layer": 4096, "num_layers": 12},
        {"num_hidden_layers": "many", "hidden_size": None, "num_experts": True},
    ],
)
def test_what_says_nothing_of_weights_is_left_alone(fields: Fields) -> None:
    check_plausible(fields, {"t": TensorInfo("t", (64, 64), "F32", "f")})

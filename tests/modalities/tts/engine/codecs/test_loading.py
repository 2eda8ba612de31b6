"""Codecs come out of checkpoints as transformers saved them, or as part of a larger file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.codec_models import MODELS, random_model
from support.tiers import first
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.codecs.loading import (
    CodecBlueprint,
    adapter_for,
    build_decoder,
    fold_weight_norms,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["mimi", "encodec", "dac", "higgs"])
@pytest.mark.parametrize("prefix", first(["codec_model.", ""]))
def test_a_codec_of_transformers(tmp_path: Path, name: str, prefix: str) -> None:
    saved = random_model(name, torch.float32)
    tensors = {prefix + key: tensor.clone() for key, tensor in saved.state_dict().items()}
    others = {"lm_head.weight": torch.zeros(2, 2)} if prefix else {}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(saved.config.to_dict()))
    with Checkpoint.open(tmp_path) as checkpoint:
        blueprint = CodecBlueprint(checkpoint.config, prefix)
        loaded = blueprint.build(checkpoint, CPU, lambda _: None)
    assert blueprint.num_bytes() == sum(t.numel() * 4 for t in saved.state_dict().values())
    for key, tensor in saved.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor, atol=0, rtol=0)
    for model in (saved, loaded):
        fold_weight_norms(model)
    codes_BQF = adapter_for(saved).probe_codes(1, 4)
    with torch.inference_mode():
        expected_BS, ours_BS = (adapter_for(m).one_shot(codes_BQF) for m in (saved, loaded))
    torch.testing.assert_close(ours_BS, expected_BS, atol=1e-6, rtol=0)


def test_snac_without_its_encoder(tmp_path: Path) -> None:
    saved = random_model("snac", torch.float32)
    config = saved.config
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    extra = {
        "encoder.block.0.weight": torch.zeros(2),
        "quantizer.quantizers.0.in_proj.bias": torch.zeros(2),
    }
    save_file({**saved.state_dict(), **extra}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**fields, "attn_window_size": None}))
    with Checkpoint.open(tmp_path) as checkpoint:
        loaded = CodecBlueprint(checkpoint.config).build(checkpoint, CPU, lambda _: None)
    codes_BQF = adapter_for(saved).probe_codes(1, 4)
    torch.testing.assert_close(loaded.decode(codes_BQF), saved.decode(codes_BQF), atol=0, rtol=0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_streams_keep_is_known_without_weights(name: str) -> None:
    model = random_model(name, torch.float32)
    fields = asdict(model.config) if name == "snac" else model.config.to_dict()
    state_bytes = CodecBlueprint(fields).state_bytes(5)
    assert state_bytes == build_decoder(model, num_rows=5).state_bytes > 0


def test_what_is_no_codec_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match="'llama' is not a known audio codec"):
        CodecBlueprint({"model_type": "llama"}).num_bytes()
    with pytest.raises(WeightsError, match="attn_window_size"):
        CodecBlueprint({"vq_strides": [4, 2, 1], "attn_window_size": 32}).num_bytes()

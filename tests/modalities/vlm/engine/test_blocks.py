"""Vision models held in blocks of integers: tower and decoder."""

from __future__ import annotations

from pathlib import Path

import torch

from support.vision_models import save_model
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.block_layers import BlockLinear, block_bytes
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint


def test_tower_and_decoder_are_held_in_blocks(tmp_path: Path, native: NativeKernels) -> None:
    save_model("qwen2_vl", tmp_path)
    sizes = {}
    for kind in ("auto", "q8_0"):
        with Checkpoint.open(tmp_path) as checkpoint:
            blueprint = VisionBlueprint(
                checkpoint,
                max_length=0,
                dtype=torch.float32,
                device=torch.device("cpu"),
                native=native,
                encoding=WeightEncoding(kind),
            )
            decoder, encoder = blueprint.build(lambda share: None)
        sizes[kind] = (blueprint.text.weight_bytes(), blueprint.encoder_bytes())
        layers = [each for each in encoder._model.modules() if type(each) is BlockLinear]
        assert bool(layers) == (kind == "q8_0")
        assert decoder.decoder.layers[0].attention.qkv.has_blocks == (kind == "q8_0")
    assert all(held < plain for held, plain in zip(sizes["q8_0"], sizes["auto"], strict=True))
    assert block_bytes(encoder._model) < sizes["q8_0"][1]

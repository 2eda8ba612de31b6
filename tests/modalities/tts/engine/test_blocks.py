"""Speech language models whose layers are held in blocks of integers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.speech_models import csm, orpheus, setup_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.tts.engine.loader import open_blueprint


def opened(folder: Path, native: NativeKernels, encoding: str) -> tuple[DecoderStack, int]:
    """The decoder's layers, and the bytes announced for all weights."""
    setup = replace(setup_of(folder), native=native, encoding=WeightEncoding(encoding))
    with Checkpoint.open(folder) as checkpoint:
        blueprint = open_blueprint(checkpoint.config, setup)
        model = blueprint.build(checkpoint, lambda share: None)
    stack = getattr(model, "backbone", model)
    assert isinstance(stack, DecoderStack)
    return stack, blueprint.weight_bytes()


@pytest.mark.parametrize("save", [csm, orpheus])
def test_layers_are_held_in_blocks(save, tmp_path: Path, native: NativeKernels) -> None:
    save(tmp_path)
    plain, plain_bytes = opened(tmp_path, native, "auto")
    packed, packed_bytes = opened(tmp_path, native, "q8_0")
    assert packed_bytes < plain_bytes
    for layer, reference in zip(packed.layers, plain.layers, strict=True):
        theirs, ours = reference.attention.qkv, layer.attention.qkv
        assert ours.has_blocks
        assert not theirs.has_blocks
        x_TI = torch.randn(5, ours.num_inputs, generator=torch.Generator().manual_seed(0))
        expected = theirs(x_TI)
        assert 0 < (ours(x_TI) - expected).norm() < 0.03 * expected.norm()

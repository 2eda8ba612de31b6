"""Adapters of a vision model's language part: rows equal the models that PEFT has merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.text_adapters import save_adapter
from support.vision_models import pixels, save_model
from support.vision_rig import VisionRig, generate
from triptych.core.runtime.kernels.native.library import NativeKernels

HELLO, WHAT, NUM_TOKENS = (1, 5, 9, 12), (20, 21, 22), 3


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_rows_equal_merged_models(native: NativeKernels, tmp_path: Path, name: str) -> None:
    model = save_model(name, tmp_path / "model")
    modules = r".*language_model.*\.(q_proj|up_proj|down_proj)"
    merged = save_adapter(tmp_path / "a", model, target_modules=modules, task_type=None)
    rig = VisionRig(tmp_path / "model", native=native, adapters=[tmp_path / "a"])
    parts, rows = (HELLO, pixels(40, 60, 1), WHAT), []
    for adapter in (0, -1):
        rows.append(rig.look(*parts))
        rows[-1].adapter = adapter
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=NUM_TOKENS - 1)
    for row, reference in zip(rows, (merged, model), strict=True):
        ids, logits_NV = generate(reference, tmp_path / "model", rig, parts, NUM_TOKENS)
        ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
        torch.testing.assert_close(ours_NV, logits_NV, atol=1e-4, rtol=1e-4)
        assert row.tokens[row.num_prompt_tokens :] == ids
    adapted_V, plain_V = (row.logits[row.num_prompt_tokens] for row in rows)
    assert float((adapted_V - plain_V).abs().max()) > 1e-2

"""Whole tiny models on the kernels of a GPU, interpreted, against transformers' own.

Rows go through chunks, steps that they share, and snapshots that other rows find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.batch_driver import CPU, BatchDriver
from support.gpu_rehearsal import rehearse_gpu
from support.mixture_families import MIXTURES, save_mixture
from support.recurrent_models import recurrent_model
from support.tiers import nightly
from support.token_world import token_request
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.layers import moe
from triptych.core.runtime.tensors.checkpoint import Checkpoint

PAGE_SIZE, NUM_NEW = 16, 2


def saved(folder: Path, name: str) -> Any:
    """Save a tiny random model; returns transformers' own."""
    if name in MIXTURES:
        own = {"gpt-oss": {"sliding_window": 12}, "llama-4": {"attention_chunk_size": 12}}
        return save_mixture(folder, name, num_hidden_layers=2, **own[name])
    reference = recurrent_model(name)
    reference.save_pretrained(folder)
    return reference


def on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BatchDriver:
    """The model with its forward pass on interpreted kernels, and all else on the CPU."""
    monkeypatch.setattr(moe, "has_grouped_products", lambda device: True)
    with Checkpoint.open(folder) as checkpoint:
        blueprint = NativeBlueprint(
            checkpoint.config, max_length=64, dtype=torch.float32, device=CPU
        )
        model = blueprint.build(checkpoint, lambda _: None)
    forward = model.forward

    def rehearsed(*given: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            rehearse_gpu(patch)
            return forward(*given)

    monkeypatch.setattr(model, "forward", rehearsed)
    layout = blueprint.kv_layout(PAGE_SIZE, torch.float32)
    options = {"max_length": 64, "max_batch_size": 2, "max_batch_input_tokens": 36}
    windows = None
    if window := layout.longest_window:
        windows = WindowSize.least(window, PAGE_SIZE, num_rows=2, step_tokens=36)
    return BatchDriver(model, layout, None, num_pages=9, windows=windows, **options)


@pytest.mark.parametrize("name", [nightly("llama-4"), "gpt-oss", "granite-hybrid", "kimi-linear"])
def test_logits_through_every_path(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, engine = saved(tmp_path, name), on_gpu(tmp_path, monkeypatch)
    long = tuple(3 + n * n % 90 for n in range(40))
    prompts = {"a": long, "b": (*long[:32], 5, 6)}
    for job, ids in prompts.items():
        engine.submit(job, token_request(ids, max_tokens=NUM_NEW, temperature=0.0))
    engine.run()
    assert engine.scheduler.stats().counters["cached_tokens_total"] > 0
    for job, ids in prompts.items():
        tokens = (*ids, *(token for each in engine.deltas(job) for token in each.token_ids))
        with torch.inference_mode():
            expected_TV = reference(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        found_TV = torch.stack([engine.logits[job][n] for n in range(len(ids), len(tokens))])
        torch.testing.assert_close(found_TV, expected_TV[len(ids) - 1 :], atol=2e-4, rtol=2e-4)

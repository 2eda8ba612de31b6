"""Captured runs of denoising models: the same answers, for rows that come, go and differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.captured import CountingCalls, verified_steps
from support.denoiser_families import TINY, build, conditioning_of, sample_of
from triptych.modalities.diffusion.engine.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.wire import AdapterUse

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


def batch_of(name: str, *seeds: int) -> Batch:
    return Batch(
        samples=torch.stack([sample_of(name, seed) for seed in seeds]),
        times=torch.tensor([900.0 / (1 + seed) for seed in seeds]),
        conditioning=[conditioning_of(name, seed) for seed in seeds],
    )


def models(name: str) -> tuple[DenoiseModel, DenoiseModel, CountingCalls]:
    torch.manual_seed(0)
    module = build(name).eval()
    eager, captured = open_model(module), open_model(module)
    captured.graphs, backend = verified_steps()
    return eager, captured, backend


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_answers_are_bitwise_those_without(name: str) -> None:
    eager, captured, backend = models(name)
    kept: list[tuple[Tensor, Tensor]] = []
    for seeds in ((1,), (2,), (3, 4), (5, 1), (6,)):
        batch = batch_of(name, *seeds)
        kept.append((captured.velocity(batch), eager.velocity(batch)))
        if isinstance(captured, SpanModel) and isinstance(eager, SpanModel):
            (ours, our_hidden), (theirs, their_hidden) = captured.span(batch), eager.span(batch)
            kept += [(ours, theirs), (our_hidden, their_hidden)]
            kept.append((captured.head(batch, our_hidden), eager.head(batch, their_hidden)))
    assert all(torch.equal(ours, theirs) for ours, theirs in kept), "what rows keep stays"
    kinds = 3 if isinstance(captured, SpanModel) else 1
    assert captured.graphs is not None
    assert captured.graphs.num_captured == 2 * kinds
    assert backend.num_replays == 5 * kinds


@torch.inference_mode()
def test_what_a_row_brings_in_another_shape_is_another_run() -> None:
    eager, captured, _ = models("FluxTransformer2DModel")
    batch = batch_of("FluxTransformer2DModel", 1)
    row = batch.conditioning[0]
    longer = torch.cat((row.rows["encoder_hidden_states"],) * 2)
    ids = torch.cat((row.shared["txt_ids"],) * 2)
    other = replace(
        row,
        rows={**row.rows, "encoder_hidden_states": longer},
        shared={**row.shared, "txt_ids": ids},
        key="longer",
    )
    for conditioning in (row, other, row, other):
        asked = replace(batch, conditioning=[conditioning])
        assert torch.equal(captured.velocity(asked), eager.velocity(asked))


@torch.inference_mode()
def test_runs_of_rows_with_adapters_are_not_captured() -> None:
    _, captured, backend = models("FluxTransformer2DModel")
    batch = batch_of("FluxTransformer2DModel", 1)
    uses = (AdapterUse(name="ink", scale=1.0),)
    asked = replace(batch, conditioning=[replace(batch.conditioning[0], adapters=uses)])
    ran = captured.captured("x", lambda batch: [batch.samples], asked)
    assert ran[0] is asked.samples
    assert backend.num_replays == 0

"""Combinations of two guidance branches, against those of diffusers."""

from __future__ import annotations

import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance

from triptych.modalities.diffusion.engine.guidance import (
    Guidance,
    GuidedStep,
    NormRule,
    Projection,
    Trend,
    combine,
)


def velocities(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positive, negative = torch.randn(2, 1, 4, 6, 5, generator=generator)
    return positive, negative


def test_projected_guidance_is_that_of_diffusers_and_a_repeated_step_counts_once() -> None:
    projection = Projection(scale=8.0, momentum=-0.5, limit=3.0, parallel=0.2, after_step=1)
    guidance, trend = Guidance(scale=3.5, projection=projection), Trend(projection.momentum)
    theirs = AdaptiveProjectedMixGuidance(
        guidance_scale=3.5,
        adaptive_projected_guidance_scale=8.0,
        adaptive_projected_guidance_momentum=-0.5,
        adaptive_projected_guidance_rescale=3.0,
        eta=0.2,
        adaptive_projected_guidance_start_step=1,
    )
    for step in range(4):
        positive, negative = velocities(step)
        theirs.set_state(step=step, num_inference_steps=4, timestep=torch.tensor(1.0))
        theirs.prepare_inputs({"prompt": (positive, negative)})
        expected = theirs.forward(positive, negative).pred
        for _ in range(2):
            ours = combine([GuidedStep(guidance, step, trend)], positive, negative)
            assert torch.allclose(ours, expected, atol=1e-5)


def test_a_limited_norm_is_never_larger_than_the_positive_branches() -> None:
    positive, negative = velocities(7)
    for scale in (0.5, 4.0):
        limited = combine(
            [GuidedStep(Guidance(scale=scale, norm=NormRule.LIMIT), 0)], positive, negative
        )
        plain = negative + scale * (positive - negative)
        factor = (positive.norm(dim=-1) / (plain.norm(dim=-1) + 1e-8)).clamp(max=1)
        assert torch.allclose(limited, plain * factor[..., None], atol=1e-6)

"""Sampling of one token."""

from __future__ import annotations

import pytest
import torch

from triptych.modalities.asr.engine.tokens import SeededSampler


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-40, 1e-8])
def test_tiny_temperatures_take_the_likeliest(temperature: float) -> None:
    sampler = SeededSampler(0)
    logits_V = torch.tensor([-torch.inf, 3.0, 30.0, 29.0, -torch.inf])
    assert {sampler.sample(logits_V, temperature)[0] for _ in range(8)} == {2}

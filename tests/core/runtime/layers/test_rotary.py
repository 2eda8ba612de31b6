"""Rotary frequencies against transformers' own table of variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from triptych.core.runtime.layers.rotary import ROPE_KINDS, RopeConfig, Rotary, rope_frequencies

NUM_DIMS = 16
TRAINED = 64
SHORT, LONG = (1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0), (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0},
    "proportional": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "factor": 4.0},
}


def ours(kind: str, max_length: int, **fields: Any) -> tuple[torch.Tensor, float]:
    config = RopeConfig(
        kind=kind,
        theta=5000.0,
        num_rotated_dims=NUM_DIMS,
        max_length=max_length,
        trained_length=TRAINED,
        **fields,
    )
    return rope_frequencies(config)


def theirs(kind: str, max_length: int, **fields: Any) -> tuple[torch.Tensor, float]:
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **fields}
    if kind != "dynamic":
        parameters["original_max_position_embeddings"] = TRAINED
    config = LlamaConfig(
        hidden_size=4 * NUM_DIMS,
        num_attention_heads=4,
        max_position_embeddings=TRAINED if kind == "dynamic" else 4 * TRAINED,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), max_length)
    return frequencies, factor


@pytest.mark.parametrize("max_length", [TRAINED // 2, TRAINED, 3 * TRAINED])
@pytest.mark.parametrize("kind", VARIANTS)
def test_variants_agree_with_transformers(kind: str, max_length: int) -> None:
    expected, expected_factor = theirs(kind, max_length, **VARIANTS[kind])
    frequencies, factor = ours(kind, max_length, **VARIANTS[kind])
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 16.0, "attention_factor": 1.7},
        {"factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0},
        {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"factor": 0.5},
    ],
)
def test_yarn_options(fields: dict[str, Any]) -> None:
    expected, expected_factor = theirs("yarn", TRAINED, **fields)
    frequencies, factor = ours("yarn", TRAINED, **fields)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_yarn_untruncated() -> None:
    expected, _ = theirs("yarn", TRAINED, factor=16.0, truncate=False)
    frequencies, _ = ours("yarn", TRAINED, factor=16.0, is_truncated=False)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


def test_every_kind_but_the_default_is_covered() -> None:
    assert set(VARIANTS) == ROPE_KINDS - {"default"}


def test_rows_carry_the_sign_of_the_half_and_the_attention_factor() -> None:
    config = RopeConfig(
        kind="yarn",
        num_rotated_dims=4,
        max_length=8,
        trained_length=8,
        attention_factor=2.0,
    )
    cos_T1R, sin_T1R = Rotary(config, torch.device("cpu")).rows(torch.tensor([0, 1]), torch.float32)
    assert cos_T1R.shape == sin_T1R.shape == (2, 1, 4)
    assert cos_T1R[0, 0].tolist() == [2.0] * 4
    first, second = sin_T1R[1, 0].chunk(2)
    assert torch.equal(first, -second)
    assert second[0] == pytest.approx(2 * torch.sin(torch.tensor(1.0)).item())


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_each_axis_turns_its_own_frequencies(is_interleaved: bool) -> None:
    config = RopeConfig(
        num_rotated_dims=16,
        max_length=64,
        trained_length=64,
        sections=(4, 2, 2),
        has_interleaved_sections=is_interleaved,
    )
    rotary = Rotary(config, torch.device("cpu"))
    positions_3T = torch.tensor([[3, 4, 5], [7, 7, 8], [1, 2, 1]])
    axes = [0, 1, 2, 0, 1, 2, 0, 0] if is_interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    for rows, alone in zip(
        rotary.rows(positions_3T, torch.float32),
        zip(*(rotary.rows(axis, torch.float32) for axis in positions_3T), strict=True),
        strict=True,
    ):
        expected = torch.stack([alone[axis][..., dim] for dim, axis in enumerate(axes * 2)], -1)
        torch.testing.assert_close(rows, expected)
        assert rows.is_contiguous(), "native kernels read it by address"


def test_text_is_at_the_same_place_on_all_axes() -> None:
    config = RopeConfig(num_rotated_dims=16, max_length=64, trained_length=64, sections=(4, 2, 2))
    rotary = Rotary(config, torch.device("cpu"))
    positions_T = torch.tensor([3, 4, 5])
    one, three = (rotary.rows(p, torch.float32) for p in (positions_T, positions_T.expand(3, -1)))
    for ours, theirs in zip(one, three, strict=True):
        torch.testing.assert_close(ours, theirs)

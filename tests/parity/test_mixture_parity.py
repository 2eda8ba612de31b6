"""Mixtures of experts against transformers: every path, after prompts of 300 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_rig import Rig, assert_errs_no_more_than_in_bfloat16
from support.every_path import (
    assert_same_alone,
    assert_same_tokens,
    every_path,
    open_rig,
)
from support.mixture_families import CHOSEN, MIXTURES, NUMBERS, save_mixture
from support.tiers import first
from triptych.core.runtime.kernels.native.library import NativeKernels


@pytest.fixture(scope="module", params=MIXTURES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, save_mixture(folder, request.param)


def test_float32_is_transformers(native: NativeKernels, model: tuple[Path, Any]) -> None:
    folder, reference = model
    for kernels in (None, native):
        rig = open_rig(folder, torch.float32, kernels)
        assert_same_tokens(every_path(rig), reference)


@pytest.mark.parametrize("name", first(MIXTURES, 4))
def test_bfloat16_errs_no_more_than_transformers(
    native: NativeKernels, tmp_path: Path, name: str
) -> None:
    """Every expert is chosen: with few of them, rounding may choose others."""
    extra = MIXTURES[name][1]
    number = next(extra[key] for key in NUMBERS if key in extra)
    of_all = {key: number for key in CHOSEN if key in extra}
    groups = {key: 1 for key in ("n_group", "topk_group") if key in extra}
    reference = save_mixture(tmp_path, name, **of_all, **groups)
    rows = every_path(open_rig(tmp_path, torch.bfloat16, native))
    assert_errs_no_more_than_in_bfloat16(rows, reference)


@pytest.mark.parametrize("model", first(MIXTURES, 4), indirect=True, scope="module")
def test_logits_are_bitwise_the_same_alone(native: NativeKernels, model: tuple[Path, Any]) -> None:
    """Of a kernel level: one family runs on all in `test_decoder_parity`."""

    def rig() -> Rig:
        return open_rig(model[0], torch.bfloat16, native)

    assert_same_alone(every_path(rig()), rig)

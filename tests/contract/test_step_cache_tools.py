"""What the benchmark of step caches measures and seeks is right, without any model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.modalities.diffusion.engine.caches.decisions import Decisions
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.engine.calibration.planning import Measured

BENCHMARKS = Path(__file__).parents[2] / "samples" / "benchmarks"
NUM_STEPS = 20


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def known() -> Any:
    """Of a model whose outputs turn slowly."""
    from step_caches.methods import Calibrated

    levels = np.linspace(1, 0.05, NUM_STEPS)
    angles = 2 * levels
    return Calibrated(
        measured=Measured(
            gram_NN=np.cos(angles[:, None] - angles),
            influence_N=np.full(NUM_STEPS, 1 / NUM_STEPS),
            points=tuple(Point(step, level) for step, level in enumerate(levels)),
        ),
        polynomial=(0.0, 0.0, 0.0, 1.0, 0.0),
        ratios={level.value: (0.97,) * NUM_STEPS for level in Level},
    )


def _wave() -> torch.Tensor:
    """Three channels of waves in 0..1."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(40.0), indexing="ij")
    waves = [(x / (2 + channel) + y / 5).sin() for channel in range(3)]
    return (torch.stack(waves)[None] + 1) / 2


def test_ssim_is_that_of_scikit_image() -> None:
    from step_caches.measures import ssim

    wave = _wave()
    other = (wave * 0.8 + wave.roll(3, -1) * 0.1 + 0.05).clamp(0, 1)
    # structural_similarity(..., channel_axis=0, data_range=1, gaussian_weights=True, sigma=1.5,
    # use_sample_covariance=False) of scikit-image 0.26
    assert ssim(wave, other) == pytest.approx([0.9553481], abs=1e-6)
    assert ssim(wave, wave) == pytest.approx([1.0])


def test_psnr_of_equal_pictures_is_the_peak() -> None:
    from step_caches.measures import psnr_db

    wave = _wave()
    assert psnr_db(wave, wave) == [99.0]
    assert psnr_db(wave, wave + 0.1) == pytest.approx([20.0], abs=1e-3)


def test_threshold_is_found_within_the_trials(known: Any) -> None:
    from step_caches.methods import FBCache
    from step_caches.search import Search

    tried = []

    def attempt(cache: CacheMethod) -> tuple[float, float]:
        gate: Any = cache.open_gate(NUM_STEPS)
        tried.append(gate.threshold)
        runs = float(np.clip(round(8 - 3 * np.log(gate.threshold / 0.3)), 1, NUM_STEPS))
        return runs, 20 + runs - cache.extrapolator.order

    best = Search(known, attempt, 16).best(FBCache(), 7)
    assert best is not None
    assert best.num_runs == 7
    assert best.setting["order"] == 0
    assert len(tried) <= 16


@pytest.mark.parametrize("num_computed", [4, 10])
def test_settings_without_thresholds_keep_to_their_budget(known: Any, num_computed: int) -> None:
    from step_caches.methods import METHODS

    for method in METHODS:
        if method.has_threshold:
            continue
        settings = list(method.settings(known, num_computed))
        assert len(settings) >= 20
        for setting in settings:
            cache = method.open(setting, known)
            rule = Decisions(cache.open_gate, cache.bounds, NUM_STEPS)
            num_runs = sum(rule.may_compute(range(NUM_STEPS)))
            assert num_computed - 1 <= num_runs <= num_computed


def _cell(psnr_db: float, num_runs: float) -> Any:
    from step_caches.results import Cell

    return Cell(
        setting={},
        num_runs=[num_runs],
        psnr_db=[psnr_db],
        ssim=[1.0],
        features=[0.0],
        right=1.0,
        cpu_share=None,
    )


def test_equal_quality_lies_between_measured_cells() -> None:
    from step_caches.report import needed

    cells = {4: _cell(20, 4), 8: _cell(30, 8)}
    assert needed(cells, 25) == 6
    assert needed(cells, 10) == 4
    assert needed(cells, 31) is None


def test_results_go_on_where_they_ended(tmp_path: Path) -> None:
    from step_caches.report import markdown
    from step_caches.results import Reference, Results, Terms

    terms = Terms(steps=[20], shares=[0.1, 0.4], num_pictures=1, num_tuning=1, num_trials=1)
    path = tmp_path / "image_caches.json"
    first = Results.open(path, terms)
    first.of_model("one")
    first.put_reference("20 guided", Reference(right=1, seeds_psnr_db=[9], seeds_features=[0.5]))
    first.put("20 guided", "planned", 8, _cell(30, 8))
    first.put("20 guided", "FBCache", 3, None)
    again = Results.open(path, terms)
    assert terms.budgets(20) == [3, 8]
    assert again.has("20 guided", "planned", 8)
    assert again.has("20 guided", "FBCache", 3)
    assert not again.has("20 guided", "planned", 3)
    assert "| planned | 8.0 | 30.0 dB (30.0, 30.0) |" in markdown(again)
    with pytest.raises(SystemExit, match="another model"):
        again.of_model("two")
    with pytest.raises(SystemExit, match="other terms"):
        Results.open(path, Terms(steps=[20], shares=[], num_pictures=2, num_tuning=1, num_trials=1))

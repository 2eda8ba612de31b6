"""What the benchmark of step caches measures and seeks is right, without any model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.tiers import first
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.engine.calibration.planning import ErrorModel

BENCHMARKS = Path(__file__).parents[2] / "samples" / "benchmarks"
NUM_STEPS = 20


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def known() -> Any:
    return _known(NUM_STEPS)


def _known(num_steps: int) -> Any:
    """Of a model whose outputs turn slowly."""
    from step_caches.methods import Calibrated

    levels = np.linspace(1, 0.05, num_steps)
    angles = 2 * levels
    return Calibrated(
        measured=ErrorModel(
            gram_NN=np.cos(angles[:, None] - angles),
            influence_N=np.full(num_steps, 1 / num_steps),
            points=tuple(Point(step, level) for step, level in enumerate(levels)),
        ),
        polynomial=(0.0, 0.0, 0.0, 1.0, 0.0),
        ratios={level.value: (0.97,) * num_steps for level in Level},
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


def test_psnr_of_equal_images_is_the_peak() -> None:
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


def test_search_without_thresholds_goes_on_with_the_best(known: Any) -> None:
    from step_caches.methods import TaylorSeer
    from step_caches.search import Search

    taylorseer = TaylorSeer()
    settings = list(taylorseer.settings(known, 8))
    assert len(settings) > 40
    tried = []

    def attempt(cache: CacheMethod) -> tuple[float, float]:
        gate: Any = cache.open_gate(NUM_STEPS)
        tried.append(gate.warmup)
        return 8.0, -abs(gate.warmup - 4) - 0.1 * abs(cache.extrapolator.order - 1)

    best = Search(known, attempt, 16).best(taylorseer, 8)
    assert best is not None
    assert (best.setting["warmup"], best.setting["order"]) == (4, 1)
    assert len(tried) == 16
    assert sum(abs(warmup - 4) <= 1 for warmup in tried[8:]) >= 6


def test_budgets_know_nothing_of_each_other(known: Any) -> None:
    """A search of two budgets finds for the second what one finds that begins there."""
    from step_caches.methods import METHODS
    from step_caches.search import Search

    def attempt(cache: CacheMethod) -> tuple[float, float]:
        gate: Any = cache.open_gate(NUM_STEPS)
        threshold = getattr(gate, "threshold", 1)
        order = getattr(cache.extrapolator, "order", 0)
        return float(np.clip(5 - 3 * np.log(threshold), 1, NUM_STEPS)), 20 - threshold - order

    for method in METHODS:
        both = Search(known, attempt, 12)
        both.best(method, 5)
        assert both.best(method, 9) == Search(known, attempt, 12).best(method, 9)


@pytest.mark.parametrize("num_computed", [4, 10])
def test_settings_without_thresholds_keep_to_their_budget(known: Any, num_computed: int) -> None:
    from step_caches.methods import METHODS, count_runs

    for method in METHODS:
        if method.has_threshold:
            continue
        settings = list(method.settings(known, num_computed))
        assert len(settings) >= 20
        for setting in settings:
            num_runs = count_runs(method.open(setting, known), NUM_STEPS)
            assert num_computed - 1 <= num_runs <= num_computed


@pytest.mark.parametrize(("num_steps", "num_computed"), first([(28, 4), (50, 8), (14, 3)]))
def test_each_method_can_compute_as_few_steps_as_are_measured(
    num_steps: int, num_computed: int
) -> None:
    from step_caches.methods import HIGH, METHODS, THRESHOLD, count_runs

    known = _known(num_steps)
    for method in METHODS:
        settings = list(method.settings(known, num_computed))
        assert settings, method.name
        for setting in settings[:: 1 + len(settings) // 8]:
            cache = method.open({**setting, THRESHOLD: HIGH}, known)
            if cache.open_gate(num_steps).signal is None:
                assert count_runs(cache, num_steps) <= num_computed


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
    assert needed(cells, 25) == "6.0"
    assert needed(cells, 10) == "≤ 4.0"
    assert needed(cells, 31) == "-"


def test_results_go_on_where_they_ended(tmp_path: Path) -> None:
    from step_caches.report import markdown
    from step_caches.results import Reference, Results, Terms

    terms = Terms(steps=[20], shares=[0.1, 0.4], num_images=1, num_tuning=1, num_trials=1)
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
    assert Results.read(path).terms == terms
    with pytest.raises(SystemExit, match=r"other terms \(shares, num_images\)"):
        Results.open(path, Terms(steps=[20], shares=[], num_images=2, num_tuning=1, num_trials=1))

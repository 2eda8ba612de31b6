"""Which step cache a request runs with: its own word, the server's, and what was calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.core.errors import ConfigError, InvalidRequest, UnsupportedOption
from triptych.core.options.config import Config, ImageOptions, ModelOptions
from triptych.modalities.diffusion.engine.caches.choice import CacheResolver
from triptych.modalities.diffusion.engine.caches.decisions import (
    FirstBlockGate,
    IntervalGate,
    MagCacheGate,
    PlanGate,
    TeaCacheGate,
)
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences, StepTaylor
from triptych.modalities.diffusion.engine.caches.methods import Level, rescaling_of
from triptych.modalities.diffusion.engine.calibration.file import (
    CalibratedRun,
    CalibrationFile,
    TriedPlan,
    cached_path,
    model_digest,
    read_calibration,
)
from triptych.modalities.diffusion.wire import StepCache

FLUX = "FluxTransformer2DModel"


def plan(*computed: int, low_psnr_db: float = 40.0, order: int = 1) -> TriedPlan:
    return TriedPlan(
        computed=computed,
        order=order,
        expected_error=0.01,
        median_psnr_db=low_psnr_db + 3,
        low_psnr_db=low_psnr_db,
    )


def run_of(num_steps: int, *plans: TriedPlan, sampler: str = "") -> CalibratedRun:
    return CalibratedRun(
        num_steps=num_steps,
        sampler=sampler,
        num_evaluations=num_steps,
        num_images=4,
        width=64,
        height=64,
        ratios=tuple(1 + step / 100 for step in range(num_steps)),
        polynomial=(0.0, 0.0, 0.0, 1.0, num_steps / 1000),
        plans=plans,
    )


PLANS = (
    plan(0, 5, low_psnr_db=20.0),
    plan(0, 3, 5, low_psnr_db=33.0, order=2),
    plan(0, 1, 3, 5, low_psnr_db=45.0),
)


def book(*runs: CalibratedRun, model_class: str = FLUX, **options: Any) -> CacheResolver:
    probes = options.pop("can_probe", True)
    images = ImageOptions(**options)
    return CacheResolver(model_class=model_class, can_probe=probes, options=images, runs=runs)


def gate(book: CacheResolver, choice: StepCache, num_steps: int = 6, sampler: str = "") -> Any:
    method = book.method(choice, num_steps, sampler)
    assert method is not None
    return method.open_gate(num_steps)


def test_a_request_that_says_nothing_gets_the_plan_where_there_is_one() -> None:
    calibrated = book(run_of(6, *PLANS))
    method = calibrated.method(StepCache(), 6)
    assert method is not None
    assert method.open_gate(6) == PlanGate((True, False, False, True, False, True))
    assert (method.extrapolator, method.level) == (DividedDifferences(2), Level.VELOCITY)
    assert calibrated.method(StepCache(), 7) is None
    assert calibrated.method(StepCache(), 6, "unipc") is None
    assert book().method(StepCache(), 6) is None


def test_the_models_own_sampler_may_be_called_by_name() -> None:
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    calibrated = replace(book(run_of(6, *PLANS)), scheduler=flow)
    assert calibrated.method(StepCache(), 6, "euler") is not None
    assert calibrated.method(StepCache(), 6, "heun") is None


@pytest.mark.parametrize(("least_db", "num_computed"), [(10.0, 2), (32.0, 3), (40.0, 4)])
def test_a_plan_is_as_cheap_as_its_error_allows(least_db: float, num_computed: int) -> None:
    calibrated = book(run_of(6, *PLANS), step_cache_min_psnr_db=least_db)
    for name in ("auto", "planned"):
        assert sum(gate(calibrated, StepCache(name=name)).plan) == num_computed


def test_where_no_plan_is_close_auto_computes_and_planned_takes_the_closest() -> None:
    calibrated = book(run_of(6, *PLANS), step_cache_min_psnr_db=60.0)
    assert calibrated.method(StepCache(), 6) is None
    assert sum(gate(calibrated, StepCache(name="planned")).plan) == 4


def test_how_many_steps_compute_may_be_chosen() -> None:
    calibrated = book(run_of(6, *PLANS))
    for asked, computed in ((2, 2), (3, 3), (6, 4)):
        for name in ("auto", "planned"):
            choice = StepCache(name=name, num_computed=asked)
            assert sum(gate(calibrated, choice).plan) == computed
    with pytest.raises(InvalidRequest, match="compute at least 2"):
        calibrated.method(StepCache(num_computed=1), 6)
    with pytest.raises(InvalidRequest, match="ask for 6 steps, or run `triptych calibrate`"):
        calibrated.method(StepCache(num_computed=3), 9)


def test_a_sampler_of_two_runs_a_step_is_planned_by_runs() -> None:
    heun = msgspec.structs.replace(run_of(3, plan(0, 2, 4), sampler="heun"), num_evaluations=5)
    method = book(heun).method(StepCache(), 3, "heun")
    assert method is not None
    assert method.open_gate(5) == PlanGate((True, False, True, False, True))


def test_plans_that_are_missing_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"No plans for 9 steps .*ask for 6, 8 steps"):
        book(run_of(8, *PLANS), run_of(6, *PLANS)).method(StepCache(name="planned"), 9)
    with pytest.raises(InvalidRequest, match="run `triptych calibrate`"):
        book().method(StepCache(name="planned"), 6)
    with pytest.raises(InvalidRequest, match="No magnitudes"):
        book().method(StepCache(name="magcache"), 6)


def test_off_is_off_whatever_the_server_has() -> None:
    assert book(run_of(6, *PLANS), teacache=True).method(StepCache(name="off"), 6) is None
    assert book(run_of(6, *PLANS), step_cache="off").method(StepCache(), 6) is None


@pytest.mark.parametrize("options", [{"teacache": True}, {"step_cache": "teacache"}])
def test_teacache_is_configured(options: dict[str, Any]) -> None:
    assert gate(book(**options), StepCache()) == TeaCacheGate(rescaling_of(FLUX), 0.4)
    own = {"teacache_coefficients": (1.0, 0.5), "teacache_rel_l1_thresh": 0.3}
    assert gate(book(**options, **own), StepCache()) == TeaCacheGate((1.0, 0.5), 0.3)
    choice = StepCache(name="teacache", threshold=0.7, coefficients=(2.0,))
    assert gate(book(**own), choice) == TeaCacheGate((2.0,), 0.7)
    assert gate(book(**own), StepCache(name="teacache")) == TeaCacheGate((1.0, 0.5), 0.3)


def test_teacache_takes_what_was_fitted_before_what_was_published() -> None:
    choice = StepCache(name="teacache")
    fitted = book(run_of(20), run_of(50))
    assert gate(fitted, choice, 24) == TeaCacheGate(run_of(20).polynomial, 0.2)
    with pytest.raises(InvalidRequest, match="triptych calibrate"):
        book(model_class="SanaTransformer2DModel").method(choice, 20)


def test_first_block_caching_is_configured_and_extrapolates_with_taylorseer() -> None:
    options = {"first_block_caching": True, "residual_threshold": 0.1}
    method = book(**options).method(StepCache(), 6)
    assert method is not None
    assert method.open_gate(6) == FirstBlockGate(0.1)
    assert (method.extrapolator, method.level) == (DividedDifferences(0), Level.SPAN)
    both = book(**options, taylorseer=True, taylorseer_max_order=2).method(StepCache(), 6)
    assert both is not None
    assert (both.open_gate(6), both.extrapolator) == (FirstBlockGate(0.1), DividedDifferences(2))
    own = book(**options).method(StepCache(name="first-block", threshold=0.2, order=1), 6)
    assert own is not None
    assert (own.open_gate(6), own.extrapolator) == (FirstBlockGate(0.2), DividedDifferences(1))


def test_taylorseer_is_configured() -> None:
    server = {"taylorseer_cache_interval": 3, "taylorseer_max_order": 2}
    method = book(taylorseer=True, **server, taylorseer_warmup_steps=4).method(StepCache(), 6)
    assert method is not None
    assert method.open_gate(6) == IntervalGate(3, 4)
    assert method.extrapolator == DividedDifferences(2)
    choice = StepCache(name="taylorseer", interval=2, warmup=1, order=1, by_step=True)
    own = book(**server).method(choice, 6)
    assert own is not None
    assert (own.open_gate(6), own.extrapolator) == (IntervalGate(2, 1), StepTaylor(1))


def test_magcache_takes_the_nearest_calibration() -> None:
    choice = StepCache(name="magcache", threshold=0.1)
    calibrated = book(run_of(20), run_of(50), run_of(30, sampler="unipc"))
    found = gate(calibrated, choice, 40)
    assert isinstance(found, MagCacheGate)
    assert (found.ratios[-1], found.threshold, len(found.ratios)) == (1.49, 0.1, 40)
    assert gate(calibrated, choice, 40, "unipc").ratios[-1] == 1.29
    method = calibrated.method(choice, 40)
    assert method is not None
    assert method.level is Level.VELOCITY


def test_skips_in_a_row_can_be_bounded() -> None:
    method = book().method(StepCache(name="first-block", max_skips=2), 6)
    assert method is not None
    assert method.bounds.max_skips == 2


@pytest.mark.parametrize("name", ["teacache", "first-block"])
def test_models_that_run_as_a_whole_say_what_works(name: Any) -> None:
    whole = book(run_of(6, *PLANS), model_class="UNet2DConditionModel", can_probe=False)
    with pytest.raises(UnsupportedOption, match="UNet2DConditionModel runs only as a whole: use"):
        whole.method(StepCache(name=name), 6)
    for other in ("planned", "taylorseer", "magcache"):
        method = whole.method(StepCache(name=other), 6)
        assert method is not None
        assert method.level is Level.VELOCITY


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            StepCache(name="planned", threshold=0.1),
            "has no setting threshold: .*teacache, first-block",
        ),
        (StepCache(threshold=0.1), "auto has no setting threshold"),
        (StepCache(name="off", num_computed=3), "off has no setting num_computed"),
        (StepCache(name="first-block", by_step=True), "has no setting by_step"),
        (StepCache(name="taylorseer", interval=0), "interval .*at least 1"),
        (StepCache(name="taylorseer", order=9), "order .*at most 3"),
        (StepCache(name="first-block", threshold=float("nan")), "threshold .*at least 0"),
        (StepCache(name="first-block", threshold=-1.0), "threshold .*at least 0"),
        (StepCache(name="teacache", coefficients=(1.0, float("inf"))), "coefficients .*at most"),
        (StepCache(num_computed=0), "num_computed .*at least 1"),
        (StepCache(name="fastest"), "no step cache 'fastest'; choose one of auto, off"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_mean_nothing_are_refused(choice: StepCache, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        book(run_of(6, *PLANS)).method(choice, 6)


def test_what_a_request_leaves_open_is_the_servers() -> None:
    server = book(teacache=True, teacache_rel_l1_thresh=0.3)
    assert gate(server, StepCache(threshold=0.5)) == TeaCacheGate(rescaling_of(FLUX), 0.5)
    choice = StepCache(name="first-block", threshold=0.0)
    assert gate(server, choice) == FirstBlockGate(0.0)


# -- on disk ------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text("{}")
    (folder / "transformer" / "model.safetensors").write_bytes(bytes(3_000_000))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(models=ModelOptions(cache_dir=str(tmp_path / "cache")))


def file_of(folder: Path, *runs: CalibratedRun) -> CalibrationFile:
    return CalibrationFile(digest=model_digest(folder, ModelOptions()), model_class=FLUX, runs=runs)


def test_calibrations_next_to_the_model_and_of_this_machine_are_read(
    folder: Path, config: Config
) -> None:
    file_of(folder, run_of(6, *PLANS), run_of(8)).write(folder / "calibration.json")
    own = file_of(folder, run_of(6, plan(0, 5)))
    own.write(cached_path(config, own.digest))
    opened = CacheResolver.open(folder, FLUX, can_probe=True, config=config)
    assert list(opened.runs) == [run_of(6, plan(0, 5)), run_of(8)]


def test_a_calibration_survives_copying_and_not_another_model(folder: Path, tmp_path: Path) -> None:
    copy = write_model(tmp_path / "copy")
    digest = model_digest(folder, ModelOptions())
    (copy / "calibration.json").write_text("no part of the model")
    assert model_digest(copy, ModelOptions()) == digest
    with (copy / "transformer" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert model_digest(copy, ModelOptions()) != digest
    (folder / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
    assert model_digest(folder, ModelOptions()) != digest


def test_a_calibration_is_not_for_weights_that_are_put_in_the_models_place(
    folder: Path, tmp_path: Path
) -> None:
    def digest(*overrides: str) -> str:
        return model_digest(folder, ModelOptions(model_override=overrides))

    file = tmp_path / "other.safetensors"
    file.write_bytes(b"other")
    assert digest(f"transformer.weight_path={file}") != digest()
    assert digest("transformer.quantization_encoding=float32") == digest()
    assert digest(f"vae.weight_path={file}") == digest()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"digest": 1}',
        b'{"magic": "other", "digest": "%s", "model_class": "x"}',
        b'{"version": 99, "digest": "%s", "model_class": "x"}',
        b'{"digest": "of another model", "model_class": "x"}',
    ],
)
def test_a_file_that_is_not_of_this_model_is_not_used(
    folder: Path, config: Config, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    digest = model_digest(folder, ModelOptions()).encode()
    (folder / "calibration.json").write_bytes(content.replace(b"%s", digest))
    assert CacheResolver.open(folder, FLUX, can_probe=True, config=config).runs == []
    assert "is not used" in caplog.text


def test_new_runs_take_the_place_of_old_ones(folder: Path) -> None:
    path = folder / "calibration.json"
    file = file_of(folder, run_of(6), run_of(8)).with_runs([run_of(6, *PLANS), run_of(4)])
    file.write(path)
    assert read_calibration(path, file.digest) == file
    path.write_bytes(path.read_bytes().replace(b'"num_images"', b'"num_pictures"'))
    assert read_calibration(path, file.digest) == file, "as the first release wrote it"
    assert [(run.num_steps, len(run.plans)) for run in file.runs] == [(4, 0), (6, 3), (8, 0)]
    assert [entry.name for entry in folder.iterdir() if "partial" in entry.name] == []


def test_unwritable_calibration_file_is_reported(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        file_of(folder).write(folder / "scheduler" / "scheduler_config.json" / "x.json")


@pytest.mark.parametrize(
    ("options", "can_probe", "message"),
    [
        ({"teacache": True}, False, "runs only as a whole"),
        ({"teacache": True}, True, "give teacache_coefficients"),
        ({"step_cache": "planned"}, True, "No plans"),
        ({"step_cache": "magcache"}, True, "No magnitudes"),
    ],
)
def test_a_server_whose_cache_its_model_cannot_have_does_not_start(
    folder: Path, config: Config, options: dict[str, Any], can_probe: bool, message: str
) -> None:
    config = replace(config, images=ImageOptions(**options))
    with pytest.raises(ConfigError, match=message):
        CacheResolver.open(folder, "SanaTransformer2DModel", can_probe=can_probe, config=config)
    fine = replace(config, images=ImageOptions(taylorseer=True))
    CacheResolver.open(folder, "SanaTransformer2DModel", can_probe=can_probe, config=fine)

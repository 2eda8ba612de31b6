"""Resolves a requested step cache to the method that a row runs with.

Owns the defaults: the server's options complete a request, and calibrated or published values
complete the options. A cache that is not available is refused by name. Knows no torch.

The choice of plans: of the plans tried for the number of steps and the sampler, the one with the
fewest computed steps that keeps nine of ten calibration images within `--step-cache-min-psnr-db` of
the uncached images. If there is none, `auto` skips nothing and `planned` takes the closest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec

from triptych.core.errors import ConfigError, InvalidRequest, RequestError, UnsupportedOption
from triptych.core.options.config import Config, ImageOptions
from triptych.core.options.declaration import Range
from triptych.core.weights.layout import read_json
from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    Level,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
    threshold_of,
)
from triptych.modalities.diffusion.engine.calibration.file import (
    CalibratedRun,
    TriedPlan,
    known_runs,
    model_digest,
)
from triptych.modalities.diffusion.sampler_names import short_name
from triptych.modalities.diffusion.wire import CacheName, StepCache

_PARAM = "cache"
_WITHIN: Mapping[str, Range] = MappingProxyType(
    {
        "threshold": Range(low=0, high=1e6),
        "coefficients": Range(low=-1e6, high=1e6),
        "interval": Range(low=1, high=1000),
        "order": Range(low=0, high=3),
        "warmup": Range(low=0, high=1000),
        "max_skips": Range(low=1, high=1000),
        "num_computed": Range(low=1, high=1000),
    }
)
_TAKES: Mapping[CacheName, frozenset[str]] = MappingProxyType(
    {
        "auto": frozenset({"num_computed"}),
        "off": frozenset(),
        "planned": frozenset({"num_computed"}),
        "teacache": frozenset({"threshold", "coefficients", "max_skips"}),
        "first-block": frozenset({"threshold", "order", "max_skips"}),
        "taylorseer": frozenset({"interval", "order", "warmup", "by_step", "max_skips"}),
        "magcache": frozenset({"threshold", "max_skips"}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResolver:
    """The step caches of one model. `can_probe`: its blocks can run separately (`SpanModel`).

    `scheduler` is the model's scheduler_config.json, if it has one.
    """

    model_class: str
    can_probe: bool
    options: ImageOptions
    runs: Sequence[CalibratedRun] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls, folder: Path, model_class: str, *, can_probe: bool, config: Config
    ) -> CacheResolver:
        """The resolver of the model in `folder`, with the calibrations found on this machine.

        `model_class` is that of the transformer or UNet. Raises `ConfigError` if the server's
        options choose a cache that this model cannot have.
        """
        runs = known_runs(folder, config, model_digest(folder, config.models))
        file = folder / "scheduler" / "scheduler_config.json"
        book = cls(
            model_class=model_class,
            can_probe=can_probe,
            options=config.images,
            runs=runs,
            scheduler=read_json(file) if file.is_file() else {},
        )
        try:
            if book._with_defaults(StepCache()).name != "planned":
                book.method(StepCache(), num_steps=0)
            elif not runs:
                raise _not_calibrated("plans")
        except RequestError as error:
            raise ConfigError(error.message) from error
        return book

    def method(self, choice: StepCache, num_steps: int, sampler: str = "") -> CacheMethod | None:
        """The method for rows of a request; `None`: every step computes.

        `num_steps` as requested, not evaluations of the model; `sampler` empty for the model's
        default. Raises `InvalidRequest` for unknown or out-of-range settings, `UnsupportedOption`
        for caches that this model does not support; both name an alternative.
        """
        asked = self._with_defaults(choice)
        _check(asked)
        sampler = short_name(self.scheduler, sampler)
        match asked.name:
            case "off":
                return None
            case "auto" | "planned":
                return self._planned(asked, num_steps, sampler)
        method = self._rule_method(asked, num_steps, sampler)
        if asked.max_skips is None:
            return method
        return replace(method, bounds=replace(method.bounds, max_skips=asked.max_skips))

    def _with_defaults(self, choice: StepCache) -> StepCache:
        """The choice completed with the server's options."""
        options = self.options
        name = choice.name
        if name == "auto":
            name = _name_of(options) if choice.num_computed is None else "planned"
        defaults: Mapping[str, Mapping[str, Any]] = {
            "teacache": {
                "threshold": options.teacache_rel_l1_thresh or None,
                "coefficients": options.teacache_coefficients,
            },
            "first-block": {
                "threshold": options.residual_threshold,
                "order": options.taylorseer_max_order if options.taylorseer else 0,
            },
            "taylorseer": {
                "interval": options.taylorseer_cache_interval,
                "order": options.taylorseer_max_order,
                "warmup": options.taylorseer_warmup_steps,
            },
        }
        given = _set_fields(choice)
        left = {key: value for key, value in defaults.get(name, {}).items() if key not in given}
        return msgspec.structs.replace(choice, name=name, **left)

    def _rule_method(self, asked: StepCache, num_steps: int, sampler: str) -> CacheMethod:
        """The method of a cache that decides by a rule, not by a plan."""
        if asked.name in ("teacache", "first-block") and not self.can_probe:
            raise UnsupportedOption(
                f"{asked.name} probes the blocks of a model, and {self.model_class} runs only as a"
                " whole: use planned, taylorseer or magcache.",
                param=_PARAM,
            )
        settings = _set_fields(asked)
        settings.pop("max_skips", None)
        match asked.name:
            case "first-block":
                return first_block(**settings)
            case "taylorseer":
                return taylorseer(**settings)
            case "magcache":
                run = _nearest(self.runs, num_steps, sampler)
                if run is None:
                    raise _not_calibrated("magnitudes")
                # The ratios were measured on the outputs.
                return magcache(run.ratios, **settings, level=Level.VELOCITY)
        run = _nearest([run for run in self.runs if run.polynomial], num_steps, sampler)
        coefficients = asked.coefficients or (run.polynomial if run else ())
        suited = threshold_of("" if coefficients else self.model_class)
        threshold = suited if asked.threshold is None else asked.threshold
        return teacache(self.model_class, threshold=threshold, coefficients=coefficients)

    def _planned(self, asked: StepCache, num_steps: int, sampler: str) -> CacheMethod | None:
        here = [run for run in self.runs if run.sampler == sampler]
        run = next((run for run in here if run.num_steps == num_steps), None)
        if run is None:
            if asked.name == "auto":
                return None
            raise _not_calibrated(f"plans for {num_steps} steps", [run.num_steps for run in here])
        plan = self._choose(run, asked)
        if plan is None:
            return None
        computed = set(plan.computed)
        mask = [step in computed for step in range(run.num_evaluations)]
        return planned(mask, order=plan.order)

    def _choose(self, run: CalibratedRun, asked: StepCache) -> TriedPlan | None:
        plans = sorted(run.plans, key=lambda plan: len(plan.computed))
        if asked.num_computed is not None:
            affordable = [plan for plan in plans if len(plan.computed) <= asked.num_computed]
            if not affordable:
                raise InvalidRequest(
                    f"Plans for {run.num_steps} steps compute at least {len(plans[0].computed)} of"
                    f" them: ask for at least as many.",
                    param=_PARAM,
                )
            return affordable[-1]
        close = close_plan(run, self.options.step_cache_min_psnr_db)
        if close is None and asked.name == "planned":
            return max(plans, key=lambda plan: plan.low_psnr_db)
        return close


def close_plan(run: CalibratedRun, least_db: float) -> TriedPlan | None:
    """The plan with the fewest computed steps whose images are close enough, if any."""
    close = [plan for plan in run.plans if plan.low_psnr_db >= least_db]
    return min(close, key=lambda plan: len(plan.computed), default=None)


def _name_of(options: ImageOptions) -> CacheName:
    """The server's cache; options that exclude each other are refused when they are parsed."""
    if options.teacache:
        return "teacache"
    if options.first_block_caching:
        return "first-block"
    return "taylorseer" if options.taylorseer else cast("CacheName", options.step_cache)


def _set_fields(choice: StepCache) -> dict[str, Any]:
    """The settings that a choice makes."""
    settings = msgspec.structs.asdict(choice)
    return {
        name: value
        for name, value in settings.items()
        if name != "name" and value is not None and value is not False and value != ()
    }


def _check(asked: StepCache) -> None:
    takes = _TAKES.get(asked.name)
    if takes is None:
        known = ", ".join(_TAKES)
        raise InvalidRequest(
            f"There is no step cache {asked.name!r}; choose one of {known}.", param=_PARAM
        )
    for name, value in _set_fields(asked).items():
        if name not in takes:
            those = ", ".join(cache for cache, names in _TAKES.items() if name in names)
            raise InvalidRequest(
                f"{asked.name} has no setting {name}: leave it out, or choose one of {those}.",
                param=_PARAM,
            )
        within = _WITHIN.get(name)
        numbers = value if isinstance(value, tuple) else (value,)
        if within is not None and not all(number in within for number in numbers):
            raise InvalidRequest(f"{name} of a step cache must be {within}.", param=_PARAM)


def _nearest(runs: Sequence[CalibratedRun], num_steps: int, sampler: str) -> CalibratedRun | None:
    """The run closest to a request: with its sampler if any, then by number of steps."""
    return min(
        runs, key=lambda run: (run.sampler != sampler, abs(run.num_steps - num_steps)), default=None
    )


def _not_calibrated(what: str, there_are: Sequence[int] = ()) -> InvalidRequest:
    known = f"ask for {', '.join(map(str, sorted(there_are)))} steps, or " if there_are else ""
    return InvalidRequest(
        f"No {what} were calibrated for this model: {known}run `triptych calibrate`, or choose"
        " another step cache.",
        param=_PARAM,
    )

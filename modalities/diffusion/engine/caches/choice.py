"""From the step cache that is asked for to the method that a row runs with.

Owns the defaults: what a request leaves open is the server's, what the server leaves open is what
was calibrated, or published. Whatever cannot be had is refused by name. Knows no torch.

The rule of plans: of those tried for the number of steps and the sampler, the one that computes
least among those that leave nine of ten calibration images within `--step-cache-min-psnr-db` of
their uncached selves. Where none does, `auto` skips nothing and `planned` takes the closest.
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
class CacheBook:
    """The step caches of one model. `can_probe`: its blocks can be run apart (`SpanModel`).

    `scheduler` is the model's scheduler_config.json, where it has one.
    """

    model_class: str
    can_probe: bool
    options: ImageOptions
    runs: Sequence[CalibratedRun] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, model_class: str, *, can_probe: bool, config: Config) -> CacheBook:
        """The book of the model in `folder`, with the calibrations that this machine has of it.

        `model_class` is that of the transformer or UNet. Raises `ConfigError` where the server's
        options ask for a cache that this model can never have.
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
            if book._filled(StepCache()).name != "planned":
                book.method(StepCache(), num_steps=0)
            elif not runs:
                raise _lacking("plans")
        except RequestError as error:
            raise ConfigError(error.message) from error
        return book

    def method(self, choice: StepCache, num_steps: int, sampler: str = "") -> CacheMethod | None:
        """What rows of a request run with; `None`: every step computes.

        `num_steps` as requested, not evaluations of the model; `sampler` empty for the model's own.
        Raises `InvalidRequest` for what is unknown or out of range, `UnsupportedOption` for what
        this model cannot do; both name the way out.
        """
        asked = self._filled(choice)
        _check(asked)
        sampler = short_name(self.scheduler, sampler)
        match asked.name:
            case "off":
                return None
            case "auto" | "planned":
                return self._planned(asked, num_steps, sampler)
        method = self._ruled(asked, num_steps, sampler)
        if asked.max_skips is None:
            return method
        return replace(method, bounds=replace(method.bounds, max_skips=asked.max_skips))

    def _filled(self, choice: StepCache) -> StepCache:
        """The choice with the server's options for what it leaves open."""
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
        given = _given(choice)
        left = {key: value for key, value in defaults.get(name, {}).items() if key not in given}
        return msgspec.structs.replace(choice, name=name, **left)

    def _ruled(self, asked: StepCache, num_steps: int, sampler: str) -> CacheMethod:
        """The method of a cache that decides by a rule, on the way or beforehand."""
        if asked.name in ("teacache", "first-block") and not self.can_probe:
            raise UnsupportedOption(
                f"{asked.name} looks between the blocks of a model, and {self.model_class} runs"
                " only as a whole: use planned, taylorseer or magcache.",
                param=_PARAM,
            )
        settings = _given(asked)
        settings.pop("max_skips", None)
        match asked.name:
            case "first-block":
                return first_block(**settings)
            case "taylorseer":
                return taylorseer(**settings)
            case "magcache":
                run = _nearest(self.runs, num_steps, sampler)
                if run is None:
                    raise _lacking("magnitudes")
                # What was measured are the outputs, so that is where the ratios hold.
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
            raise _lacking(f"plans for {num_steps} steps", [run.num_steps for run in here])
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
                    f" them: ask for so many.",
                    param=_PARAM,
                )
            return affordable[-1]
        close = close_plan(run, self.options.step_cache_min_psnr_db)
        if close is None and asked.name == "planned":
            return max(plans, key=lambda plan: plan.low_psnr_db)
        return close


def close_plan(run: CalibratedRun, least_db: float) -> TriedPlan | None:
    """The plan that computes least of those close enough to be taken unasked, if there is one."""
    close = [plan for plan in run.plans if plan.low_psnr_db >= least_db]
    return min(close, key=lambda plan: len(plan.computed), default=None)


def _name_of(options: ImageOptions) -> CacheName:
    """The server's cache; which flags exclude each other is checked where options are."""
    if options.teacache:
        return "teacache"
    if options.first_block_caching:
        return "first-block"
    return "taylorseer" if options.taylorseer else cast("CacheName", options.step_cache)


def _given(choice: StepCache) -> dict[str, Any]:
    """The settings that a choice does not leave open."""
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
        raise InvalidRequest(f"There is no step cache {asked.name!r}: it is {known}.", param=_PARAM)
    for name, value in _given(asked).items():
        if name not in takes:
            those = ", ".join(cache for cache, names in _TAKES.items() if name in names)
            raise InvalidRequest(
                f"{asked.name} takes no {name}: leave it out, or choose one of {those}.",
                param=_PARAM,
            )
        within = _WITHIN.get(name)
        numbers = value if isinstance(value, tuple) else (value,)
        if within is not None and not all(number in within for number in numbers):
            raise InvalidRequest(f"{name} of a step cache must be {within}.", param=_PARAM)


def _nearest(runs: Sequence[CalibratedRun], num_steps: int, sampler: str) -> CalibratedRun | None:
    """The run most like a request: of its sampler if there is one, of about as many steps."""
    return min(
        runs, key=lambda run: (run.sampler != sampler, abs(run.num_steps - num_steps)), default=None
    )


def _lacking(what: str, there_are: Sequence[int] = ()) -> InvalidRequest:
    known = f"ask for {', '.join(map(str, sorted(there_are)))} steps, or " if there_are else ""
    return InvalidRequest(
        f"No {what} were calibrated for this model: {known}run `triptych calibrate`, or choose"
        " another step cache.",
        param=_PARAM,
    )

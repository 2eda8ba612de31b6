"""`triptych warm-cache`: do now what a first start would do, and keep it as a bundle.

Owns the command's words, its phases and their order. What a bundle is and how it appears whole is
`core/bundle`'s, what a phase does is left to what a start does there. Loads torch only to load the
models, Triton only to compile for a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from triptych.core.bundle.contents import add_model, copy_folder
from triptych.core.bundle.manifest import TRITON, BundledKernels, BundleManifest, MemoryProfile
from triptych.core.bundle.store import NONE, bundle_folder, content_options, write_bundle
from triptych.core.bundle.triton_cache import target_folder
from triptych.core.errors import ConfigError, DeviceError
from triptych.core.options.config import Config
from triptych.core.options.table import Resolved, add_options, resolve_with_sources
from triptych.core.process import logs
from triptych.core.process.cli_io import count_bar
from triptych.core.process.lazy import load
from triptych.core.process.lookups import Lookup, listening
from triptych.core.process.versions import versions
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.progress import RichProgress
from triptych.core.weights.resolve import ResolvedModel, place_of
from triptych.modalities.registry import default_models, resolve_models
from triptych.startup import Startup, summarize

if TYPE_CHECKING:
    from rich.progress import Progress

    from triptych.core.runtime.devices.device import Device
    from triptych.core.runtime.kernels.triton.compile import CompileTarget

_SECTIONS = ("models", "device", "cache", "schedule", "speech", "images", "vision")
_UNUSED = frozenset({"load", "idle_unload_s"})
_COMPILE = "triptych.core.runtime.kernels.triton.compile"
_DEVICE = "triptych.core.runtime.devices.device"
_MEMORY = "triptych.core.runtime.engine.model_memory"
_BUNDLE_LIBRARY = "triptych.core.runtime.kernels.native.build:bundle_library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--target`, and the options that a model is loaded with."""
    parser.add_argument(
        "--target",
        action="append",
        metavar="API[:ARCH]",
        help="compile the kernels of a GPU, which need not be here: cuda:sm_90, hip:gfx942, or cuda"
        " for all that are supported; repeat for several. Without it: those of the device here.",
    )
    add_options(parser, sections=_SECTIONS, exclude=_UNUSED)


def run(args: argparse.Namespace) -> int:
    """Make the bundle. Raises `SetupError` in one actionable line."""
    resolved = resolve_with_sources(args)
    if resolved.sources["log_level"] != "default":
        logs.configure(resolved.config.server)
    if resolved.config.models.bundle == NONE:
        raise ConfigError("--bundle none leaves nothing to write; name a folder, or leave it out.")
    _WarmCache(resolved, _read_targets(args.target or ())).run()
    return 0


def _target_of(device: Device) -> CompileTarget | None:
    """What kernels are compiled for here; `None` on a CPU."""
    return load(f"{_COMPILE}:CompileTarget").parse(device.target) if device.target else None


def _read_targets(texts: Sequence[str]) -> tuple[CompileTarget, ...]:
    """The targets named; an API alone stands for all its devices that kernels are checked for."""
    if not texts:
        return ()
    parse, supported = load(f"{_COMPILE}:CompileTarget").parse, load(f"{_COMPILE}:TARGETS")
    targets: dict[CompileTarget, None] = {}
    for text in texts:
        of_api = [target for target in supported if target.backend == text]
        targets |= dict.fromkeys(of_api or [parse(text)])
    return tuple(targets)


@dataclass
class _WarmCache:
    """One run of the command."""

    resolved: Resolved
    targets: tuple[CompileTarget, ...]
    startup: Startup = field(init=False)
    phases: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.resolved.config
        self.startup = Startup(config.server)
        self.folder = bundle_folder(config.models, [place_of(each) for each in self._references()])
        # An earlier bundle is no source of a new one: what it has may be out of date.
        self.config = replace(config, models=replace(config.models, bundle=NONE))

    def _references(self) -> Sequence[str]:
        return self.resolved.config.models.model or default_models()

    def run(self) -> None:
        """Do all phases; the bundle appears when the last is over."""
        started_s = time.monotonic()
        models = self._weights()
        manifest = write_bundle(self.folder, lambda folder: self._fill(folder, models))
        if manifest.memory is not None:
            self._show_memory(manifest.memory)
        num_bytes = sum(seal.num_bytes for seal in manifest.files.values())
        note = f"{self.folder} ({decimal(num_bytes)} beside the weights)"
        self.startup.phase("bundle", time.monotonic() - started_s, note)

    def _show_memory(self, memory: MemoryProfile) -> None:
        """What each model plans with, and what all of them took."""
        planned: dict[str, int] = {}
        for owner, num_bytes in memory.planned.items():
            model = owner.rpartition("/")[0]
            planned[model] = planned.get(model, 0) + num_bytes
        shares = ", ".join(f"{model} {decimal(size)}" for model, size in planned.items())
        note = f"{decimal(memory.taken_bytes)} taken; caches included, planned: {shares}"
        self.startup.phase("memory", self.phases["load"], note)

    def _weights(self) -> tuple[ResolvedModel, ...]:
        """Fetch, convert and verify all models."""
        progress = RichProgress()
        with self._phase("weights"):
            try:
                return resolve_models(replace(self.resolved, config=self.config), progress)
            finally:
                progress.stop()

    def _fill(self, folder: Path, models: Sequence[ResolvedModel]) -> BundleManifest:
        """Fill the folder of a new bundle, and say what is in it."""
        options = self.config.models
        with self._phase("copy"):
            bundled = tuple(add_model(folder, model, options) for model in models)
        device: Device = load(f"{_DEVICE}:Device").open(self.config.device.device)
        targets = self.targets or tuple(filter(None, [_target_of(device)]))
        compiled = {str(target): self._compile(target, folder) for target in targets}
        is_here = not self.targets or _target_of(device) in self.targets
        memory = self._load(models, device) if is_here else None
        return BundleManifest(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            options=content_options(options),
            device=str(device.torch),
            models=bundled,
            kernels=self._kernels(folder) if is_here else None,
            targets=compiled,
            memory=memory,
            phases=self.phases,
        )

    def _compile(self, target: CompileTarget, folder: Path) -> tuple[str, ...]:
        """Compile all kernels for a target, and put the results into the bundle."""
        name = target_folder(str(target))
        cache = WeightsCache.open(self.config.models.cache_dir).triton / name
        with self._phase(f"{target}"), _bar() as bar:
            task = bar.add_task(f"Compiling for {target}", total=None)
            results = load(f"{_COMPILE}:compile_all")(
                [target], cache, lambda compiled: bar.advance(task)
            )
        failed = [each for each in results if each.error]
        if failed:
            raise DeviceError(f"{failed[0].name} does not compile for {target}: {failed[0].error}.")
        copy_folder(cache, folder / TRITON / name)
        return tuple(each.name for each in results)

    def _load(self, models: Sequence[ResolvedModel], device: Device) -> MemoryProfile:
        """Load all models as the engine does, and see what they take."""
        with self._phase("load"):
            return asyncio.run(_profile(self.config, models, device))

    def _kernels(self, folder: Path) -> BundledKernels | None:
        """The native kernels that the models were loaded with, if any."""
        with self._phase("kernels"):
            kernels = load(f"{_MEMORY}:open_kernels")(self.config)
            if kernels is None:
                return None
            promised: BundledKernels = load(_BUNDLE_LIBRARY)(kernels.path, kernels.level, folder)
            return promised

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase, and show what it found and what it had to make."""
        lookups: list[Lookup] = []
        started_s = time.monotonic()
        with listening(lookups.append):
            yield
        self.phases[name] = time.monotonic() - started_s
        found = {lookup.phase: summarize(lookups, lookup.phase) for lookup in lookups}
        notes = (text if phase == name else f"{phase}: {text}" for phase, text in found.items())
        self.startup.phase(name, self.phases[name], "; ".join(notes))


def _bar() -> Progress:
    """How many are done, on a terminal."""
    return count_bar(is_hidden=not sys.stderr.isatty(), is_transient=True)


async def _profile(
    config: Config, models: Sequence[ResolvedModel], device: Device
) -> MemoryProfile:
    """What the models take of the device, planned and in fact, all of them loaded."""
    from triptych.compose import build_engine
    from triptych.schedulers.local import LocalClient

    engine = build_engine(config, models)
    before_bytes = device.taken_bytes()
    client = LocalClient(engine)
    try:
        with _bar() as bar:
            for model in bar.track(models, description="Loading"):
                await client.load(model.name)
        return MemoryProfile(
            planned=dict(engine.ledger.by_owner()),
            taken_bytes=device.taken_bytes() - before_bytes,
        )
    finally:
        await client.close()

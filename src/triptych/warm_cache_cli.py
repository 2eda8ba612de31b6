"""`triptych warm-cache`: does the work of a first start in advance and stores it as a bundle.

Owns the command's arguments and the order of its phases. `core/bundle` writes bundles, and each
phase calls the same code as a start. Loads torch only to load models, and Triton only to compile
for a GPU.
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
from triptych.core.options.table import (
    Resolved,
    add_model_operands,
    add_options,
    resolve_with_sources,
)
from triptych.core.process import logs
from triptych.core.process.cli_io import count_bar
from triptych.core.process.lazy import load
from triptych.core.process.lookups import Lookup, listen_to_lookups
from triptych.core.process.versions import versions
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.progress import RichProgress
from triptych.core.weights.resolve import ResolvedModel, place_of
from triptych.modalities.registry import default_models, resolve_models
from triptych.startup.phases import PhaseLines, summarize

if TYPE_CHECKING:
    from rich.progress import Progress

    from triptych.core.runtime.devices.device import Device
    from triptych.core.runtime.kernels.triton.compile import CompileTarget

_SECTIONS = ("models", "device", "cache", "schedule", "speech", "images", "adapters", "vision")
_UNUSED = frozenset({"load", "idle_unload_s"})
_COMPILE = "triptych.core.runtime.kernels.triton.compile"
_DEVICE = "triptych.core.runtime.devices.device"
_MEMORY = "triptych.core.runtime.engine.model_memory"
_BUNDLE_LIBRARY = "triptych.core.runtime.kernels.native.build:bundle_library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--target` and the options of loading models."""
    parser.add_argument(
        "--target",
        action="append",
        metavar="API[:ARCH]",
        help="GPU to compile kernels for, which need not be present: cuda:sm_90, hip:gfx942, or"
        " cuda for all supported ones; repeat for several [default: the present device]",
    )
    add_model_operands(parser)
    add_options(parser, sections=_SECTIONS, exclude=_UNUSED)


def run(args: argparse.Namespace) -> int:
    """Create the bundle. Raises `SetupError` in one actionable line."""
    resolved = resolve_with_sources(args)
    if resolved.sources["log_level"] != "default":
        logs.configure(resolved.config.server)
    if resolved.config.models.bundle == NONE:
        raise ConfigError(
            "--bundle none: there is nothing to write; name a folder or leave it out."
        )
    _WarmCache(resolved, _read_targets(args.target or ())).run()
    return 0


def _target_of(device: Device) -> CompileTarget | None:
    """Return the compile target of the device; `None` on a CPU."""
    return load(f"{_COMPILE}:CompileTarget").parse(device.target) if device.target else None


def _read_targets(texts: Sequence[str]) -> tuple[CompileTarget, ...]:
    """Parse the targets; an API name alone stands for all its supported devices."""
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
    """One run of `triptych warm-cache`."""

    resolved: Resolved
    targets: tuple[CompileTarget, ...]
    lines: PhaseLines = field(init=False)
    phases: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.resolved.config
        self.lines = PhaseLines(config.server)
        self.folder = bundle_folder(config.models, [place_of(each) for each in self._references()])
        # Never start from an earlier bundle: its contents may be out of date.
        self.config = replace(config, models=replace(config.models, bundle=NONE))

    def _references(self) -> Sequence[str]:
        return self.resolved.config.models.model or default_models()

    def run(self) -> None:
        """Run all phases; the bundle appears when the last one ends."""
        started_s = time.monotonic()
        models = self._weights()
        manifest = write_bundle(self.folder, lambda folder: self._fill(folder, models))
        if manifest.memory is not None:
            self._show_memory(manifest.memory)
        num_bytes = sum(seal.num_bytes for seal in manifest.files.values())
        note = f"{self.folder} ({decimal(num_bytes)} in addition to the weights)"
        self.lines.phase("bundle", time.monotonic() - started_s, note)

    def _show_memory(self, memory: MemoryProfile) -> None:
        """Print the planned memory of each model and the memory used by all."""
        planned: dict[str, int] = {}
        for owner, num_bytes in memory.planned.items():
            model = owner.rpartition("/")[0]
            planned[model] = planned.get(model, 0) + num_bytes
        shares = ", ".join(f"{model} {decimal(size)}" for model, size in planned.items())
        note = f"{decimal(memory.taken_bytes)} used; planned, including caches: {shares}"
        self.lines.phase("memory", self.phases["load"], note)

    def _weights(self) -> tuple[ResolvedModel, ...]:
        """Fetch, convert and verify all models."""
        progress = RichProgress()
        with self._phase("weights"):
            try:
                return resolve_models(replace(self.resolved, config=self.config), progress)
            finally:
                progress.stop()

    def _fill(self, folder: Path, models: Sequence[ResolvedModel]) -> BundleManifest:
        """Fill the folder of a new bundle, and return its manifest."""
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
        """Load all models as the engine does, and measure their memory."""
        with self._phase("load"):
            return asyncio.run(_profile(self.config, models, device))

    def _kernels(self, folder: Path) -> BundledKernels | None:
        """Bundle the native kernels that the models were loaded with, if any."""
        with self._phase("kernels"):
            kernels = load(f"{_MEMORY}:open_kernels")(self.config)
            if kernels is None:
                return None
            bundled: BundledKernels = load(_BUNDLE_LIBRARY)(kernels.path, kernels.level, folder)
            return bundled

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time a phase, and print its cache hits and misses."""
        lookups: list[Lookup] = []
        started_s = time.monotonic()
        with listen_to_lookups(lookups.append):
            yield
        self.phases[name] = time.monotonic() - started_s
        found = {lookup.phase: summarize(lookups, lookup.phase) for lookup in lookups}
        notes = (text if phase == name else f"{phase}: {text}" for phase, text in found.items())
        self.lines.phase(name, self.phases[name], "; ".join(notes))


def _bar() -> Progress:
    """Return a counting progress bar, hidden without a terminal."""
    return count_bar(is_hidden=not sys.stderr.isatty(), is_transient=True)


async def _profile(
    config: Config, models: Sequence[ResolvedModel], device: Device
) -> MemoryProfile:
    """Load all models, and return their planned and used device memory."""
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

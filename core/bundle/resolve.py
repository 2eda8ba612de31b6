"""Resolving the models of a start: from a bundle, or else from their own references.

Owns the choice between a bundle's copy of a model and its other places, and the check that no two
models have one name. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from triptych.core.bundle.manifest import BundledModel
from triptych.core.bundle.store import Bundle, find_bundle
from triptych.core.errors import BundleError, ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.options.served_names import ServedNames
from triptych.core.process.lookups import record_miss, timed_lookup
from triptych.core.weights.manifest import verify
from triptych.core.weights.packages import Installer, run_installer
from triptych.core.weights.pipeline_index import is_pipeline
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import (
    EMBEDDED_REFERENCE,
    ResolvedModel,
    Source,
    place_of,
    place_stamp,
    resolve,
    served_name,
)


def resolve_all(
    options: ModelOptions,
    progress: Progress,
    *,
    install: Installer = run_installer,
    sources: Sequence[Source] = (),
    defaults: Sequence[str] = (EMBEDDED_REFERENCE,),
) -> tuple[ResolvedModel, ...]:
    """Resolve every `--model`, or the `defaults` if none is given.

    Raises `ConfigError` if names clash, `WeightsError` if a model is invalid or unreachable.
    """
    pairs = named_references(options, defaults)
    references, names = ([each[i] for each in pairs] for i in (0, 1))
    ServedNames.read(options).check(names)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Two models would be served as {name!r}; write --model NAME=REFERENCE."
            )
    bundle = find_bundle(options, [place_of(reference) for reference in references])
    resolver = _Resolver(options, progress, install, sources)
    resolved = tuple(resolver.resolve(reference, name, bundle) for reference, name in pairs)
    if options.model_override and not any(is_pipeline(Path(model.folder)) for model in resolved):
        raise ConfigError(
            "--model-override is for parts of image models, but no image model is served."
        )
    return resolved


def named_references(options: ModelOptions, defaults: Sequence[str]) -> list[tuple[str, str]]:
    """Every `--model`, or the `defaults` if none is given, with its served name."""
    references, own = options.model or tuple(defaults), ServedNames.read(options).own
    return [
        (reference, own[i] if i < len(own) else served_name(reference))
        for i, reference in enumerate(references)
    ]


@dataclass(frozen=True, slots=True)
class _Resolver:
    """Resolves references one by one, with or without a bundle."""

    options: ModelOptions
    progress: Progress
    install: Installer
    sources: Sequence[Source]

    def resolve(self, reference: str, name: str, bundle: Bundle | None) -> ResolvedModel:
        """The model of `reference`, from `bundle` if its copy is valid."""
        self.progress.begin(name)
        promised = bundle.model(place_of(reference)) if bundle else None
        if bundle is None or promised is None:
            return self._resolve_outside(reference, name)
        with timed_lookup("weights", name) as search:
            search.is_promised = True
            try:
                folder = self._folder_in(bundle, promised)
            except (BundleError, WeightsError) as error:
                record_miss(error.message)
                folder = None
            if folder is not None:
                return ResolvedModel(
                    name=name,
                    reference=reference,
                    folder=str(folder),
                    digest=promised.digest,
                    bundle=str(bundle.folder),
                )
            model = self._resolve_outside(reference, name)
            if model.digest == promised.digest:
                return structs.replace(model, bundle=str(bundle.folder))
            record_miss("its files differ from those in the bundle")
            return model

    def _resolve_outside(self, reference: str, name: str) -> ResolvedModel:
        return resolve(
            reference,
            name=name,
            options=self.options,
            progress=self.progress,
            install=self.install,
            sources=self.sources,
        )

    def _folder_in(self, bundle: Bundle, promised: BundledModel) -> Path | None:
        """The model's folder in the bundle; `None` if its weights are stored outside the bundle.

        Raises `BundleError` or `WeightsError` if the files have changed.
        """
        here = place_stamp(promised.reference)
        if not promised.folder or (here and here != promised.stamp):
            return None
        folder = bundle.model_folder(promised)
        verify(folder, self.progress)
        return folder

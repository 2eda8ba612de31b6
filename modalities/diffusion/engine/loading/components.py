"""Loads the parts of an image model from a folder with model_index.json onto the device.

Owns which file becomes which part, and its type: the model's own unless `--model-override` says
otherwise. `modules.py` builds and fills modules, `classes.py` lists the allowed classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig

from triptych.core.block_formats import BLOCK_ENCODINGS
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.weights.encoding import AUTO, STORED_ONLY
from triptych.core.weights.layout import brief, read_json
from triptych.core.weights.library_errors import library_errors
from triptych.core.weights.overrides import PLAIN_TYPES, PartOverride, read_overrides
from triptych.core.weights.part_files import part_folder, part_weight_file
from triptych.core.weights.pipeline_index import (
    PipelineComponent,
    PipelineIndex,
    is_part,
    prefix_errors,
    read_pipeline,
)
from triptych.modalities.diffusion.engine.loading.classes import class_of, part_in
from triptych.modalities.diffusion.engine.loading.modules import (
    Holding,
    Report,
    held_bytes,
    is_of_diffusers,
    open_diffusers_module,
    open_transformers_module,
)
from triptych.modalities.diffusion.engine.loading.outline import outline
from triptych.modalities.diffusion.engine.loading.weights import Weights, open_weights


def open_reader(kind: Any, folder: Path) -> Any:
    """A tokenizer or processor of a class of transformers. Raises `WeightsError`."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises no narrower type
        raise WeightsError(
            f"The files in {folder.name} are not usable as {kind.__name__}: {brief(error)}."
        ) from error


_FOR_ALL = (*BLOCK_ENCODINGS, *STORED_ONLY)
"""Encodings that `--quantization-encoding` applies to every part except the autoencoder."""
_CONFIGURATIONS: Mapping[str, str] = MappingProxyType({
    "scheduler": "scheduler_config.json",
    "guider": "guider_config.json",
    "ocr_guider": "guider_config.json",
})  # fmt: skip
"""Parts that are read as mappings."""
_OF_PROCESSOR = PipelineComponent("tokenizer", "transformers", "PreTrainedTokenizerFast")
"""The tokenizer among a processor's files, of a model that names none."""
WRITER = "vision_language_encoder"
"""The part that writes tokens of images."""
_SAMPLING = "generation_config.json"
_HOST = torch.device("cpu")
DtypeOf = Callable[[torch.dtype], torch.dtype]
"""Maps the type that weights are stored in to the one to hold and compute in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """A loaded image model: `pipeline` is the class that model_index.json names.

    `parts` by their names in that file: modules in evaluation mode on the device, tokenizers, as
    `scheduler` the mapping in scheduler_config.json (likewise guiders), and the file's plain
    entries, such as `is_distilled`. A part that the model leaves empty is absent.
    """

    pipeline: str
    parts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One part before it is loaded. `file` has its weights if its folder does not.

    `encoding` is the requested one: a plain type or blocks; empty: as stored.
    """

    part: PipelineComponent
    kind: Any
    folder: Path
    file: Path | None
    encoding: str

    def dtype(self, weights: Weights, dtype: DtypeOf) -> torch.dtype:
        """The type to hold it in; `force_upcast` marks autoencoders that overflow in float16."""
        if self.encoding in PLAIN_TYPES:
            return getattr(torch, self.encoding)  # type: ignore[no-any-return]
        held = dtype(weights.dtype)
        overflows = held is torch.float16 and weights.config.get("force_upcast")
        return torch.float32 if overflows else held

    def holding(
        self, weights: Weights, dtype: DtypeOf, device: torch.device, native: NativeKernels | None
    ) -> Holding:
        """The device, type and encoding to hold the part in."""
        held = self.dtype(weights, dtype)
        return Holding(device=device, dtype=held, wanted=self.encoding or AUTO, native=native)


def open_components(
    folder: str | Path,
    options: ModelOptions,
    *,
    device: torch.device,
    dtype: DtypeOf,
    report: Report,
    native: NativeKernels | None = None,
) -> Components:
    """Load every part of the model in `folder`; `report` receives the share of bytes done, 0 to 1.

    On a CPU, weights in blocks are packed for the `native` kernels.

    Raises `WeightsError` naming part, file and tensor if anything is missing, damaged, of an
    unknown class, or left over, and `ConfigError` for an override of no part. All classes are
    checked before anything is loaded.
    """
    index = read_pipeline(Path(folder))
    plans = _plan(index, Path(folder), options)
    sizes = component_bytes(folder, options, dtype=dtype, device=device)
    parts: dict[str, Any] = dict(index.facts)
    total = max(sum(sizes.values()), 1)
    done = 0
    for plan in plans:
        name = plan.part.name
        with prefix_errors(name):
            if plan.part.has_weights:
                progress = _share_of(report, done / total, sizes[name] / total)
                build = (
                    open_diffusers_module
                    if is_of_diffusers(plan.kind)
                    else open_transformers_module
                )
                with open_weights(plan.folder, plan.file) as weights:
                    holding = plan.holding(weights, dtype, device, native)
                    is_foreign = plan.file is not None
                    parts[name] = build(
                        plan.kind, weights, holding, progress, is_foreign=is_foreign
                    )
                if name == WRITER:
                    read_sampling(parts[name], plan.folder)
                done += sizes[name]
            else:
                parts[name] = _open_plain(plan)
    return Components(pipeline=index.pipeline, parts=parts)


def read_sampling(module: Any, folder: Path) -> None:
    """Read how a language model samples, where its folder says so. Raises `WeightsError`."""
    file = folder / _SAMPLING
    if file.is_file():
        with library_errors(f"{_SAMPLING} is not usable"):
            module.generation_config = GenerationConfig.from_dict(read_json(file))


def outline_components(folder: str | Path, options: ModelOptions, *, dtype: DtypeOf) -> Components:
    """The parts as `open_components` would load them, but without weights; see `outline`.

    Reads only headers, takes no device memory, and raises as `open_components` does.
    """
    index = read_pipeline(Path(folder))
    parts: dict[str, Any] = dict(index.facts)
    for plan in _plan(index, Path(folder), options):
        name = plan.part.name
        with prefix_errors(name):
            if not plan.part.has_weights:
                parts[name] = _open_plain(plan)
                continue
            with open_weights(plan.folder, plan.file) as weights:
                parts[name] = outline(plan.kind, weights.config, plan.dtype(weights, dtype))
    return Components(pipeline=index.pipeline, parts=parts)


def _open_plain(plan: _Plan) -> Any:
    """Open a part without weights."""
    if name := _CONFIGURATIONS.get(plan.part.name):
        return read_json(plan.folder / name)
    return open_reader(plan.kind, plan.folder)


def denoiser_of(parts: Mapping[str, Any]) -> Any:
    """The part that denoises: a transformer, or a UNet in older pipelines."""
    return parts.get("transformer") or parts["unet"]


def component_bytes(
    folder: str | Path, options: ModelOptions, *, dtype: DtypeOf, device: torch.device = _HOST
) -> dict[str, int]:
    """Bytes that each part with weights takes on the device, by name. Reads only headers."""
    sizes = {}
    for plan in _plan(read_pipeline(Path(folder)), Path(folder), options):
        if plan.part.has_weights:
            with prefix_errors(plan.part.name), open_weights(plan.folder, plan.file) as weights:
                holding = plan.holding(weights, dtype, device, None)
                is_foreign = plan.file is not None
                sizes[plan.part.name] = held_bytes(
                    plan.kind, weights, holding, is_foreign=is_foreign
                )
    return sizes


def _plan(index: PipelineIndex, folder: Path, options: ModelOptions) -> list[_Plan]:
    """Every part, with its overrides applied."""
    overrides = read_overrides(options)
    names = dict.fromkeys((*index.parts, *(n for n, o in overrides.items() if o.path)))
    for name in overrides:
        if name not in names or not is_part(name):
            raise ConfigError(
                f"--model-override names the part {name!r:.40}; the model has:"
                f" {', '.join(index.parts)}."
            )
    plans = [
        _plan_part(name, index.parts.get(name), folder / name, overrides.get(name), options)
        for name in names
    ]
    if "processor" in names and "tokenizer" not in names:
        plans.append(_plan_part("tokenizer", _OF_PROCESSOR, folder / "processor", None, options))
    return plans


def _plan_part(
    name: str,
    declared: PipelineComponent | None,
    own: Path,
    override: PartOverride | None,
    options: ModelOptions,
) -> _Plan:
    override = override or PartOverride()
    with prefix_errors(name):
        folder = part_folder(override, options, own)
        part = part_in(folder, name, declared) if override.path or declared is None else declared
        file = part_weight_file(override, options)
        if not part.has_weights and (file or override.quantization_encoding):
            raise ConfigError(f"{name} has no weights; --model-override takes its path.")
        kind = None if name in _CONFIGURATIONS else class_of(part)
    encoding = override.quantization_encoding
    if not encoding and name != "vae" and options.quantization_encoding in _FOR_ALL:
        encoding = options.quantization_encoding
    return _Plan(part=part, kind=kind, folder=folder, file=file, encoding=encoding)


def _share_of(report: Report, begin: float, length: float) -> Report:
    """A report function for a part, which reports the whole's progress."""
    return lambda share: report(begin + length * share)

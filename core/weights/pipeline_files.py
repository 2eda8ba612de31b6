"""Which files of a repository with model_index.json are needed, out of all it offers.

Owns the choice: parts that draw, one set of weights for each, in the precision wanted where there
are several. Fetches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.overrides import PartOverride, read_overrides
from triptych.core.weights.pipeline_index import PIPELINE_INDEX, PipelineComponent, PipelineIndex

_STEM = r"(?:model|diffusion_pytorch_model)"
_WEIGHTS = re.compile(
    rf"{_STEM}(?:\.(?P<before>[a-z]\w*))?(?:-\d+-of-\d+)?(?:\.(?P<after>[a-z]\w*))?\.safetensors"
    rf"|{_STEM}\.safetensors\.index(?:\.(?P<index>\w+))?\.json"
)
_SMALL = (".json", ".txt", ".jinja", ".model")
_VARIANTS: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16"}


def needed_files(index: PipelineIndex, files: Iterable[str], options: ModelOptions) -> list[str]:
    """The files to fetch, of `files` (paths in the repository). What overrides bring is left out.

    Raises `WeightsError` for a part whose weights are only there in an unsafe format.
    """
    overrides = read_overrides(options)
    inside: dict[str, list[str]] = {name: [] for name in index.parts}
    for path in files:
        folder, _, name = path.partition("/")
        if folder in inside and "/" not in name:
            inside[folder].append(name)
    needed = [PIPELINE_INDEX]
    for part in index.parts.values():
        override = overrides.get(part.name, PartOverride())
        if not override.path:
            chosen = _of_part(part, inside[part.name], override, options)
            needed += [f"{part.name}/{name}" for name in chosen]
    return needed


def _of_part(
    part: PipelineComponent, names: list[str], override: PartOverride, options: ModelOptions
) -> list[str]:
    variants: dict[str, list[str]] = {}
    for name in names:
        if match := _WEIGHTS.fullmatch(name):
            variant = match["before"] or match["after"] or match["index"] or ""
            variants.setdefault(variant, []).append(name)
    weights = {name for chosen in variants.values() for name in chosen}
    small = [name for name in names if name.endswith(_SMALL) and name not in weights]
    if not part.has_weights or override.weight_path:
        return small
    if not any(name.endswith(".safetensors") for name in weights):
        raise WeightsError(
            f"{part.name} has no safetensors; other weights are an unsafe format, since loading"
            " them can run code."
        )
    wanted = _VARIANTS.get(override.quantization_encoding or options.dtype, "")
    order = (wanted, "", *_VARIANTS.values(), *sorted(variants))
    return small + variants[next(variant for variant in order if variant in variants)]

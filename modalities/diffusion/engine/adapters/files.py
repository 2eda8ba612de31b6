"""Reads LoRA files of several layouts as pairs of matrices by part and module.

Owns reading: keys of diffusers, PEFT and kohya, and others that diffusers' conversions, which are
pure functions, support. The strength (alpha over rank) is multiplied into one of the matrices
first, so that conversions need not handle it. Variants of LoRA with more than two matrices are
refused by name.

Legend: r rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import msgspec
from diffusers.utils.state_dict_utils import (
    StateDictType,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.typed import decode_json
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import read_json
from triptych.core.weights.library_errors import library_errors
from triptych.core.weights.peft import CONFIG, PeftConfig, locate_adapter, refuse_variants

_KEY = re.compile(
    r"((?P<part>transformer|unet|text_encoder(_\d)?)\.)?(?P<module>.+)"
    r"\.lora_(?P<side>[AB])(\.\w+)?\.weight"
)
_UP_OF = {
    ".lora_down.weight": ".lora_up.weight",
    ".lora.down.weight": ".lora.up.weight",
    ".lora_A.weight": ".lora_B.weight",
}
_PEFT_PREFIX = "base_model.model."
_METADATA = "lora_adapter_metadata"  # diffusers' name for it in a file's metadata


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank change of a module: `down` `[r, in]`, then `up` `[out, r]`, or kernels."""

    part: str
    module: str
    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """The rank of the change."""
        return len(self.down)


def open_adapter_file(place: str, options: ModelOptions) -> Checkpoint:
    """Open the verified file of an adapter: a file, or a folder or hub repository with one.

    Raises `WeightsError` naming file and tensor for damaged files, and for other formats.
    """
    file = locate_adapter(place, options)
    config = file.with_name(CONFIG)
    return Checkpoint.open_file(file, read_json(config) if config.is_file() else {})


def read_adapter(
    checkpoint: Checkpoint, pipeline: str, denoiser: str, config: Any
) -> list[LowRank]:
    """The pairs of an adapter made for models of the class `pipeline`.

    `denoiser` names the denoising part, `config` is its configuration: other programs number a
    UNet's blocks differently. Raises `WeightsError` naming tensors that are not understood.
    """
    for name, info in checkpoint.tensors.items():
        refuse_variants([name], info.file)
    tensors = _scale_by_alpha({name: checkpoint.read(name) for name in checkpoint.tensors})
    if all(name.startswith(_PEFT_PREFIX) for name in tensors) and checkpoint.config:
        tensors = {
            f"{denoiser}.{name.removeprefix(_PEFT_PREFIX)}": tensor
            for name, tensor in tensors.items()
        }
    else:
        options = {"unet_config": config} if denoiser == "unet" else {}
        tensors = _convert_names(tensors, pipeline, options)
    configs = _lora_configs(checkpoint, denoiser)
    pairs = _pair(tensors, denoiser)
    return [_at_full_strength(pair, configs.get(pair.part, {})) for pair in pairs]


def _scale_by_alpha(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiply each `alpha` over rank into its `up`, and set the `alpha` to the rank."""
    scaled = dict(tensors)
    for name, alpha in tensors.items():
        module = name.removesuffix(".alpha")
        for down, up in _UP_OF.items():
            if module != name and {module + down, module + up} <= tensors.keys():
                if alpha.numel() != 1:
                    raise WeightsError(f"Tensor {name!r} is not a single number.")
                rank = max(1, len(tensors[module + down]))
                scaled[module + up] = tensors[module + up].float() * (float(alpha) / rank)
                scaled[name] = alpha.new_full(alpha.shape, rank)
    return scaled


def _convert_names(
    tensors: dict[str, Tensor], pipeline: str, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Rename tensors to diffusers' parts and modules, and PEFT's sides."""
    convert = getattr(getattr(diffusers, pipeline, None), "lora_state_dict", None)
    with library_errors(f"Its tensor names are not those of a known LoRA for {pipeline}"):
        found = convert(tensors, **options) if convert else tensors
        named = found[0] if isinstance(found, tuple) else found
        texts = {name: named[name] for name in named if name.startswith("text_encoder")}
        others = {name: named[name] for name in named if name not in texts}
        for kind in (StateDictType.DIFFUSERS_OLD, StateDictType.DIFFUSERS):
            texts = convert_state_dict_to_peft(texts, kind)
        return {**convert_unet_state_dict_to_peft(others), **texts}


def _pair(tensors: Mapping[str, Tensor], denoiser: str) -> list[LowRank]:
    """Pair tensors by module; names without a part belong to the denoiser."""
    sides: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise WeightsError(f"Tensor {name!r} is not part of a LoRA.")
        where = (match["part"] or denoiser, match["module"])
        sides.setdefault(where, {})[match["side"]] = tensor
    for (part, module), pair in sides.items():
        if len(pair) < 2:
            raise WeightsError(f"The LoRA of {part}.{module} lacks its lora_{'AB'['A' in pair]}.")
    return [
        LowRank(part=part, module=module, down=pair["A"], up=pair["B"])
        for (part, module), pair in sides.items()
    ]


def _lora_configs(checkpoint: Checkpoint, denoiser: str) -> dict[str, dict[str, Any]]:
    """PEFT's LoraConfig by part: from adapter_config.json, for one part, or the metadata."""
    if checkpoint.config:
        return {denoiser: dict(checkpoint.config)}
    try:
        packed = decode_json(checkpoint.metadata().get(_METADATA, "{}"), dict)
    except msgspec.DecodeError as error:
        raise WeightsError(f"Its metadata {_METADATA} is damaged.") from error
    configs: dict[str, dict[str, Any]] = {}
    for name, value in packed.items():
        part, _, field = name.partition(".")
        configs.setdefault(part, {})[field] = value
    return configs


def _at_full_strength(pair: LowRank, config: Mapping[str, Any]) -> LowRank:
    """The pair multiplied by alpha over rank, configured for the part or for module paths."""
    strength = PeftConfig(config).strength(pair.module, pair.rank)
    return pair if strength is None else replace(pair, up=pair.up.float() * strength)

"""LoRA adapters in PEFT's format: their folder, their configuration and the names of their tensors.

Owns what can be known of an adapter without torch: whether it is of a kind that is offered, its
strength, its content's digest, and whether it changes a decoder of text. Knows no model.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.regular_file import open_regular
from triptych.core.weights.layout import TensorInfo, brief, read_header, read_json, single_file
from triptych.core.weights.module_patterns import ModulePattern, module_pattern
from triptych.core.weights.resolve import path_of

CONFIG = "adapter_config.json"
_HUB_FILES = ("*.safetensors", CONFIG)
_PREFIX = "base_model.model."
_READ_BYTES = 2**20
_MAX_NUMBER = 1e9
_MAX_PATTERNS = 4096
_MAX_NAME_CHARS = 256
_VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "dora_scale": "DoRA",
        "lora_magnitude_vector": "DoRA",
        "hada_w": "LoHa",
        "lokr_w": "LoKr",
        "lora_B.bias": "LoRA with biases",
        "oft_": "OFT",
    }
)
"""Marks in the names of tensors, and the kinds of adapters that have them."""
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA",
        "use_qalora": "QA-LoRA",
        "use_bdlora": "BD-LoRA",
        "lora_bias": "LoRA with biases",
        "fan_in_fan_out": "LoRA of transposed weights",
        "alora_invocation_tokens": "activated LoRA",
        "arrow_config": "Arrow",
        "kasa_config": "KaSA",
        "monteclora_config": "MonteCLoRA",
        "velora_config": "VeLoRA",
        "layer_replication": "LoRA of replicated layers",
        "megatron_config": "LoRA of Megatron's layers",
        "target_parameters": "LoRA of parameters such as stacked experts",
        "trainable_token_indices": "LoRA with trained tokens",
    }
)
"""Fields of the configuration that must be empty, and what they are in words."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that also change the base model, whose weights the adapter then needs."""
_OF_DECODER = re.compile(
    r"base_model\.model\.(?:(?:model|language_model|text_model|backbone)\.)*(?:lm_head\.|embed_tokens\.|"
    r"layers\.\d+\.(?:self_attn|mlp|feed_forward|linear_attn|mamba|conv)\.)"
)
_PAIR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.(?!weight$)\w+)?(?:\.weight)?"
)
_COPY = re.compile(r"(?:\.(?:modules_to_save|base_layer))?(?:\.default)?\.weight$")
"""The end of the name of a module's whole weight."""


def locate_adapter(place: str, options: ModelOptions) -> Path:
    """The safetensors file of an adapter: a file, or that of a folder or a hub repository.

    Raises `WeightsError` if there is none, if it has another format, or if it may not be read.
    """
    path = path_of(place)
    try:
        if not path.exists() and not path.suffix:
            from triptych.core.weights.hub import download_snapshot  # imports an HTTP client

            path = download_snapshot(place, replace(options, revision=""), _HUB_FILES)
        file = single_file(path) if path.is_dir() else path
        if file.suffix != ".safetensors":
            raise WeightsError(
                f"{file.name[:80]} is not a safetensors file; convert the adapter to one."
            )
        file.exists()  # raises what reading the file would raise
    except WeightsError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise WeightsError(f"{path.name[:80]!r} cannot be read: {reason}.") from error
    return file


def refuse_variants(names: Iterable[str], file: str) -> None:
    """Raise `WeightsError` naming a tensor of a kind of adapter that is not offered."""
    for name in names:
        for mark, variant in _VARIANTS.items():
            if mark in name:
                raise WeightsError(
                    f"{file} is {variant} (tensor {name[:80]!r}), which is not offered; use plain"
                    " LoRA."
                )


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of an `adapter_config.json`, or of the same settings elsewhere."""

    fields: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Self:
        """The checked configuration next to an adapter's `file`. Raises `WeightsError`."""
        config = cls(read_json(file.with_name(CONFIG)))
        config.check()
        return config

    def check(self) -> None:
        """Raise `WeightsError` naming what this adapter has and is not offered."""
        kind = self.fields.get("peft_type", "LORA")
        if kind != "LORA":
            raise WeightsError(f"{CONFIG}: {str(kind)[:40]} is not offered; use plain LoRA.")
        for field, variant in _UNSUPPORTED.items():
            if self.fields.get(field):
                raise WeightsError(f"{CONFIG}: {variant} ({field}) is not offered; use plain LoRA.")
        if self.fields.get("bias", "none") != "none":
            raise WeightsError(f"{CONFIG}: trained biases (bias) are not offered; train without.")
        start = self.fields.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise WeightsError(
                f"{CONFIG}: with init_lora_weights {start[:40]!r} it needs a changed base model;"
                " save it with PEFT's path_initial_model_for_weight_conversion."
            )

    def strength(self, module: str, rank: int) -> float | None:
        """The factor of a module's change: alpha over the rank, or over its root (rsLoRA).

        `None` without an alpha. Raises `WeightsError` for values that are no numbers.
        """
        alpha = self._of_module("alpha_pattern", module, "lora_alpha")
        if alpha is None:
            return None
        root = math.sqrt(max(1, rank)) if self.fields.get("use_rslora") else max(1, rank)
        return alpha / root

    def check_rank(self, module: str, rank: int) -> None:
        """Raise `WeightsError` if the rank of a module is not that of the configuration."""
        said = self._of_module("rank_pattern", module, "r")
        if said is not None and said != rank:
            raise WeightsError(f"The rank of {module} is {rank}; {CONFIG} says {said:g}.")

    def _of_module(self, patterns: str, module: str, default: str) -> float | None:
        """The value of the first pattern that matches the end of a module's path, as in PEFT."""
        found = self.fields.get(default)
        for pattern, value in self._patterns(patterns):
            if pattern.matches(module):
                found = value
                break
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if is_number and abs(found) <= _MAX_NUMBER:  # which NaN is not
            return float(found)
        raise WeightsError(f"{CONFIG}: {default} and {patterns} must be numbers up to 1e9.")

    def _patterns(self, field: str) -> Iterator[tuple[ModulePattern, Any]]:
        """The patterns of a field, and their values. Raises `WeightsError`."""
        by_pattern = self.fields.get(field) or {}
        if not isinstance(by_pattern, dict) or len(by_pattern) > _MAX_PATTERNS:
            raise WeightsError(f"{CONFIG}: {field} is not an object of up to {_MAX_PATTERNS}.")
        for pattern, value in by_pattern.items():
            try:
                yield module_pattern(pattern), value
            except ValueError as error:
                raise WeightsError(f"{CONFIG}: {field}: {error}.") from error


@dataclass(frozen=True, slots=True)
class TextAdapter:
    """The header of an adapter of a text model.

    `pairs` are the names of its matrices, first `A` and then `B`, by module; those of `embedded`
    modules are of an embedding. `saved` are whole weights, by module: those are in place of the
    model's, before any change.
    """

    file: Path
    config: PeftConfig
    tensors: Mapping[str, TensorInfo]
    pairs: Mapping[str, tuple[str, str]]
    embedded: Collection[str]
    saved: Mapping[str, str]

    @classmethod
    def read(cls, place: str, options: ModelOptions) -> Self:
        """Read the header of an adapter. Raises `WeightsError` naming what is not understood."""
        file = locate_adapter(place, options)
        if not file.with_name(CONFIG).is_file():
            raise WeightsError(f"There is no {CONFIG} next to {file.name}; save it with PEFT.")
        config, tensors = PeftConfig.read(file), read_header(file)
        refuse_variants(tensors, file.name)
        pairs, embedded, saved = _modules_of(tensors)
        adapter = cls(file, config, tensors, pairs, embedded, saved)
        for module in pairs:
            adapter._check_pair(module)
        return adapter

    def _check_pair(self, module: str) -> None:
        """Raise `WeightsError` unless a module's matrices have the rank of the configuration."""
        for name in self.pairs[module]:
            shape = self.tensors[name].shape
            if len(shape) != 2 or not all(shape):
                raise WeightsError(f"Tensor {name} has shape {list(shape)}; it must be a matrix.")
        rank = self.tensors[self.pairs[module][0]].shape[0]
        self.config.check_rank(module, rank)
        self.config.strength(module, rank)

    @property
    def max_rank(self) -> int:
        """The highest rank of its changes."""
        return max((self.tensors[down].shape[0] for down, _ in self.pairs.values()), default=0)


def _modules_of(
    tensors: Iterable[str],
) -> tuple[dict[str, tuple[str, str]], set[str], dict[str, str]]:
    """The `pairs`, `embedded` and `saved` modules of a `TextAdapter`. Raises `WeightsError`."""
    sides: dict[tuple[str, bool], dict[str, str]] = {}
    saved: dict[str, str] = {}
    for name in tensors:
        if len(name) > _MAX_NAME_CHARS:
            raise WeightsError(f"The name of tensor {name[:80]!r} is too long.")
        module = name.removeprefix(_PREFIX)
        if match := _PAIR.fullmatch(module):
            where = sides.setdefault((match["module"], match["kind"] is not None), {})
            side = match["side"]
        elif module.endswith(".weight"):
            where, side = saved, _COPY.sub("", module)
        else:
            raise WeightsError(f"Tensor {name!r} is not part of a LoRA.")
        if side in where:
            raise WeightsError(f"Tensors {where[side]} and {name} are the same part of a module.")
        where[side] = name
    pairs: dict[str, tuple[str, str]] = {}
    for (module, _), pair in sides.items():
        if len(pair) < 2:
            raise WeightsError(f"The LoRA of {module} lacks its lora_{'AB'['A' in pair]}.")
        if module in pairs:
            raise WeightsError(f"{module} has two LoRAs, one of them for an embedding.")
        pairs[module] = pair["A"], pair["B"]
    return pairs, {module for module, is_embedded in sides if is_embedded}, saved


def is_of_text(file: Path) -> bool:
    """Whether an adapter changes a decoder of text, by its configuration or its tensors."""
    config = file.with_name(CONFIG)
    if not config.is_file():
        return False
    is_said = read_json(config).get("task_type") == "CAUSAL_LM"
    return is_said or any(map(_OF_DECODER.match, read_header(file)))


def adapter_digest(file: Path) -> str:
    """SHA-256, hex, of an adapter: its configuration and its whole weights. Raises `WeightsError`.

    Equal digests mean equal changes. Adapters of image models may have no configuration.
    """
    digest = hashlib.sha256()
    config = file.with_name(CONFIG)
    for each in (config, file) if config.exists() else (file,):
        try:
            with open_regular(each) as stream:
                own = hashlib.sha256()
                while block := stream.read(_READ_BYTES):
                    own.update(block)
        except OSError as error:
            raise WeightsError(f"{each.name} cannot be read: {error.strerror}.") from error
        digest.update(own.digest())
    return digest.hexdigest()


def check_digest(file: Path, digest: str) -> None:
    """Raise `WeightsError` where an adapter's files have changed since `digest` was computed."""
    if adapter_digest(file) != digest:
        raise WeightsError(
            f"{file.name} is not what it was when the adapter was named: load the adapter again."
        )

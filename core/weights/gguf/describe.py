"""The configuration and the tensors of a GGUF file, in the form of transformers.

Owns the choice of a row of the table, and the match between the names of a file and a row. Reads
metadata and tensor infos, never tensor data except rope factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.architecture import NEXTN, Architecture, Place
from triptych.core.weights.gguf.dense import DENSE_ROWS
from triptych.core.weights.gguf.fields import NULL
from triptych.core.weights.gguf.gemma import GEMMA_ROWS
from triptych.core.weights.gguf.header import GgufFile, GgufTensor
from triptych.core.weights.gguf.hybrids import HYBRID_ROWS
from triptych.core.weights.gguf.layouts import GgufTarget
from triptych.core.weights.gguf.metadata import Metadata
from triptych.core.weights.gguf.mixtures import MIXTURE_ROWS

_TABLES = (DENSE_ROWS, GEMMA_ROWS, MIXTURE_ROWS, HYBRID_ROWS)
ARCHITECTURES: Mapping[str, tuple[Architecture, ...]] = MappingProxyType(
    {
        name: tuple(row for table in _TABLES for row in table.get(name, ()))
        for name in sorted({name for table in _TABLES for name in table})
    }
)
"""The rows for each name of an architecture."""
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
_ENDINGS = ("weight", "bias")
_OF_METADATA = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Tensors that become fields of the configuration."""
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The configuration, and the tensors by their names in transformers."""

    config: Mapping[str, Any]
    tensors: Mapping[str, GgufTarget]


def describe(file: GgufFile, dtype: str) -> GgufModel:
    """Describe `file`; its tensors will have the safetensors type `dtype`.

    Raises `WeightsError` for architectures and tensors outside the table.
    """
    metadata = Metadata(file)
    row = _row(metadata)
    try:
        read = {name: reader(metadata) for name, reader in row.fields.items()}
    except WeightsError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise WeightsError(f"{file.name} has metadata that does not fit {row.model}.") from error
    config = {
        "architectures": [row.model],
        "model_type": row.model_type,
        "dtype": _DTYPE_NAMES[dtype],
        **{k: None if v is NULL else v for k, v in read.items() if v is not None},
    }
    tensors: dict[str, GgufTarget] = {}
    for name, target in _targets(metadata, row, config):
        if name in tensors:
            raise WeightsError(f"{file.name} has tensor {name!r} twice.")
        tensors[name] = target
    return GgufModel(config, tensors)


def _check(file: GgufFile, target: GgufTarget) -> None:
    """Refuse a target whose rows are not those of its sources."""
    widths = {source.shape[-1] for source in target.sources}
    num_values = sum(math.prod(source.shape) for source in target.sources)
    rows, width = target.rows, max(widths) if len(target.sources[0].shape) > 1 else 1
    num_rows = num_values // width
    is_within = rows is None or (len(rows) > 0 and min(rows) >= 0 and max(rows) < num_rows)
    num_used = num_values if rows is None else len(rows) * width
    has_columns = target.inputs is None or len(target.inputs) == width
    is_alike = target.whole is not None or len(widths) == 1
    if not (is_within and is_alike and has_columns and num_used == math.prod(target.shape)):
        raise _unfit(file, target.sources[0])


def _row(metadata: Metadata) -> Architecture:
    rows = ARCHITECTURES.get(metadata.architecture, ())
    for row in rows:
        if row.fits(metadata):
            return row
    raise WeightsError(
        f"{metadata.file.name} holds the architecture {metadata.architecture[:40]!r}; GGUF files of"
        f" {', '.join(ARCHITECTURES)} are supported."
    )


def _targets(
    metadata: Metadata, row: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, GgufTarget]]:
    """The tensors of the folder, in the file's order."""
    for source in metadata.file.tensors:
        if source in _OF_METADATA:
            continue
        match = _LAYER.fullmatch(source)
        layer, name = (int(match[1]), match[2]) if match else (None, source)
        if layer is not None and layer >= metadata.num_layers:
            if not metadata.has("nextn_predict_layers"):
                raise _unknown(metadata, source)
            if layer > metadata.num_layers or not row.predicting:
                continue  # the first of them drafts
        yield from _targets_of(metadata, row, config, (layer, name))


def _targets_of(
    metadata: Metadata,
    row: Architecture,
    config: Mapping[str, Any],
    where: tuple[int | None, str],
) -> Iterator[tuple[str, GgufTarget]]:
    """The targets of one tensor of the file; of several that become one, those of the first."""
    layer, name = where
    stem, _, ending = name.rpartition(".")
    prefix = "" if layer is None else f"blk.{layer}."
    if layer is not None and row.unused(metadata, layer, stem):
        return
    predicts = layer is not None and layer >= metadata.num_layers
    names = row.globals if layer is None else row.layers
    names = {**names, **row.predicting} if predicts else names
    entry, suffix = names.get(name), ""
    if entry is None and ending in _ENDINGS:
        entry, suffix = names.get(stem), f".{ending}"
    if entry is None:
        if predicts and name.startswith(NEXTN):
            return  # a copy of what the model has
        raise _unknown(metadata, f"{prefix}{name}")
    place = entry if isinstance(entry, Place) else Place(entry)
    if place.sources and stem != place.sources[0]:
        return
    sources = [_tensor(metadata, f"{prefix}{each}{suffix}") for each in place.sources]
    below = "" if layer is None else row.prefix_of(layer, metadata.num_layers, name)
    whole = f"{below}{place.name}{suffix}"
    sources = sources or [metadata.file.tensors[f"{prefix}{name}"]]
    try:
        targets = list(place.layout(whole, sources, config))
    except (ValueError, ArithmeticError) as error:
        raise _unfit(metadata.file, sources[0]) from error
    for _, target in targets:
        _check(metadata.file, target)
    yield from targets


def _tensor(metadata: Metadata, name: str) -> GgufTensor:
    tensor = metadata.tensor(name)
    if tensor is None:
        raise WeightsError(f"{metadata.file.name} has no tensor {name!r}.")
    return tensor


def _unfit(file: GgufFile, tensor: GgufTensor) -> WeightsError:
    shape = list(tensor.shape)
    return WeightsError(
        f"Tensor {tensor.name!r} in {file.name} has the shape {shape}, which its metadata does not"
        " allow."
    )


def _unknown(metadata: Metadata, name: str) -> WeightsError:
    return WeightsError(f"Tensor {name!r} in {metadata.file.name} has an unknown name.")

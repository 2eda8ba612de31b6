"""Typed look-ups in the metadata of one GGUF file, under its architecture's prefix.

Owns the checks of single values: their types, ranges and lengths. Knows no configuration of
transformers.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.header import GgufFile, GgufTensor

MAX_LAYERS = 1024
T = TypeVar("T")


class Metadata:
    """The metadata of one file. Every method raises `WeightsError`, naming file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    @cached_property
    def num_layers(self) -> int:
        """The number of layers of the model itself, without those that predict further tokens."""
        number = self.count("block_count") - self.count("nextn_predict_layers", 0)
        if not 0 < number <= MAX_LAYERS:
            raise self.invalid("block_count")
        return number

    def get(self, key: str) -> Any:
        """The raw value, or `None`."""
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def has(self, key: str) -> bool:
        """Whether the file has a value that is neither 0 nor empty."""
        value = self.get(key)
        return bool(np.any(value)) if isinstance(value, np.ndarray) else bool(value)

    def scalar(self, key: str, default: T) -> T:
        """The value, of the default's type."""
        return self.file.scalar(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, or the default; of a list of layers the one that is not 0."""
        value = self.get(key)
        if isinstance(value, np.ndarray):
            values = {int(each) for each in self.layers(key) or () if each}
            value = values.pop() if len(values) == 1 else self._only(key, values)
        if default is not None and (value is None or value == 0):
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.invalid(key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, or the default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float | int) or not math.isfinite(value) or value <= 0:
            raise self.invalid(key)
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def layers(self, key: str) -> list[Any] | None:
        """The values of the layers, from a list or from one number for all; `None` without any."""
        value = self.get(key)
        if value is None:
            return None
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * self.num_layers
        if len(values) < self.num_layers:
            raise self.invalid(key)
        return values[: self.num_layers]

    def tensor(self, name: str) -> GgufTensor | None:
        """A tensor of the file, if it has it."""
        return self.file.tensors.get(name)

    def in_layers(self, name: str) -> list[bool]:
        """Which layers have the tensor `blk.{}.name`."""
        return [f"blk.{layer}.{name}" in self.file.tensors for layer in range(self.num_layers)]

    def invalid(self, key: str) -> WeightsError:
        """The error for a value that cannot be used."""
        return WeightsError(f"{self.file.name} has an invalid {key}: {self.get(key)!r:.40}.")

    def _only(self, key: str, values: set[int]) -> int | None:
        if values:
            raise WeightsError(f"{self.file.name}: {key} differs between layers.")
        return None

"""The changes that llama.cpp's converter makes to tensors, undone: orders of rows, shapes, values.

Owns a class or function for each change. Rows are only ever picked, which quantized blocks survive;
changes of values take blocks apart. Reads no data. The changes are those of llama.cpp's conversion
scripts (github.com/ggml-org/llama.cpp, folder conversion).

Shapes: E experts, F features of an expert, C hidden, H heads, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.core.weights.gguf.header import GgufTensor

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[Array], Array]
Config = Mapping[str, Any]
Tensors = Sequence[GgufTensor]


@dataclass(frozen=True, slots=True)
class GgufTarget:
    """One tensor of the folder, from the rows of the file's `sources`, one after the other.

    `rows` are the numbers of its rows there, `inputs` those of its columns; `None`: all. `change`
    gets float values of some rows, `whole` those of all sources at once. An `is_exact` tensor stays
    float32.
    """

    sources: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    rows: Array | range | None = None
    inputs: Array | None = None
    change: Change | None = None
    whole: Callable[[Sequence[Array]], Array] | None = None
    is_exact: bool = False


class Layout(Protocol):
    """How the tensors under one name of the file become tensors of the folder.

    Shapes that metadata does not allow may raise `ValueError`; targets are checked afterwards.
    """

    def __call__(
        self, name: str, sources: Tensors, config: Config
    ) -> Iterator[tuple[str, GgufTarget]]:
        """Yield names and targets; `name` has the place of an expert's number as `{}`."""


def plain(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """The tensor as it is."""
    (source,) = sources
    yield name, GgufTarget((source,), source.shape)


def exact(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """The vector in float32: a choice of experts, or a decay, depends on its last bits."""
    (source,) = sources
    yield name, GgufTarget((source,), (_num_values(source),), is_exact=True)


def flat(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """A vector that the file has as a matrix."""
    (source,) = sources
    yield name, GgufTarget((source,), (_num_values(source),))


def one_row(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """A matrix of one row that the file has as a vector."""
    (source,) = sources
    yield name, GgufTarget((source,), (1, _num_values(source)))


def convolution(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """The kernel of a convolution of single channels: `[C, K]` becomes `[C, 1, K]`.

    There may be axes of one value, too.
    """
    (source,) = sources
    width = source.shape[-1]
    yield name, GgufTarget((source,), (_num_values(source) // width, 1, width))


def minus_one(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """The weight of a norm that the class adds 1 to, and the file has with the 1."""
    (source,) = sources
    yield name, GgufTarget((source,), source.shape, change=lambda values: values - np.float32(1))


def log_of_negative(
    name: str, sources: Tensors, config: Config
) -> Iterator[tuple[str, GgufTarget]]:
    """`A_log` of a state space: the file has `-exp(A_log)`."""
    (source,) = sources

    def change(values: Array) -> Array:
        return np.log(-values)

    yield name, GgufTarget((source,), (_num_values(source),), change=change, is_exact=True)


def log_of_negative_4d(
    name: str, sources: Tensors, config: Config
) -> Iterator[tuple[str, GgufTarget]]:
    """The same of Kimi Linear, which is `[1, 1, H, 1]`."""
    for place, target in log_of_negative(name, sources, config):
        yield place, replace(target, shape=(1, 1, *target.shape, 1))


def per_expert(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """One tensor for each expert, of a stack of weights `[E, F, C]` or of biases `[E, F]`."""
    (source,) = sources
    num_experts, *shape = source.shape
    num_rows = shape[0] if len(shape) > 1 else 1
    for expert in range(num_experts):
        rows = range(expert * num_rows, (expert + 1) * num_rows)
        yield name.format(expert), GgufTarget((source,), tuple(shape), rows)


@dataclass(frozen=True, slots=True)
class HalvedExperts:
    """Several tensors for each expert, of a stack whose rows are theirs one after the other."""

    names: tuple[str, ...]

    def __call__(
        self, name: str, sources: Tensors, config: Config
    ) -> Iterator[tuple[str, GgufTarget]]:
        """Yield the tensors; see `Layout`."""
        (source,) = sources
        num_experts, num_rows, num_inputs = source.shape
        size = num_rows // len(self.names)
        for number in range(num_experts * len(self.names)):
            expert, part = divmod(number, len(self.names))
            rows = range(number * size, (number + 1) * size)
            place = name.replace(".{}.", f".{expert}.{self.names[part]}.")
            yield place, GgufTarget((source,), (size, num_inputs), rows)


def joined(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """Several matrices as one, their rows one after the other."""
    num_rows = sum(source.shape[0] for source in sources)
    yield name, GgufTarget(tuple(sources), (num_rows, *sources[0].shape[1:]))


def _rows_of_heads(config: Config, heads: str) -> NDArray[np.int64]:
    """The numbers of a projection's rows by head, H heads of D; `heads` is the field of H."""
    num_heads, head_dim = config[heads], config["head_dim"]
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class Rotated:
    """Rows of heads whose rotated halves the file interleaves: `LlamaModel.permute`.

    Row (head, pair, half) there is row (head, half, pair) here.
    """

    heads: str

    def __call__(
        self, name: str, sources: Tensors, config: Config
    ) -> Iterator[tuple[str, GgufTarget]]:
        """Yield the tensors; see `Layout`."""
        (source,) = sources
        rows_HD = _rows_of_heads(config, self.heads)
        rows = rows_HD.reshape(len(rows_HD), -1, 2).swapaxes(1, 2)
        yield name, GgufTarget((source,), source.shape, rows.reshape(-1))


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of heads whose rotated pairs the file divides in halves: `Glm4Model.normal_to_neox`.

    Row (head, half, pair) there is row (head, pair, half) here. Rows of a head that are not rotated
    come after them.
    """

    heads: str

    def __call__(
        self, name: str, sources: Tensors, config: Config
    ) -> Iterator[tuple[str, GgufTarget]]:
        """Yield the tensors; see `Layout`."""
        (source,) = sources
        rows_HD = _rows_of_heads(config, self.heads)
        num_rotated = int(rows_HD.shape[1] * config["rope_parameters"]["partial_rotary_factor"])
        halves = rows_HD[:, :num_rotated].reshape(len(rows_HD), 2, num_rotated // 2)
        pairs = halves.swapaxes(1, 2).reshape(len(rows_HD), num_rotated)
        both = np.concatenate([pairs, rows_HD[:, num_rotated:]], axis=1)
        yield name, GgufTarget((source,), source.shape, both.reshape(-1))


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """The value heads of linear attention: the file has the first of every key head, then the rest.

    Here those of one key head are together. `size` is the field with the rows of a head, 1 if
    empty; rows of queries and keys before them stay where they are if `follows_keys`.
    """

    size: str = ""
    follows_keys: bool = False
    layout: Layout = plain

    def __call__(
        self, name: str, sources: Tensors, config: Config
    ) -> Iterator[tuple[str, GgufTarget]]:
        """Yield the tensors; see `Layout`."""
        num_fixed = _num_key_rows(config) if self.follows_keys else 0
        order = value_order(config, config[self.size] if self.size else 1)
        rows = np.concatenate((np.arange(num_fixed), num_fixed + order))
        for place, target in self.layout(name, sources, config):
            yield place, replace(target, rows=_unless_same(rows, target.shape[0]))


def value_columns(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """The projection whose inputs are value heads, in the order of `ValueHeads`."""
    (source,) = sources
    order = value_order(config, config["linear_value_head_dim"])
    yield name, GgufTarget((source,), source.shape, inputs=_unless_same(order, source.shape[1]))


def value_order(config: Config, size: int) -> Array:
    """The places in the file of the rows of value heads."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    places = np.arange(num_values * size).reshape(num_values // num_keys, num_keys, size)
    return places.swapaxes(0, 1).reshape(-1)


def by_key_head(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """`in_proj_qkvz` of Qwen3-Next: query, key, value and gate of one key head, then the next.

    The file has all queries, keys and values in one matrix, and the gates in another.
    """
    num_keys = config["linear_num_key_heads"]
    value_rows = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    key_rows = num_keys * config["linear_key_head_dim"]
    sizes = (key_rows, key_rows, value_rows, value_rows)
    starts = np.cumsum((0, *sizes))
    parts = [
        np.arange(start, start + size).reshape(num_keys, -1)
        for start, size in zip(starts, sizes, strict=False)
    ]
    rows = np.concatenate(parts, axis=1).reshape(-1)
    yield name, GgufTarget(tuple(sources), (len(rows), sources[0].shape[1]), rows)


def latent_heads(name: str, sources: Tensors, config: Config) -> Iterator[tuple[str, GgufTarget]]:
    """`kv_b_proj` of latent attention: of each head the rows of keys, then those of values.

    The file has the keys' transposed, `[H, R, D]`, and the values' `[H, D, R]`, for R latent rows.
    """
    keys, values = sources

    def whole(arrays: Sequence[Array]) -> Array:
        return np.concatenate((arrays[0].swapaxes(1, 2), arrays[1]), axis=1)

    num_heads, num_latent, key_dim = keys.shape
    num_rows = num_heads * (key_dim + values.shape[1])
    yield name, GgufTarget(tuple(sources), (num_rows, num_latent), whole=whole)


def _unless_same(order: Array, size: int) -> Array | None:
    """The order, or `None` where it is that of all `size` rows already."""
    is_same = len(order) == size and bool((order == np.arange(size)).all())
    return None if is_same else order


def _num_key_rows(config: Config) -> int:
    rows: int = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return rows


def _num_values(source: GgufTensor) -> int:
    return math.prod(source.shape)

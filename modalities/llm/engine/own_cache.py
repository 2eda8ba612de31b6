"""The cache object of a class of transformers, taken apart into cells and states of our cache.

Owns the last resort for classes whose attention cannot be ours and whose cache is more than keys
and values: what grows with a row goes to pages, everything else is the row's state. So pages,
snapshots, preemption and the memory table know such a row as they know others. What a class keeps
is found by comparing its cache after passes of several lengths on the meta device; nothing of a
class is named here. Knows no step (`own_rows` runs them), no configuration and no checkpoint.

A tensor grows by an entry for each block of `rate` tokens. An entry lies in the cells of its
block's last tokens, as many as are surely in one page: a page then never holds a part of an entry
whose other tokens may differ between the rows that share it.

Shapes: S entries, E values of an entry.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch.fx.experimental import _config

from triptych.core.errors import WeightsError
from triptych.core.runtime.layers.attention import LatentShape
from triptych.core.runtime.layers.states import LayerState, StateShape
from triptych.modalities.llm.engine.bridge import refusal

Path = tuple[Any, ...]
"""The way to a part of a cache object: names of attributes, keys and indices."""
Parts = Mapping[Path, Any]
"""What a cache object holds: tensors, whole numbers, `True`, `False` and `None`."""

_fx: Any = _config  # its module gets its methods as it is imported
_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
"""The names by which classes take what they have returned by the same name."""
_RECURRENT = "recurrent_states"
"""The attribute of transformers' layers of a cache with the states of recurrences."""
_MIN_SAMPLE = 16
"""The least tokens of the passes that are compared; classes may take long for each token."""
_NONE, _NUMBER, _FLAG = 1, 2, 3
_CODES = 4
"""A line's first tensor has a code for each part: the size of a tensor or the value, and its kind.
A line of zeros is that of a row without tokens."""


def parts_of(cache: Any, path: Path = ()) -> dict[Path, Any]:
    """All parts of a cache object. Parts of other types belong to its form, which never changes."""
    if cache is None or isinstance(cache, torch.Tensor | int):
        return {path: cache}
    found: dict[Path, Any] = {}
    for key, child in _children(cache):
        found |= parts_of(child, (*path, key))
    return found


def with_parts(cache: Any, parts: Parts, path: Path = ()) -> Any:
    """A copy of a cache object with other parts."""
    if path in parts:
        return parts[path]
    children = {key: with_parts(child, parts, (*path, key)) for key, child in _children(cache)}
    if isinstance(cache, tuple):
        return tuple(children.values())
    if not children:
        return cache
    twin = copy.copy(cache)
    for key, child in children.items():
        if isinstance(twin, dict | list):
            twin[key] = child
        else:
            setattr(twin, key, child)
    return twin


def _children(cache: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(cache, dict):
        yield from cache.items()
    elif isinstance(cache, list | tuple):
        yield from enumerate(cache)
    elif type(cache).__module__.startswith("transformers.") and not hasattr(cache, "model_type"):
        yield from vars(cache).items()


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A tensor of a class's cache, which may be found at several `paths`.

    `shape` is its largest, along the one `axis` that varies, if any; of a tensor in pages that of
    an entry, and it has one for each `rate` tokens. `is_plain` says whether cells may be of the
    cache's type, or must keep every bit.
    """

    paths: tuple[Path, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    rate: int = 0
    is_plain: bool = True

    @property
    def num_values(self) -> int:
        """The values of an entry, or the most of a state."""
        return prod(self.shape)

    def cells_per_entry(self, page_size: int) -> int:
        """The cells that an entry takes, one a token."""
        return gcd(self.rate, page_size)

    def cells(self, page_size: int, dtype: torch.dtype) -> LatentShape:
        """The cells of a tensor in pages."""
        num_cells, num_values = self.cells_per_entry(page_size), self.num_values
        if not self.is_plain:
            num_values = -(-num_values * self.dtype.itemsize // dtype.itemsize)
        width = -(-num_values // num_cells)
        return LatentShape(num_heads=1, head_dim=width, value_dim=0)

    def num_bytes(self, num_tokens: int) -> int:
        """The bytes of the tensor in a row of some tokens."""
        num_entries = num_tokens // self.rate if self.rate else 1
        return num_entries * self.num_values * self.dtype.itemsize

    def rows(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """The entries of a tensor in pages from `first` on, `[S, E]`."""
        assert self.axis is not None
        entries = tensor.movedim(self.axis, 0)[first:]
        return entries.reshape(len(entries), self.num_values)

    def of_rows(self, rows_SE: torch.Tensor) -> torch.Tensor:
        """The tensor with these entries."""
        assert self.axis is not None
        others = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        return rows_SE.reshape(len(rows_SE), *others).movedim(0, self.axis)


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The parts of the cache object that a class takes as `argument`."""

    argument: str
    states: tuple[CacheTensor, ...]
    grown: tuple[CacheTensor, ...]
    values: tuple[Path, ...]

    def shapes(self, page_size: int, dtype: torch.dtype) -> tuple[LatentShape, ...]:
        """The cells of the tensors in pages."""
        return tuple(tensor.cells(page_size, dtype) for tensor in self.grown)

    @property
    def line(self) -> LayerState:
        """A row's state: the codes of all parts, and the tensors of one size."""
        num_codes = len(self.states) + len(self.grown) + len(self.values)
        codes = StateShape((num_codes,), torch.int64)
        return codes, *(StateShape((each.num_values,), each.dtype) for each in self.states)

    @property
    def paths(self) -> frozenset[Path]:
        """The ways to all parts."""
        own = (path for tensor in self.states + self.grown for path in tensor.paths)
        return frozenset((*own, *self.values))

    @property
    def recurrent_parts(self) -> list[int]:
        """The numbers in a row's state of the tensors that transformers calls recurrent."""
        named = (any(_RECURRENT in path for path in each.paths) for each in self.states)
        return [number for number, is_recurrent in enumerate(named, 1) if is_recurrent]

    @property
    def longest_block(self) -> int:
        """The most tokens of an entry in pages."""
        return max((tensor.rate for tensor in self.grown), default=0)

    def num_bytes(self, num_tokens: int) -> int:
        """The bytes of the object for a row of some tokens."""
        return sum(tensor.num_bytes(num_tokens) for tensor in self.states + self.grown)

    def codes(self, parts: Parts) -> list[int]:
        """The numbers from which `sizes` and `plain_values` come back."""
        sizes = [_size_code(parts[each.paths[0]], each) for each in self.states + self.grown]
        return [*sizes, *(_code(parts[path]) for path in self.values)]

    def sizes(self, codes: Sequence[int]) -> list[int | None]:
        """The sizes along their axes of states, or `None` of one that is not there yet."""
        num_states = len(self.states)
        return [None if code % _CODES == _NONE else code // _CODES for code in codes[:num_states]]

    def are_there(self, codes: Sequence[int]) -> list[bool]:
        """Of each tensor in pages, whether the object has it yet."""
        first = len(self.states)
        return [code % _CODES != _NONE for code in codes[first : first + len(self.grown)]]

    def plain_values(self, codes: Sequence[int]) -> dict[Path, int | bool | None]:
        """The values that are no tensors."""
        own = codes[len(self.states) + len(self.grown) :]
        return {path: _decoded(code) for path, code in zip(self.values, own, strict=True)}


def _size_code(tensor: Any, plan: CacheTensor) -> int:
    if tensor is None:
        return _NONE
    size = 0 if plan.axis is None else tensor.shape[plan.axis]
    return int(size) * _CODES + _NUMBER


def _code(value: Any) -> int:
    if value is None:
        return _NONE
    if not isinstance(value, int):
        raise WeightsError(refusal("its cache changes its form in a row"))
    return value * _CODES + (_FLAG if isinstance(value, bool) else _NUMBER)


def _decoded(code: int) -> int | bool | None:
    kind, value = code % _CODES, code // _CODES
    if kind == _NONE:
        return None
    return bool(value) if kind == _FLAG else value


def find_own_cache(body: torch.nn.Module, longest_block: int, dtype: torch.dtype) -> OwnCache:
    """The parts of a class's cache, from passes of its body on the meta device.

    `longest_block` is the most tokens of a window, or of a block that the class keeps together. The
    body is in bfloat16; at run time its tensors of that type have the model's, `dtype`. Raises
    `WeightsError` for a cache that cannot be taken apart.
    """
    first = _pass_over(1, body)
    argument = _argument_of(first, body)
    found = {1: parts_of(first[argument])}
    for num_tokens in _sample_lengths(longest_block):
        found[num_tokens] = parts_of(_pass_over(num_tokens, body)[argument])
    last = found[max(found)]
    if any(parts.keys() != last.keys() for parts in found.values()):
        raise WeightsError(refusal("its cache changes its form in a row"))
    paths: dict[int, list[Path]] = {}
    for path, part in last.items():
        if isinstance(part, torch.Tensor):
            paths.setdefault(id(part), []).append(path)
    tensors = [
        _tensor({num: parts[same[0]] for num, parts in found.items()}, tuple(same), dtype)
        for same in paths.values()
    ]
    return OwnCache(
        argument,
        states=tuple(tensor for tensor in tensors if not tensor.rate),
        grown=tuple(tensor for tensor in tensors if tensor.rate),
        values=tuple(path for path, part in last.items() if not isinstance(part, torch.Tensor)),
    )


def _argument_of(output: Any, body: torch.nn.Module) -> str:
    """The name by which a class takes its own cache. Raises `WeightsError` if it has none."""
    taken = inspect.signature(body.forward).parameters
    names = [name for name in _ARGUMENTS if name in taken and output.get(name) is not None]
    if not names:
        raise WeightsError(refusal("its class keeps no keys and values between steps"))
    return names[0]


def _pass_over(num_tokens: int, body: torch.nn.Module) -> Any:
    ids_1T = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
    # A class may look for tokens that are not masked: on the meta device, all are such.
    with torch.inference_mode(), _fx.patch(meta_nonzero_assume_all_nonzero=True):
        return body(input_ids=ids_1T, use_cache=True)


def _sample_lengths(longest_block: int) -> tuple[int, ...]:
    """The numbers of tokens after which caches are compared.

    They are two and four blocks, rounded up to a power of two, and one token fewer than each: there
    a block whose length is a power of two lacks only its last token.
    """
    base = max(_MIN_SAMPLE, 1 << (2 * longest_block).bit_length())
    return base - 1, base, 2 * base - 1, 2 * base


def _tensor(found: Mapping[int, Any], paths: tuple[Path, ...], dtype: torch.dtype) -> CacheTensor:
    """The plan of one tensor, from what it was after some numbers of tokens."""
    last = found[max(found)]
    found = {num_tokens: x for num_tokens, x in found.items() if x is not None}
    if any(not isinstance(x, torch.Tensor) or x.dim() != last.dim() for x in found.values()):
        raise WeightsError(refusal("its cache changes its form in a row"))
    most = [max(sizes) for sizes in zip(*(x.shape for x in found.values()), strict=True)]
    least = [min(sizes) for sizes in zip(*(x.shape for x in found.values()), strict=True)]
    axes = [axis for axis, size in enumerate(most) if size != least[axis]]
    is_plain = last.dtype is torch.bfloat16
    own_dtype = dtype if is_plain else last.dtype
    if not axes:
        return CacheTensor(paths, tuple(most), own_dtype)
    if len(axes) > 1:
        raise WeightsError(refusal("a tensor of its cache grows along several axes"))
    axis = axes[0]
    rate = _rate({num: x.shape[axis] for num, x in found.items()})
    if rate:
        most[axis] = 1
    return CacheTensor(paths, tuple(most), own_dtype, axis, rate, is_plain)


def _rate(sizes: Mapping[int, int]) -> int:
    """The tokens of an entry in a tensor of these sizes after numbers of tokens; 0 of a state."""
    last = max(sizes)
    if sizes[last] == sizes[last // 2]:
        return 0
    rate = last // max(1, sizes[last])
    if any(size != num_tokens // max(1, rate) for num_tokens, size in sizes.items()):
        raise WeightsError(refusal("its cache does not grow by whole blocks of tokens"))
    return rate

"""Reads `data.pkl` of a file of `torch.save`, without an unpickler.

A pickle is a program; this reader follows the few instructions that describe dictionaries of
tensors and refuses any other by name. Nothing that the file names is looked up, imported or called.
Owns the grammar and its limits. Knows nothing of files: `Rebuild` reads the storages.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

MAX_BYTES = 64 * 2**20
MAX_OPCODES = 2_000_000
"""About 35 for each tensor."""
MAX_DEPTH = MAX_RANK = 16
MAX_SIZE = 2**30
"""Upper limit of any dimension and stride."""
STORAGES: Mapping[str, str] = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
"""The names of storage types in a file, and torch's dtype of their elements."""

_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_DICT = "collections OrderedDict"
_NAMES = frozenset({_TENSOR, _PARAMETER, _DICT, *STORAGES})
_SCALARS = frozenset(["BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"])
_FRESH: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES: Mapping[str, int] = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class UnsafePickle(ValueError):
    """The pickle is not a dictionary of tensors; the message says what it is."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage of the file: its name, torch's dtype of its elements, and their number."""

    key: str
    dtype: str
    num_elements: int


class Rebuild(Protocol):
    """Makes a tensor over a storage. Raises `UnsafePickle` where it would exceed the storage."""

    def __call__(
        self, storage: StorageRef, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> Any:
        """Return the tensor."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in the file, one of `_NAMES`. It is only ever compared."""

    text: str


def read_pickle(data: bytes, rebuild: Rebuild, tensor_type: type) -> Any:
    """The object that `data` describes. Raises `UnsafePickle`."""
    if len(data) > MAX_BYTES:
        raise UnsafePickle(f"its description has {len(data)} bytes")
    reader = _StackMachine(rebuild, tensor_type)
    try:
        for opcode, argument, _ in islice(pickletools.genops(data), MAX_OPCODES):
            if opcode.name == "STOP":
                return reader.result()
            reader.take(opcode.name, argument)
    except UnsafePickle:
        raise
    except (IndexError, KeyError, ValueError) as error:  # an empty stack or memo, or cut short
        raise UnsafePickle("its description is damaged") from error
    raise UnsafePickle(f"its description has more than {MAX_OPCODES} instructions")


class _StackMachine:
    """The stack machine of pickle, without everything that acts."""

    def __init__(self, rebuild: Rebuild, tensor_type: type) -> None:
        self._rebuild = rebuild
        self._tensor_type = tensor_type
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}
        self._steps: Mapping[str, Callable[[Any], None]] = {
            "PROTO": self._expect_protocol,
            "MARK": self._mark,
            "GLOBAL": self._name,
            "BINPERSID": self._storage,
            "REDUCE": self._reduce,
            "BUILD": self._drop_attributes,
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "SETITEM": lambda _: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "APPEND": lambda _: self._append([self._stack.pop()]),
            "APPENDS": lambda _: self._append(self._since_mark()),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
        }

    def take(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        if name in _SCALARS:
            self._stack.append(argument)
        elif name in _FRESH:
            self._stack.append(_FRESH[name]())
        elif name in _TUPLES:
            items = tuple(self._stack.pop() for _ in range(_TUPLES[name]))
            self._stack.append(items[::-1])
        elif name in self._steps:
            self._steps[name](argument)
        else:
            raise UnsafePickle(f"it holds the instruction {name}")

    def result(self) -> Any:
        """The object that the instructions built."""
        if self._below or len(self._stack) != 1:
            raise UnsafePickle("its description is damaged")
        _check_depth(self._stack[0])
        return self._stack[0]

    def _expect_protocol(self, version: int) -> None:
        if version != 2:
            raise UnsafePickle(
                f"it is written in pickle protocol {version}, not 2 as torch.save's are"
            )

    def _mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _put(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _get(self, key: int) -> None:
        """Get an object that cannot contain itself, or grow with every mention."""
        value = self._memo[key]
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, dict | list | tuple) for part in parts):
            raise UnsafePickle("it refers to a container twice")
        self._stack.append(value)

    def _name(self, text: str) -> None:
        if text not in _NAMES:
            raise UnsafePickle(f"it names {text.replace(' ', '.')[:80]!a}")
        self._stack.append(_Name(text))

    def _storage(self, _: None) -> None:
        match self._stack.pop():
            case ("storage", _Name(kind), str(key), str(), int(count)) if (
                kind in STORAGES and key.isascii() and key.isdigit() and count >= 0
            ):
                self._stack.append(StorageRef(key, STORAGES[kind], count))
            case _:
                raise UnsafePickle("it refers to something that is not a storage")

    def _reduce(self, _: None) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        match (name, arguments):
            case (_Name(text), ()) if text == _DICT:
                self._stack.append(OrderedDict())
            case (_Name(text), (tensor, bool(), OrderedDict())) if (
                text == _PARAMETER and isinstance(tensor, self._tensor_type)
            ):
                self._stack.append(tensor)
            case (
                _Name(text),
                (StorageRef() as storage, int(offset), tuple(size), tuple(stride), bool(), hooks),
            ) if text == _TENSOR and isinstance(hooks, OrderedDict):
                self._stack.append(self._rebuild(storage, offset, _sizes(size), _sizes(stride)))
            case _:
                raise UnsafePickle("it calls something that does not make a tensor")

    def _drop_attributes(self, _: None) -> None:
        """Drop the versions of modules, which a state dict has as attributes."""
        attributes = self._stack.pop()
        if not isinstance(self._stack[-1], OrderedDict) or type(attributes) is not dict:
            raise UnsafePickle("it sets the state of an object")

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise UnsafePickle("its description is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise UnsafePickle("a key in it is neither a string nor a number")
            target[key] = value

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise UnsafePickle("its description is damaged")
        target.extend(items)


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...]:
    is_plain = all(type(n) is int and 0 <= n <= MAX_SIZE for n in values)
    if not is_plain or len(values) > MAX_RANK:
        raise UnsafePickle("a tensor in it has an invalid shape")
    return values


def _check_depth(root: Any) -> None:
    """Check that reading the result cannot exhaust the stack, and that no name is left as data."""
    level = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
            elif isinstance(value, _Name | StorageRef):
                raise UnsafePickle("it holds a name in place of data")
        if not below:
            return
        level = below
    raise UnsafePickle(f"it is nested more than {MAX_DEPTH} deep")

"""Recurrent layers of transformers' models on the states of our cache.

Owns how the modules of a model that keep a state are found, and how they run. A pass on the meta
device records who updates a state and of which shape. In a step every row then goes through such a
module by itself, because the module does not know where a row ends: the decode rows as a batch of
one token each, every chunk alone. The module is given its row's state as if it came from
transformers' own cache, so it computes what it would compute there.

Shapes: T tokens, D decode rows.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.states import LayerState, StateShape

# Its warning that faster kernels are not installed is for users of transformers.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)

RECURRENT = "recurrent"
"""The kind of a state that is no end of a convolution's inputs."""
_CACHE = "cache"
"""The argument of transformers' modules that is their cache."""
_MOST_TOKENS = 256
"""Tokens that go through a module at once: some classes take memory for tokens times states."""
_MAMBA2_CHUNK = 256


class StateKey(NamedTuple):
    """The name of a state in transformers' cache: its kind, its layer, and its number there."""

    kind: str
    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class RecurrentModule:
    """A module that keeps states: its name in the body, and the states by their names."""

    name: str
    states: tuple[tuple[StateKey, StateShape], ...]

    @property
    def layer_state(self) -> LayerState:
        """The tensors that the cache keeps for it."""
        return tuple(shape for _, shape in self.states)


def recurrent_bytes(modules: Sequence[RecurrentModule]) -> int:
    """A generous estimate of the memory that a module takes for its intermediate results.

    Mamba computes with a state for each token, others with scores between the tokens of a chunk.
    """
    shapes = [shape for module in modules for key, shape in module.states if key.kind == RECURRENT]
    sizes = [
        12 * prod(shape.shape) if len(shape.shape) < 3 else 16 * _MAMBA2_CHUNK * shape.shape[0]
        for shape in shapes
    ]
    return _MOST_TOKENS * max(sizes, default=0)


class StateRecorder:
    """A cache of transformers that records the states of one pass over a new row, in bfloat16.

    States of that type will be of the model's, `dtype`. The methods are those that transformers'
    modules call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._running: list[str] = []
        self._found: dict[str, dict[StateKey, StateShape]] = {}

    @property
    def modules(self) -> tuple[RecurrentModule, ...]:
        """The modules that updated states, in the order of their first update."""
        found = self._found.items()
        return tuple(RecurrentModule(name, tuple(states.items())) for name, states in found)

    @contextmanager
    def watch(self, body: torch.nn.Module) -> Iterator[None]:
        """Be the cache of all modules in `body` that take one."""
        with ExitStack() as hooks:
            for name, module in body.named_modules():
                if module is not body and _CACHE in inspect.signature(module.forward).parameters:
                    before = module.register_forward_pre_hook(
                        partial(self._enter, name), with_kwargs=True
                    )
                    after = module.register_forward_hook(self._leave)
                    hooks.callback(before.remove)
                    hooks.callback(after.remove)
            yield

    def _enter(self, name: str, module: torch.nn.Module, args: Any, given: Any) -> Any:
        self._running.append(name)
        bound = inspect.signature(module.forward).bind(*args, **given)
        bound.arguments[_CACHE] = self
        return bound.args, bound.kwargs

    def _leave(self, *_: object) -> None:
        self._running.pop()

    def _record(self, key: StateKey, shape: Sequence[int], dtype: torch.dtype) -> None:
        states = self._found.setdefault(self._running[-1], {})
        states[key] = StateShape(tuple(shape), self._dtype if dtype is torch.bfloat16 else dtype)

    def update(self, key: Any, value: Any, *_: object, **__: object) -> tuple[Any, Any]:
        """Keys and values are recorded by attention."""
        return key, value

    def is_recording_past(self, layer: int) -> bool:
        """No past is kept to go back to."""
        return False

    def get_conv_state(self, layer: int, state_idx: int = 0) -> None:
        """The row is new."""

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> None:
        """The row is new."""

    def update_conv_state(
        self,
        inputs: torch.Tensor,
        layer: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Record the state of a convolution, of which the last inputs are kept."""
        width = inputs.shape[-1] if conv_kernel_size is None else conv_kernel_size
        key = StateKey("conv", layer, state_idx)
        self._record(key, (*inputs.shape[1:-1], width), inputs.dtype)
        return inputs

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Record any other state."""
        self._record(StateKey(RECURRENT, layer_idx, state_idx), state.shape[1:], state.dtype)
        return state

    def get_linear_cache(self, layer: int) -> None:
        """The row is new; MiniMax's name of a recurrent state."""

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        """Record a state of MiniMax."""
        self.update_recurrent_state(state, layer)


class _RowsCache:
    """A cache of transformers with the states of some rows: of new ones, or of ones that go on."""

    def __init__(self, states: Mapping[StateKey, torch.Tensor], *, is_new: bool) -> None:
        self._states = states
        self._is_new = is_new

    def is_recording_past(self, layer: int) -> bool:
        """No past is kept to go back to."""
        return False

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution."""
        return None if self._is_new else self._states[StateKey("conv", layer, state_idx)]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Any other state."""
        return None if self._is_new else self._states[StateKey(RECURRENT, layer, state_idx)]

    def update_conv_state(
        self, inputs: torch.Tensor, layer: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Keep the last inputs, and return those that the convolution reads."""
        state = self._states[StateKey("conv", layer, state_idx)]
        width = state.shape[-1]
        if not self._is_new:
            inputs = torch.cat([state, inputs], dim=-1)
        state.copy_(pad(inputs, (max(0, width - inputs.shape[-1]), 0))[..., -width:])
        return inputs

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Keep a state."""
        kept = self._states[StateKey(RECURRENT, layer_idx, state_idx)]
        kept.copy_(state)
        return kept

    def get_linear_cache(self, layer: int) -> torch.Tensor | None:
        """MiniMax's name of a recurrent state."""
        return self.get_recurrent_state(layer)

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        """Keep a state of MiniMax."""
        self.update_recurrent_state(state, layer)


class Recurrence:
    """The recurrent modules of a loaded model. Outside a step they run as their class does.

    A row that goes on does so by `_MOST_TOKENS` at once, or one by one if it `is_slow`: classes of
    Mamba's first version know no state in a pass over several tokens.
    """

    def __init__(self, body: torch.nn.Module, modules: Sequence[RecurrentModule]) -> None:
        self._step: PagedStep | None = None
        self.is_slow = False
        for number, plan in enumerate(modules):
            module = body.get_submodule(plan.name)
            keys = [key for key, _ in plan.states]
            module.forward = partial(self._run, module.forward, number, keys)

    @contextmanager
    def over(self, step: PagedStep) -> Iterator[None]:
        """Run the modules on the rows of `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _run(
        self,
        forward: Callable[..., Any],
        number: int,
        keys: Sequence[StateKey],
        *args: Any,
        **given: Any,
    ) -> Any:
        """Run module `number`, row by row in a step."""
        step = self._step
        if step is None:
            return forward(*args, **given)
        given = {**dict(zip(inspect.signature(forward).parameters, args, strict=False)), **given}
        assert step.kv.states is not None, "a model with recurrent layers has states"
        states = dict(zip(keys, step.kv.states.layers[number], strict=True))
        outputs = []
        if step.batch.num_decode_rows:
            outputs.append(_decode(forward, given, states, step))
        for part, cache in _chunks(step, states, 1 if self.is_slow else _MOST_TOKENS):
            own = _cut(given, len(step.batch.write_slots_T), part)
            outputs.append(forward(**own | {_CACHE: cache}))
        return _joined(outputs)


def _decode(
    forward: Callable[..., Any],
    given: Mapping[str, Any],
    states: Mapping[StateKey, torch.Tensor],
    step: PagedStep,
) -> Any:
    """The outputs of the decode rows, which go on from copies of their states."""
    assert step.states is not None, "the runner finds the rows' states"
    num_rows = step.batch.num_decode_rows
    slots_D = step.states.slots_B[:num_rows]
    copies = {key: state.index_select(0, slots_D) for key, state in states.items()}
    part = _cut(given, len(step.batch.write_slots_T), slice(0, num_rows))
    output = forward(**_swapped(part) | {_CACHE: _RowsCache(copies, is_new=False)})
    for key, state in states.items():
        state.index_copy_(0, slots_D, copies[key])
    return _swapped(output)


def _chunks(
    step: PagedStep, states: Mapping[StateKey, torch.Tensor], most_continued: int
) -> Iterator[tuple[slice, _RowsCache]]:
    """The tokens of prompt chunks between snapshots, with the states that they go on from.

    At most `most_continued` tokens of a row that is not new go together. A snapshot is taken when
    the tokens before it are computed.
    """
    assert step.states is not None, "the runner finds the rows' states"
    batch, row = step.batch, -1
    lengths_B, contexts_B = batch.host_query_lengths_B, batch.host_context_lengths_B
    for segment in step.states.segments(lengths_B.tolist()):
        if segment.row < batch.num_decode_rows:
            continue
        is_new = segment.row != row and contexts_B[segment.row] == lengths_B[segment.row]
        row, slot = segment.row, step.states.host_slots_B[segment.row]
        own = {key: state[slot : slot + 1] for key, state in states.items()}
        start = segment.start
        while start < segment.stop:
            stop = min(start + (_MOST_TOKENS if is_new else most_continued), segment.stop)
            yield slice(start, stop), _RowsCache(own, is_new=is_new)
            start, is_new = stop, False
        if segment.line >= 0:
            for state in states.values():
                state[segment.line] = state[slot]


def _cut(value: Any, num_tokens: int, part: slice) -> Any:
    """The part of all tensors in `value` that have an entry for each token, `[1, T, ...]`."""
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value[:, part]
    return _mapped(lambda each: _cut(each, num_tokens, part), value)


def _swapped(value: Any) -> Any:
    """All tensors in `value` with rows and tokens exchanged."""
    if isinstance(value, torch.Tensor):
        return value.transpose(0, 1)
    return _mapped(_swapped, value)


def _joined(parts: Sequence[Any]) -> Any:
    """The outputs of all tokens. Of results that are not for tokens, the last part's."""
    if isinstance(parts[0], tuple):
        return tuple([_joined(each) for each in zip(*parts, strict=True)])
    if isinstance(parts[0], torch.Tensor) and all(part.shape[0] == 1 for part in parts):
        return torch.cat(list(parts), dim=1)
    return parts[-1]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every entry changed, if it is a tuple or a dictionary."""
    if isinstance(value, tuple):
        return tuple([change(each) for each in value])
    if isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return value

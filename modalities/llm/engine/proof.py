"""The proof that a model of transformers computes on our pages what its class computes.

Owns the comparison at load, over two chunks and two rows: first the masks of every layer, which say
what a token sees, then the hidden states and the logits. Windows are narrowed for it, so that a few
dozen tokens are more than the longest one. A window that only a mask has becomes part of the plan.
Knows no checkpoint.

Shapes: T tokens, C hidden, Q queries, S keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.layers.states import RowStates, StateBatch, StateCut
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.llm.engine.bridge import (
    OWN_ATTENTION,
    BridgedStep,
    CachePlan,
    problem,
    refusal,
)
from triptych.modalities.llm.engine.recurrence import Recurrence

PAGE_SIZE = 16
NARROW_WINDOW = 8
_NUM_TOKENS, _NUM_FIRST = 40, 24
"""Tokens of the proof, and those of its first chunk."""
_LONGEST_WINDOW = 512
"""A window that cannot be narrowed is compared over more tokens than it has, up to this many."""
_FIRST_PLAIN_ID = 5
"""After the likely padding ids, which some models do not count as positions."""
_LARGEST_DIFFERENCE = 0.1
"""Of a token's hidden state, relative to its norm: far above the effect of rounding to 8 bits."""
_EXACT_DIFFERENCE = 1e-3
"""The same in float32 on a CPU, where all products are exact to 24 bits: far above the effect of
rounding, and far below that of other positions, of later tokens, or of a state that was lost."""
_HIDDEN_SCORE = -1e4
"""A score of the mask below which a token does not see a key."""

_Chunks = Sequence[tuple[int, torch.Tensor]]
"""Chunks of rows: the first position, and the hidden states."""

Masks = Mapping[int, torch.Tensor]
"""What the tokens of a layer see, `[Q, S]`, by layer."""


class BridgedModel(Protocol):
    """A model of transformers and its body, as `fallback.FallbackModel`."""

    vocab_size: int
    plan: CachePlan
    whole: Any
    body: Any
    recurrence: Recurrence

    def run_step(self, step: BridgedStep, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Compute the last hidden states, `hidden_TC`."""

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Compute the scores of the vocabulary, `logits_RV`."""


def prove(
    model: BridgedModel, *, max_length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a model on our cache with the unmodified class; `model.plan` gets mask windows.

    Raises `WeightsError` where masks or results differ.
    """
    with torch.inference_mode(), narrowed(model.body) as window:
        num_tokens = min(max(_NUM_TOKENS, _farthest(model) + PAGE_SIZE), max_length)
        ids_T = (torch.arange(num_tokens, device=device) + _FIRST_PLAIN_ID) % model.vocab_size
        with library_errors(problem("its class does not run without a cache")):
            own_TC, own_V, masks = _on_its_own(model, ids_T)
        with library_errors(problem("it does not run a step of several rows")):
            chunks, windows = _on_pages(model, ids_T, dtype)
            if model.plan.has_states:
                chunks = _at_best_pace(model, ids_T, own_TC, chunks, dtype)
            narrow = None if window is None else min(window, NARROW_WINDOW)
            found, plan = list[int](), model.plan
            if not plan.by_rows:
                found = _check_masks(plan, masks, windows, narrow)
            if found and narrow is not None:
                model.plan = plan.with_mask_windows(dict.fromkeys(found, narrow))
                chunks, _ = _on_pages(model, ids_T, dtype)
        with library_errors(problem("its head reads more than hidden states")):
            logits_V = model.logits(own_TC[-1:])[0]
    if window is not None:
        model.plan = plan.with_mask_windows(dict.fromkeys(found, window))
    if not _are_near(chunks, own_TC, dtype):
        share = f"{_error(chunks, own_TC):.2%} of their norm"
        raise WeightsError(refusal(f"its own positions or masks change its results by {share}"))
    if not bool(is_near(logits_V, own_V, dtype)):
        raise WeightsError(refusal("its head computes other scores than its class"))


def _are_near(chunks: _Chunks, own_TC: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether most hidden states of each chunk are those of the class."""
    near = [is_near(x_TC, own_TC[start : start + len(x_TC)], dtype) for start, x_TC in chunks]
    return all(2 * int(is_near_T.sum()) >= len(is_near_T) for is_near_T in near)


def _at_best_pace(
    model: BridgedModel,
    ids_T: torch.Tensor,
    own_TC: torch.Tensor,
    chunks: _Chunks,
    dtype: torch.dtype,
) -> _Chunks:
    """The chunks, by which rows go on one token at a time if that is nearer to the class.

    The same holds for a class that ignores its states when it gets several tokens.
    """
    error = _error(chunks, own_TC)
    if error <= _EXACT_DIFFERENCE:
        return chunks
    forgotten, _ = _on_pages(model, ids_T, dtype, forgets=True)
    is_forgetful = bool(model.plan.recurrent_parts) and torch.equal(forgotten[1][1], chunks[1][1])
    model.recurrence.is_slow = True
    slow_chunks, _ = _on_pages(model, ids_T, dtype)
    if is_forgetful or 2 * _error(slow_chunks, own_TC) < error:
        return slow_chunks
    model.recurrence.is_slow = False
    return chunks


def _error(chunks: _Chunks, own_TC: torch.Tensor) -> float:
    """The difference from the class of the middle token of the worst chunk."""
    differences = (_difference(x_TC, own_TC[start : start + len(x_TC)]) for start, x_TC in chunks)
    return max(float(difference_T.median()) for difference_T in differences)


def is_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether each row of values is that of the class, but for rounding in a model of this type."""
    is_exact = found.is_cpu and dtype is torch.float32
    largest = _EXACT_DIFFERENCE if is_exact else _LARGEST_DIFFERENCE
    return torch.le(_difference(found, expected), largest)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row of values, relative to the norm."""
    norm = torch.linalg.vector_norm(expected.float(), dim=-1).clamp(min=1e-30)
    difference: torch.Tensor = torch.linalg.vector_norm((found - expected).float(), dim=-1) / norm
    return difference


def _on_pages(
    model: BridgedModel, ids_T: torch.Tensor, dtype: torch.dtype, *, forgets: bool = False
) -> tuple[_Chunks, dict[int, int | None]]:
    """The `hidden_TC` of some chunks on our cache, and the windows that attention was given.

    The second step has the second chunk of one row and the first of another, so that a class that
    counts positions along a step fails. Rows with states also decode, and go on from a snapshot; if
    the cache `forgets`, recurrent states are zeros after each step. A chunk is its first position
    and its hidden states.
    """
    num_tokens, num_pages = len(ids_T), -(-len(ids_T) // PAGE_SIZE)
    layout = model.plan.layout(PAGE_SIZE, dtype)
    kv = KvCache(layout, 2 * num_pages, ids_T.device, num_slots=2, num_snapshots=1)
    windows: dict[int, int | None] = {}
    chunks: list[tuple[int, torch.Tensor]] = []
    for planned in _steps(num_tokens, has_states=kv.states is not None):
        batch, positions_T = lay_out_rows(planned.chunks, num_pages, ids_T.device)
        states = None
        if kv.states is not None:
            batch.num_decode_rows = len(planned.chunks) if planned.decodes else 0
            states = _states(planned, kv.states, ids_T.device)
        step = BridgedStep(PagedStep(kv, batch, states), model.plan, windows)
        hidden_TC = model.run_step(step, positions_T, input_ids=ids_T[positions_T].unsqueeze(0))
        sizes = batch.host_query_lengths_B.tolist()
        starts = [start for _, start, _ in planned.chunks]
        chunks += zip(starts, hidden_TC.split(sizes), strict=True)
        if forgets and kv.states is not None:
            for layer, number in model.plan.recurrent_parts:
                kv.states.layers[layer][number].zero_()
    return chunks, windows


class _Step(NamedTuple):
    """A step over chunks of rows, each (row, start, end).

    The first row's state is saved after its first `num_saved` tokens, or restored before the step.
    """

    chunks: Sequence[tuple[int, int, int]]
    decodes: bool = False
    num_saved: int = 0
    restores: bool = False


def _steps(num_tokens: int, *, has_states: bool) -> list[_Step]:
    """The steps of the proof."""
    middle, last = min(_NUM_FIRST, num_tokens - 1), num_tokens - 1
    if not has_states:
        return [_Step([(0, 0, middle)]), _Step([(0, middle, num_tokens), (1, 0, middle)])]
    num_saved = middle // 2
    return [
        _Step([(0, 0, middle)], num_saved=num_saved),
        _Step([(0, middle, last), (1, 0, middle)]),
        _Step([(0, last, num_tokens), (1, middle, middle + 1)], decodes=True),
        _Step([(0, num_saved, num_tokens)], restores=True),
    ]


def _states(planned: _Step, states: RowStates, device: torch.device) -> StateBatch:
    """The states of a step, brought into their slots."""
    snapshot = states.snapshot_line(0)
    if planned.restores:
        states.copy([(snapshot, 0)])
    cuts = [StateCut(0, planned.num_saved, snapshot)] if planned.num_saved else []
    return states_of(planned.chunks, device, cuts)


def states_of(
    chunks: Sequence[tuple[int, int, int]], device: torch.device, cuts: Sequence[StateCut] = ()
) -> StateBatch:
    """The states of rows whose slots have their numbers."""
    lines = [row for row, _, _ in chunks]
    return StateBatch(torch.tensor(lines, device=device), lines, cuts)


def lay_out_rows(
    chunks: Sequence[tuple[int, int, int]], num_pages: int, device: torch.device
) -> tuple[AttentionBatch, torch.Tensor]:
    """The batch of some rows' chunks, and the positions of its tokens."""
    rows = torch.tensor([row for row, _, _ in chunks], device=device)
    sizes = [end - start for _, start, end in chunks]
    ends = [end for _, _, end in chunks]
    positions_T = torch.cat([torch.arange(start, end, device=device) for _, start, end in chunks])
    first_slots_B = rows * num_pages * PAGE_SIZE
    slots_T = first_slots_B.repeat_interleave(torch.tensor(sizes, device=device)) + positions_T
    batch = AttentionBatch(
        page_table_BM=rows[:, None] * num_pages + torch.arange(num_pages, device=device),
        context_lengths_B=torch.tensor(ends, device=device),
        query_starts_B=torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()], device=device),
        write_slots_T=slots_T,
        num_decode_rows=0,
        host_query_lengths_B=np.array(sizes),
        host_context_lengths_B=np.array(ends),
    )
    return batch, positions_T


def _on_its_own(
    model: BridgedModel, ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Masks]:
    """The `hidden_TC`, the last token's logits and the masks of transformers' own model."""
    given = {"input_ids": ids_T.unsqueeze(0), "use_cache": False}
    with class_outputs(model.body) as found:
        logits_V = model.whole(**given).logits[0, -1]
        if not found.outputs:  # the whole reads a part of the body
            model.body(**given)
    return found.hidden_TC, logits_V, found.masks


@dataclass(slots=True)
class ClassOutputs:
    """The outputs of a body in its own attention, and what the tokens of its layers see."""

    outputs: list[Any] = field(default_factory=list)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def hidden_TC(self) -> torch.Tensor:  # noqa: N802 - a shape
        """The hidden states of the last forward."""
        hidden_TC: torch.Tensor = self.outputs[-1].last_hidden_state[0]
        return hidden_TC

    def keep(self, module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A hook before a layer's attention, which keeps its mask."""
        given_mask = given.get("attention_mask")
        for mask in given_mask.values() if isinstance(given_mask, Mapping) else (given_mask,):
            if isinstance(mask, torch.Tensor) and mask.dim() == 4:
                self.masks[int(module.layer_idx)] = _seen(mask[..., : mask.shape[-2]])


@contextmanager
def class_outputs(body: Any) -> Iterator[ClassOutputs]:
    """Let a body run as its class does, without our attention, and keep outputs and masks."""
    found = ClassOutputs()
    used, body.config._attn_implementation = body.config._attn_implementation, OWN_ATTENTION
    try:
        with ExitStack() as hooks:
            for module in body.modules():
                if _attends(module):
                    hook = module.register_forward_pre_hook(found.keep, with_kwargs=True)
                    hooks.callback(hook.remove)
            hook = body.register_forward_hook(lambda *call: found.outputs.append(call[-1]))
            hooks.callback(hook.remove)
            yield found
    finally:
        body.config._attn_implementation = used


def _attends(module: torch.nn.Module) -> bool:
    """Whether a module is given the mask of one layer."""
    is_of_layer = isinstance(getattr(module, "layer_idx", None), int)
    return is_of_layer and "attention_mask" in inspect.signature(module.forward).parameters


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Which keys each query sees, the same for all heads. Raises `WeightsError` for biases."""
    seen = mask if mask.dtype is torch.bool else mask > _HIDDEN_SCORE
    is_biased = mask.dtype is not torch.bool and bool(mask.masked_fill(~seen, 0).any())
    first_QS: torch.Tensor = seen[0, 0]
    if is_biased or not bool((seen == first_QS).all()):
        raise WeightsError(refusal("its mask has biases, or differs between heads"))
    return first_QS


def _check_masks(
    plan: CachePlan, masks: Masks, windows: Mapping[int, int | None], stated: int | None
) -> list[int]:
    """The layers whose window is in their mask alone. Raises `WeightsError` for other masks."""
    if masks.keys() != plan.layers.keys():
        raise WeightsError(refusal("the masks of its layers cannot be read"))
    found = []
    for layer, seen_QS in masks.items():
        given = windows.get(layer)
        if bool((seen_QS == causal_mask(seen_QS, given)).all()):
            continue
        if given is None and bool((seen_QS == causal_mask(seen_QS, stated)).all()):
            found.append(layer)
            continue
        raise WeightsError(refusal("its mask is not that of a causal window"))
    return found


def causal_mask(like_QS: torch.Tensor, window: int | None) -> torch.Tensor:
    """The mask of tokens that see themselves and earlier tokens, within a window if given."""
    ones_QS = torch.ones_like(like_QS, dtype=torch.bool)
    return ones_QS.tril() if window is None else ones_QS.tril().triu(1 - window)


@contextmanager
def narrowed(body: torch.nn.Module) -> Iterator[int | None]:
    """Narrow all windows of a model, if they are those of its configuration, which is yielded.

    Modules that derive another number from the configuration keep theirs.
    """
    window = _window(body.config)
    owners = {id(owner): owner for module in body.modules() for owner in _owners(module)}
    windowed = [owner for owner in owners.values() if _window(owner) is not None]
    if window is None or any(_window(owner) != window for owner in windowed):
        yield None
        return
    for owner in windowed:
        owner.sliding_window = min(window, NARROW_WINDOW)
    try:
        yield window
    finally:
        for owner in windowed:
            owner.sliding_window = window


def _owners(module: torch.nn.Module) -> tuple[Any, ...]:
    return module, getattr(module, "config", None)


def _window(owner: Any) -> int | None:
    window = getattr(owner, "sliding_window", None)
    return (
        window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None
    )


def _farthest(model: BridgedModel) -> int:
    """The tokens after which a row has all that its class keeps: a window, or two blocks."""
    own = model.plan.own
    return max(_widest(model.body), 0 if own is None else 2 * own.longest_block)


def _widest(body: torch.nn.Module) -> int:
    """The widest window of a model. Raises `WeightsError` for one too wide to be compared."""
    widest = max((_window(module) or 0 for module in body.modules()), default=0)
    if widest > _LONGEST_WINDOW:
        raise WeightsError(refusal(f"its windows of {widest} tokens cannot be checked"))
    return widest

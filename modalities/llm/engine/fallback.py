"""Runs any other causal language model of transformers on our paged cache.

Owns the class, its configuration and its weights. The rows of a step go through the model as one
sequence with explicit positions; only attention (`bridge`) and recurrent layers (`recurrence`) know
where a row ends. Where its attention cannot be ours, each row runs by itself with the class's own
(`rows`), and where its cache cannot be ours, with that of the class, too (`own_rows`). Slower than
our decoder, with the same server around it.

No code of a checkpoint is ever executed: the class comes from the installed transformers by its
name, the configuration is reduced to that class's fields, weights are safetensors. A model is
refused whose results on our pages are not those of the unmodified class (`proof`).

Shapes: T tokens, R rows of logits, C hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.decoders.kept_weights import ClassNames, KeptWeights, load_kept
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout, KvShape, PagedStep
from triptych.core.runtime.layers.block_layers import BlockDevice
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.whole import check_complete
from triptych.core.text.context_length import context_length
from triptych.core.weights.encoding import PLAIN, WeightEncoding
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.llm.engine.bridge import (
    ATTENTION,
    OWN_ATTENTION,
    STEP,
    BridgedStep,
    CachePlan,
    Tracing,
    problem,
    refusal,
)
from triptych.modalities.llm.engine.class_config import (
    can_bridge,
    check_direction,
    fit_context,
    keeps_states,
    longest_block,
    read_class,
)
from triptych.modalities.llm.engine.latents import store_rows
from triptych.modalities.llm.engine.own_cache import find_own_cache
from triptych.modalities.llm.engine.own_rows import OwnRows, own_row_bytes
from triptych.modalities.llm.engine.proof import prove
from triptych.modalities.llm.engine.recurrence import Recurrence, StateRecorder, recurrent_bytes
from triptych.modalities.llm.engine.rows import (
    RunRow,
    cache_argument,
    new_cache,
    plan_of_cache,
    row_values,
    run_rows,
)

_TWO_IDS = torch.zeros((1, 2), dtype=torch.int64, device="meta")


class FallbackBlueprint:
    """Implements `core.runtime.decoders.native.Blueprint` with a class of transformers."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
        encoding: WeightEncoding = PLAIN,
    ) -> None:
        self._kind, self._config = self._read(config)
        stated = context_length(lambda name: getattr(self._config, name, None))
        self.max_length: int = max_length or stated
        fit_context(self._config, self.max_length)
        self.vocab_size: int = self._config.vocab_size
        self.dtype = dtype
        self._device = device
        self._native = native
        self._encoding = encoding

    def _read(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        kind, parsed = read_class(config)
        parsed._attn_implementation = ATTENTION if can_bridge(kind, parsed) else OWN_ATTENTION
        return kind, parsed

    @property
    def _class(self) -> tuple[Any, Any]:
        """The class and the configuration of the whole model."""
        return self._kind, self._config

    @cached_property
    def _sketch(self) -> Any:
        """The model on the meta device."""
        return sketch(*self._class)

    @property
    def _sketched_body(self) -> Any:
        return self._body_of(self._sketch)

    def _body_of(self, model: Any) -> Any:
        return body_of(model)

    @cached_property
    def plan(self) -> CachePlan:
        """The cells and states of all layers, as the class's forward uses them on the meta device.

        Where our attention cannot replace its own, the plan is by rows, and where our cache cannot
        replace its own either, it has the class's. A few old classes read values in their forward,
        which the meta device has not; their layers are alike, as the configuration says. The proof
        checks each.
        """
        check_direction(self._sketch)
        refused: WeightsError | None = None
        for attempt in self._attempts():
            try:
                with library_errors(""):
                    return attempt()
            except WeightsError as error:
                is_ours = error.__cause__ is None  # a sentence of ours, not a library's words
                if is_ours and (refused is None or attempt != self._own_plan):
                    refused = error
        raise refused or WeightsError(refusal("its class does not run without weights"))

    def _attempts(self) -> Iterator[Callable[[], CachePlan]]:
        """The ways to run the class, the fastest first."""
        has_states = keeps_states(self._kind, self._config)
        is_bridged = self.attention == ATTENTION
        if is_bridged and (has_states or not _counts_positions(self._sketch)):
            yield self._bridged_plan
        for config in (self._config, self._sketched_body.config):
            config._attn_implementation = OWN_ATTENTION
        if not has_states:
            yield self._plan_by_rows
        yield self._own_plan

    def _plan_by_rows(self) -> CachePlan:
        """The plan with the class's own attention over our pages."""
        cache, argument = new_cache(), cache_argument(self._sketch, self._sketched_body)
        num_tokens = _TWO_IDS.shape[1]
        try:
            self._first_pass(**{argument: cache}, use_cache=True)
        except RuntimeError:
            first = plan_of_cache(cache, argument, num_tokens).shapes[:1] if cache.layers else ()
            return replace(_stated_plan(self._config, *first), cache_argument=argument)
        return plan_of_cache(cache, argument, num_tokens)

    def _own_plan(self) -> CachePlan:
        """The plan with the class's own attention and cache."""
        body = self._body_of(typed_sketch(*self._class, self.dtype))
        longest = min(longest_block(self._config), self.max_length)
        return CachePlan.of_own(find_own_cache(body, longest, self.dtype))

    @property
    def attention(self) -> str:
        """The name of the attention that the class gets, once the plan is known."""
        return str(self._config._attn_implementation)

    def _bridged_plan(self) -> CachePlan:
        tracing, states = Tracing(), StateRecorder(self.dtype)
        rows, num_layers = (
            store_rows(self._sketched_body, ATTENTION),
            self._config.num_hidden_layers,
        )
        try:
            with states.watch(self._sketched_body):
                self._first_pass(position_ids=_TWO_IDS, use_cache=False, **{STEP: tracing})
        except RuntimeError:
            if len(rows) != num_layers:
                raise
            return CachePlan.of_shapes({each.layer: each.shape for each in rows})
        if self._kind._is_stateful and not states.modules:
            raise WeightsError(refusal("it keeps a recurrent state in a way of its own"))
        return tracing.plan(num_layers, states.modules)

    def _first_pass(self, **given: Any) -> None:
        body = self._sketched_body
        with suppress(StrictDataclassError):  # a few classes insist on a number
            body.config.pad_token_id = None  # others look for it among the ids
        with torch.inference_mode():
            body(input_ids=_TWO_IDS, **given)

    def weight_bytes(self) -> int:
        """Bytes of weights, counted on the meta device."""
        names = ClassNames.of(self._sketch, self._encoding.stored)
        kept = KeptWeights(self._sketch, self._encoding, names)
        num_values: int = sum(parameter.numel() for parameter in self._sketch.parameters())
        return (num_values - kept.num_values) * self.dtype.itemsize + kept.num_bytes

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """A generous estimate: transformers fuses nothing."""
        config = self._config
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        inner = max(inner) if isinstance(inner, Sequence) else inner
        values: int = num_tokens * (12 * config.hidden_size + 4 * inner + self.max_length)
        plan, row_bytes = self.known_plan(), 0
        num_heads = getattr(config, "num_attention_heads", None) or 0
        if plan.own is not None:
            row_bytes = own_row_bytes(plan.own, num_heads, self.max_length)
        elif plan.by_rows:
            values += row_values(plan, num_heads, self.max_length)
        row_bytes += recurrent_bytes(plan.recurrent)
        return values * self.dtype.itemsize + row_bytes + logits_bytes(num_rows, self.vocab_size)

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        return self.known_plan().layout(page_size, dtype)

    def known_plan(self) -> CachePlan:
        """The plan. Raises `WeightsError` if there is none."""
        with library_errors(problem("its first pass fails")):
            return self.plan

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> FallbackModel:
        """Load through transformers, check completeness, and try some tokens."""
        plan = self.known_plan()  # before loading: it says which attention the model gets
        try:
            model, info = load_kept(
                self._kind,
                self._sketch,
                checkpoint,
                self._encoding,
                BlockDevice(device=self._device, dtype=self.dtype, native=self._native),
                config=self._config,
                dtype=self.dtype,
            )
        except RuntimeError as error:
            raise WeightsError("transformers cannot convert the weights of this model.") from error
        predicts = bool(checkpoint.config.get("num_nextn_predict_layers"))
        check_complete(info, checkpoint, self._config.num_hidden_layers if predicts else 0)
        pin_rope(model, self.max_length)
        with absorbed(model, plan, self._native):
            built = FallbackModel(model.eval(), self.vocab_size, plan)
            prove(built, max_length=self.max_length, dtype=self.dtype, device=self._device)
        report(1.0)
        return built


class FallbackModel:
    """Implements `core.runtime.engine.token_runner.CausalModel` around a transformers model."""

    def __init__(self, model: Any, vocab_size: int, plan: CachePlan) -> None:
        self.vocab_size = vocab_size
        self.plan = plan
        self.whole = model
        owner, self.body = self._parts(model)
        self.recurrence = Recurrence(self._layers_of(model), plan.recurrent)
        self._own_rows = None if plan.own is None else OwnRows(plan.own)
        # The same head with a body that returns its input, so that scales and caps are applied.
        self._head = copy.copy(owner)
        self._given = _GivenHidden(self.body)
        self._head._modules = {
            name: self._given if module is self.body else module
            for name, module in owner._modules.items()
        }

    def _parts(self, model: Any) -> tuple[Any, Any]:
        """The module with the head, and its body."""
        return model, body_of(model)

    def _layers_of(self, model: Any) -> Any:
        """The module whose first pass the plan is from."""
        return body_of(model)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """The last hidden state of every token, normalized: `hidden_TC`."""
        bridged = BridgedStep(step, self.plan)
        return self.run_step(bridged, positions_T, input_ids=token_ids_T.unsqueeze(0))

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary for each row: `logits_RV`."""
        self._given.last_hidden_state = hidden_1RC = hidden_RC.unsqueeze(0)
        logits_RV: torch.Tensor = self._head(inputs_embeds=hidden_1RC, use_cache=False).logits[0]
        return logits_RV

    def run_step(self, step: BridgedStep, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the body on a step: `hidden_TC`."""
        if self.plan.by_rows:
            return self._run_rows(partial(self._run_row, inputs), step.step)
        with self.recurrence.over(step.step):
            output = self.body(
                position_ids=positions.unsqueeze(0), use_cache=False, **{STEP: step}, **inputs
            )
        hidden_TC: torch.Tensor = output.last_hidden_state[0]
        return hidden_TC

    def _run_rows(self, run: RunRow, step: PagedStep) -> torch.Tensor:
        """Run each row of a step by itself: `hidden_TC`."""
        if self._own_rows is not None:
            return self._own_rows.run(run, step, is_slow=self.recurrence.is_slow)
        return run_rows(run, step, self.plan)

    def _run_row(
        self, inputs: Mapping[str, torch.Tensor], tokens: slice, cache: Mapping[str, Any]
    ) -> Any:
        """Run the body on some tokens of a step, all of one row."""
        return self.body(**{name: x[:, tokens] for name, x in inputs.items()}, **cache)


def sketch(kind: Any, config: Any) -> Any:
    """A model of class `kind` on the meta device. Raises `WeightsError`."""
    with library_errors(f"config.json is not usable as {kind.__name__}"), torch.device("meta"):
        return kind(copy.deepcopy(config)).to(torch.bfloat16).eval()


def typed_sketch(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """As `sketch`, with the weights in float32 that a class loads so in a model of `dtype`."""
    with library_errors(f"config.json is not usable as {kind.__name__}"), torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
    if patterns := list(model._get_dtype_plan(dtype)):
        kept, *_ = build_glob_alternation(patterns)
        for name, parameter in model.named_parameters():
            if kept.search(name):
                parameter.data = parameter.data.float()
    return model


def body_of(model: Any) -> Any:
    """The part of a model that computes hidden states; a few classes misname theirs."""
    return model.model if model.base_model is model else model.base_model


class _GivenHidden(torch.nn.Module):
    """Replaces the body and returns the hidden states that it is given."""

    last_hidden_state: torch.Tensor | None = None

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self._attributes = vars(body)

    def forward(self, *_: object, **__: object) -> _GivenHidden:
        return self

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> Any:
        """The decoder of an old class is the body; it has no outputs, but the body's numbers."""
        return self if name == "decoder" else self._attributes.get(name)


def _counts_positions(model: Any) -> bool:
    """Whether a class counts positions from its padding, which differs from ours by an offset."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


def _stated_plan(config: Any, first: KvShape | None = None) -> CachePlan:
    """The plan in a configuration whose layers are all alike, all as the `first` if it is known."""
    num_heads = config.num_attention_heads
    shape = first or KvShape(
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )
    return CachePlan.of_shapes(dict.fromkeys(range(config.num_hidden_layers), shape))


@contextmanager
def absorbed(model: Any, plan: CachePlan, native: NativeKernels | None) -> Iterator[None]:
    """Pack a model's projections, and prepare its latent attention for compressed rows.

    After the block, in which the model is proved, its class can no longer expand them.
    """
    if plan.own is not None:  # a class may change its weights as it first runs
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device))
    expansions = [] if plan.by_rows else store_rows(model, ATTENTION)
    for expansion in expansions:
        expansion.take_weight(native)
    pack_linears(model, native)
    yield
    for expansion in expansions:
        expansion.drop_weight()


def pin_rope(model: torch.nn.Module, max_length: int) -> None:
    """Fix frequencies that would depend on the longest row; see `core.runtime.layers.rotary`."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            init: Any = ROPE_INIT_FUNCTIONS[kind]
            module.inv_freq, module.attention_scaling = init(module.config, None, max_length)
            module.rope_type = "pinned"  # type: ignore[assignment]  # no update rule has this name

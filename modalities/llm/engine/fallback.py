"""Runs any other causal language model of transformers on our paged cache.

Owns the bridge: transformers' attention interface on one side,
`core.runtime.kernels.paged_attention` on the other. The rows of a step go through the model as one
sequence with explicit positions; only attention knows where a row ends. Slower than our decoder,
with the same server around it.

No code of a checkpoint is ever executed: the class comes from the installed transformers by its
name, the configuration is reduced to that class's fields, weights are safetensors. A model that
does not fit a plain paged cache is refused: recurrent state, different layouts per layer, attention
with soft caps, sinks or biases, windows that only the mask has. A first pass compares its hidden
states with those of the unmodified class.

Shapes: T tokens, R rows of logits, H heads, K key-value heads, D head dim, C hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
    write_pages,
)
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.quiet import transformers_loading
from triptych.core.text.context_length import context_length
from triptych.core.weights.library_errors import library_errors

ATTENTION = "triptych_paged"
"""The name of our attention in transformers' registry."""

_OTHER_KINDS = (
    (
        {
            *modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        },
        "it recognizes speech, for which models of the Whisper family are served.",
    ),
    (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "it sees images, but not as the models do that are served: those have a text_config and"
        " a vision_config.",
    ),
    (
        modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
        "it is a speech model of no family in docs/speech_models.md.",
    ),
    (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "its decoder reads an encoder's states; those that chat here are decoders alone.",
    ),
)
"""Kinds of models in transformers that are not language models, and what to use instead."""
_LEGACY_FIELDS = frozenset(
    ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
)
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
NUM_PROVED_TOKENS = 16
_FIRST_PLAIN_ID = 5
"""After the likely padding ids, which some models do not count as positions."""
_LARGEST_DIFFERENCE = 0.1
"""Of a token's hidden state, relative to its norm: far above the effect of rounding, and far below
the effect of other positions or of attention to later tokens."""
_UNSUPPORTED_ATTENTION = ("softcap", "s_aux", "position_bias", "indices", "head_mask")


@dataclass(slots=True)
class _TracedStep(PagedStep):
    """A step that records which layers use the cache, and whether any has a window."""

    layers_seen: list[int] = field(default_factory=list)
    has_window: bool = False


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
    ) -> None:
        self._kind, self._config = _read(config)
        stated = context_length(lambda name: getattr(self._config, name, None))
        self.max_length: int = max_length or stated
        self.vocab_size: int = self._config.vocab_size
        self.dtype = dtype
        self._device = device
        self._native = native

    def weight_bytes(self) -> int:
        """Bytes of weights, counted on a model on the meta device."""
        with (
            library_errors(f"config.json is not usable as {self._kind.__name__}"),
            torch.device("meta"),
        ):
            sketch = self._kind(copy.deepcopy(self._config))
        num_values: int = sum(parameter.numel() for parameter in sketch.parameters())
        return num_values * self.dtype.itemsize

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """A generous estimate: transformers fuses nothing."""
        config = self._config
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        values: int = num_tokens * (12 * config.hidden_size + 4 * inner + self.max_length)
        return values * self.dtype.itemsize + logits_bytes(num_rows, self.vocab_size)

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The layout in the configuration; the first pass checks it."""
        config = self._config
        num_heads = config.num_attention_heads
        with library_errors(refusal("its layers are not alike")):
            return KvLayout(
                num_layers=config.num_hidden_layers,
                num_heads=num_heads,
                num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
                page_size=page_size,
                dtype=dtype,
            )

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> FallbackModel:
        """Load through transformers, check completeness, and try some tokens."""
        try:
            model, info = load_whole(self._kind, checkpoint, config=self._config, dtype=self.dtype)
        except RuntimeError as error:
            raise WeightsError("transformers cannot convert the weights of this model.") from error
        check_complete(info, checkpoint)
        pin_rope(model, self.max_length)
        pack_linears(model.to(self._device), self._native)
        built = FallbackModel(model.eval(), self.vocab_size)
        built.prove(self.kv_layout(NUM_PROVED_TOKENS, self.dtype), self._device)
        report(1.0)
        return built


class FallbackModel:
    """Implements `core.runtime.engine.token_runner.CausalModel` around a transformers model."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._body = model.base_model
        # The same head with a body that returns its input, so that scales and caps are applied.
        self._head = copy.copy(model)
        self._head._modules = dict(model._modules)
        self._given = _GivenHidden()
        self._head._modules[model.base_model_prefix] = self._given

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """The last hidden state of every token, normalized: `hidden_TC`."""
        return self._run(step, positions_T, input_ids=token_ids_T.unsqueeze(0))

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary for each row: `logits_RV`."""
        self._given.last_hidden_state = hidden_RC.unsqueeze(0)
        logits_RV: torch.Tensor = self._head(input_ids=None, use_cache=False).logits[0]
        return logits_RV

    def prove(self, layout: KvLayout, device: torch.device) -> None:
        """Run one page of tokens on our cache and with the unmodified class.

        Raises `WeightsError` unless every layer uses the cache once and both results agree.
        """
        num_tokens = layout.page_size
        positions = torch.arange(num_tokens, device=device)
        ids = (positions + _FIRST_PLAIN_ID) % self.vocab_size
        batch = AttentionBatch(
            page_table_BM=positions[:1].view(1, 1),
            context_lengths_B=positions[-1:] + 1,
            query_starts_B=positions[:1],
            write_slots_T=positions,
            num_decode_rows=0,
            host_query_lengths_B=np.array([num_tokens]),
            host_context_lengths_B=np.array([num_tokens]),
        )
        step = _TracedStep(KvCache(layout, 1, device), batch)
        with (
            torch.inference_mode(),
            library_errors(refusal("it does not run a step of several rows")),
        ):
            hidden_TC = self.forward(ids, positions, step)
            self.logits(hidden_TC[-1:])
            own_TC = self._on_its_own(ids)
        if sorted(step.layers_seen) != list(range(layout.num_layers)):
            raise WeightsError(refusal("not every layer of it is attention over its own cache"))
        if _states_window(self._body.config) and not step.has_window:
            raise WeightsError(refusal("its window is in its mask alone"))
        difference_T, own_T = (x.float().norm(dim=-1) for x in (hidden_TC - own_TC, own_TC))
        if 2 * (difference_T <= _LARGEST_DIFFERENCE * own_T).sum() < num_tokens:
            raise WeightsError(refusal("its own positions or masks change its results"))

    def _on_its_own(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The `hidden_TC` of transformers' own attention, masks and positions."""
        config = self._body.config
        config._attn_implementation = "eager"
        try:
            output = self._body(input_ids=ids_T.unsqueeze(0), use_cache=False)
        finally:
            config._attn_implementation = ATTENTION
        hidden_TC: torch.Tensor = output.last_hidden_state[0]
        return hidden_TC

    def _run(
        self, step: PagedStep, positions_T: torch.Tensor, **inputs: torch.Tensor
    ) -> torch.Tensor:
        output = self._body(
            position_ids=positions_T.unsqueeze(0), use_cache=False, triptych_step=step, **inputs
        )
        hidden_TC: torch.Tensor = output.last_hidden_state[0]
        return hidden_TC


class _GivenHidden(torch.nn.Module):
    """Replaces the body and returns the hidden states that it is given."""

    last_hidden_state: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> _GivenHidden:
        return self

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> Any:
        """All other outputs (caches, attentions, router logits) are `None`."""
        return None


def _attend(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface on our pages; the batch defines what a row sees.

    No mask is built for our attention, so any mask is the model's own.
    """
    step = options.get("triptych_step")
    if not isinstance(step, PagedStep):
        raise WeightsError(refusal("it does not hand its arguments down to attention"))
    is_biased = any(options.get(name) is not None for name in _UNSUPPORTED_ATTENTION)
    if is_biased or attention_mask is not None:
        raise WeightsError(refusal("its attention has soft caps, sinks or biases"))
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module has one
    if isinstance(step, _TracedStep):
        step.layers_seen.append(layer)
    layout = step.kv.layout
    shape = (layout.num_kv_heads, layout.head_dim)
    if not layer < layout.num_layers or k_TKD.shape[1:] != shape or v_TKD.shape[1:] != shape:
        raise WeightsError(refusal("its layers cache keys and values of different shapes"))
    pages = step.kv.pages[layer]
    write_pages(k_TKD, v_TKD, pages, step.batch)
    scale, window = options.get("scaling"), options.get("sliding_window")
    if isinstance(step, _TracedStep) and window:
        step.has_window = True
    out_THD = paged_attention(
        q_THD,
        pages,
        step.batch,
        AttentionRule(
            scale=1 / math.sqrt(layout.head_dim) if scale is None else scale, window=window
        ),
    )
    return out_THD.unsqueeze(0), None


# transformers looks attention up by name, and builds no mask for an implementation without a mask
# function.
transformers.AttentionInterface.register(ATTENTION, _attend)


def _read(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model class and its configuration, reduced to the fields that the class declares."""
    family = config.get("model_type")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or family not in CONFIG_MAPPING:
        raise WeightsError(_other_kind(family))
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    config_kind = CONFIG_MAPPING[family]
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    known = set(config_kind.__dataclass_fields__) | set(config_kind.attribute_map)
    fields = {k: v for k, v in config.items() if k in known | _LEGACY_FIELDS and k[0] != "_"}
    with library_errors(f"config.json is not usable as {family}"):
        parsed = config_kind(**fields, attn_implementation=ATTENTION)
    layer_types = set(getattr(parsed, "layer_types", None) or ())
    is_plain = layer_types <= {"full_attention", "sliding_attention"} and not kind._is_stateful
    if not is_plain or not kind._supports_attention_backend or config_kind.sub_configs:
        raise WeightsError(
            refusal("it keeps state of another kind, or has parts that are not text")
        )
    for name in _COUNTS:
        count = getattr(parsed, name, None)
        if not isinstance(count, int) or count < 1:
            raise WeightsError(f"config.json: {name} is {count!r}, not a number above 0.")
    return kind, parsed


def _states_window(config: Any) -> bool:
    """Whether a configuration has a window that is narrower than the context."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_used = getattr(config, "use_sliding_window", True) is not False
    is_used = is_used and (not kinds or "sliding_attention" in kinds)
    return bool(window) and is_used and window < config.max_position_embeddings


def _other_kind(family: Any) -> str:
    """The refusal of a model without a language model class in transformers."""
    for names, reason in _OTHER_KINDS:
        if family in names:
            return f"model_type {family!r} in config.json: {reason}"
    return (
        f"model_type {family!r} in config.json is no language model that transformers knows, and of"
        " no other kind that is served."
    )


def load_whole(kind: Any, checkpoint: Checkpoint, **given: Any) -> tuple[Any, Mapping[str, Any]]:
    """A checkpoint loaded as transformers' class `kind`, and a report for `check_complete`.

    Raises `WeightsError` where its weights are quantized.
    """
    if checkpoint.encoding:
        raise WeightsError(
            f"Its weights are quantized by {checkpoint.encoding}, which is read for the families of"
            " our own decoder alone (docs/models.md): take its bfloat16 files."
        )
    with transformers_loading():
        model, info = kind.from_pretrained(
            checkpoint.folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **given,
        )
    return model, info


def check_complete(info: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise `WeightsError` naming tensors that are missing, left over or of another shape."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            named = ", ".join(sorted(map(str, info[problem]))[:3])
            files = ", ".join(sorted({t.file for t in checkpoint.tensors.values()})[:3])
            raise WeightsError(f"{problem.replace('_', ' ')} in {files}: {named}.")


def pin_rope(model: torch.nn.Module, max_length: int) -> None:
    """Fix frequencies that would depend on the longest row; see `core.runtime.layers.rotary`."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            init: Any = ROPE_INIT_FUNCTIONS[kind]
            module.inv_freq, module.attention_scaling = init(module.config, None, max_length)
            module.rope_type = "pinned"  # type: ignore[assignment]  # no update rule has this name


def refusal(reason: str) -> str:
    """The message that refuses a model of transformers."""
    return f"This model cannot run on the paged cache: {reason}. Choose a model of another family."

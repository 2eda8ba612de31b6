"""Readers of single configuration fields from a GGUF file's metadata.

Owns the fields that several architectures share, and the forms of their rotary settings and layer
kinds in transformers. A reader that returns `None` leaves its field out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.quants import dequantize

from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.metadata import Metadata

Field = Callable[[Metadata], Any]
Fields = Mapping[str, Field]
Rope = dict[str, Any]
MAX_FACTORS = 4096
NULL = object()
"""The value that a reader returns for a null in the configuration."""
_ROPE_FACTORS = "rope_freqs.weight"
_UNROTATED = 1e10
"""A divisor of frequencies above which a pair is not rotated at all: files write 1e30."""
_YARN_FIELDS = MappingProxyType(
    {
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
        "rope.scaling.yarn_attn_factor": "attention_factor",
    }
)


def count(key: str, default: int | None = None) -> Field:
    """A whole number above 0."""
    return lambda m: m.count(key, default)


def count_if_there(key: str) -> Field:
    """A whole number above 0, where the file has one."""
    return lambda m: m.count(key) if m.has(key) else None


def count_or_null(key: str) -> Field:
    """A whole number above 0, or a null that stands in the configuration."""
    return lambda m: m.count(key) if m.has(key) else NULL


def number(key: str, default: float | None = None) -> Field:
    """A number above 0."""
    return lambda m: m.number(key, default)


def number_if_there(key: str) -> Field:
    """A number above 0, where the file has one."""
    return lambda m: m.number(key) if m.has(key) else None


def flag(key: str, default: bool) -> Field:
    """A truth value."""
    return lambda m: m.scalar(key, default)


def always(value: Any) -> Field:
    """The same value for every file."""
    return lambda m: value


def has_tensor(name: str) -> Field:
    """Whether any layer has the tensor `blk.{}.name`."""
    return lambda m: any(m.in_layers(name))


def rows_of(name: str) -> Field:
    """The number of rows of a tensor, where the file has it."""
    return lambda m: None if (tensor := m.tensor(name)) is None else tensor.shape[0]


def has_no(name: str) -> Field:
    """Whether the file lacks a tensor."""
    return lambda m: m.tensor(name) is None


def token_id(name: str) -> Field:
    """The id of a special token, or null: a class's own default may be none of the file's."""
    return lambda m: m.file.metadata.get(f"tokenizer.ggml.{name}_token_id", NULL)


def head_dim(m: Metadata) -> int:
    """The size of a head, by default an even share of the hidden size."""
    default = max(1, m.count("embedding_length") // m.count("attention.head_count"))
    return m.count("attention.key_length", default)


def mlp_size(m: Metadata) -> int:
    """The inner size of a dense layer; files of experts alone have none, and theirs is given."""
    if m.has("feed_forward_length"):
        return m.count("feed_forward_length")
    return m.count("expert_feed_forward_length")


def num_kv_heads(m: Metadata) -> int:
    """The number of heads of keys, by default that of queries."""
    return m.count("attention.head_count_kv", m.count("attention.head_count"))


def vocab_size(m: Metadata) -> int:
    """The number of embeddings."""
    embeddings = m.tensor("token_embd.weight")
    if embeddings is None:
        raise WeightsError(f"{m.file.name} has no tensor 'token_embd.weight'.")
    return embeddings.shape[0]


def num_dense_mlp(m: Metadata) -> int:
    """The number of leading layers without experts."""
    return m.count("leading_dense_block_count", 0)


def layer_kinds(
    default: int, *, near: str = "sliding_attention", far: str = "full_attention"
) -> Field:
    """The kind of every layer by its window: as the file lists them, or of each `default` the last.

    Without a window all are `far`.
    """

    def read(m: Metadata) -> list[str]:
        pattern = m.get("attention.sliding_window_pattern")
        if not isinstance(pattern, np.ndarray):
            period = pattern or default
            is_near = [layer % period < period - 1 for layer in range(m.num_layers)]
        else:
            is_near = m.layers("attention.sliding_window_pattern") or []
        return [near if each else far for each in is_near]

    return read


def windowed_kinds(default: int) -> Field:
    """As `layer_kinds`, but without any window all layers see everything."""
    kinds = layer_kinds(default)

    def read(m: Metadata) -> list[str]:
        has_window = m.has("attention.sliding_window")
        return kinds(m) if has_window else ["full_attention"] * m.num_layers

    return read


def kinds_by_tensor(**tensors: str) -> Field:
    """The kind of every layer by a tensor that it has: the first that fits."""

    def read(m: Metadata) -> list[str]:
        present = {kind: m.in_layers(name) for kind, name in tensors.items()}
        layers = range(m.num_layers)
        found = [next((k for k, has in present.items() if has[i]), "") for i in layers]
        if "" in found:
            raise WeightsError(
                f"{m.file.name} has no tensors of a known kind of layer {found.index('')}."
            )
        return found

    return read


def layers_with(m: Metadata, tensor: str) -> list[int]:
    """The numbers of the layers that have a tensor."""
    return [layer for layer, has in enumerate(m.in_layers(tensor)) if has]


def rope(m: Metadata) -> Rope:
    """The rotary settings of a model that rotates whole heads."""
    rotated = m.count("rope.dimension_count", head_dim(m))
    if rotated != head_dim(m):
        raise WeightsError(
            f"{m.file.name} rotates {rotated} of {head_dim(m)} values of a head, which"
            f" {m.architecture} does not."
        )
    return plain_rope(m)


def plain_rope(m: Metadata) -> Rope:
    """The rotary settings, whatever the part of a head that they are for."""
    theta = {"rope_type": "default", "rope_theta": m.number("rope.freq_base", 10_000.0)}
    return {**theta, **_scaling(m)}


def partial_rope(m: Metadata) -> Rope:
    """The rotary settings of a model that rotates a part of each head."""
    size = head_dim(m)
    rotated = m.count("rope.dimension_count", size)
    share = {} if rotated == size else {"partial_rotary_factor": rotated / size}
    return {**plain_rope(m), **share}


def rope_by_kind(near_theta: float | None = None) -> Field:
    """The rotary settings of layers with and without a window; only those without are scaled."""
    return lambda m: {"full_attention": rope(m), "sliding_attention": near_rope(m, near_theta)}


def near_rope(m: Metadata, theta: float | None) -> Rope:
    """The rotary settings of layers with a window; `theta` is used where the file has none.

    Without it the base is that of the other layers.
    """
    base = m.number("rope.freq_base", 10_000.0) if theta is None else theta
    return {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", base)}


def frequency_factors(m: Metadata, name: str) -> list[float]:
    """The divisors of frequencies in a tensor."""
    tensor = m.file.tensors[name]
    if len(tensor.shape) != 1 or tensor.kind.name != "F32" or tensor.shape[0] > MAX_FACTORS:
        raise WeightsError(f"Tensor {name!r} in {m.file.name} is not a short F32 vector.")
    factors: list[float] = dequantize(m.file.rows(tensor), tensor.kind).reshape(-1).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise WeightsError(f"Tensor {name!r} in {m.file.name} holds invalid factors.")
    return factors


def rotated_share(m: Metadata) -> float:
    """The share of pairs that are rotated, where the others have an enormous divisor."""
    factors = frequency_factors(m, _ROPE_FACTORS) if m.tensor(_ROPE_FACTORS) else [1.0]
    return sum(factor < _UNROTATED for factor in factors) / len(factors)


def _scaling(m: Metadata) -> Rope:
    """The scaling of rotary frequencies, in the form of `rope_parameters`."""
    if m.tensor(_ROPE_FACTORS) is not None:
        return _divided(m)
    if m.tensor("rope_factors_long.weight") is not None:
        return _long(m)
    kind = m.scalar("rope.scaling.type", "none")
    if kind in ("", "none"):
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": m.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        return _yarn(m)
    raise WeightsError(f"{m.file.name} has the unsupported rope scaling {kind!r:.40}.")


def _divided(m: Metadata) -> Rope:
    """Llama 3.1 and its relatives: each frequency has a divisor.

    `longrope` with equal short and long factors and no attention factor divides by exactly these.
    """
    factors = frequency_factors(m, _ROPE_FACTORS)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": m.count("context_length"),
    }


def _long(m: Metadata) -> Rope:
    length = m.count("rope.scaling.original_context_length", m.count("context_length"))
    scaling = {
        "rope_type": "longrope",
        "short_factor": frequency_factors(m, "rope_factors_short.weight"),
        "long_factor": frequency_factors(m, "rope_factors_long.weight"),
        "original_max_position_embeddings": length,
    }
    if m.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = m.number("rope.scaling.attn_factor")
    return scaling


def _yarn(m: Metadata) -> Rope:
    length = m.count("rope.scaling.original_context_length", m.count("context_length"))
    scaling: Rope = {
        "rope_type": "yarn",
        "factor": m.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": length,
    }
    present = {ours: m.number(key) for key, ours in _YARN_FIELDS.items() if m.has(key)}
    return scaling | present

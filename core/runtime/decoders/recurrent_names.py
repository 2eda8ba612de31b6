"""The places of a checkpoint's tensors in recurrent layers.

Owns the names and the order of rows in the files: ours has all of one kind together, since a
convolution reads them so. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from triptych.core.runtime.decoders.layer_names import LAYER_NAMES
from triptych.core.runtime.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mamba2 import Mamba2
from triptych.core.runtime.layers.recurrent import RecurrentLayer
from triptych.core.runtime.layers.shards import Shard

_SINGLE_PROJECTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "kimi_linear": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
        "olmo_hybrid": ("q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj"),
    }
)
"""Of gated delta nets: queries, keys, values, changes, decays, gates."""


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """The names of a layer's parts: `into` are the rows of its first projection, in our order.

    `later` are the projections of its low values, if there are any.
    """

    module: str
    into: Sequence[tuple[str, Shard]]
    out: str = "out_proj"
    convolution: str = "conv1d"
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    later: Mapping[str, Linear] = field(default_factory=dict)


def recurrent_names(layer: RecurrentLayer, naming: str) -> RecurrentNames:
    """The names of a layer of a family."""
    names, own = _names_of_kind(layer, naming), LAYER_NAMES[naming].recurrent
    return replace(names, module=own) if own else names


def _names_of_kind(layer: RecurrentLayer, naming: str) -> RecurrentNames:
    whole = [("in_proj", Shard.whole(layer.config.num_inputs))]
    if isinstance(layer, Mamba2):
        scan = {"A_log": layer.decay_log_H, "dt_bias": layer.dt_bias_X, "D": layer.skip_H}
        norm = {"norm.weight": layer.norm_O} if layer.config.has_norm else {}
        return RecurrentNames("mamba", whole, tensors=scan | norm)
    if not isinstance(layer, GatedDeltaNet):
        return RecurrentNames("conv", whole, convolution="conv")
    if naming in _SINGLE_PROJECTIONS:
        return _names_of_single(layer, naming)
    tensors = {
        "A_log": layer.decay_log_H,
        "dt_bias": layer.dt_bias_X,
        "norm.weight": layer.norm_E,
    }
    rows = _grouped_rows if naming == "qwen3_next" else _rows
    return RecurrentNames("linear_attn", rows(layer.config), tensors=tensors)


def _names_of_single(layer: GatedDeltaNet, naming: str) -> RecurrentNames:
    """The names where each kind of input has a projection of its own."""
    config: DeltaNetConfig = layer.config
    numbers = config.num_value_heads
    sizes = config.num_keys, config.num_keys, config.num_outputs, numbers
    rest = (config.num_decays, config.num_outputs)
    later: dict[str, Linear] = {}
    if layer.decays is not None and layer.gates is not None:
        rest = (config.low_rank,) * 2
        later = {"f_b_proj": layer.decays, "g_b_proj": layer.gates}
    parts = zip(_SINGLE_PROJECTIONS[naming], (*sizes, *rest), strict=True)
    decays = layer.decay_log_H.view(1, 1, -1, 1) if later else layer.decay_log_H
    return RecurrentNames(
        "linear_attn",
        [(name, Shard.whole(size)) for name, size in parts],
        out="o_proj",
        tensors={"A_log": decays, "dt_bias": layer.dt_bias_X, "o_norm.weight": layer.norm_E},
        later=later,
    )


def _rows(config: DeltaNetConfig) -> list[tuple[str, Shard]]:
    return [
        ("in_proj_qkv", Shard.whole(config.num_channels)),
        ("in_proj_b", Shard.whole(config.num_value_heads)),
        ("in_proj_a", Shard.whole(config.num_value_heads)),
        ("in_proj_z", Shard.whole(config.num_outputs)),
    ]


def _grouped_rows(config: DeltaNetConfig) -> list[tuple[str, Shard]]:
    """Rows of files that have, for each key head, its query and key and all that belongs to it."""
    repeats = config.num_value_heads // config.num_key_heads
    values = repeats * config.value_dim
    num_groups, sizes = config.num_key_heads, (config.key_dim,) * 2 + (values,) * 2
    with_gates = _parts("in_proj_qkvz", num_groups, sizes)
    numbers = _parts("in_proj_ba", num_groups, (repeats, repeats))
    return [*with_gates[:-num_groups], *numbers, *with_gates[-num_groups:]]


def _parts(name: str, num_groups: int, sizes: Sequence[int]) -> list[tuple[str, Shard]]:
    """All first parts of some groups, then all second ones, and so on."""
    width = sum(sizes)
    return [
        (name, Shard(group * width + sum(sizes[:part]), size, num_groups * width))
        for part, size in enumerate(sizes)
        for group in range(num_groups)
    ]

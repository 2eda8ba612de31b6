"""One rank's part of a decoder: its configuration when the model is divided.

Owns the choice of divided parts and its limits. Heads, features of MLPs and the vocabulary are
divided; norms and the residual stream are whole on every rank (Shoeybi et al. 2019,
arXiv:1909.08053). Of a mixture of experts a rank has some features of each expert, or some whole
experts (Lepikhin et al. 2020, arXiv:2006.16668).
"""

from __future__ import annotations

from dataclasses import replace

from triptych.core.errors import ConfigError
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.mixers import is_recurrent
from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.layers.shards import PLAIN_UNIT, even_shard, feature_shard


def divide(
    config: DecoderConfig,
    rank: int,
    num_ranks: int,
    *,
    by_experts: bool = False,
    unit: int = PLAIN_UNIT,
) -> DecoderConfig:
    """The configuration of `rank`; features are divided in whole units where possible.

    Raises `ConfigError` where there are too many ranks.
    """
    if any(map(is_recurrent, config.parts())):
        raise ConfigError(
            "--tensor-parallel-size: recurrent layers are not divided yet; leave it out."
        )
    layers = [layer for layer in config.attending if isinstance(layer, AttentionConfig)]
    if any(layer.head_norm and layer.head_norm.is_joint for layer in layers):
        raise ConfigError(
            "--tensor-parallel-size: this model's norms read the queries of all heads, so that"
            " heads cannot be divided; leave it out."
        )
    if any(config.gate_deviations):
        raise ConfigError(
            "--tensor-parallel-size: this model's sparse activations read all features of an MLP,"
            " so that features cannot be divided; leave it out."
        )
    most = min(
        config.intermediate_size,
        config.vocab_size,
        *(layer.num_heads for layer in config.attending),
    )
    if num_ranks > most:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: this model can be divided by {most} at most, with"
            " a query head for each; lower it."
        )
    sizes = (config.features_of(layer).total for layer in range(len(config.attention)))
    features = tuple(feature_shard(size, rank, num_ranks, unit) for size in sizes)
    widest = max(shard.length for shard in features)
    moe = config.moe
    if moe is not None:
        moe = _divide_experts(moe, rank, num_ranks, by_experts=by_experts, unit=unit)
    return replace(
        config,
        attention=tuple(layer.of_rank(rank, num_ranks) for layer in config.attending),
        intermediate_size=widest,
        features=features,
        vocabulary=even_shard(config.vocab_size, rank, num_ranks),
        moe=moe,
    )


def _divide_experts(
    moe: MoeConfig, rank: int, num_ranks: int, *, by_experts: bool, unit: int
) -> MoeConfig:
    most = moe.num_experts if by_experts else moe.intermediate_size
    most = min(most, moe.shared_size or most)
    if num_ranks > most:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: this model's experts can be divided by {most} at"
            " most; lower it."
        )
    if moe.shared_size:
        moe = replace(moe, shared_features=feature_shard(moe.shared_size, rank, num_ranks, unit))
    if by_experts:
        return replace(moe, experts=even_shard(moe.num_experts, rank, num_ranks))
    return replace(moe, features=feature_shard(moe.intermediate_size, rank, num_ranks, unit))

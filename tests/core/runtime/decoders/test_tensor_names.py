"""Where a decoder's tensors go: rows that are held in blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from triptych.core.runtime.decoders.projection_targets import ProjectionTarget
from triptych.core.runtime.decoders.tensor_names import decoder_targets, is_unused
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.weights.encoding import WeightEncoding
from triptych.core.weights.layout import TensorInfo

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    norm_eps=1e-5,
    attention=(AttentionConfig(hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32),),
    rope=RopeConfig(num_rotated_dims=32, max_length=80, trained_length=80),
    has_tied_embeddings=True,
)


@dataclass
class Ones:
    """A source of tensors of ones."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        return torch.ones(self.tensors[name].shape)


def test_with_rows_in_blocks_nothing_plain_is_allocated() -> None:
    decoder = Decoder(CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    source, num_bytes = Ones(), 0
    for target in decoder_targets(decoder, encoding=WeightEncoding("q8_0")):
        source.tensors[target.name] = TensorInfo(target.name, target.shape, "F32", "x")
        target.fill(source)
        num_bytes += target.num_bytes(4) if len(target.shape) == 2 else 0
    assert sum(linear.num_bytes for linear in decoder.linears()) == num_bytes


def test_weights_of_an_indexs_heads_stay_plain() -> None:
    latent = LatentConfig(
        hidden_size=64,
        num_heads=2,
        nope_dim=32,
        rope_dim=32,
        value_dim=32,
        kv_rank=32,
        q_rank=32,
        scale=1.0,
        index=KeyIndexConfig(num_heads=2, head_dim=32, num_chosen=8),
    )
    config = replace(CONFIG, attention=(latent,))
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("meta"))
    is_plain = {
        target.name.split(".")[-2]: target.format is None
        for target in decoder_targets(decoder, encoding=WeightEncoding("q8_0"))
        if isinstance(target, ProjectionTarget) and ".indexer." in target.name
    }
    assert is_plain == {"wk": False, "wq_b": False, "weights_proj": True}


def test_tensors_of_no_decoder_are_known_by_their_names() -> None:
    unused = ("model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "mtp.fc.weight")
    unused += ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight")
    assert all(map(is_unused, unused))
    assert not is_unused("model.layers.0.mtp.weight")

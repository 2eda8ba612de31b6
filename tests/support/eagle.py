"""EAGLE-3 heads of random weights, one that agrees with its model, and the published forward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from triptych.core.runtime.decoders.families.table import read_decoder_config
from triptych.core.runtime.decoders.heads.eagle import EagleConfig, EagleHead
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.hidden_rows import HiddenRows

Tensors = dict[str, torch.Tensor]


def names_of(config: EagleConfig) -> list[str]:
    """The tensors of a head's checkpoint."""
    layer = [
        *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
        *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
        *("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"),
    ]
    own = {"embed_tokens.weight": config.embeds, "lm_head.weight": config.projects}
    own |= {"d2t": config.is_mapped}
    optional = [name for name, has in own.items() if has]
    return ["fc.weight", "norm.weight", *(f"midlayer.{name}" for name in layer), *optional]


def random_tensors(config: EagleConfig, num_target_tokens: int) -> Tensors:
    """Random weights; the tokens that it drafts are spread over the target's."""
    source, sketch = torch.Generator().manual_seed(5), EagleHead(config, **META)
    tensors = {}
    for target in sketch.targets(names_of(config)):
        values = torch.randn(target.shape, generator=source)
        is_matrix = len(target.shape) == 2
        tensors[target.name] = values * target.shape[-1] ** -0.5 if is_matrix else 1 + 0.2 * values
    if config.is_mapped:
        chosen = torch.randperm(num_target_tokens, generator=source)[: config.vocab_size]
        tensors["d2t"] = chosen.sort().values - torch.arange(config.vocab_size)
    return tensors


META = {"dtype": torch.float32, "device": torch.device("meta")}


def join_head(
    config: EagleConfig,
    tensors: Tensors,
    decoder: Decoder,
    layers: Sequence[int],
    native: NativeKernels | None,
) -> EagleHead:
    """A head with these weights, for whose sake the decoder keeps rows."""
    head = EagleHead(config, dtype=decoder.dtype, device=torch.device("cpu"))
    for target in head.targets(names_of(config)):
        target.into.copy_(tensors[target.name])  # type: ignore[attr-defined]
    head.join(decoder, native)
    decoder.hidden_rows = HiddenRows(layers, head.fuse)
    return head


def eagle_config(decoder: Decoder, vocab_size: int = 0, **special: bool) -> EagleConfig:
    """A head of the decoder's size; with `vocab_size`, of so many of its tokens."""
    own = decoder.config
    flags = {"embeds": False, "projects": bool(vocab_size), "is_mapped": bool(vocab_size)}
    return EagleConfig(
        layer=replace(own, attention=own.attention[:1], has_tied_embeddings=False),
        target_size=own.hidden_size,
        vocab_size=vocab_size or own.vocab_size,
        **{"has_fuse_bias": False, "has_normed_residual": False, **flags, **special},
    )


def agreeing_tensors(config: EagleConfig) -> Tensors:
    """A head that says what follows its token, from any text before it.

    Each token attends to itself, by keys and values that are its embedding, which goes on to the
    projection: as in a model whose layers change little.
    """
    tensors = {name: torch.zeros_like(x) for name, x in random_tensors(config, 1).items()}
    size, attention = config.layer.hidden_size, config.layer.attention[0]
    same = torch.eye(size)
    for name in "qkv":
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        weight[:, :size] = same * (1.0 if name == "v" else 8.0)
    tensors["midlayer.self_attn.o_proj.weight"].copy_(same)
    assert attention.num_heads == attention.num_kv_heads
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = torch.ones_like(tensor)
    return tensors


HEAD = {
    "vocab_size": 64,
    "draft_vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def save_head(folder: Path, **special: Any) -> None:
    """A head with random weights, of the configuration `HEAD` with what is special."""
    fields = HEAD | {"target_hidden_size": 32} | special
    layer = read_decoder_config(fields | {"architectures": ["LlamaForCausalLM"]})
    kind = EagleConfig(
        layer=layer,
        target_size=fields["target_hidden_size"],
        vocab_size=40,
        is_mapped=True,
        embeds=True,
        projects=True,
        has_fuse_bias=False,
        has_normed_residual=False,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = random_tensors(kind, fields["vocab_size"])
    assert tensors.keys() == set(names_of(kind))
    tensors["t2d"] = torch.zeros(fields["vocab_size"], dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")


class PublishedEagle:
    """The forward of vLLM's and SGLang's heads over whole texts, in float32."""

    def __init__(self, config: EagleConfig, tensors: Tensors, embeddings_VC: torch.Tensor) -> None:
        self._config, self._tensors, self._embeddings_VC = config, tensors, embeddings_VC

    def fuse(self, states_TC: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of positions."""
        return torch.cat([*states_TC], 1) @ self._tensors["fc.weight"].t()

    def hidden(self, token_ids: Sequence[int], rows_TW: torch.Tensor) -> torch.Tensor:
        """The hidden states of tokens, each of which follows the position of its row."""
        embedded = self._norm("midlayer.input_layernorm", self._embeddings_VC[[*token_ids]])
        normed = self._norm("midlayer.hidden_norm", rows_TW)
        residual = normed if self._config.has_normed_residual else rows_TW
        x = residual + self._attend(torch.cat([embedded, normed], 1))
        y = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (self._of(f"mlp.{name}_proj", y) for name in ("gate", "up"))
        return x + self._of("mlp.down_proj", silu(gate) * up)

    def logits(self, hidden_RC: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The scores of the target's tokens."""
        scores = self._norm("norm", hidden_RC) @ self._tensors["lm_head.weight"].t()
        whole = torch.full((len(scores), num_tokens), -1e30)
        whole[:, torch.arange(scores.shape[1]) + self._tensors["d2t"]] = scores
        return whole

    def _attend(self, x_TX: torch.Tensor) -> torch.Tensor:
        layer = self._config.layer.attention[0]
        shape = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
        q, k, v = (
            self._of(f"self_attn.{name}_proj", x_TX).unflatten(1, (heads, -1)).transpose(0, 1)
            for name, heads in shape.items()
        )
        q, k = self._rotated(q), self._rotated(k)
        groups = layer.num_heads // layer.num_kv_heads
        k, v = (each.repeat_interleave(groups, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) * layer.head_dim**-0.5
        scores += torch.full_like(scores, -torch.inf).triu(1)
        return self._of("self_attn.o_proj", (scores.softmax(2) @ v).transpose(0, 1).flatten(1))

    def _rotated(self, x_HTD: torch.Tensor) -> torch.Tensor:
        size = x_HTD.shape[2]
        frequencies = self._config.layer.rope.theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.arange(x_HTD.shape[1])[:, None] * frequencies.repeat(2)
        first, second = x_HTD.chunk(2, 2)
        return x_HTD * angles.cos() + torch.cat([-second, first], 2) * angles.sin()

    def _of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"midlayer.{name}.weight"].t()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.layer.norm_eps)
        return x * scale * self._tensors[f"{name}.weight"]

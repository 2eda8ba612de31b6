"""Tiny models of transformers, and GGUF files made from them by the rules of llama.cpp's converter.

The names of tensors are those of the `gguf` library's tables; the changes of values are written
here in the forward direction, after llama.cpp's conversion scripts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from safetensors.torch import load_file

from support.weight_files import tiny_metadata, write_gguf

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 272, 32, 64, 4, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
Tensors = Iterable[tuple[str, torch.Tensor]]
Change = Callable[[str, torch.Tensor, Any], Tensors]


@dataclass(frozen=True)
class Family:
    """A class, its fields, and what its files hold besides the common metadata."""

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    extra: Mapping[str, list[float]] = field(default_factory=dict)

    def build(self) -> Any:
        """The model with random weights; none of them is alike."""
        kind = getattr(transformers, self.model)
        torch.manual_seed(3)
        model = kind(kind.config_class(**{**SIZES, **self.fields})).float()
        with torch.no_grad():
            for value in model.state_dict().values():
                if value.is_floating_point():
                    value.add_(torch.randn_like(value) * 0.1)
        return model


_CONVERTERS_NAMES = {
    r"e_score_correction_bias": "e_score_correction.bias",
    r"expert_bias": "expert_bias.bias",
    r"model\.(layers\.\d+\.feed_forward\.experts\.w)": r"\1",
    r"backbone\.(layers\.\d+)\.mixer\.experts": r"model.\1.mlp.experts",
}
"""Names that the converter changes before it looks them up."""


def rotated(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`LlamaModel.permute`."""
    if name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def divided_pairs(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`Glm4Model.normal_to_neox`."""
    if name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        heads = tensor.unflatten(0, (-1, config.head_dim))
        size = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        parts = [heads[:, :size:2], heads[:, 1:size:2], heads[:, size:]]
        tensor = torch.cat(parts, dim=1).flatten(0, 1)
    yield name, tensor


def plus_one(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield name, tensor + name.endswith("norm.weight")


def plus_one_but_inner(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield name, tensor + (name.endswith("norm.weight") and "linear_attn" not in name)


def halved_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """The stacked gate and up of experts, one after the other in rows."""
    stem = name.removesuffix(".weight")
    if stem.endswith(("experts.gate_up_proj", "input_linear")):
        gate, up = tensor.chunk(2, dim=-2)
        shared = "mlp" if not config.num_local_experts else "mlp.shared_experts"
        place = stem.replace("shared_mlp.input_linear", f"{shared}.gate_up_proj")
        place = place.replace("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj")
        yield place.replace("gate_up_proj", "gate_proj.weight"), gate
        yield place.replace("gate_up_proj", "up_proj.weight"), up
        return
    if not config.num_local_experts:
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    name = name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
    name = name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")
    yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), tensor


def transposed_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Llama 4's experts, whose inputs are the rows."""
    is_stack = "experts." in name and tensor.dim() == 3
    yield from halved_experts(name, tensor.transpose(1, 2) if is_stack else tensor, config)


def interleaved_experts(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """The experts of gpt-oss: gate and up alternate."""
    name = name.replace("sinks", "sinks.weight")
    if "experts." not in name:
        yield name, tensor
        return
    ending = ".bias" if name.endswith("_bias") else ".weight"
    stem, tensor = name.removesuffix("_bias"), tensor if ending == ".bias" else tensor.mT
    if stem.endswith("down_proj"):
        yield stem + ending, tensor
        return
    gate, up = (tensor[:, start::2] for start in (0, 1))
    yield stem.replace("gate_up_proj", "gate_proj") + ending, gate
    yield stem.replace("gate_up_proj", "up_proj") + ending, up


def state_space(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    yield name.replace(".dt_bias", ".dt_proj.bias"), tensor


def mamba(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Mamba 2 has single columns, and a norm of groups."""
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    for place, value in state_space(name, tensor, config):
        if place.endswith((".A_log", ".D")):
            yield place, value[:, None]
        elif place.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            yield place, value.view(groups, -1)
        else:
            yield place, value


def tiled_value_heads(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """`_LinearAttentionVReorderBase`: the first value head of every key head, then the second."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim if re.search("qkv|_z|conv1d|out_proj", name) else 1
    first = 2 * keys * config.linear_key_head_dim if re.search("qkv|conv1d", name) else 0
    if "linear_attn" not in name or "norm" in name:
        yield name, tensor
        return
    if "out_proj" in name:
        tensor = tensor.t()
    order = torch.arange(values * size).view(keys, -1, size).transpose(0, 1).flatten()
    tensor = torch.cat((tensor[:first], tensor[first:][order]))
    yield name, tensor.t() if "out_proj" in name else tensor


def by_kind_of_row(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Qwen3-Next: all queries, keys and values, and the gates apart."""
    if "in_proj_qkvz" not in name:
        yield name, tensor
        return
    key = config.linear_key_head_dim
    value = config.linear_value_head_dim * config.linear_num_value_heads
    value //= config.linear_num_key_heads
    heads = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
    *parts, gate = (each.flatten(0, 1) for each in heads.split([key, key, value, value], dim=1))
    block = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1", name)
    yield f"{block}.attn_qkv.weight", torch.cat(parts)
    yield f"{block}.attn_gate.weight", gate


def latent(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if "kv_b_proj" not in name:
        yield name, tensor
        return
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
    yield name.replace("kv_b", "v_b"), values


def kimi(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    if name.endswith("conv1d.weight"):
        tensor = tensor.reshape(1, -1, 1, tensor.shape[-1])
    elif name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    name = as_published(name).replace(".dt_bias", ".dt_proj.bias")
    yield from latent(name, tensor, config)


def as_published(name: str) -> str:
    """A name of Kimi Linear, as transformers saves it."""
    return re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)


def gemma4(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    block = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1", name)
    if name.endswith("router.scale"):
        yield f"{block}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{block}.ffn_down_exps.scale", tensor
    elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def gemma3n(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield (f"{name}.weight" if name.endswith("_scale") else name), tensor


def write_model(
    family: Family, architecture: str, folder: Path, *, kind: Kind = Kind.F32
) -> tuple[Path, Any]:
    """Write a GGUF file of a family's model; returns it and the model.

    Matrices of whole blocks have the type `kind`.
    """
    model = family.build()
    model.save_pretrained(folder / "model")
    stored = _stacked(load_file(folder / "model" / "model.safetensors"))
    for change in family.changes:
        stored = dict(
            pair for name, tensor in stored.items() for pair in change(name, tensor, model.config)
        )
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    tensors = {_name(arch, name): tensor.numpy() for name, tensor in stored.items()}
    tensors |= {name: torch.tensor(values).numpy() for name, values in family.extra.items()}
    metadata = _metadata(architecture, model.config)
    metadata |= {f"{architecture}.{key}": value for key, value in family.metadata.items()}
    block = GGML_QUANT_SIZES[kind][0]
    blocks = {
        name: (kind, quantize(values, kind))
        for name, values in tensors.items()
        if values.ndim > 1 and values.shape[-1] % block == 0 and block > 1
    }
    file = folder / "tiny.gguf"
    write_gguf(file, architecture, metadata=metadata, tensors=tensors, blocks=blocks)
    return file, model


def _name(arch: MODEL_ARCH, name: str) -> str:
    """The name in the library's tables."""
    if name.startswith("blk."):
        return name
    for own, theirs in _CONVERTERS_NAMES.items():
        name = re.sub(own, theirs, name)
    known = get_tensor_name_map(arch, 8).get_name(name, try_suffixes=(".weight", ".bias"))
    assert known is not None, name
    return known


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with those of single experts, or of numbered matrices, as stacks."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*(?:experts|altup\w*_projections))\.(\d+)\.(.*)", name)
        place = f"{match[1]}.{match[3]}" if match else name
        stacks.setdefault(place, {})[int(match[2]) if match else -1] = tensor
    return {
        name: parts[-1] if -1 in parts else torch.stack([parts[n] for n in range(len(parts))])
        for name, parts in stacks.items()
    }


def _metadata(architecture: str, config: Any) -> dict[str, Any]:
    """The keys that the converter writes for every model."""
    fields = config.to_dict()
    ropes = fields.get("rope_parameters") or {}
    head, inner = fields.get("head_dim"), fields.get("intermediate_size")
    keys = {
        "block_count": len(fields.get("layers_block_type") or ()) or fields["num_hidden_layers"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": inner[0] if isinstance(inner, list) else inner,
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": fields.get("sliding_window"),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": ropes.get("full_attention", ropes).get("rope_theta"),
        "vocab_size": VOCAB,
    }
    given = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {**tiny_metadata(architecture), **given}

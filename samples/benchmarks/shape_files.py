"""GGUF files in the shapes of published models, with fewer and narrower layers and random weights.

Owns names, sizes and types of tensors, and the keys that describe them. Knows nothing of decoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.tensors.quantize import quantize_blocks

VOCABULARY = 32_768
Keys = dict[str, int | float | str | list[bool] | list[int]]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
BLOCKS = "q8_0"
"""The type of matrices, but for experts in MXFP4."""


@dataclass(frozen=True)
class Shape:
    """A GGUF file: its architecture, the keys below it, and its tensors with their types.

    `encoding` is the value of --quantization-encoding that keeps the blocks.
    """

    architecture: str
    keys: Keys
    tensors: Tensors
    encoding: str = BLOCKS


def gpt_oss(width: int = 512, num_layers: int = 6, num_experts: int = 32) -> Shape:
    """gpt-oss-20b with a sixth of its width and a quarter of its layers: 32 experts, 4 for a token.

    Types are those of its published file: experts in MXFP4, other matrices in Q8_0.
    """
    heads, kv_heads, size = 16, 2, 64
    keys: Keys = {
        **common_keys(width, num_layers, heads=heads, kv_heads=kv_heads, head_size=size),
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_count": num_experts,
        "expert_used_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.freq_base": 150_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
    projections = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    layer: Tensors = {
        **{f"attn_{name}.weight": (BLOCKS, (size, width)) for name, size in projections.items()},
        **{f"attn_{name}.bias": ("f32", (size,)) for name, size in projections.items()},
        "attn_norm.weight": ("f32", (width,)),
        "attn_output.weight": (BLOCKS, (width, heads * size)),
        "attn_output.bias": ("f32", (width,)),
        "attn_sinks.weight": ("f32", (heads,)),
        "post_attention_norm.weight": ("f32", (width,)),
        "ffn_gate_inp.weight": ("f32", (num_experts, width)),
        "ffn_gate_inp.bias": ("f32", (num_experts,)),
    }
    for part in ("gate", "up", "down"):
        layer[f"ffn_{part}_exps.weight"] = ("mxfp4", (num_experts, width, width))
        layer[f"ffn_{part}_exps.bias"] = ("f32", (num_experts, width))
    output: Tensors = {"output.weight": (BLOCKS, (VOCABULARY, width))}
    return Shape("gpt-oss", keys, {**output, **around([layer] * num_layers, width)}, "mxfp4")


def gemma4(width: int = 768, num_layers: int = 15, inner: int = 2560, inputs: int = 128) -> Shape:
    """Gemma-4-E2B with half of its width and layers: heads of 256 and 512, windows, shared caches.

    Each layer has a table of `inputs` features for each word; the last five read others' caches.
    """
    heads, near, far, num_shared = 4, 256, 512, 5
    is_near = [(index + 1) % 5 != 0 for index in range(num_layers)]
    keys: Keys = {
        **common_keys(width, num_layers, heads=heads, kv_heads=1, head_size=far),
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": is_near,
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": inputs,
        "feed_forward_length": inner,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": far,
        "rope.dimension_count_swa": near,
        "final_logit_softcapping": 30.0,
    }

    def layer(index: int) -> Tensors:
        size = near if is_near[index] else far
        own = {"k": (size, width), "v": (size, width)} if index < num_layers - num_shared else {}
        matrices = {
            **{f"attn_{name}": dims for name, dims in own.items()},
            "attn_q": (heads * size, width),
            "attn_output": (width, heads * size),
            **mlp(width, inner),
            "inp_gate": (inputs, width),
            "proj": (width, inputs),
        }
        wide = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        head_norms = ("attn_q_norm", "attn_k_norm") if own else ("attn_q_norm",)
        vectors = dict.fromkeys(wide, width) | dict.fromkeys(head_norms, size)
        return weights(matrices, {**vectors, "layer_output_scale": 1})

    tables = {
        "per_layer_token_embd": (VOCABULARY, num_layers * inputs),
        "per_layer_model_proj": (num_layers * inputs, width),
    }
    outer = weights(tables, {"per_layer_proj_norm": inputs, "rope_freqs": far // 2})
    layers = [layer(index) for index in range(num_layers)]
    return Shape("gemma4", keys, {**outer, **around(layers, width)})


def qwen35(width: int = 768, num_layers: int = 12, inner: int = 2560) -> Shape:
    """Qwen3.5-0.8B with three quarters of its width and half of its layers.

    Three of four layers are gated delta nets, whose state is 16 matrices of 128 by 128.
    """
    heads, kv_heads, size = 8, 2, 256
    state_heads, state_size, kernel = 16, 128, 4
    states = state_heads * state_size
    keys: Keys = {
        **common_keys(width, num_layers, heads=heads, kv_heads=kv_heads, head_size=size),
        "feed_forward_length": inner,
        "full_attention_interval": 4,
        "rope.freq_base": 1e7,
        "rope.dimension_count": size // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state_size,
        "ssm.group_count": state_heads,
        "ssm.time_step_rank": state_heads,
        "ssm.inner_size": states,
    }
    norms = {"attn_norm": width, "post_attention_norm": width}
    attention = {
        "attn_q": (2 * heads * size, width),  # the second half gates the output
        "attn_k": (kv_heads * size, width),
        "attn_v": (kv_heads * size, width),
        "attn_output": (width, heads * size),
    }
    delta_net = {
        "attn_qkv": (3 * states, width),
        "attn_gate": (states, width),
        "ssm_alpha": (state_heads, width),
        "ssm_beta": (state_heads, width),
        "ssm_out": (width, states),
    }
    full = weights(
        {**attention, **mlp(width, inner)}, {**norms, "attn_q_norm": size, "attn_k_norm": size}
    )
    recurrent: Tensors = {
        **weights({**delta_net, **mlp(width, inner)}, {**norms, "ssm_norm": state_size}),
        "ssm_conv1d.weight": ("f32", (3 * states, kernel)),
        "ssm_a": ("f32", (state_heads,)),
        "ssm_dt.bias": ("f32", (state_heads,)),
    }
    layers = [full if index % 4 == 3 else recurrent for index in range(num_layers)]
    return Shape("qwen35", keys, around(layers, width))


SHAPES: Mapping[str, Callable[[], Shape]] = {
    "gpt-oss": gpt_oss,
    "gemma4": gemma4,
    "qwen35": qwen35,
}


def common_keys(width: int, num_layers: int, *, heads: int, kv_heads: int, head_size: int) -> Keys:
    """The keys that all architectures have."""
    return {
        "context_length": 131_072,
        "embedding_length": width,
        "block_count": num_layers,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


def mlp(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a gated MLP."""
    return {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}


def weights(matrices: Mapping[str, tuple[int, ...]], vectors: Mapping[str, int]) -> Tensors:
    """Matrices in blocks and vectors of float32, under the names that files have."""
    blocks: Tensors = {f"{name}.weight": (BLOCKS, dims) for name, dims in matrices.items()}
    return blocks | {f"{name}.weight": ("f32", (size,)) for name, size in vectors.items()}


def around(layers: list[Tensors], width: int) -> Tensors:
    """The tensors of a model: the layers', the vocabulary's and the last norm."""
    tensors = weights({"token_embd": (VOCABULARY, width)}, {"output_norm": width})
    for index, layer in enumerate(layers):
        tensors |= {f"blk.{index}.{name}": each for name, each in layer.items()}
    return tensors


def write_shape(shape: Shape, target: Path) -> int:
    """Write the file; returns the number of its weights."""
    writer = GGUFWriter(target, shape.architecture)
    for name, value in shape.keys.items():
        write_key = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        write_key[type(value)](f"{shape.architecture}.{name}", value)
    write_vocabulary(writer)
    generator, total = torch.Generator().manual_seed(0), 0
    for name, (kind, dims) in shape.tensors.items():
        values = values_of(name, dims, generator)
        total += values.numel()
        if kind == "f32":
            writer.add_tensor(name, values.numpy())
            continue
        blocks = quantize_blocks(values.view(-1, dims[-1]), FORMATS[kind]).blocks_OB
        raw = blocks.view(*dims[:-1], -1).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def values_of(name: str, dims: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random values of the size that the tensor has in trained models."""
    if name == "rope_freqs.weight":  # a quarter of the pairs is rotated
        return torch.where(torch.arange(dims[0]) < dims[0] // 4, 1.0, 1e30)
    if name.endswith("layer_output_scale.weight"):
        return torch.full(dims, 0.9)
    if name.endswith("ssm_a"):  # minus a rate of decay
        return -torch.empty(dims).uniform_(1, 16, generator=generator)
    values = torch.randn(dims, generator=generator) * math.sqrt(1 / dims[-1])
    return values + 1 if "norm" in name else values


def write_vocabulary(writer: GGUFWriter) -> None:
    """Write a tokenizer of bytes, and of words that no text has."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    merged = letters[0] + letters[1]
    writer.add_token_list([*letters, merged, *(f"<{n}>" for n in range(VOCABULARY - 257))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(VOCABULARY - 1)

"""Hugging Face config and tensor names for a GGUF file.

Owns the tables for the dense decoder families (llama, which smollm and mistral share, qwen2,
qwen3). Reads metadata and tensor infos, never tensor data except rope factors.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; row order of q and k:
`LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from gguf.quants import dequantize

from triptych.core.errors import WeightsError
from triptych.core.weights.gguf_header import GgufFile

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The config, the GGUF tensor behind each Hugging Face name, and the heads to reorder."""

    config: Mapping[str, Any]
    tensors: Mapping[str, str]
    num_heads_of: Mapping[str, int]
    head_dim: int

    def row_order(self, name: str) -> np.ndarray[Any, np.dtype[np.intp]] | None:
        """Rows of the file's tensor in Hugging Face order; `None` where they already are.

        llama.cpp interleaves the two halves of each rotated head: row (head, pair, half) there is
        row (head, half, pair) here.
        """
        num_heads = self.num_heads_of.get(name)
        if num_heads is None:
            return None
        rows = np.arange(num_heads * self.head_dim)
        return rows.reshape(num_heads, self.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class _Metadata:
    """Typed look-ups under one architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ("llama", "qwen2", "qwen3"):
            raise WeightsError(
                f"{file.name} holds the architecture {self.architecture[:40]!r}; GGUF files of"
                " llama (also smollm, mistral), qwen2 and qwen3 are supported."
            )

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def scalar(self, key: str, default: T) -> T:
        return self.file.scalar(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise WeightsError(f"{self.file.name} has an invalid {key}: {value!r:.40}.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, float | int) or not math.isfinite(value) or value <= 0:
            raise WeightsError(f"{self.file.name} has an invalid {key}: {value!r:.40}.")
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06


def describe(file: GgufFile, dtype: str) -> GgufModel:
    """Map `file` to Hugging Face names; its tensors will have the safetensors type `dtype`.

    Raises `WeightsError` for architectures and tensors outside the tables.
    """
    metadata = _Metadata(file)
    config = _config(metadata, dtype)
    tensors = _tensor_names(file, config["num_hidden_layers"])
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
    num_heads_of = {}
    if metadata.architecture == "llama":
        for name in tensors:
            if ".q_proj." in name:
                num_heads_of[name] = config["num_attention_heads"]
            elif ".k_proj." in name:
                num_heads_of[name] = config["num_key_value_heads"]
    model = GgufModel(config, tensors, num_heads_of, config["head_dim"])
    _check_heads(file, model)
    return model


def _config(metadata: _Metadata, dtype: str) -> dict[str, Any]:
    file = metadata.file
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    window = metadata.scalar("attention.sliding_window", 0)
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise WeightsError(f"{file.name} has no tensor 'token_embd.weight'.")
    head_dim = metadata.integer("attention.key_length", max(1, hidden_size // num_heads))
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise WeightsError(f"{file.name} rotates only a part of each head, which is not supported.")
    model_type = metadata.architecture
    if window and model_type == "llama":
        model_type = "mistral"  # llama.cpp has one name for both; only mistral has windows
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "dtype": _DTYPE_NAMES[dtype],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if window:
        config |= {"sliding_window": metadata.integer("attention.sliding_window")}
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """The rope scaling in the form of Hugging Face configs.

    Frequency factors (Llama 3.1 and later) are stored as a tensor of divisors; `longrope` with
    equal short and long factors and no attention factor divides by exactly these.
    """
    if _ROPE_FACTORS in metadata.file.tensors:
        factors = _rope_factors(metadata.file)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.integer("context_length"),
        }
    kind = metadata.scalar("rope.scaling.type", "none")
    if kind in ("", "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise WeightsError(f"{metadata.file.name} has the unsupported rope scaling {kind!r:.40}.")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": metadata.number("rope.scaling.factor", 1.0),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        )
        for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{key}") is not None:
                scaling[ours] = metadata.number(f"rope.scaling.{key}", 1.0)
    return scaling


def _rope_factors(file: GgufFile) -> list[float]:
    tensor = file.tensors[_ROPE_FACTORS]
    if len(tensor.shape) != 1 or tensor.kind.name != "F32" or tensor.shape[0] > 4096:
        raise WeightsError(f"Tensor {_ROPE_FACTORS!r} in {file.name} is not a short F32 vector.")
    factors: list[float] = dequantize(file.rows(tensor), tensor.kind).reshape(-1).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise WeightsError(f"Tensor {_ROPE_FACTORS!r} in {file.name} holds invalid factors.")
    return factors


def _tensor_names(file: GgufFile, num_layers: int) -> dict[str, str]:
    """The GGUF tensor behind each Hugging Face name, in the file's order."""
    names = {}
    for source in file.tensors:
        if source == _ROPE_FACTORS:
            continue
        stem, _, suffix = source.rpartition(".")
        if match := _LAYER.fullmatch(source):
            layer, stem, suffix = match.groups()
            target = _LAYER_NAMES.get(stem) if int(layer) < num_layers else None
            target = target and f"model.layers.{int(layer)}.{target}"
        else:
            target = _GLOBAL_NAMES.get(stem) if suffix == "weight" else None
        if target is None:
            raise WeightsError(f"Tensor {source!r} in {file.name} has an unknown name.")
        if f"{target}.{suffix}" in names:
            raise WeightsError(f"Tensor {source!r} in {file.name} appears twice.")
        names[f"{target}.{suffix}"] = source
    return names


def _check_heads(file: GgufFile, model: GgufModel) -> None:
    for name, num_heads in model.num_heads_of.items():
        shape = file.tensors[model.tensors[name]].shape
        if shape[0] != num_heads * model.head_dim or model.head_dim % 2:
            raise WeightsError(
                f"Tensor {model.tensors[name]!r} in {file.name} has {shape[0]} rows, not"
                f" {num_heads} heads of {model.head_dim}."
            )

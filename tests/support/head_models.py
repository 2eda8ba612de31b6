"""Tiny models with a layer that predicts further tokens, as files have it, and a DFlash draft.

A model is saved with one layer more than its configuration has: the last one is the predicting
one, under the name that the family's files give it. What such a head computes is written out here
with transformers' own layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, scaled_dot_product_attention

from support.decoder_families import LATENT, TINY
from support.gguf_families import FAMILIES
from support.gguf_models import write_model
from support.mixture_families import GROUPED, MIXTURES
from support.recurrent_models import ALL, RECURRENT
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep

PAGE = 4
_SLIDING, _FULL = "sliding_attention", "full_attention"
_IN_LAYER = ("", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_APART = ("layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_ERNIE = ("mtp_block.0.", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", "")
_NORMS = ("enorm", "hnorm", "shared_head_norm")
_MIMO = ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


@dataclass(frozen=True)
class _Layout:
    """Transformers' family and fields, and the names: a prefix, and what follows it."""

    family: str
    fields: dict[str, Any]
    prefix: str
    names: tuple[str, str, str, str, str]
    num_layers: int = 2
    joins_hidden_first: bool = False
    architecture: str = ""


def _small(extra: dict[str, Any]) -> dict[str, Any]:
    return TINY | {"tie_word_embeddings": False} | extra


def _hybrid(name: str) -> dict[str, Any]:
    kinds = ["linear_attention", _FULL, _FULL]
    return ALL | RECURRENT[name][1] | {"layer_types": kinds}


LAYOUTS = {
    "deepseek-v3": _Layout(
        "DeepseekV3",
        _small(LATENT | GROUPED | {"attention_bias": False}),
        "model.layers.2.",
        _IN_LAYER,
    ),
    "deepseek-v3.2": _Layout(
        "DeepseekV32",
        _small(LATENT | GROUPED | {"attention_bias": False})
        | {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 16},
        "model.layers.2.",
        _IN_LAYER,
    ),
    "glm-4.5": _Layout("Glm4Moe", _small(MIXTURES["glm-4.5"][1]), "model.layers.2.", _IN_LAYER),
    "qwen3.5": _Layout("Qwen3_5Text", _hybrid("qwen3.5"), "mtp.", _APART),
    "qwen3-next": _Layout("Qwen3Next", _hybrid("qwen3-next"), "mtp.", _APART),
    "exaone": _Layout(
        "ExaoneMoe",
        _small(MIXTURES["exaone"][1])
        | {
            "layer_types": [_SLIDING, _FULL, _FULL],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        "mtp.",
        _APART,
    ),
    "ernie-4.5": _Layout(
        "Ernie4_5_Moe",
        _small(MIXTURES["ernie-4.5"][1]) | {"moe_layer_end_index": 1, "num_key_value_heads": 2},
        "model.",
        _ERNIE,
    ),
    "mimo": _Layout(
        "Qwen2",
        _small({}),
        "model.mtp_layers.0.",
        _MIMO,
        joins_hidden_first=True,
        architecture="MiMoForCausalLM",
    ),
}


@dataclass
class Mtp:
    """The layer of a saved model, as transformers' modules compute it."""

    model: Any
    embedding_norm: Any
    hidden_norm: Any
    projection_OI: torch.Tensor
    final_norm: Any
    joins_hidden_first: bool

    @torch.inference_mode()
    def __call__(self, ids_T: torch.Tensor, hidden_TC: torch.Tensor) -> torch.Tensor:
        """The result for tokens `ids_T`, each after the position of its hidden state."""
        body, num_tokens = self.model.model, len(ids_T)
        pair = [self.embedding_norm(body.embed_tokens(ids_T)), self.hidden_norm(hidden_TC)]
        pair = pair[::-1] if self.joins_hidden_first else pair
        x_1TC = linear(torch.cat(pair, dim=1), self.projection_OI)[None]
        positions = torch.arange(num_tokens)[None]
        mask = torch.full((1, 1, num_tokens, num_tokens), -torch.inf, dtype=x_1TC.dtype).triu(1)
        found = body.layers[-1](
            x_1TC,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=body.rotary_emb(x_1TC, positions),
        )
        found = found[0] if isinstance(found, tuple) else found
        result: torch.Tensor = self.final_norm(found[0])
        return result

    @torch.inference_mode()
    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """The scores of the vocabulary."""
        scores: torch.Tensor = self.model.lm_head(hidden_TC)
        return scores


def save_mtp(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Mtp:
    """Save a model with its predicting layer."""
    layout = LAYOUTS[name]
    fields = layout.fields | {"num_hidden_layers": layout.num_layers + 1}
    config = getattr(transformers, f"{layout.family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(5)
    model = getattr(transformers, f"{layout.family.removesuffix('Text')}ForCausalLM")(config)
    model = model.eval().to(dtype)
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder)
    size = config.hidden_size
    norms = [_norm_like(model.model.norm, size) for _ in range(3)]
    if name == "ernie-4.5":
        norms[2] = model.model.norm
    projection_OI = (torch.randn(size, 2 * size) * (2 * size) ** -0.5).to(dtype)
    mtp = Mtp(model, *norms[:2], projection_OI, norms[2], layout.joins_hidden_first)
    _rename(folder, layout, mtp)
    return mtp


def _norm_like(norm: Any, size: int) -> Any:
    """Another norm of the same kind, with other weights."""
    made = type(norm)(size, eps=getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
    with torch.no_grad():
        made.weight += 0.2 * torch.randn(size)
    return made.to(norm.weight.dtype)


def _rename(folder: Path, layout: _Layout, mtp: Mtp) -> None:
    layer, embedding_norm, hidden_norm, projection, final_norm = layout.names
    old = f"model.layers.{layout.num_layers}."
    tensors = {
        f"{layout.prefix}{layer}{key.removeprefix(old)}" if key.startswith(old) else key: tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors[f"{layout.prefix}{embedding_norm}.weight"] = mtp.embedding_norm.weight.detach()
    tensors[f"{layout.prefix}{hidden_norm}.weight"] = mtp.hidden_norm.weight.detach()
    tensors[f"{layout.prefix}{projection}.weight"] = mtp.projection_OI
    if projection == "eh_proj":  # files of these families have copies of what layers share
        tensors[f"{layout.prefix}embed_tokens.weight"] = mtp.model.model.embed_tokens.weight.clone()
        tensors[f"{layout.prefix}shared_head.head.weight"] = mtp.model.lm_head.weight.clone()
    if final_norm:
        tensors[f"{layout.prefix}{final_norm}.weight"] = mtp.final_norm.weight.detach()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layout.num_layers, "num_nextn_predict_layers": 1}
    if layout.architecture:
        config["architectures"] = [layout.architecture]
    (folder / "config.json").write_text(json.dumps(config))


def write_predicting(name: str, folder: Path) -> tuple[Path, Mtp]:
    """Write a GGUF file of a model, whose fifth layer predicts a further token."""
    family, is_qwen = FAMILIES[name], name == "qwen35"
    fields = {**family.fields, "num_hidden_layers": 5}
    if is_qwen:
        fields["layer_types"] = [*fields["layer_types"], _FULL]
    body = family.build().model
    size, norm = body.config.hidden_size, body.norm
    torch.manual_seed(5)
    norms = [_norm_like(norm, size) for _ in range(3)]
    projection_OI = torch.randn(size, 2 * size) * (2 * size) ** -0.5
    values = {
        **{part: norm.weight.detach() + is_qwen for part, norm in zip(_NORMS, norms, strict=True)},
        "eh_proj": projection_OI,
        "shared_head_head": projection_OI,
    }
    extra = {f"blk.4.nextn.{part}.weight": value.tolist() for part, value in values.items()}
    metadata = {**family.metadata, "nextn_predict_layers": 1}
    changed = replace(family, fields=fields, metadata=metadata, extra=extra)
    file, model = write_model(changed, name, folder)
    model.eval().set_attn_implementation("eager")
    return file, Mtp(model, norms[0], norms[1], projection_OI, norms[2], joins_hidden_first=False)


DRAFT = {
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 5,
    "dflash_config": {"mask_token_id": 198, "target_layer_ids": [0, 2]},
    "architectures": ["DFlashDraftModel"],
}


@dataclass
class DFlash:
    """A draft, written out with the parts of transformers' Qwen3."""

    model: Any
    projection_OI: torch.Tensor
    hidden_norm: Any

    @torch.inference_mode()
    def context(self, states_TC: list[torch.Tensor]) -> torch.Tensor:
        """The rows of the target's states."""
        rows_TC: torch.Tensor = self.hidden_norm(
            linear(torch.cat(states_TC, 1), self.projection_OI)
        )
        return rows_TC

    @torch.inference_mode()
    def __call__(self, rows_TC: torch.Tensor, x_BC: torch.Tensor) -> torch.Tensor:
        """The result for a block of embedded tokens after a context."""
        body, num_rows = self.model.model, len(rows_TC)
        positions = torch.arange(num_rows + len(x_BC))[None]
        cos_1TD, sin_1TD = body.rotary_emb(x_BC[None], positions)
        for layer in body.layers:
            own, normed_BC = layer.self_attn, layer.input_layernorm(x_BC)
            both_TC, size = torch.cat([rows_TC, normed_BC]), own.head_dim
            q_HBD = own.q_norm(own.q_proj(normed_BC).unflatten(1, (-1, size))).transpose(0, 1)
            k_KTD = own.k_norm(own.k_proj(both_TC).unflatten(1, (-1, size))).transpose(0, 1)
            v_KTD = own.v_proj(both_TC).unflatten(1, (-1, size)).transpose(0, 1)
            q_HBD = _turned(q_HBD, cos_1TD[:, num_rows:], sin_1TD[:, num_rows:])
            k_KTD = _turned(k_KTD, cos_1TD, sin_1TD)
            mixed = scaled_dot_product_attention(
                q_HBD[None], k_KTD[None], v_KTD[None], enable_gqa=True
            )
            x_BC = x_BC + own.o_proj(mixed[0].transpose(0, 1).flatten(1))
            x_BC = x_BC + layer.mlp(layer.post_attention_layernorm(x_BC))
        result: torch.Tensor = body.norm(x_BC)
        return result


def _turned(x_HTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_HTD.chunk(2, dim=2)
    return x_HTD * cos + torch.cat([-second, first], dim=2) * sin


def save_dflash(folder: Path, dtype: torch.dtype = torch.float32, **edits: Any) -> DFlash:
    """Save a draft for a model of `TINY`'s sizes."""
    config = transformers.Qwen3Config(**TINY | {"num_hidden_layers": 2})
    torch.manual_seed(6)
    model = transformers.Qwen3ForCausalLM(config).eval().to(dtype)
    model.save_pretrained(folder)
    size = config.hidden_size
    projection_OI = (torch.randn(size, 2 * size) * (2 * size) ** -0.5).to(dtype)
    draft = DFlash(model, projection_OI, _norm_like(model.model.norm, size))
    tensors = {
        key.removeprefix("model."): tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
        if "embed_tokens" not in key and "lm_head" not in key
    }
    tensors |= {"fc.weight": projection_OI, "hidden_norm.weight": draft.hidden_norm.weight.detach()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | DRAFT | edits
    (folder / "config.json").write_text(json.dumps(fields))
    return draft


_ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def let_layers_add_nothing(folder: Path, *, has_one_token: bool = False) -> None:
    """Change the weights so that a predicting layer and its model agree.

    What follows a token then depends on that token alone; with `has_one_token`, on nothing.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(_ADDED) or "experts.down_proj" in name:
            tensor.zero_()
        elif name.endswith(("norm.weight", "norm_hidden.weight", "norm_embedding.weight")):
            tensor.fill_(0.0 if "mtp.norm.weight" in tensors else 1.0)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor.copy_(torch.eye(*tensor.shape))
        elif has_one_token and name.endswith("embed_tokens.weight"):
            tensor.copy_(tensor[:1].clone().expand_as(tensor))
    save_file(tensors, file, metadata={"format": "pt"})


class Cells:
    """A head's cells for one text, and steps over them."""

    def __init__(
        self, layout: KvLayout, native: NativeKernels | None, device: torch.device | None = None
    ) -> None:
        device = device or torch.device("cpu")
        self.kv = KvCache(layout, 8, device, native)
        for tensor in self.kv.tensors:
            tensor[:-1].fill_(torch.nan)
        self._device = device
        self._pages = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])

    def step(
        self, start: int, num_tokens: int, contexts: list[int] | None = None
    ) -> tuple[torch.Tensor, PagedStep]:
        """Positions from `start` on, as a chunk, or as rows of one token with `contexts`."""
        positions_T = torch.arange(start, start + num_tokens)
        lengths = [num_tokens] if contexts is None else [1] * num_tokens
        contexts = contexts or [start + num_tokens]
        batch = AttentionBatch(
            page_table_BM=self._pages.expand(len(lengths), -1).contiguous().to(self._device),
            context_lengths_B=torch.tensor(contexts, device=self._device),
            query_starts_B=torch.arange(len(lengths), device=self._device),
            write_slots_T=(self._pages[positions_T // PAGE] * PAGE + positions_T % PAGE).to(
                self._device
            ),
            num_decode_rows=lengths.count(1),
            host_query_lengths_B=np.array(lengths),
            host_context_lengths_B=np.array(contexts),
            native=self.kv.native,
        )
        return positions_T.to(self._device), PagedStep(self.kv, batch)

"""Tiny models of diffusers' classes with random weights, and what a row tells each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from triptych.modalities.diffusion.families.family import Conditioning

TEXT, WIDTH = 5, 16  # tokens of a prompt, and their width


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """`rows`: shapes of a row's tensors; integer tensors and constants in `fixed`."""

    config: Mapping[str, Any]
    sample: tuple[int, ...]
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Callable[[], Mapping[str, Any]] = dict


def ids(height: int, width: int, axes: int = 3) -> Tensor:
    grid = torch.zeros(height, width, axes)
    grid[..., axes - 2] = torch.arange(height)[:, None]
    grid[..., axes - 1] = torch.arange(width)[None]
    return grid.view(-1, axes)


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_TEXT = {"encoder_hidden_states": (TEXT, WIDTH)}
_PACKED = {**_HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 2}
_PACKED |= {"joint_attention_dim": WIDTH, "axes_dims_rope": [2, 2, 4]}
_MASK = torch.ones(TEXT, dtype=torch.long)
_WAN = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": WIDTH,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
_HUNYUAN = {
    **_HEADS,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": WIDTH,
    "rope_axes_dim": (2, 2, 4),
}
_COGVIDEO = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": WIDTH,
    "num_layers": 3,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 5,
    "max_text_seq_length": TEXT,
    "use_rotary_positional_embeddings": False,
}


def _flux_ids(axes: int = 3) -> dict[str, Tensor]:
    return {"img_ids": ids(4, 4, axes), "txt_ids": torch.zeros(TEXT, axes)}


TINY: dict[str, Tiny] = {
    "FluxTransformer2DModel": Tiny(
        config={**_PACKED, "pooled_projection_dim": 12, "guidance_embeds": True},
        sample=(16, 4),
        rows={**_TEXT, "pooled_projections": (12,), "guidance": ()},
        shared=_flux_ids,
    ),
    "Flux2Transformer2DModel": Tiny(
        config={**_PACKED, "axes_dims_rope": [2, 2, 2, 2], "timestep_guidance_channels": 16},
        sample=(16, 4),
        rows={**_TEXT, "guidance": ()},
        shared=lambda: _flux_ids(4),
    ),
    "ChromaTransformer2DModel": Tiny(
        config={
            **_PACKED,
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        sample=(16, 4),
        rows=_TEXT,
        shared=_flux_ids,
    ),
    "BriaTransformer2DModel": Tiny(config=_PACKED, sample=(16, 4), rows=_TEXT, shared=_flux_ids),
    "LongCatImageTransformer2DModel": Tiny(
        config=_PACKED, sample=(16, 4), rows=_TEXT, shared=_flux_ids
    ),
    "OvisImageTransformer2DModel": Tiny(
        config={**_PACKED, "out_channels": 4}, sample=(16, 4), rows=_TEXT, shared=_flux_ids
    ),
    "QwenImageTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "joint_attention_dim": WIDTH,
            "axes_dims_rope": (2, 2, 4),
        },
        sample=(16, 16),
        rows=_TEXT,
        shared=lambda: {"img_shapes": [[(1, 4, 4)]]},
    ),
    "SD3Transformer2DModel": Tiny(
        config={
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 12,
            "pos_embed_max_size": 8,
        },
        sample=(4, 8, 8),
        rows={**_TEXT, "pooled_projections": (12,)},
    ),
    "AuraFlowTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        sample=(4, 8, 8),
        rows=_TEXT,
    ),
    "PixArtTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "num_layers": 3,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": WIDTH,
            "use_additional_conditions": False,
        },
        sample=(4, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK},
        shared=lambda: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "DiTTransformer2DModel": Tiny(
        config={**_HEADS, "num_layers": 3, "sample_size": 8, "num_embeds_ada_norm": 10},
        sample=(4, 8, 8),
        fixed={"class_labels": torch.tensor(3)},
    ),
    "SanaTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": WIDTH,
            "sample_size": 8,
        },
        sample=(4, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK},
    ),
    "SanaVideoTransformer3DModel": Tiny(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": WIDTH,
            "sample_size": 8,
            "rope_max_seq_len": 32,
        },
        sample=(4, 2, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK},
    ),
    "ZImageTransformer2DModel": Tiny(
        config={
            "in_channels": 4,
            "dim": 16,
            "n_layers": 3,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": WIDTH,
            "axes_dims": [2, 2, 4],
            "axes_lens": [600, 32, 32],
        },
        sample=(4, 1, 8, 8),
        rows={"cap_feats": (TEXT, WIDTH)},
    ),
    "Lumina2Transformer2DModel": Tiny(
        config={
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 16,
            "num_layers": 3,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (300, 32, 32),
            "cap_feat_dim": WIDTH,
        },
        sample=(4, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK.bool()},
    ),
    "LuminaNextDiT2DModel": Tiny(
        config={
            "sample_size": 8,
            "hidden_size": 16,
            "num_layers": 3,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "cross_attention_dim": WIDTH,
        },
        sample=(4, 8, 8),
        rows=_TEXT,
        fixed={"encoder_mask": _MASK},
        shared=lambda: {
            "image_rotary_emb": diffusers.models.embeddings.get_2d_rotary_pos_embed_lumina(
                8, 16, 16
            ),
            "cross_attention_kwargs": {},
        },
    ),
    "HiDreamImageTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "caption_channels": [WIDTH, WIDTH],
            "text_emb_dim": 12,
            "num_routed_experts": 2,
            "num_activated_experts": 1,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (16, 16),
            "llama_layers": [0, 1, 1, 0],
            "force_inference_output": True,
        },
        sample=(4, 8, 8),
        rows={
            "encoder_hidden_states_t5": (TEXT, WIDTH),
            "encoder_hidden_states_llama3": (4, TEXT, WIDTH),
            "pooled_embeds": (12,),
        },
    ),
    "WanTransformer3DModel": Tiny(config=_WAN, sample=(4, 1, 8, 8), rows=_TEXT),
    "WanVACETransformer3DModel": Tiny(
        config={**_WAN, "vace_layers": [0, 2], "vace_in_channels": 6},
        sample=(4, 1, 8, 8),
        rows={**_TEXT, "control_hidden_states": (6, 1, 8, 8)},
    ),
    "SkyReelsV2Transformer3DModel": Tiny(config=_WAN, sample=(4, 1, 8, 8), rows=_TEXT),
    "ChronoEditTransformer3DModel": Tiny(
        config={**_WAN, "rope_temporal_skip_len": 2}, sample=(4, 1, 8, 8), rows=_TEXT
    ),
    "CogView3PlusTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        sample=(4, 8, 8),
        rows={**_TEXT, "original_size": (2,), "target_size": (2,), "crop_coords": (2,)},
    ),
    "CogView4Transformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "sample_size": 8,
            "rope_axes_dim": (8, 8),
        },
        sample=(4, 8, 8),
        rows={**_TEXT, "original_size": (2,), "target_size": (2,), "crop_coords": (2,)},
    ),
    "CogVideoXTransformer3DModel": Tiny(config=_COGVIDEO, sample=(2, 4, 4, 4), rows=_TEXT),
    "ConsisIDTransformer3DModel": Tiny(config=_COGVIDEO, sample=(2, 4, 4, 4), rows=_TEXT),
    "EasyAnimateTransformer3DModel": Tiny(
        config={
            **_HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 3,
            "mmdit_layers": 3,
            "time_embed_dim": 8,
            "text_embed_dim": WIDTH,
            "sample_width": 8,
            "sample_height": 8,
        },
        sample=(4, 1, 8, 8),
        rows=_TEXT,
    ),
    "HunyuanDiT2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 16,
            "num_layers": 4,
            "cross_attention_dim": WIDTH,
            "cross_attention_dim_t5": WIDTH,
            "pooled_projection_dim": 4,
            "text_len": TEXT,
            "text_len_t5": TEXT,
            "activation_fn": "gelu-approximate",
        },
        sample=(4, 8, 8),
        rows={**_TEXT, "encoder_hidden_states_t5": (TEXT, WIDTH), "image_meta_size": (6,)},
        fixed={
            "text_embedding_mask": _MASK,
            "text_embedding_mask_t5": _MASK,
            "style": torch.tensor(0),
        },
        shared=lambda: {
            "image_rotary_emb": [
                torch.from_numpy(part) if not torch.is_tensor(part) else part
                for part in diffusers.models.embeddings.get_2d_rotary_pos_embed(
                    8, ((0, 0), (4, 4)), (4, 4), output_type="pt"
                )
            ]
        },
    ),
    "HunyuanVideoTransformer3DModel": Tiny(
        config={
            **_HUNYUAN,
            "in_channels": 4,
            "out_channels": 4,
            "pooled_projection_dim": 8,
            "guidance_embeds": True,
        },
        sample=(4, 1, 8, 8),
        rows={**_TEXT, "pooled_projections": (8,), "guidance": ()},
        fixed={"encoder_attention_mask": _MASK},
    ),
    "HunyuanVideo15Transformer3DModel": Tiny(
        config={
            **{k: v for k, v in _HUNYUAN.items() if k != "num_single_layers"},
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "text_embed_2_dim": 6,
            "image_embed_dim": 6,
            "task_type": "t2v",
        },
        sample=(4, 1, 8, 8),
        rows={**_TEXT, "encoder_hidden_states_2": (3, 6)},
        fixed={
            "encoder_attention_mask": _MASK.bool(),
            "encoder_attention_mask_2": torch.ones(3, dtype=torch.bool),
            "image_embeds": torch.zeros(2, 6),
        },
    ),
    "HunyuanImageTransformer2DModel": Tiny(
        config={**_HUNYUAN, "in_channels": 4, "out_channels": 4, "rope_axes_dim": (4, 4)},
        sample=(4, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK},
    ),
    "LTXVideoTransformer3DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "num_layers": 3,
            "caption_channels": WIDTH,
        },
        sample=(16, 4),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK},
        shared=lambda: {"num_frames": 1, "height": 4, "width": 4},
    ),
    "MochiTransformer3DModel": Tiny(
        config={
            **_HEADS,
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 4,
            "max_sequence_length": TEXT,
        },
        sample=(4, 1, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK.bool()},
    ),
    "AllegroTransformer3DModel": Tiny(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "cross_attention_dim": 24,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 1,
            "caption_channels": WIDTH,
        },
        sample=(4, 1, 8, 8),
        rows=_TEXT,
    ),
    "LatteTransformer3DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": WIDTH,
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "video_length": 2,
            "attention_bias": True,
            "activation_fn": "gelu-approximate",
        },
        sample=(4, 2, 8, 8),
        rows=_TEXT,
    ),
    "CosmosTransformer3DModel": Tiny(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "mlp_ratio": 2,
            "text_embed_dim": WIDTH,
            "adaln_lora_dim": 4,
            "max_size": (4, 16, 16),
            "concat_padding_mask": False,
        },
        sample=(4, 1, 8, 8),
        rows=_TEXT,
    ),
    "PRXTransformer2DModel": Tiny(
        config={
            "in_channels": 4,
            "context_in_dim": WIDTH,
            "hidden_size": 16,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 3,
            "axes_dim": [4, 4],
        },
        sample=(4, 8, 8),
        rows=_TEXT,
    ),
    "StableAudioDiTModel": Tiny(
        config={
            **_HEADS,
            "attention_head_dim": 16,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 32,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": WIDTH,
        },
        sample=(4, 8),
        rows={**_TEXT, "global_hidden_states": (1, 8)},
        shared=lambda: {
            "rotary_embedding": diffusers.models.embeddings.get_1d_rotary_pos_embed(
                8, 9, use_real=True, repeat_interleave_real=False
            )
        },
    ),
    "GlmImageTransformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "prior_vq_quantizer_codebook_size": 16,
        },
        sample=(4, 8, 8),
        rows={**_TEXT, "target_size": (2,), "crop_coords": (2,)},
        fixed={
            "prior_token_id": torch.arange(16),
            "prior_token_drop": torch.zeros(16, dtype=torch.bool),
        },
    ),
    "Krea2Transformer2DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "num_layers": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "timestep_embed_dim": 16,
            "text_hidden_dim": WIDTH,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 24,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (2, 2, 4),
        },
        sample=(16, 4),
        rows={"encoder_hidden_states": (TEXT, 2, WIDTH)},
        shared=lambda: {"position_ids": torch.cat([torch.zeros(TEXT, 3), ids(4, 4)])},
    ),
    "ErnieImageTransformer2DModel": Tiny(
        config={
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_layers": 3,
            "ffn_hidden_size": 24,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": WIDTH,
            "rope_axes_dim": (4, 2, 2),
        },
        sample=(4, 4, 4),
        rows={"text_bth": (TEXT, WIDTH)},
        fixed={"text_lens": torch.tensor(TEXT)},
    ),
    "JoyImageEditTransformer3DModel": Tiny(
        config={
            "in_channels": 4,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "text_dim": WIDTH,
            "mlp_width_ratio": 2.0,
            "num_layers": 3,
            "rope_dim_list": [2, 2, 4],
        },
        sample=(1, 4, 1, 8, 8),
        rows=_TEXT,
    ),
    "Kandinsky5Transformer3DModel": Tiny(
        config={
            "in_text_dim": WIDTH,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 16,
            "ff_dim": 24,
            "num_text_blocks": 1,
            "num_visual_blocks": 3,
            "axes_dims": (4, 2, 2),
        },
        sample=(1, 8, 8, 4),
        rows={**_TEXT, "pooled_projections": (8,)},
        shared=lambda: {
            "visual_rope_pos": [torch.arange(1), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(TEXT),
        },
    ),
    "MotifVideoTransformer3DModel": Tiny(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "text_embed_dim": WIDTH,
            "rope_axes_dim": (2, 2, 4),
        },
        sample=(4, 1, 8, 8),
        rows=_TEXT,
        fixed={"encoder_attention_mask": _MASK.bool()},
    ),
    "UNet2DConditionModel": Tiny(
        config={
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 4,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 2,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 32,
        },
        sample=(4, 8, 8),
        rows={
            **_TEXT,
            "added_cond_kwargs.text_embeds": (8,),
            "added_cond_kwargs.time_ids": (6,),
        },
    ),
    "UNet2DModel": Tiny(
        config={
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "norm_num_groups": 4,
        },
        sample=(4, 8, 8),
    ),
    "UNet3DConditionModel": Tiny(
        config={
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "norm_num_groups": 4,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 4,
        },
        sample=(4, 2, 8, 8),
        rows=_TEXT,
    ),
}


def build(name: str) -> nn.Module:
    """The model, its weights drawn anew so that none is zero."""
    torch.manual_seed(0)
    module: nn.Module = getattr(diffusers, name)(**TINY[name].config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
            weight.copy_(torch.randn_like(weight) * scale)
    return module


def sample_of(name: str, seed: int) -> Tensor:
    return torch.randn(TINY[name].sample, generator=torch.Generator().manual_seed(seed))


def conditioning_of(name: str, seed: int) -> Conditioning:
    generator = torch.Generator().manual_seed(100 + seed)
    tiny = TINY[name]
    drawn = {arg: torch.randn(shape, generator=generator) for arg, shape in tiny.rows.items()}
    return Conditioning(rows={**drawn, **tiny.fixed}, shared=tiny.shared())

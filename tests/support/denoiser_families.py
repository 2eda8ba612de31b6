"""Tiny random models of diffusers' classes, and the inputs of a row for each of them."""

from __future__ import annotations

import diffusers
import torch
from torch import Tensor, nn

from support.tiny_denoisers import HEADS, MASK, PACKED, PROMPT, TEXT, WAN, WIDTH, Tiny, flux_ids
from triptych.modalities.diffusion.engine.families.model import Conditioning

TINY: dict[str, Tiny] = {
    "FluxTransformer2DModel": Tiny(
        config={**PACKED, "pooled_projection_dim": 12, "guidance_embeds": True},
        sample=(16, 4),
        rows={**PROMPT, "pooled_projections": (12,), "guidance": ()},
        shared=flux_ids,
    ),
    "Flux2Transformer2DModel": Tiny(
        config={**PACKED, "axes_dims_rope": [2, 2, 2, 2], "timestep_guidance_channels": 16},
        sample=(16, 4),
        rows={**PROMPT, "guidance": ()},
        shared=lambda: flux_ids(4),
    ),
    "ChromaTransformer2DModel": Tiny(
        config={
            **PACKED,
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        sample=(16, 4),
        rows=PROMPT,
        shared=flux_ids,
    ),
    "LongCatImageTransformer2DModel": Tiny(
        config={**PACKED, "pooled_projection_dim": 12},
        sample=(16, 4),
        rows=PROMPT,
        shared=flux_ids,
    ),
    "ErnieImageTransformer2DModel": Tiny(
        config={
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_layers": 3,
            "ffn_hidden_size": 24,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": WIDTH,
            "rope_axes_dim": (4, 2, 2),
        },
        sample=(4, 8, 8),
        rows={"text_bth": (TEXT, WIDTH)},
        fixed={"text_lens": torch.tensor(TEXT)},
    ),
    "HunyuanImageTransformer2DModel": Tiny(
        config={
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": WIDTH,
            "text_embed_2_dim": 12,
            "rope_axes_dim": (4, 4),
        },
        sample=(4, 8, 8),
        rows={**PROMPT, "encoder_hidden_states_2": (3, 12)},
        fixed={
            "encoder_attention_mask": MASK,
            "encoder_attention_mask_2": torch.tensor([1, 1, 0]),
        },
    ),
    "GlmImageTransformer2DModel": Tiny(
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 16,
            "condition_dim": 4,
            "prior_vq_quantizer_codebook_size": 20,
        },
        sample=(4, 8, 8),
        rows={**PROMPT, "target_size": (2,), "crop_coords": (2,)},
        fixed={
            "prior_token_id": torch.arange(16),
            "prior_token_drop": torch.zeros(16, dtype=torch.bool),
        },
    ),
    "OvisImageTransformer2DModel": Tiny(
        config={**PACKED, "out_channels": 4}, sample=(16, 4), rows=PROMPT, shared=flux_ids
    ),
    "QwenImageTransformer2DModel": Tiny(
        config={
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "joint_attention_dim": WIDTH,
            "axes_dims_rope": (2, 2, 4),
        },
        sample=(16, 16),
        rows=PROMPT,
        shared=lambda: {"img_shapes": [[(1, 4, 4)]]},
    ),
    "QwenImage21Transformer2DModel": Tiny(
        config={
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "context_in_dim": WIDTH,
            "axes_dims_rope": (4, 2, 2),
        },
        sample=(16, 4),
        rows=PROMPT,
        shared=lambda: {
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": torch.tensor([[False] * TEXT + [True] * 4]),
        },
    ),
    "SD3Transformer2DModel": Tiny(
        config={
            **HEADS,
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
        rows={**PROMPT, "pooled_projections": (12,)},
    ),
    "AuraFlowTransformer2DModel": Tiny(
        config={
            **HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        sample=(4, 8, 8),
        rows=PROMPT,
    ),
    "PixArtTransformer2DModel": Tiny(
        config={
            **HEADS,
            "num_layers": 3,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": WIDTH,
            "use_additional_conditions": False,
        },
        sample=(4, 8, 8),
        rows=PROMPT,
        fixed={"encoder_attention_mask": MASK},
        shared=lambda: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SanaTransformer2DModel": Tiny(
        config={
            **HEADS,
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
        rows=PROMPT,
        fixed={"encoder_attention_mask": MASK},
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
        rows=PROMPT,
        fixed={"encoder_attention_mask": MASK.bool()},
    ),
    "HiDreamImageTransformer2DModel": Tiny(
        config={
            **HEADS,
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
    "WanTransformer3DModel": Tiny(config=WAN, sample=(4, 1, 8, 8), rows=PROMPT),
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
            **PROMPT,
            "added_cond_kwargs.text_embeds": (8,),
            "added_cond_kwargs.time_ids": (6,),
        },
    ),
}


def build(name: str, **edits: object) -> nn.Module:
    """The model, its weights drawn again so that none is zero."""
    torch.manual_seed(0)
    module: nn.Module = getattr(diffusers, name)(**{**TINY[name].config, **edits}).eval()
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

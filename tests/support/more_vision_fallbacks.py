"""More of the tiny models that see, with their processors: see `vision_fallbacks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

from support.vision_models import IMAGE_ID, MERGED_TOWER, PINPOINTS, TEXT, TOWER, text
from support.vision_processors import (
    AXES,
    BEGIN_ID,
    END_ID,
    SQUARE,
    TorchvisionImages,
    bare,
    qwen_images,
)


def _step3p7() -> tuple[Any, Any]:
    config = transformers.Step3p7Config(
        text_config=text(
            "step3p5",
            head_dim=8,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            share_expert_dim=24,
            num_sliding_attention_heads=6,
        ),
        vision_config={**TOWER, "image_size": 56, "max_position_embeddings": 64, "mlp_ratio": 1.5},
        image_token_id=IMAGE_ID,
    )
    images = TorchvisionImages(
        "Step3p7ImageProcessor",
        {
            "size": {"height": 56, "width": 56},
            "patch_size": 28,
            "vision_patch_size": 7,
            "downsampler_stride": 4,
        },
    )
    return config, bare("Step3p7Processor", images, image_word="<im_patch>")


def _deepseek_ocr2() -> tuple[Any, Any]:
    config = transformers.DeepseekOcr2Config(
        text_config=text(
            "deepseek_ocr2_text",
            num_key_value_heads=4,
            mlp_layer_types=["dense", "sparse", "sparse"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=24,
        ),
        vision_config={
            "sam_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 48,
                "patch_size": 1,
                "window_size": 4,
                "global_attn_indexes": [],
                "downsample_channels": [12, 24],
            },
            "encoder_config": {**TOWER, "num_key_value_heads": 2, "vocab_size": 8},
        },
        image_token_id=IMAGE_ID,
    )
    images = transformers.DeepseekOcr2ImageProcessorPil(
        size={"height": 48, "width": 48}, tile_size=96
    )
    return config, bare("DeepseekOcr2Processor", images, patch_size=1)


def _dots3_note() -> tuple[Any, Any]:
    config = transformers.Dots3NoteConfig(
        text_config=text(
            "dots3_note_text",
            layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_key_value_heads=4,
            head_dim=12,
            sliding_window=8,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
            index_n_heads=8,
            index_head_dim=8,
            index_topk=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_experts_intermediate_size=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=24,
            swa_kv_lora_rank=24,
            swa_head_dim=12,
            swa_qk_nope_head_dim=8,
            swa_v_head_dim=8,
            swa_qk_rope_head_dim=4,
        ),
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 7,
            "adapter_in_dim": 24,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense", "dense"],
        },
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "adapter_input_size": 16,
            "adapter_out_dim": 32,
            "feature_size": 8,
            "downsample_hidden_size": 8,
        },
        image_token_id=IMAGE_ID,
        video_token_id=1,
        audio_token_id=2,
    )
    return config, bare(
        "Dots3NoteProcessor",
        qwen_images("Qwen2VLImageProcessorPil", 7, temporal_patch_size=1),
        image_word="<|imgpad|>",
    )


def _granite4_vision() -> tuple[Any, Any]:
    config = transformers.Granite4VisionConfig(
        text_config=text(
            "granite4_vision_text",
            embedding_multiplier=2.0,
            attention_multiplier=0.3,
            num_hidden_layers=6,
        ),
        vision_config={
            **TOWER,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "hidden_size": 64,
        },
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 16,
        },
        image_grid_pinpoints=PINPOINTS,
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0], [-2, 1]],
        spatial_target_layers=[2, 3, 4, 5],
        vision_feature_select_strategy="full",
        image_token_index=IMAGE_ID,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"height": 28, "width": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=PINPOINTS,
    )
    return config, bare(
        "Granite4VisionProcessor",
        images,
        patch_size=7,
        downsample_rate="1/2",
        vision_feature_select_strategy="full",
    )


def _cohere_compass() -> tuple[Any, Any]:
    config = transformers.CohereCompassConfig(
        text_config=text(
            "cohere_compass_text",
            logit_scale=0.5,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": {
                    **AXES,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        vision_config={
            "depth": 3,
            **MERGED_TOWER,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE_ID,
        video_token_id=1,
        vision_start_token_id=BEGIN_ID,
        vision_end_token_id=END_ID,
    )
    images = transformers.CohereCompassImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 4096}, patch_size=8
    )
    return config, bare("CohereCompassProcessor", images, image_word="<|IMAGE_PAD|>")


_SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


def _deepseek_vl() -> tuple[Any, Any]:
    config = transformers.DeepseekVLConfig(
        text_config=TEXT, vision_config=_SIGLIP, image_token_id=IMAGE_ID
    )
    images = transformers.DeepseekVLImageProcessorPil(size=SQUARE, min_size=7)
    return config, bare("DeepseekVLProcessor", images, num_image_tokens=16)


def _deepseek_vl_hybrid() -> tuple[Any, Any]:
    config = transformers.DeepseekVLHybridConfig(
        text_config=TEXT,
        vision_config=_SIGLIP,
        high_res_vision_config={
            "model_type": "sam_vision_model",
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 16,
        },
        image_token_id=IMAGE_ID,
    )
    images = transformers.DeepseekVLHybridImageProcessorPil(
        size=SQUARE, high_res_size={"height": 64, "width": 64}, min_size=7
    )
    return config, bare("DeepseekVLHybridProcessor", images, num_image_tokens=16)


def _janus() -> tuple[Any, Any]:
    config = transformers.JanusConfig(
        text_config=TEXT,
        vision_config={
            **{k: v for k, v in TOWER.items() if k != "intermediate_size"},
            "mlp_ratio": 1.5,
            "projection_dim": 32,
            "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 16,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=IMAGE_ID,
    )
    images = transformers.JanusImageProcessorPil(size=SQUARE, min_size=7)
    return config, bare("JanusProcessor", images, num_image_tokens=16)


def _glm5_next() -> tuple[Any, Any]:
    config = transformers.Glm5NextConfig(
        text_config=text(
            "glm5_next_text",
            num_key_value_heads=4,
            layer_types=["linear_attention", "indexed_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=8,
            v_head_dim=8,
            index_n_heads=16,
            index_head_dim=8,
            index_topk=16,
            index_kpool=4,
            linear_head_dim=8,
            linear_num_heads=4,
            hc_mult=2,
            hc_sinkhorn_iters=2,
        ),
        vision_config={
            **MERGED_TOWER,
            "depth": 2,
            "patch_size": 7,
            "image_size": 28,
            "projection_intermediate_size": 48,
        },
        image_token_id=IMAGE_ID,
        image_start_token_id=BEGIN_ID,
        image_end_token_id=END_ID,
        video_start_token_id=2,
        video_end_token_id=3,
    )
    images = transformers.Glm5NextImageProcessorPil(
        patch_size=7, min_image_tokens=2, max_image_tokens=8
    )
    return config, bare("Glm5NextProcessor", images)


def _qwen4_exp() -> tuple[Any, Any]:
    config = transformers.Qwen4ExpConfig(
        text_config=text(
            "qwen4_exp_text",
            head_dim=8,
            num_hidden_layers=2,
            layer_types=["linear_attention", "indexed_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            hc_lowrank=8,
            ple_layer_ids=[1],
            ngram_vocab_size_base=50,
            heads_per_ngram=2,
            split_ngram_parts=2,
            indexer_n_heads=16,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=32,
            indexer_compress_ratio=4,
            rope_parameters={**AXES, "mrope_section": [2, 1, 1]},
        ),
        vision_config={
            "depth": 2,
            **MERGED_TOWER,
            "patch_size": 8,
            "num_position_embeddings": 16,
        },
        image_token_id=IMAGE_ID,
        video_token_id=1,
        vision_start_token_id=BEGIN_ID,
        vision_end_token_id=END_ID,
    )
    return config, bare("Qwen3VLProcessor", qwen_images("Qwen2VLImageProcessorPil", 8))


MORE_MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "glm5_next": _glm5_next,
    "qwen4_exp": _qwen4_exp,
    "step3p7": _step3p7,
    "deepseek_ocr2": _deepseek_ocr2,
    "dots3_note": _dots3_note,
    "granite4_vision": _granite4_vision,
    "cohere_compass": _cohere_compass,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": _deepseek_vl_hybrid,
    "janus": _janus,
}

"""Tiny models that see, of families that run on transformers: with their processors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from support.more_vision_fallbacks import MORE_MODELS
from support.vision_models import IMAGE_ID, MERGED_TOWER, TEXT, TOWER, VOCAB_SIZE, text
from support.vision_processors import (
    AXES,
    BEGIN_ID,
    END_ID,
    SQUARE,
    TorchvisionImages,
    bare,
    qwen_images,
    tokenizer,
)


def _vipllava() -> tuple[Any, Any]:
    config = transformers.VipLlavaConfig(
        text_config=TEXT,
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        vision_feature_layers=[-1, -2],
        image_token_index=IMAGE_ID,
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE)
    return config, transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def _aya_vision() -> tuple[Any, Any]:
    config = transformers.AyaVisionConfig(
        text_config=text("cohere2", sliding_window=8, head_dim=8, logit_scale=0.5),
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        vision_feature_layer=-1,
        downsample_factor=2,
        image_token_index=IMAGE_ID,
    )
    images = transformers.GotOcr2ImageProcessorPil(size=SQUARE, min_patches=1, max_patches=4)
    return config, transformers.AyaVisionProcessor(
        images,
        tokenizer(),
        patch_size=7,
        img_size=28,
        downsample_factor=2,
        img_patch_token="<image>",
    )


def _qwen3_vl_moe() -> tuple[Any, Any]:
    config = transformers.Qwen3VLMoeConfig(
        text_config=text(
            "qwen3_vl_moe_text",
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            rope_parameters={**AXES, "mrope_section": [2, 1, 1]},
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
    return config, bare("Qwen3VLProcessor", qwen_images("Qwen2VLImageProcessorPil", 8))


def _glm46v() -> tuple[Any, Any]:
    config = transformers.Glm46VConfig(
        text_config=text(
            "glm4v_text", rope_parameters={**AXES, "partial_rotary_factor": 1.0}, head_dim=8
        ),
        vision_config={
            "model_type": "glm4v_vision",
            "depth": 2,
            **MERGED_TOWER,
            "patch_size": 7,
            "image_size": 28,
        },
        image_token_id=IMAGE_ID,
        video_token_id=1,
        image_start_token_id=BEGIN_ID,
        image_end_token_id=END_ID,
        video_start_token_id=2,
        video_end_token_id=3,
    )
    return config, bare("Glm46VProcessor", qwen_images("Glm46VImageProcessorPil", 7))


def _paddleocr_vl() -> tuple[Any, Any]:
    config = transformers.PaddleOCRVLConfig(
        text_config=text("paddleocr_vl_text", head_dim=8, rope_parameters=AXES),
        vision_config={**TOWER, "spatial_merge_size": 2},
        image_token_id=IMAGE_ID,
        video_token_id=1,
        vision_start_token_id=BEGIN_ID,
        vision_end_token_id=END_ID,
    )
    images = transformers.PaddleOCRVLImageProcessorPil(
        patch_size=7, size={"shortest_edge": 4 * 196, "longest_edge": 16 * 196}
    )
    return config, bare("PaddleOCRVLProcessor", images)


def _ernie4_5_vl_moe() -> tuple[Any, Any]:
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=text(
            "ernie4_5_vl_moe_text",
            moe_intermediate_size=[24, 16],
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            rope_parameters={**AXES, "mrope_section": [1, 1, 2]},
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 7,
        },
        image_token_id=IMAGE_ID,
        image_start_token_id=BEGIN_ID,
        image_end_token_id=END_ID,
        video_token_id=1,
        video_start_token_id=2,
        video_end_token_id=3,
    )
    images = qwen_images("Ernie4_5_VLMoeImageProcessorPil", 7)
    return config, bare("Ernie4_5_VLMoeProcessor", images)


def _gemma4() -> tuple[Any, Any]:
    config = transformers.Gemma4Config(
        text_config=text(
            "gemma4_text",
            num_hidden_layers=4,
            head_dim=8,
            global_head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
            use_bidirectional_attention="vision",
        ),
        vision_config={
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "patch_size": 4,
            "position_embedding_size": 64,
            "pooling_kernel_size": 3,
        },
        audio_config=None,
        image_token_id=IMAGE_ID,
        boi_token_id=BEGIN_ID,
        eoi_token_id=END_ID,
        video_token_id=1,
        audio_token_id=2,
    )
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    return config, bare("Gemma4Processor", images)


def _hunyuan_vl() -> tuple[Any, Any]:
    config = transformers.HunYuanVLConfig(
        text_config=text(
            "hunyuan_vl_text", head_dim=8, rope_parameters={**AXES, "mrope_section": [1, 1, 1, 1]}
        ),
        vision_config={**TOWER, "out_hidden_size": 32, "text_hidden_size": 32},
        image_token_id=IMAGE_ID,
        image_start_token_id=BEGIN_ID,
        image_end_token_id=END_ID,
    )
    images = transformers.HunYuanVLImageProcessorPil(
        patch_size=7, size={"shortest_edge": 4 * 196, "longest_edge": 16 * 196}
    )
    return config, bare("HunYuanVLProcessor", images)


def _cohere2_vision() -> tuple[Any, Any]:
    config = transformers.Cohere2VisionConfig(
        text_config=text("cohere2", sliding_window=8, head_dim=8, logit_scale=0.5),
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        alignment_intermediate_size=32,
        image_token_id=IMAGE_ID,
    )
    fields = {"size": SQUARE, "patch_size": 2, "max_patches": 4}
    images = TorchvisionImages("Cohere2VisionImageProcessor", fields)
    return config, bare("Cohere2VisionProcessor", images)


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "vipllava": _vipllava,
    "aya_vision": _aya_vision,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm46v": _glm46v,
    "paddleocr_vl": _paddleocr_vl,
    "ernie4_5_vl_moe": _ernie4_5_vl_moe,
    "gemma4": _gemma4,
    "hunyuan_vl": _hunyuan_vl,
    "cohere2_vision": _cohere2_vision,
    **MORE_MODELS,
}


def save_model(name: str, folder: Path) -> tuple[Any, Any]:
    """The model and its processor, saved in `folder`."""
    torch.manual_seed(0)
    config, processor = MODELS[name]()
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    fields = {"image_processor": processor.image_processor.to_dict()}
    for field in inspect.signature(type(processor).__init__).parameters:
        if isinstance(value := getattr(processor, field, None), str | int):
            fields[field] = value
    fields["processor_class"] = type(processor).__name__
    (folder / "processor_config.json").write_text(json.dumps(fields, default=str))
    return model, processor

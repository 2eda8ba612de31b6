"""Tiny models that see, one of each family, and images for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from triptych.core.engine_api.pixels import Pixels

VOCAB_SIZE = 80
IMAGE_ID = 70
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
TEXT = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def pixels(height: int, width: int, seed: int = 0) -> Pixels:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pixels(width=width, height=height, rgb=values.tobytes())


def text(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **fields}


def _llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        text_config=TEXT,
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        image_token_id=IMAGE_ID,
    )
    square = {"height": 28, "width": 28}
    return config, transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)


def _pixtral_llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        text_config=text("mistral", sliding_window=None),
        vision_config={**TOWER, "model_type": "pixtral", "image_size": 56},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_id=IMAGE_ID,
    )
    return config, _pixtral_images()


def _pixtral_images() -> Any:
    patch = {"height": 7, "width": 7}
    return transformers.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=patch)


def _llava_next() -> tuple[Any, Any]:
    config = transformers.LlavaNextConfig(
        text_config=text("mistral", sliding_window=None),
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        image_grid_pinpoints=PINPOINTS,
        image_token_id=IMAGE_ID,
    )
    return config, transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=PINPOINTS,
    )


def _llava_onevision() -> tuple[Any, Any]:
    config = transformers.LlavaOnevisionConfig(
        text_config=text("qwen2"),
        vision_config={**TOWER, "model_type": "siglip_vision_model"},
        image_grid_pinpoints=PINPOINTS,
        image_token_id=IMAGE_ID,
        video_token_id=71,
    )
    return config, transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
    )


def _idefics3() -> tuple[Any, Any]:
    config = transformers.Idefics3Config(
        text_config=TEXT, vision_config=TOWER, scale_factor=2, image_token_id=IMAGE_ID
    )
    size, tile = {"longest_edge": 56}, {"longest_edge": 28}
    return config, transformers.Idefics3ImageProcessorPil(size=size, max_image_size=tile)


def _smolvlm() -> tuple[Any, Any]:
    config = transformers.SmolVLMConfig(
        text_config=TEXT, vision_config=TOWER, scale_factor=2, image_token_id=IMAGE_ID
    )
    size, tile = {"longest_edge": 56}, {"longest_edge": 28}
    return config, transformers.SmolVLMImageProcessorPil(size=size, max_image_size=tile)


def _internvl() -> tuple[Any, Any]:
    config = transformers.InternVLConfig(
        text_config=text("qwen2"),
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=IMAGE_ID,
    )
    size = {"height": 28, "width": 28}
    return config, transformers.GotOcr2ImageProcessorPil(size=size, min_patches=1, max_patches=4)


def _mistral3() -> tuple[Any, Any]:
    config = transformers.Mistral3Config(
        text_config=text("mistral", sliding_window=None),
        vision_config={**TOWER, "model_type": "pixtral", "image_size": 56},
        spatial_merge_size=2,
        image_token_id=IMAGE_ID,
    )
    return config, _pixtral_images()


def _mistral_small_4() -> tuple[Any, Any]:
    config, images = _mistral3()
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config.text_config = transformers.Mistral4Config(
        **text("mistral4", num_key_value_heads=4, head_dim=12, qk_rope_head_dim=4),
        **latent,
        **experts,
        rope_parameters={
            **yarn,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 1 / 3,
        },
    )
    return config, images


def _qwen_images(patch_size: int) -> Any:
    area = (2 * patch_size) ** 2
    size = {"shortest_edge": 4 * area, "longest_edge": 16 * area}
    return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=patch_size)


def _gemma3() -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        text_config=text(
            "gemma3_text",
            num_hidden_layers=4,
            head_dim=16,
            query_pre_attn_scalar=12,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=IMAGE_ID,
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return config, images


def _paligemma() -> tuple[Any, Any]:
    config = transformers.PaliGemmaConfig(
        text_config=text("gemma", head_dim=16),
        vision_config={
            **TOWER,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 32,
        },
        projection_dim=32,
        image_token_index=IMAGE_ID,
    )
    return config, transformers.SiglipImageProcessorPil(size={"height": 28, "width": 28})


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MERGED_TOWER = {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
"""The sizes of a tower whose own last layer makes the language model's inputs."""
_QWEN_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": 71,
    "vision_start_token_id": 72,
    "vision_end_token_id": 73,
}


def _qwen2_vl() -> tuple[Any, Any]:
    config = transformers.Qwen2VLConfig(
        text_config=text("qwen2_vl_text", rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]}),
        vision_config={
            "depth": 2,
            "embed_dim": 24,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 7,
        },
        **_QWEN_IDS,
    )
    return config, _qwen_images(7)


def _qwen2_5_vl() -> tuple[Any, Any]:
    config = transformers.Qwen2_5_VLConfig(
        text_config=text("qwen2_5_vl_text", rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]}),
        vision_config={
            "depth": 3,
            **MERGED_TOWER,
            "patch_size": 7,
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        **_QWEN_IDS,
    )
    return config, _qwen_images(7)


def _qwen3_vl() -> tuple[Any, Any]:
    config = transformers.Qwen3VLConfig(
        text_config=text(
            "qwen3_vl_text",
            head_dim=16,
            rope_parameters={**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        ),
        vision_config={
            "depth": 3,
            **MERGED_TOWER,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **_QWEN_IDS,
    )
    return config, _qwen_images(8)


def _qwen3_5(experts: str = "", **fields: Any) -> tuple[Any, Any]:
    config = getattr(transformers, f"Qwen3_5{experts}Config")(
        text_config=text(
            f"qwen3_5{experts.lower() and '_' + experts.lower()}_text",
            head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            rope_parameters={**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            **fields,
        ),
        vision_config={
            "depth": 2,
            **MERGED_TOWER,
            "patch_size": 8,
            "num_position_embeddings": 16,
        },
        **_QWEN_IDS,
    )
    return config, _qwen_images(8)


def _qwen3_5_moe() -> tuple[Any, Any]:
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
    return _qwen3_5("Moe", num_experts=4, num_experts_per_tok=2, **sizes)


def _glm_ocr() -> tuple[Any, Any]:
    config = transformers.GlmOcrConfig(
        text_config=text(
            "glm_ocr_text",
            rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]},
            head_dim=8,
            num_nextn_predict_layers=1,
        ),
        vision_config={
            "depth": 2,
            **MERGED_TOWER,
            "patch_size": 7,
            "image_size": 28,
        },
        image_token_id=IMAGE_ID,
        video_token_id=71,
        image_start_token_id=72,
        image_end_token_id=73,
        video_start_token_id=74,
        video_end_token_id=75,
    )
    area = 14**2
    size = {"shortest_edge": 4 * area, "longest_edge": 16 * area}
    return config, transformers.Glm46VImageProcessorPil(size=size, patch_size=7)


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "pixtral": _pixtral_llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "mistral_small_4": _mistral_small_4,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "glm_ocr": _glm_ocr,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}


def save_model(name: str, folder: Path) -> Any:
    """The model itself, in `folder` with its image processor's settings."""
    torch.manual_seed(0)
    config, images = MODELS[name]()
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    return model


def encode(spelled: str) -> list[int]:
    """Ids for separators, as a tokenizer that knows them would give."""
    return [30 + sum(word.encode()) % 30 for word in spelled.replace(">", "> ").split()]

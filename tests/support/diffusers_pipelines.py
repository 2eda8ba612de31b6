"""Tiny pipelines of diffusers with random weights: our components and theirs, the same modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import transformers
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import nn

from support.denoiser_families import TINY, build
from support.tiny_autoencoders import (
    alpha_vae,
    deep_vae,
    flux2_vae,
    hunyuan_vae,
    randomized,
    vae,
    video_vae,
)
from support.tiny_text_encoders import (
    WIDTH,
    PilProcessor,
    clip,
    gemma,
    llama,
    mistral,
    qwen,
    seeing,
    seeing3,
    t5,
    tokenizer,
    writing,
)

FLOW: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
_SHIFTED = {"use_dynamic_shifting": True}
_FLOW_SIGMAS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_STEPWISE = [
    FLOW,
    {"_class_name": "FlowMatchHeunDiscreteScheduler", "shift": 2.0},
    {"_class_name": "DPMSolverMultistepScheduler", **_FLOW_SIGMAS, "flow_shift": 3.0},
]
_SPACED = [
    {**FLOW, **_SHIFTED},
    {**FLOW, "use_karras_sigmas": True},
    {"_class_name": "UniPCMultistepScheduler", **_FLOW_SIGMAS, **_SHIFTED},
]
_NOISE = [
    {"_class_name": "DDIMScheduler", "steps_offset": 1, "clip_sample": False},
    {"_class_name": "EulerDiscreteScheduler", "steps_offset": 1},
    {"_class_name": "DPMSolverMultistepScheduler", "steps_offset": 1, "use_karras_sigmas": True},
    {"_class_name": "UniPCMultistepScheduler", "steps_offset": 1},
]
_SHIFTED_STEPWISE = [
    {**FLOW, **_SHIFTED},
    FLOW,
    {"_class_name": "UniPCMultistepScheduler", **_FLOW_SIGMAS, "flow_shift": 3.0},
]
SCHEDULERS: dict[str, list[dict[str, Any]]] = {
    "AuraFlowPipeline": _STEPWISE[:2],
    "ChromaPipeline": _SPACED,
    "ErnieImagePipeline": [FLOW],
    "Flux2KleinPipeline": _SPACED,
    "Flux2Pipeline": _SPACED,
    "FluxFillPipeline": _SPACED[:1],
    "FluxKontextPipeline": _SPACED[:1],
    "FluxPipeline": _SPACED,
    "GlmImagePipeline": [{**FLOW, **_SHIFTED, "base_shift": 0.25, "max_shift": 0.75}, FLOW],
    "HiDreamImagePipeline": _SHIFTED_STEPWISE,
    "HunyuanImagePipeline": [FLOW],
    "LongCatImageEditPipeline": _SPACED[:1],
    "LongCatImagePipeline": _SPACED[:2],
    "Lumina2Pipeline": _SPACED,
    "OvisImagePipeline": _SPACED,
    "PixArtAlphaPipeline": _NOISE,
    "PixArtSigmaPipeline": _NOISE,
    "QwenImage21Pipeline": _SPACED[:2],
    "QwenImageEditPipeline": _SPACED[:1],
    "QwenImageEditPlusPipeline": _SPACED[:1],
    "QwenImageLayeredPipeline": _SPACED[:1],
    "QwenImagePipeline": _SPACED,
    "SanaPipeline": _STEPWISE,
    "SanaSprintPipeline": [{"_class_name": "SCMScheduler"}],
    "StableDiffusion3Pipeline": _STEPWISE,
    "StableDiffusionPipeline": _NOISE,
    "StableDiffusionXLPipeline": _NOISE,
    "WanPipeline": [*_STEPWISE[:2], _SHIFTED_STEPWISE[2]],
    "ZImagePipeline": [*_SPACED[:2], {**FLOW, "shift_terminal": 0.05}],
}


def _unet(**extra: Any) -> nn.Module:
    return randomized(
        diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=2,
            **extra,
        )
    )


def _sized_pixart() -> nn.Module:
    module: Any = build("PixArtTransformer2DModel")
    sized = {"attention_head_dim": 12, "cross_attention_dim": 24, "sample_size": 128}
    sized["use_additional_conditions"] = True
    return randomized(type(module).from_config({**module.config, **sized}))


def _packed(name: str, **extra: Any) -> nn.Module:
    """The tiny transformer with channels for patches of 2 x 2 of four latents."""
    return _extended(name, **{"in_channels": 16, **extra})


def _extended(name: str, **extra: Any) -> nn.Module:
    """The tiny transformer with other settings."""
    module: Any = build(name)
    config = {**module.config, **extra}
    config.pop("_use_default_values")  # these may be among the extra ones
    return randomized(type(module).from_config(config))


def _one(encoder: Callable[[], nn.Module], length: int = 77) -> dict[str, Any]:
    return {"tokenizer": tokenizer(length), "text_encoder": encoder()}


def _clips(length: int = 77) -> dict[str, Any]:
    return {
        **_one(lambda: clip(projects=True, length=length), length),
        "tokenizer_2": tokenizer(length),
        "text_encoder_2": clip(projects=True, length=length),
    }


_COMPONENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "AuraFlowPipeline": lambda: {
        **_one(t5),
        "transformer": build("AuraFlowTransformer2DModel"),
        "vae": vae(),
    },
    "ChromaPipeline": lambda: {
        **_one(t5),
        "transformer": _packed("ChromaTransformer2DModel"),
        "vae": vae(shift=0.1),
    },
    "FluxPipeline": lambda: {
        **_one(lambda: clip(projects=False)),
        "tokenizer_2": tokenizer(512),
        "text_encoder_2": t5(),
        "transformer": _packed("FluxTransformer2DModel", pooled_projection_dim=WIDTH),
        "vae": vae(shift=0.1),
    },
    "ErnieImagePipeline": lambda: {
        **_one(qwen),
        "transformer": _packed("ErnieImageTransformer2DModel", out_channels=16),
        "vae": flux2_vae(),
    },
    "Flux2KleinPipeline": lambda: {
        **_one(lambda: qwen(28), length=512),
        "transformer": _packed(
            "Flux2Transformer2DModel", joint_attention_dim=3 * WIDTH, guidance_embeds=False
        ),
        "vae": flux2_vae(),
    },
    "Flux2Pipeline": lambda: {
        **_one(mistral, length=512),
        "transformer": _packed("Flux2Transformer2DModel", joint_attention_dim=3 * WIDTH),
        "vae": flux2_vae(),
    },
    "FluxFillPipeline": lambda: {
        **components("FluxPipeline"),
        "transformer": _packed(  # of latents, of latents without the masked part, and of the mask
            "FluxTransformer2DModel",
            in_channels=16 + 16 + 4 * 64,
            out_channels=16,
            pooled_projection_dim=WIDTH,
        ),
    },
    "FluxKontextPipeline": lambda: components("FluxPipeline"),
    "GlmImagePipeline": lambda: {
        **_one(t5, length=2048),
        **writing(),
        "transformer": build("GlmImageTransformer2DModel"),
        "vae": vae(latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 2.0, 0.5, 1.5]),
    },
    "HiDreamImagePipeline": lambda: {
        **_clips(length=248),
        "tokenizer_3": tokenizer(512),
        "text_encoder_3": t5(),
        "tokenizer_4": tokenizer(512),
        "text_encoder_4": llama(),
        "transformer": randomized(
            diffusers.HiDreamImageTransformer2DModel.from_config(
                {
                    **TINY["HiDreamImageTransformer2DModel"].config,
                    "text_emb_dim": 24,
                    # With all of them, rounding cannot flip a token's choice of expert.
                    "num_activated_experts": 2,
                }
            )
        ),
        "vae": vae(shift=0.1),
    },
    "HunyuanImagePipeline": lambda: {
        **_one(lambda: qwen(3), length=2000),
        "tokenizer_2": tokenizer(512),
        "text_encoder_2": t5(),
        "transformer": randomized(
            diffusers.HunyuanImageTransformer2DModel.from_config(
                {**TINY["HunyuanImageTransformer2DModel"].config, "text_embed_2_dim": WIDTH}
            )
        ),
        "vae": hunyuan_vae(),
        "guider": {**_GUIDER, "adaptive_projected_guidance_start_step": 5},
        "ocr_guider": {**_GUIDER, "adaptive_projected_guidance_start_step": 0},
    },
    "LongCatImageEditPipeline": lambda: {
        **components("LongCatImagePipeline"),
        **{
            "text_processor" if name == "processor" else name: part
            for name, part in seeing().items()
        },
    },
    "LongCatImagePipeline": lambda: {
        **_one(qwen, length=2000),
        "text_processor": None,
        "transformer": _packed("LongCatImageTransformer2DModel", in_channels=64),
        "vae": vae(shift=0.1, channels=16),
    },
    "Lumina2Pipeline": lambda: {
        **_one(gemma),
        "transformer": build("Lumina2Transformer2DModel"),
        "vae": vae(shift=0.1),
    },
    "Lumina2Text2ImgPipeline": lambda: components("Lumina2Pipeline"),
    "PixArtAlphaPipeline": lambda: {**_one(t5), "transformer": _sized_pixart(), "vae": vae()},
    "PixArtSigmaPipeline": lambda: {
        **_one(t5),
        "transformer": build("PixArtTransformer2DModel"),
        "vae": vae(),
    },
    "QwenImage21Pipeline": lambda: {
        **seeing3(),
        "transformer": build("QwenImage21Transformer2DModel"),
        "vae": alpha_vae(),
    },
    "QwenImageEditPipeline": lambda: components("QwenImageEditPlusPipeline"),
    "QwenImageEditPlusPipeline": lambda: {
        **seeing(),
        "transformer": build("QwenImageTransformer2DModel"),
        "vae": video_vae(),
    },
    "QwenImageLayeredPipeline": lambda: {
        **seeing(),
        "transformer": _extended(
            "QwenImageTransformer2DModel",
            in_channels=8,
            out_channels=2,
            use_additional_t_cond=True,
            use_layer3d_rope=True,
        ),
        "vae": video_vae(  # theirs takes an image with as many channels as latents for such
            input_channels=4, z_dim=2, latents_mean=[0.1, -0.2], latents_std=[1.0, 2.0]
        ),
    },
    "QwenImagePipeline": lambda: {
        **_one(qwen, length=2000),
        "transformer": build("QwenImageTransformer2DModel"),
        "vae": video_vae(),
    },
    "SanaPipeline": lambda: {
        **_one(gemma, length=2000),
        "transformer": build("SanaTransformer2DModel"),
        "vae": deep_vae(),
    },
    "SanaSprintPipeline": lambda: {
        **_one(gemma, length=2000),
        "transformer": randomized(
            diffusers.SanaTransformer2DModel.from_config(
                {**TINY["SanaTransformer2DModel"].config, "guidance_embeds": True}
            )
        ),
        "vae": deep_vae(),
    },
    "StableDiffusion3Pipeline": lambda: {
        **_clips(),
        "tokenizer_3": tokenizer(256),
        "text_encoder_3": randomized(
            transformers.T5EncoderModel(
                transformers.T5Config(
                    vocab_size=300, d_model=40, d_kv=8, d_ff=24, num_layers=2, num_heads=2
                )
            )
        ),
        "transformer": _packed(
            "SD3Transformer2DModel",
            out_channels=16,
            joint_attention_dim=40,
            pooled_projection_dim=24,
        ),
        "vae": vae(shift=0.1, channels=16),
    },
    "StableDiffusionPipeline": lambda: {
        **_one(lambda: clip(projects=False)),
        "unet": _unet(cross_attention_dim=WIDTH),
        "vae": vae(),
    },
    "StableDiffusionXLPipeline": lambda: {
        **_clips(),
        "unet": _unet(
            cross_attention_dim=2 * WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=36,
        ),
        "vae": vae(),
    },
    "WanPipeline": lambda: {
        **_one(t5, length=512),
        "transformer": build("WanTransformer3DModel"),
        "vae": video_vae(diffusers.AutoencoderKLWan),
    },
    "OvisImagePipeline": lambda: {
        **_one(qwen),
        "transformer": _packed("OvisImageTransformer2DModel", out_channels=16),
        "vae": vae(shift=0.1),
    },
    "ZImagePipeline": lambda: {
        **_one(qwen),
        "transformer": build("ZImageTransformer2DModel"),
        "vae": vae(shift=0.1),
    },
}
_GUIDER = {
    "_class_name": "AdaptiveProjectedMixGuidance",
    "guidance_scale": 3.0,
    "adaptive_projected_guidance_scale": 6.0,
    "adaptive_projected_guidance_rescale": 4.0,
}
_UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_THEIR_EXTRAS: dict[str, Mapping[str, Any]] = {
    "StableDiffusionImg2ImgPipeline": _UNCHECKED,
    "StableDiffusionInpaintPipeline": _UNCHECKED,
    "StableDiffusionPipeline": _UNCHECKED,
}


def components(name: str) -> dict[str, Any]:
    return _COMPONENTS[name]()


def their_pipeline(name: str, parts: Mapping[str, Any], scheduler: Mapping[str, Any]) -> Any:
    """Diffusers' pipeline over the same modules."""
    kind = getattr(diffusers, str(scheduler["_class_name"]))
    parts = {
        part: AdaptiveProjectedMixGuidance.from_config(value) if part.endswith("guider") else value
        for part, value in parts.items()
    }
    for part in ("processor", "text_processor"):
        if parts.get(part) and name != "GlmImagePipeline":
            parts = {**parts, part: PilProcessor(parts[part], parts["tokenizer"])}
    if name == "QwenImage21Pipeline":  # its tokenizer is a part of the processor
        parts = {part: value for part, value in parts.items() if part != "tokenizer"}
    extras = _THEIR_EXTRAS.get(name, {})
    pipeline = getattr(diffusers, name)(**parts, scheduler=kind.from_config(scheduler), **extras)
    if name == "HiDreamImagePipeline":
        pipeline.default_sample_size = 8  # it generates this many latents a side, whatever is asked
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

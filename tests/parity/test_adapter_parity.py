"""Images under two adapters: ours against `load_lora_weights` and `set_adapters` of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from support.lora_files import kohya_keys, layers, peft_keys, save_adapter
from triptych.core.options.config import AdapterOptions, Config
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters
from triptych.modalities.diffusion.engine.loading.components import Components
from triptych.modalities.diffusion.wire import AdapterUse

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]
ENDS = ("to_q", "to_out.0", "net.0.proj", "proj_in", "conv1", "time_emb_proj", "x_embedder", "conv")
TEXT_ENDS = ("q_proj", "out_proj", "fc1")


def generate(pipeline: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    latents: Tensor = pipeline(
        prompt="a red apple",
        width=64,
        height=64,
        num_inference_steps=2,
        output_type="latent",
        generator=generator,
    ).images
    return latents


def flux_kohya(transformer: Any) -> dict[str, Tensor]:
    """Under the names of the model as it was published: queries, keys and values are one layer."""
    width = transformer.transformer_blocks[0].attn.to_q.in_features
    published = nn.ModuleDict(
        {
            "double_blocks_0_img_attn_qkv": nn.Linear(width, 3 * width),
            "double_blocks_1_txt_mlp_0": nn.Linear(width, 4 * width),
            "single_blocks_0_linear2": nn.Linear(5 * width, width),
        }
    )
    return kohya_keys("lora_unet", published, layers(published, ""))


def adapter_of(name: str, parts: dict[str, Any], layout: str, **sizes: Any) -> dict[str, Tensor]:
    """An adapter of the denoiser and the first text encoder."""
    denoiser = "unet" if "unet" in parts else "transformer"
    module, text = parts[denoiser], parts["text_encoder"]
    paths, text_paths = layers(module, *ENDS), layers(text, *TEXT_ENDS)
    if layout == "peft":
        return {
            **peft_keys(denoiser, module, paths, **sizes),
            **peft_keys("text_encoder", text, text_paths, **sizes),
        }
    if not hasattr(text, "text_model"):  # files have a level more than transformers has now
        text, text_paths = (
            nn.ModuleDict({"text_model": text}),
            [f"text_model.{path}" for path in text_paths],
        )
    prefix = "lora_te" if name == "StableDiffusionPipeline" else "lora_te1"
    found = flux_kohya(module) if name == "FluxPipeline" else kohya_keys("lora_unet", module, paths)
    return {**found, **kohya_keys(prefix, text, text_paths)}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("FluxPipeline", "peft"),
        ("FluxPipeline", "kohya"),
        ("StableDiffusionPipeline", "kohya"),
        ("StableDiffusionXLPipeline", "kohya"),
        ("StableDiffusion3Pipeline", "peft"),
    ],
)
def test_an_image_is_what_diffusers_generates(name: str, layout: str, tmp_path: Path) -> None:
    parts = components(name)
    files = [
        save_adapter(tmp_path / "a.safetensors", adapter_of(name, parts, layout)),
        save_adapter(tmp_path / "b.safetensors", adapter_of(name, parts, "peft", rank=2, seed=5)),
    ]
    config = Config(adapters=AdapterOptions(lora_paths=tuple(map(str, files))))
    adapters = Adapters.open(config, Components(pipeline=name, parts=parts))
    pipeline = their_pipeline(name, parts, SCHEDULERS[name][0])
    plain = generate(pipeline)
    with adapters.applied([adapters.check([AdapterUse("a", 0.8), AdapterUse("b", -0.5)])]):
        ours = generate(pipeline)
    for file in files:
        pipeline.load_lora_weights(str(file), adapter_name=file.stem)
    pipeline.set_adapters(["a", "b"], [0.8, -0.5])
    theirs = generate(pipeline)
    assert not torch.allclose(ours, plain, atol=1e-2)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-5)


def test_strength_in_the_metadata_counts(tmp_path: Path) -> None:
    name = "FluxPipeline"
    parts = components(name)
    tensors = peft_keys("transformer", parts["transformer"], layers(parts["transformer"], "to_q"))
    metadata = {
        "transformer.r": 4,
        "transformer.lora_alpha": 10,
        "transformer.alpha_pattern": {"transformer_blocks.0.attn.to_q": 3},
        "transformer.target_modules": ["to_q"],
        "transformer.rank_pattern": {},
    }
    file = save_adapter(tmp_path / "a.safetensors", tensors, **metadata)
    config = Config(adapters=AdapterOptions(lora_paths=(str(file),)))
    adapters = Adapters.open(config, Components(pipeline=name, parts=parts))
    pipeline = their_pipeline(name, parts, SCHEDULERS[name][0])
    with adapters.applied([(AdapterUse("a"),)]):
        ours = generate(pipeline)
    pipeline.load_lora_weights(str(file), adapter_name="a")
    torch.testing.assert_close(ours, generate(pipeline), atol=1e-5, rtol=1e-5)

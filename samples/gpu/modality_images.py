"""Images on a device: every family of pipelines, every step cache, guidance, edits, adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agreement import Disagreement, Figures, Floats, pictures, share_apart
from engines import Answer, Waves
from model_case import Ask, EngineCase, in_float32, in_type, must

from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from support.lora_files import layers, peft_keys, save_adapter
from support.tiny_autoencoders import randomized
from triptych.core.engine_api.pixels import Pixels
from triptych.core.options.config import ModelOptions
from triptych.modalities.diffusion.engine.calibration.file import (
    FILE_NAME,
    CalibratedRun,
    CalibrationFile,
    TriedPlan,
    model_digest,
)
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import AdapterUse, CacheName, ImageRequest, StepCache

FLUX = "FluxPipeline"
UNSAVED = {"QwenImageEditPipeline", "QwenImageEditPlusPipeline"}
"""Pipelines whose processor cannot be saved without torchvision."""
ROUGH = ("PixArtSigmaPipeline", "StableDiffusion3Pipeline", "StableDiffusionXLPipeline")
"""Those that are compared in bfloat16, too."""
WIDE = {
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "axes_dims_rope": (8, 28, 28),
    "num_layers": 2,
    "num_single_layers": 2,
}
"""FLUX with heads of a usual size, 256 wide."""
NUM_STEPS = 8
PIXEL_LIMIT = 0.03
"""A GPU's convolutions of float32 multiply in TF32, and a random autoencoder enlarges errors."""
ROUGH_LEAST = 0.02
"""The same for types of fewer bits, of which one device rounds at other places than the other."""
PLAN = TriedPlan(
    computed=(0, 1, 3, 5, 7), order=1, expected_error=0.1, median_psnr_db=40.0, low_psnr_db=38.0
)
RUN = CalibratedRun(
    num_steps=NUM_STEPS,
    sampler="",
    num_evaluations=NUM_STEPS,
    num_images=8,
    width=64,
    height=64,
    ratios=(1.0, 0.99, 1.01, 1.0, 0.98, 1.0, 1.02, 1.0),
    polynomial=(1.0, 0.0),
    plans=(PLAN,),
)
CACHES: dict[CacheName, StepCache] = {
    "off": StepCache(name="off"),
    "planned": StepCache(name="planned"),
    "teacache": StepCache(name="teacache", threshold=0.3, coefficients=(1.0, 0.0)),
    "first-block": StepCache(name="first-block", threshold=0.8),
    "taylorseer": StepCache(name="taylorseer", interval=3, warmup=2),
    "magcache": StepCache(name="magcache", threshold=0.2),
}
LOOKING = ("teacache", "first-block")
"""Caches that decide by what the model computes."""


def save(name: str, changes: dict[str, Any], folder: Path) -> None:
    """A random pipeline, with a calibration; `changes` are of its transformer's configuration."""
    torch.manual_seed(0)
    parts = components(name)
    if changes:
        transformer = parts["transformer"]
        config = {**transformer.config, **changes}
        parts["transformer"] = randomized(type(transformer).from_config(config))
    their_pipeline(name, parts, SCHEDULERS[name][0]).save_pretrained(folder)
    denoiser = parts.get("transformer") or parts["unet"]
    digest = model_digest(folder, ModelOptions())
    file = CalibrationFile(digest=digest, model_class=type(denoiser).__name__, runs=(RUN,))
    file.write(folder / FILE_NAME)
    file_of = peft_keys("transformer", denoiser, layers(denoiser, "to_q", "to_out.0"))
    if file_of:
        save_adapter(adapter_of(folder), file_of)


def adapter_of(folder: Path) -> Path:
    """The file of the adapter that is made for a model."""
    return folder.with_name("ink.safetensors")


def picture(side: int, seed: int) -> Pixels:
    """A picture of soft colours."""
    corners = np.random.default_rng(seed).integers(0, 256, (2, 2, 3)).astype(float)
    down, across = np.meshgrid(np.linspace(0, 1, side), np.linspace(0, 1, side), indexing="ij")
    top = corners[0, 0] * (1 - across)[..., None] + corners[0, 1] * across[..., None]
    bottom = corners[1, 0] * (1 - across)[..., None] + corners[1, 1] * across[..., None]
    rgb = top * (1 - down)[..., None] + bottom * down[..., None]
    return Pixels(width=side, height=side, rgb=rgb.astype(np.uint8).tobytes())


def ask_for(**fields: Any) -> ImageRequest:
    """A request for a small image."""
    given = {"prompt": "A red apple", "width": 64, "height": 64, "seed": 7, "num_steps": 3}
    return ImageRequest(**{**given, **fields})


def draws(name: str, folder: Path) -> Waves:
    """Two images of other prompts, guided and not, in one batch; then one alone."""
    more: dict[str, Any] = {}
    spec = spec_of(name)
    if spec.needs_reference or spec.needs_mask:
        more = {"sources": (picture(64, 1),)}
    if spec.needs_mask:
        more["mask"] = b"\xff" * (64 * 64)
    first = [ask_for(**more), ask_for(prompt="Two penguins", seed=8, guidance_scale=1.0, **more)]
    return first, [ask_for(seed=9, num_images=2, **more)]


def cached(cache: CacheName, folder: Path) -> Waves:
    """Images with a step cache, with and without guidance."""
    return (
        [
            ask_for(seed=seed, guidance_scale=scale, cache=CACHES[cache], num_steps=NUM_STEPS)
            for seed, scale in ((1, 1.0), (2, 4.0))
        ],
    )


def adapted(folder: Path) -> Waves:
    """An image with the adapter, one with half of it, and one without, in one batch."""
    uses = ((AdapterUse("ink"),), (AdapterUse("ink", 0.5),), ())
    return ([ask_for(adapters=each) for each in uses],)


def edits(folder: Path) -> Waves:
    """Images that begin with a picture, whole and within a mask."""
    left = np.zeros((64, 64), np.uint8)
    left[:, :32] = 255
    sources = (picture(64, 2),)
    return (
        [
            ask_for(sources=sources, strength=0.6, num_steps=6),
            ask_for(sources=sources, strength=0.8, mask=left.tobytes(), num_steps=6),
        ],
    )


def painted(answers: Sequence[Answer]) -> Floats:
    """The finished images; raises `Disagreement` if they show nothing."""
    found = pictures(answers)
    if found.std() < 4:
        raise Disagreement(f"images of one colour: a spread of {found.std():.2g} in 255")
    return found


def apart(got: Sequence[Answer], wanted: Sequence[Answer]) -> float:
    """The error of pixels."""
    return share_apart(painted(got), painted(wanted))


def skipping(cache: CacheName) -> Callable[[Ask], Figures]:
    """In float32, with as many steps computed."""

    def compare(ask: Ask) -> Figures:
        got, wanted = ask(dtype="float32"), ask(is_reference=True, dtype="float32")
        ours, theirs = computed(got), computed(wanted)
        must(ours == theirs, f"{ours} runs of the model in the place of {theirs}")
        must(cache == "off" or sum(ours) < 2 * NUM_STEPS, "nothing was skipped")
        return {"computed": sum(ours)} | in_float32(lambda *_: apart(got, wanted), PIXEL_LIMIT)(ask)

    return compare


def computed(answers: Sequence[Answer]) -> list[int]:
    """The runs of the model that each image took."""
    return [answer[-1].num_computed for answer in answers]


def _pipeline(name: str) -> EngineCase:
    return EngineCase(
        name=f"images, {name.removesuffix('Pipeline')}, float32",
        write=partial(save, name, {}),
        requests=partial(draws, name),
        compare=in_float32(apart, PIXEL_LIMIT),
    )


def _rough(name: str) -> EngineCase:
    case = _pipeline(name)
    name = case.name.replace("float32", "bfloat16")
    return case.under(name, in_type(apart, least=ROUGH_LEAST))


def _wide(
    name: str, requests: Callable[[Path], Waves], compare: Callable[[Ask], Figures]
) -> EngineCase:
    return EngineCase(
        name=f"images, Flux 256 wide, {name}",
        write=partial(save, FLUX, WIDE),
        requests=requests,
        compare=compare,
        more=lambda folder: {"lora_paths": (f"ink={adapter_of(folder)}",)},
    )


def _flux_cases() -> Sequence[EngineCase]:
    float32 = in_float32(apart, PIXEL_LIMIT)
    bf16 = in_type(apart, least=ROUGH_LEAST)
    drawn = _wide("bfloat16", partial(draws, FLUX), bf16)
    return (
        drawn,
        *(_wide(f"cache {cache}", partial(cached, cache), skipping(cache)) for cache in CACHES),
        _wide("edits", edits, float32),
        _wide("adapters, float32", adapted, float32),
        _wide("adapters, bfloat16", adapted, bf16),
        *(
            drawn.under(f"{drawn.name}, {encoding}", bf16, quantization_encoding=encoding)
            for encoding in ("q8_0", "q4_k")
        ),
    )


CASES: Sequence[EngineCase] = (
    *_flux_cases(),
    *(_pipeline(name) for name in sorted(SCHEDULERS.keys() - UNSAVED)),
    *(_rough(name) for name in ROUGH),
)

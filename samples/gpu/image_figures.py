"""FLUX.1's shape at 1024 x 1024 in this process, compared with diffusers and `torch.compile`.

Random weights are made on the device. The text encoders have FLUX.1's widths and few layers; the
transformer and the autoencoder are its own.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import diffusers
import profiles
import torch
import transformers
from host_waits import Waits
from place import Place, Record, attempt, error_text, record
from random_weights import STD, random_values, shapes_of, write_folder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from triptych import ImagePipeline

TRANSFORMER = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}
TINY_TRANSFORMER = TRANSFORMER | {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": [8, 12, 12],
}
AUTOENCODER = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}
TINY_AUTOENCODER = AUTOENCODER | {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
PARTS = {
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "PreTrainedTokenizerFast"),
    "tokenizer_2": ("transformers", "PreTrainedTokenizerFast"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
}
VOCABULARY = 256
PROMPT = "a red apple on a wooden table"
GUIDANCE = 3.5
LEAST_TO_COMPILE_S = 20


def run(place: Place) -> Iterator[Record]:
    """Ours, a profile of its denoise step, then diffusers eager and compiled."""
    folder = place.scratch / "flux"
    write_flux(folder, place.is_tiny)
    yield from ours(place, folder)
    place.release()
    yield from theirs(place)


def size_and_steps(place: Place) -> tuple[int, int]:
    """The side of images, and their number of steps."""
    return (256, 4) if place.is_tiny else (1024, 8)


# ---- ours ----------------------------------------------------------------------------------------


def ours(place: Place, folder: Path) -> Iterator[Record]:
    """The pipeline's own times, and a profile."""
    started_s = time.perf_counter()
    with random_values(place.device):
        pipeline = ImagePipeline.from_pretrained(
            str(folder), progress=False, dtype="bfloat16", device="gpu" if place.is_gpu else "cpu"
        )
    try:
        yield record("ours, load", seconds=time.perf_counter() - started_s)
        for cache in ("off", "taylorseer"):
            generate = partial(steps_of, place, pipeline, cache)
            yield attempt(f"ours, cache {cache}", partial(measured, generate, place))
        yield from profiled(place, pipeline)
    finally:
        pipeline.close()


def steps_of(place: Place, pipeline: ImagePipeline, cache: Any) -> list[float]:
    """The times at which an image began, finished each step, and was there."""
    side, num_steps = size_and_steps(place)
    times_s = [time.perf_counter()]
    options = {"size": (side, side), "guidance_scale": GUIDANCE, "seed": 1, "cache": cache}
    stream = pipeline.stream(PROMPT, num_steps=num_steps, **options)
    times_s += [time.perf_counter() for _ in stream]
    return times_s


def measured(generate: Callable[[], list[float]], place: Place) -> dict[str, Any]:
    """The first image, which compiles and captures, then the median of two more, then waits."""
    first, *turns = [generate() for _ in range(2 if place.is_tiny else 3)]
    waits = Waits()
    with waits.counted(place):
        generate()
    steps = [end - begin for times_s in turns for begin, end in pairwise(times_s[1:-1])]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "image_s": statistics.median(times_s[-1] - times_s[0] for times_s in turns),
        "num_steps": size_and_steps(place)[1],
        "first_image_s": first[-1] - first[0],
        **waits.figures(),
    }


def profiled(place: Place, pipeline: ImagePipeline) -> Iterator[Record]:
    """A profile of the steps of one image, the first and the decoding left out."""
    side, num_steps = size_and_steps(place)
    options = {"size": (side, side), "guidance_scale": GUIDANCE, "seed": 1, "cache": "off"}
    name = "profile of a denoise step"
    try:
        stream = pipeline.stream(PROMPT, num_steps=num_steps, **options)
        next(progress for progress in stream if progress.step == 1)
        with profiles.profiler(place) as profile:
            next(progress for progress in stream if progress.step == num_steps - 1)
            place.wait()
        for _ in stream:
            pass
    except Exception as error:  # a profile that fails must not end the others
        yield record(name, error_text(error))
        return
    yield from profiles.shown(name, profile, num_steps - 2)


# ---- theirs --------------------------------------------------------------------------------------


def theirs(place: Place) -> Iterator[Record]:
    """Diffusers' pipeline on prompts that are encoded already, eager and then compiled."""
    pipe = their_pipeline(place)
    generate = partial(their_steps, place, pipe)
    yield attempt("diffusers", partial(measured, generate, place))
    if place.is_tiny:
        return  # compiling takes minutes on a small machine
    if place.left_s < LEAST_TO_COMPILE_S:
        yield record("diffusers, compiled", f"{place.left_s:.0f} s are left: too few to compile")
        return
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    yield attempt("diffusers, compiled", partial(measured, generate, place))


def their_pipeline(place: Place) -> Any:
    """Diffusers' pipeline without its text encoders, with random weights on the device."""
    transformer, autoencoder = (
        (TINY_TRANSFORMER, TINY_AUTOENCODER) if place.is_tiny else (TRANSFORMER, AUTOENCODER)
    )
    pipe = diffusers.FluxPipeline(
        transformer=randomized(diffusers.FluxTransformer2DModel, transformer, place.device),
        vae=randomized(diffusers.AutoencoderKL, autoencoder, place.device),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def randomized(kind: Any, fields: dict[str, Any], device: torch.device) -> Any:
    """A module in bfloat16 whose weights are made on the device."""
    with torch.device("meta"):
        module = kind.from_config(fields)
    module = module.to(torch.bfloat16).to_empty(device=device).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if "norm" in name and name.endswith("weight") and weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(std=STD)
    return module


def their_steps(place: Place, pipe: Any) -> list[float]:
    """As `steps_of`."""
    side, num_steps = size_and_steps(place)
    fields = pipe.transformer.config
    times_s = [time.perf_counter()]

    def note(*given: Any) -> dict[str, Any]:
        place.wait()
        times_s.append(time.perf_counter())
        return {}

    given = torch.Generator(place.device).manual_seed(1)
    hidden = torch.randn(
        1, 512, fields.joint_attention_dim, device=place.device, generator=given
    ).bfloat16()
    pipe(
        prompt_embeds=hidden,
        pooled_prompt_embeds=hidden[:, 0, : fields.pooled_projection_dim].contiguous(),
        num_inference_steps=num_steps,
        width=side,
        height=side,
        guidance_scale=GUIDANCE,
        callback_on_step_end=note,
        output_type="pil",
    )
    return [*times_s, time.perf_counter()]


# ---- files ---------------------------------------------------------------------------------------


def write_flux(folder: Path, is_tiny: bool) -> None:
    """A FLUX.1 folder whose weights are headers alone."""
    transformer = TINY_TRANSFORMER if is_tiny else TRANSFORMER
    autoencoder = TINY_AUTOENCODER if is_tiny else AUTOENCODER
    _write_part(folder / "transformer", diffusers.FluxTransformer2DModel, transformer)
    _write_part(folder / "vae", diffusers.AutoencoderKL, autoencoder)
    _write_encoders(folder, transformer, is_tiny)
    (folder / "scheduler").mkdir()
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(SCHEDULER), encoding="utf-8")
    for name, length in (("tokenizer", 77), ("tokenizer_2", 512)):
        _tokenizer(length).save_pretrained(folder / name)
    index = {"_class_name": "FluxPipeline", **PARTS}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_part(folder: Path, kind: Any, fields: dict[str, Any]) -> None:
    with torch.device("meta"):
        module = kind.from_config(fields)
    config = {"_class_name": kind.__name__, **module.config}
    write_folder(folder, "diffusion_pytorch_model", config, shapes_of(module))


def _write_encoders(folder: Path, transformer: dict[str, Any], is_tiny: bool) -> None:
    """CLIP and T5 of the widths that the transformer reads, with few layers."""
    width, wide = transformer["pooled_projection_dim"], transformer["joint_attention_dim"]
    clip = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY + 3,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_hidden_layers=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    t5 = transformers.T5Config(
        vocab_size=VOCABULARY + 3, d_model=wide, d_ff=2 * wide, num_heads=wide // 64, num_layers=2
    )
    for name, kind, config in (
        ("text_encoder", transformers.CLIPTextModel, clip),
        ("text_encoder_2", transformers.T5EncoderModel, t5),
    ):
        with torch.device("meta"):
            module: nn.Module = kind(config)
        config.architectures = [kind.__name__]
        write_folder(folder / name, "model", config.to_dict(), shapes_of(module))


def _tokenizer(length: int) -> Any:
    """A token for each byte, between a beginning and an end."""
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=length,
    )

"""What a plan says that a model takes, against what its steps hold: at the sizes people serve.

An estimate holds where it is no less than the peak, and of use where it is not much more. Layers
are few: those of a step are computed one after the other, and hold no more when they are many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from support.fake_cuda import CUDA, FakeCuda
from support.tiers import first
from triptych.core.engine_api.plan import TokenPlan, TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.families.model import Batch, Conditioning
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes.latents import decode_latents
from triptych.modalities.embedding.architecture import EncoderSizes
from triptych.modalities.embedding.engine.encoder import Encoder, activation_bytes

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SMALL, LARGE = (32, 1024), (256, 8192)
"""Rows and prompt tokens of the steps that a CPU and a large GPU take."""
CONTEXT = 16384

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"architectures": ["LlamaForCausalLM"], **LLAMA, **HEADS},
    "Qwen 3 4B": {
        "architectures": ["Qwen3ForCausalLM"],
        **HEADS,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "vocab_size": 151936,
    },
    "SmolLM2 135M": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
    },
    "Gemma 3 4B": {
        "architectures": ["Gemma3TextModel"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 2,
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
WIDEST = ("Llama 3 8B", "Gemma 3 4B")
"""In layers, and in words: what large steps take grows with these."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, top_k=50, min_p=0.05, repetition_penalty=1.1, top_logprobs=5),
    SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=5),
)


def assert_near(estimate: int, peak: int, factor: float) -> None:
    """The estimate is the peak or more, and at most so many times it."""
    assert peak <= estimate <= factor * peak, f"{estimate / 2**20:.1f} for {peak / 2**20:.1f} MiB"


def plan_of(
    sampling: SamplingParams, page_size: int, num_rows: int, chunk_size: int
) -> list[TokenPlan]:
    """All slots are bound; then all but one draw while a chunk of a prompt is computed."""
    num_pages = CONTEXT // page_size
    pages = [tuple(range(slot * num_pages, (slot + 1) * num_pages)) for slot in range(num_rows)]
    first = tuple(
        TokenRow(
            job_id=str(slot),
            slot=slot,
            start=0,
            num_tokens=1,
            token_ids=(5,),
            new_page_ids=pages[slot],
            is_sampled=slot == 0,
            sampling=sampling,
            history_ids=(5,) * CONTEXT,
            num_prompt_tokens=CONTEXT,
        )
        for slot in range(num_rows)
    )
    rows = tuple(
        TokenRow(job_id=str(slot), slot=slot, start=CONTEXT - 1, num_tokens=1)
        for slot in range(1, num_rows)
    )
    chunk = TokenRow(
        job_id="0",
        slot=0,
        start=CONTEXT - chunk_size,
        num_tokens=chunk_size,
        token_ids=(7,) * chunk_size,
    )
    return [
        TokenPlan(step_id=0, model="m", kind="prefill", rows=first),
        TokenPlan(step_id=1, model="m", kind="mixed", rows=(*rows, chunk)),
    ]


@pytest.mark.parametrize(
    ("name", "num_rows", "chunk_size"),
    [*((name, *SMALL) for name in DECODERS), *first((name, *LARGE) for name in WIDEST)],
)
def test_a_decoder(gpu: FakeCuda, name: str, num_rows: int, chunk_size: int) -> None:
    """Whatever its rows ask of sampling."""
    blueprint = NativeBlueprint(
        {**DECODERS[name], "max_position_embeddings": CONTEXT},
        max_length=0,
        dtype=BF16,
        device=CUDA,
    )
    decoder = Decoder(blueprint.config, dtype=BF16, device=CUDA)
    assert decoder.embedding.weight_OI.device == CUDA, "it is allocated when it is filled"
    decoder.prepare()
    buffers = gpu.live_bytes - blueprint.weight_bytes()
    assert 0 <= buffers < 2**17, "frequencies and norms are kept beside the weights"
    before = gpu.live_bytes
    layout = blueprint.kv_layout(64, BF16)
    num_pages = num_rows * CONTEXT // 64
    kv = KvCache(layout, num_pages, CUDA)
    assert gpu.live_bytes - before == (num_pages + 1) * layout.page_bytes
    peaks = [
        peak_of(gpu, decoder, kv, plan_of(sampling, 64, num_rows, chunk_size))
        for sampling in SAMPLINGS
    ]
    factor = 2.0 if num_rows == SMALL[0] else 3.0  # a CPU needs more to draw so many rows
    assert_near(blueprint.activation_bytes(chunk_size + num_rows, num_rows), max(peaks), factor)


def peak_of(gpu: FakeCuda, decoder: Decoder, kv: KvCache, plans: list[TokenPlan]) -> int:
    num_rows = len(plans[0].rows)
    sampler = Sampler(vocab_size=decoder.vocab_size, max_batch_size=num_rows, device=CUDA)
    runner = TokenRunner(
        TextHead(decoder, sampler, max_batch_size=num_rows, device=CUDA),
        kv,
        max_batch_size=num_rows,
        max_length=CONTEXT,
        device=CUDA,
    )
    before, peaks = gpu.live_bytes, []
    for plan in plans:
        with gpu.launch():
            runner.launch(plan)
        peaks.append(gpu.peak_bytes - before)
    return max(peaks)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A denoiser at the size it draws best. `rows` are shapes of a row's arguments."""

    config: Mapping[str, Any]
    sample: tuple[int, ...]
    rows: Mapping[str, tuple[int, ...]]
    num_tokens: int = 4096
    shared: Callable[[], Mapping[str, Any]] = field(default=dict)


def _flux_ids() -> Mapping[str, Any]:
    return {
        name: torch.zeros(n, 3, device=CUDA) for name, n in (("img_ids", 4096), ("txt_ids", 512))
    }


DENOISERS: dict[str, Drawn] = {
    "FluxTransformer2DModel": Drawn(
        config={"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True},
        sample=(4096, 64),
        rows={"encoder_hidden_states": (512, 4096), "pooled_projections": (768,), "guidance": ()},
        shared=_flux_ids,
    ),
    "SD3Transformer2DModel": Drawn(
        config={"num_layers": 3},
        sample=(16, 128, 128),
        rows={"encoder_hidden_states": (333, 4096), "pooled_projections": (2048,)},
    ),
    "QwenImageTransformer2DModel": Drawn(
        config={"num_layers": 2},
        sample=(4096, 64),
        rows={"encoder_hidden_states": (128, 3584)},
        shared=lambda: {"img_shapes": [[(1, 64, 64)]]},
    ),
    "PixArtTransformer2DModel": Drawn(
        config={"num_layers": 2, "caption_channels": 4096, "use_additional_conditions": False},
        sample=(4, 128, 128),
        rows={"encoder_hidden_states": (300, 4096), "encoder_attention_mask": (300,)},
        shared=lambda: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "UNet2DConditionModel": Drawn(
        config={"cross_attention_dim": 768},
        sample=(4, 64, 64),
        rows={"encoder_hidden_states": (77, 768)},
    ),
}


def on_cuda() -> AbstractContextManager[Any]:
    return torch.device(CUDA)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoiser(gpu: FakeCuda, name: str) -> None:
    drawn = DENOISERS[name]
    with on_cuda():
        module = getattr(diffusers, name)(**drawn.config).to(BF16).eval().requires_grad_(False)
        rows = {key: torch.ones(shape, dtype=BF16) for key, shape in drawn.rows.items()}
        samples, times = torch.zeros(2, *drawn.sample), torch.ones(2)
    conditioning = [Conditioning(rows=rows, shared=drawn.shared()) for _ in range(2)]
    batch = Batch(samples=samples, times=times, conditioning=conditioning)
    model = open_model(module)
    gc.collect()
    before = gpu.live_bytes
    with gpu.launch(), torch.inference_mode():
        model.velocity(batch)
    costs = GenerationCosts(SimpleNamespace(model=module), text_bytes=0)  # type: ignore[arg-type]
    assert_near(2 * costs.row_bytes(drawn.num_tokens), gpu.peak_bytes - before, 3.0)


FLUX_VAE = {
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}


def test_a_latent_decoder(gpu: FakeCuda) -> None:
    with on_cuda():
        vae = diffusers.AutoencoderKL(**FLUX_VAE).to(BF16).eval().requires_grad_(False)
        latents = torch.zeros(1, 16, 128, 128)
    before = gpu.live_bytes
    with gpu.launch(), torch.inference_mode():
        decode_latents(vae, latents)
    costs = GenerationCosts(SimpleNamespace(vae=vae), text_bytes=0)  # type: ignore[arg-type]
    assert_near(costs.decode_bytes(1024 * 1024), gpu.peak_bytes - before, 3.0)


def test_an_encoder_of_texts(gpu: FakeCuda) -> None:
    sizes = EncoderSizes.read(
        {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "vocab_size": 30522,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "pad_token_id": 0,
        }
    )
    encoder = Encoder(sizes, max_padding=1.2).to(CUDA, BF16).eval().requires_grad_(False)
    before = gpu.live_bytes
    with gpu.launch(), torch.inference_mode():
        encoder([(5,) * length for length in (512, 300, 128, 60, 24)])
    assert_near(activation_bytes(sizes, 1024, BF16), gpu.peak_bytes - before, 2.0)

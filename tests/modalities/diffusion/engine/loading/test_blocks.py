"""Parts of image models in blocks of integers: which, how close they are, what they take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import nn

from support.block_weights import random_blocks
from support.denoiser_families import TINY, conditioning_of, sample_of
from support.gpu_rehearsal import rehearse_gpu
from support.image_folders import save_pipeline
from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers import linear
from triptych.core.runtime.layers.block_layers import (
    BlockEmbedding,
    BlockLinear,
    block_bytes,
    block_places,
)
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.diffusion.engine.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.engine.families.table import family_of, open_model
from triptych.modalities.diffusion.engine.loading.block_rows import BlockRows
from triptych.modalities.diffusion.engine.loading.components import (
    Components,
    component_bytes,
    open_components,
)
from triptych.modalities.diffusion.engine.loading.modules import Holding, open_diffusers_module
from triptych.modalities.diffusion.engine.loading.weights import HeldWeights

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
CPU = torch.device("cpu")
WIDER: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {"num_attention_heads": 4},
    "QwenImageTransformer2DModel": {"num_attention_heads": 4},
    "SD3Transformer2DModel": {"num_attention_heads": 4, "caption_projection_dim": 32},
    "PixArtTransformer2DModel": {"num_attention_heads": 4, "cross_attention_dim": 32},
    "UNet2DConditionModel": {"block_out_channels": (32, 32), "cross_attention_dim": 32},
}
"""With rows of whole blocks."""


def random_module(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = {**TINY[name].config, **WIDER[name]}
    module: nn.Module = getattr(diffusers, name)(**config).eval().requires_grad_(False)
    for weight in module.parameters():
        scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
        weight.copy_(torch.randn_like(weight) * scale)
    return module


def velocity(name: str, module: nn.Module, *, fuses: bool = True) -> torch.Tensor:
    given = conditioning_of(name, 0)
    if name == "UNet2DConditionModel":
        given.rows["encoder_hidden_states"] = given.rows["encoder_hidden_states"].repeat(1, 4)[
            :, :32
        ]
    batch = Batch(
        samples=sample_of(name, 0)[None], times=torch.tensor([500.0]), conditioning=[given]
    )
    with torch.inference_mode():
        model = open_model(module) if fuses else DenoiseModel(module, family_of(module))
        return model.velocity(batch)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", WIDER)
def test_a_denoiser_is_as_close_as_its_format(
    name: str, kind: str, tmp_path: Path, native: NativeKernels
) -> None:
    """To the values of its blocks, as these are to the weights.

    In Q8_0 inputs have no more bits than weights, and between layers they are spread wider.
    """
    module = random_module(name)
    module.save_pretrained(tmp_path)
    holding = Holding(device=CPU, dtype=torch.float32, wanted=kind, native=native)
    with Checkpoint.open(tmp_path) as checkpoint:
        ours = open_diffusers_module(
            getattr(diffusers, name), checkpoint, holding, lambda share: None
        )
    reference = copy.deepcopy(module)
    places = block_places(reference, WeightEncoding(kind))
    for place in places:
        weight = place.layer.weight
        weight.copy_(quantize_blocks(weight, place.format).dequantize(torch.float32))
    found, expected, original = (velocity(name, each) for each in (ours, reference, module))
    own, of_format = (found - expected).norm(), (expected - original).norm()
    assert 0 < own < of_format * (3 if kind == "q8_0" else 1)
    assert len(places) > 5
    assert sum(type(each) is BlockLinear for each in ours.modules()) == len(places)


def in_float32(_: torch.dtype) -> torch.dtype:
    return torch.float32


def opened(folder: Path, native: NativeKernels, *overrides: str, wanted: str) -> Components:
    options = ModelOptions(model_override=overrides, quantization_encoding=wanted)
    return open_components(
        folder, options, device=CPU, dtype=in_float32, report=lambda share: None, native=native
    )


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a wider transformer and text encoder."""
    folder = tmp_path_factory.mktemp("flux")
    save_pipeline(folder)
    random_module("FluxTransformer2DModel").save_pretrained(folder / "transformer")
    config = transformers.T5Config(
        vocab_size=8192, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    transformers.T5EncoderModel(config).save_pretrained(folder / "text_encoder_2")
    return folder


def num_held(part: nn.Module) -> int:
    return sum(isinstance(each, BlockLinear | BlockEmbedding) for each in part.modules())


def test_every_part_but_the_autoencoder_is_held_in_blocks(
    flux: Path, native: NativeKernels
) -> None:
    parts = opened(flux, native, wanted="q8_0").parts
    assert num_held(parts["transformer"]) > 10
    assert num_held(parts["text_encoder_2"]) > 5
    assert not num_held(parts["vae"])
    mixed = opened(
        flux, native, "text_encoder_2.quantization_encoding=float32", wanted="q4_0"
    ).parts
    assert num_held(mixed["transformer"]) > 10
    assert not num_held(mixed["text_encoder_2"])
    alone = opened(flux, native, "transformer.quantization_encoding=q4_0", wanted="auto").parts
    assert num_held(alone["transformer"]) > 10
    assert not num_held(alone["text_encoder_2"])


def test_bytes_are_known_before_loading(flux: Path, native: NativeKernels) -> None:
    options = ModelOptions(quantization_encoding="q8_0")
    sizes = component_bytes(flux, options, dtype=in_float32)
    parts = opened(flux, native, wanted="q8_0").parts
    for name in ("transformer", "text_encoder_2", "vae"):
        plain = sum(w.nbytes for w in parts[name].state_dict().values() if not w.isnan().all())
        assert plain + block_bytes(parts[name]) == pytest.approx(sizes[name], rel=0.05), name


def write_gguf(file: Path, tensors: dict[str, torch.Tensor], kind: Kind) -> None:
    writer = GGUFWriter(file, "flux")
    for name, tensor in tensors.items():
        data = tensor.numpy()
        fits = data.ndim == 2 and data.shape[1] % 32 == 0
        raw = quantize(data, kind) if fits else data
        writer.add_tensor(name, raw, raw_dtype=kind if fits else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_files_blocks_stay_as_they_are(
    flux: Path, tmp_path: Path, native: NativeKernels
) -> None:
    module = random_module("FluxTransformer2DModel")
    file = tmp_path / "flux-Q4_0.gguf"
    write_gguf(file, module.state_dict(), Kind.Q4_0)
    override = f"transformer.weight_path={file}"
    part = opened(flux, native, override, wanted="q4_0").parts["transformer"]
    assert num_held(part) > 10
    options = ModelOptions(model_override=(override,), quantization_encoding="q4_0")
    size = component_bytes(flux, options, dtype=in_float32)["transformer"]
    plain = sum(w.nbytes for w in part.state_dict().values() if not w.isnan().all())
    assert plain + block_bytes(part) == pytest.approx(size, rel=0.05)
    with pytest.raises(ConfigError, match="q8_0: this model's weights are q4_0"):
        opened(flux, native, override, wanted="q8_0")
    apart = opened(flux, native, override, wanted="auto").parts["transformer"]
    assert not num_held(apart)
    ours, theirs = (velocity("FluxTransformer2DModel", each) for each in (part, apart))
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def words_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a text encoder, each once."""
    state = transformers.T5EncoderModel.from_pretrained(folder).state_dict()
    return {name: value for name, value in state.items() if name != "encoder.embed_tokens.weight"}


def test_a_text_encoder_out_of_a_whole_checkpoint_is_held_in_blocks(
    flux: Path, tmp_path: Path, native: NativeKernels
) -> None:
    """Its plain tensors are read once, for transformers."""
    file = tmp_path / "whole.safetensors"
    words = words_of(flux / "text_encoder_2")
    save_file({f"text_encoders.t5xxl.transformer.{name}": t for name, t in words.items()}, file)
    override = f"text_encoder_2.weight_path={file}"
    wish = "text_encoder_2.quantization_encoding=q8_0"
    part = opened(flux, native, override, wish, wanted="auto").parts["text_encoder_2"]
    assert num_held(part) > 5


@pytest.mark.parametrize("prefix", ["", "text_encoders.t5xxl.transformer."])
def test_a_text_encoder_takes_no_more_than_was_announced(
    prefix: str, flux: Path, tmp_path: Path, native: NativeKernels
) -> None:
    """Blocks are found by transformers' names: under others, values are held."""
    file = tmp_path / "t5-Q8_0.gguf"
    words = words_of(flux / "text_encoder_2")
    write_gguf(file, {prefix + name: value for name, value in words.items()}, Kind.Q8_0)
    overrides = (
        f"text_encoder_2.weight_path={file}",
        "text_encoder_2.quantization_encoding=q8_0",
    )
    part = opened(flux, native, *overrides, wanted="auto").parts["text_encoder_2"]
    assert num_held(part) > 5
    options = ModelOptions(model_override=overrides)
    size = component_bytes(flux, options, dtype=in_float32)["text_encoder_2"]
    plain = sum(w.nbytes for w in part.state_dict().values() if not w.isnan().all())
    assert plain + block_bytes(part) <= 1.05 * size


def test_blocks_that_were_read_as_values_are_there_still(tmp_path: Path) -> None:
    packed, plain = random_blocks("q8_0", 4, 64, seed=0), torch.ones(2)
    save_file({"a": plain}, tmp_path / "plain.safetensors")
    with Checkpoint.open_file(tmp_path / "plain.safetensors", {}) as given:
        weights = HeldWeights({"a": plain, "b": BlockRows.of(packed, torch.float32)}, given)
    assert torch.equal(weights.read("b"), packed.dequantize(torch.float32))
    assert weights.read_packed("b") is packed
    assert weights.read_packed("b") is None
    assert torch.equal(weights.read("a"), plain)
    assert weights.read_packed("a") is None


def test_floats_of_eight_bits_are_held_in_as_many(
    flux: Path, tmp_path: Path, native: NativeKernels
) -> None:
    state = random_module("FluxTransformer2DModel").state_dict()
    file = tmp_path / "flux-fp8.safetensors"
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in state.items()}, file)
    overrides = (
        f"transformer.weight_path={file}",
        "transformer.quantization_encoding=float8_e4m3fn",
    )
    part = opened(flux, native, *overrides, wanted="auto").parts["transformer"]
    apart = opened(flux, native, *overrides[:1], wanted="auto").parts["transformer"]
    assert num_held(part) > 10
    assert not num_held(apart)
    ours, theirs = (velocity("FluxTransformer2DModel", each) for each in (part, apart))
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    with pytest.raises(ConfigError, match=r"float8_e4m3fn: this model's weights are plain"):
        opened(flux, native, wanted="float8_e4m3fn")


def test_a_gpu_with_units_for_float8_holds_it(
    flux: Path, native: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made of plain numbers; queries, keys and values of a block are one product."""
    plain = opened(flux, native, wanted="auto").parts["transformer"]
    expected = velocity("FluxTransformer2DModel", plain)
    monkeypatch.setattr(Device, "target", "cuda:90")
    options = ModelOptions(quantization_encoding="float8_e4m3fn")
    rehearse_gpu(monkeypatch)
    part = open_components(
        flux, options, device=CPU, dtype=in_float32, report=lambda share: None
    ).parts["transformer"]
    sizes = component_bytes(flux, options, dtype=in_float32)
    others = sum(w.nbytes for w in part.state_dict().values() if not w.isnan().all())
    assert others + block_bytes(part) == sizes["transformer"]
    apart = velocity("FluxTransformer2DModel", copy.deepcopy(part), fuses=False)
    found = velocity("FluxTransformer2DModel", part)
    query, key = (getattr(part.transformer_blocks[0].attn, name).held for name in ("to_q", "to_k"))
    first, second = (each._parts[0].weight_OI.untyped_storage() for each in (query, key))
    assert first.data_ptr() == second.data_ptr()
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-4)
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
    monkeypatch.setattr(linear, "prefers_library", lambda *weight: True)
    monkeypatch.setattr(linear, "scaled_product", library_product)
    of_library = velocity("FluxTransformer2DModel", part)
    assert (of_library - found).norm() < 0.01 * found.norm()


def library_product(
    quantized_TI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_OI: torch.Tensor,
    scale_O: torch.Tensor,
    out_dtype: torch.dtype,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    """`scaled_product` without a GPU."""
    weight = weight_OI.float() * scale_O[:, None]
    return torch.nn.functional.linear(quantized_TI.float() * x_scale_T1, weight, bias_O)

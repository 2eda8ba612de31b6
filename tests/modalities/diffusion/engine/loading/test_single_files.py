"""Parts of an image model from other files: single checkpoints, GGUF, other folders and types."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from support.denoiser_families import TINY
from support.image_folders import keep, ldm_checkpoint, save_pipeline, states_equal
from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.diffusion.engine.loading.components import (
    Components,
    component_bytes,
    open_components,
)
from triptych.modalities.diffusion.source import EMBEDDED_IMAGES

SD = "StableDiffusionPipeline"
QWEN = "QwenImageTransformer2DModel"


def opened(folder: Path, *overrides: str) -> Components:
    return open_components(
        folder,
        ModelOptions(model_override=overrides),
        device=torch.device("cpu"),
        dtype=keep,
        report=lambda share: None,
    )


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sd")
    return folder, save_pipeline(folder, SD)


def changed(parts: dict[str, Any]) -> dict[str, Any]:
    """Other parts of the same shapes."""
    others = {name: copy.deepcopy(parts[name]) for name in ("unet", "vae", "text_encoder")}
    with torch.no_grad():
        for other in others.values():
            for weight in other.parameters():
                weight.mul_(2)
    return others


def test_every_part_of_a_whole_checkpoint_is_found(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, parts = sd
    others = changed(parts)
    file = tmp_path / "whole.safetensors"
    save_file(ldm_checkpoint(others), file)
    overrides = [f"{name}.weight_path={file}" for name in others]
    loaded = opened(folder, *overrides).parts
    for name, other in others.items():
        assert states_equal(loaded[name].state_dict(), other.state_dict()), name
    options = ModelOptions(model_override=tuple(overrides))
    assert component_bytes(folder, options, dtype=keep) == component_bytes(
        folder, ModelOptions(), dtype=keep
    )


def test_a_file_in_our_own_names_needs_no_conversion(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, parts = sd
    other = changed(parts)["vae"]
    file = tmp_path / "vae.safetensors"
    save_file(other.state_dict(), file)
    loaded = opened(folder, f"vae.weight_path={file}").parts
    assert states_equal(loaded["vae"].state_dict(), other.state_dict())


def test_a_part_of_another_class_comes_with_its_folder(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4, 4), decoder_block_out_channels=(4, 4, 4, 4)
    )
    tiny.save_pretrained(tmp_path)
    loaded = opened(sd[0], f"vae.path={tmp_path}").parts
    assert type(loaded["vae"]) is diffusers.AutoencoderTiny
    assert states_equal(loaded["vae"].state_dict(), tiny.state_dict())


def test_one_part_may_be_held_in_another_type(sd: tuple[Path, dict[str, Any]]) -> None:
    override = "unet.quantization_encoding=bfloat16"
    loaded = opened(sd[0], override).parts
    assert loaded["unet"].dtype is torch.bfloat16
    assert loaded["vae"].dtype is torch.float32
    whole = component_bytes(sd[0], ModelOptions(), dtype=keep)
    half = component_bytes(sd[0], ModelOptions(model_override=(override,)), dtype=keep)
    assert half == {**whole, "unet": whole["unet"] // 2}


def write_gguf(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantized where rows allow it; returns the values that are left of them."""
    writer, values = GGUFWriter(file, "qwen_image"), {}
    for name, tensor in tensors.items():
        data = tensor.numpy()
        kind = Kind.Q8_0 if data.ndim == 2 and data.shape[1] % 32 == 0 else Kind.F32
        raw = quantize(data, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        values[name] = torch.from_numpy(np.array(dequantize(raw, kind))).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_quantized_transformer_is_near_the_float_one(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    save_pipeline(folder, "QwenImagePipeline")
    config = {**TINY[QWEN].config, "num_attention_heads": 4, "attention_head_dim": 8}
    torch.manual_seed(1)
    module = diffusers.QwenImageTransformer2DModel(**config)
    module.save_pretrained(folder / "transformer")
    file = tmp_path / "qwen-Q8_0.gguf"
    values = write_gguf(file, module.state_dict())
    loaded = opened(
        folder,
        f"transformer.weight_path={file}",
        "transformer.quantization_encoding=float32",
    ).parts["transformer"]
    num_quantized = 0
    for name, ours in loaded.state_dict().items():
        given = module.state_dict()[name]
        # Values pass through bfloat16, which is finer than what is left of eight bits.
        torch.testing.assert_close(ours, values[name], atol=1e-6, rtol=2**-8)
        torch.testing.assert_close(ours, given, atol=float(given.abs().max()) / 64, rtol=2**-8)
        num_quantized += not torch.equal(values[name], given)
    assert num_quantized > 10


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("unet", "malformed"),
        ("unet.color=red", "fields path, weight_path, quantization_encoding"),
        ("unet.quantization_encoding=gptq", "must be one of float32, .*, q8_0, .* not 'gptq'"),
        ("transformer.quantization_encoding=float16", "names the part 'transformer'; .* unet"),
        ("tokenizer.quantization_encoding=float16", "has no weights"),
        ("os.path=/tmp", "names the part 'os'"),
    ],
)
def test_what_an_override_cannot_say_is_refused(
    override: str, message: str, sd: tuple[Path, dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(sd[0], override)


def test_a_field_is_given_once(sd: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"gives unet\.quantization_encoding twice"):
        opened(sd[0], *["unet.quantization_encoding=float16"] * 2)


def test_files_that_hold_something_else_are_refused_by_name(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, file)
    for part in ("unet", "vae", "text_encoder"):
        with pytest.raises(WeightsError, match=rf"{part}: .*other\.safetensors"):
            opened(sd[0], f"{part}.weight_path={file}")
    with pytest.raises(WeightsError, match=r"missing\.safetensors does not exist"):
        opened(sd[0], "vae.weight_path=missing.safetensors")
    pickled = tmp_path / "vae.ckpt"
    pickled.write_bytes(b"\x80\x04")
    with pytest.raises(WeightsError, match=r"vae\.ckpt is neither safetensors nor GGUF"):
        opened(sd[0], f"vae.weight_path={pickled}")


def base_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Configurations come from this folder; returns the repositories that were asked for."""
    from triptych.modalities.diffusion.engine.loading import whole

    asked: list[str] = []

    def download(repository: str, *_: object) -> Path:
        asked.append(repository)
        return folder

    monkeypatch.setattr(whole, "download_snapshot", download)
    return asked


def test_a_whole_checkpoint_is_a_model(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = base_on_the_hub(sd[0], monkeypatch)
    others = changed(sd[1])
    file = tmp_path / "mine.safetensors"
    save_file(ldm_checkpoint(others), file)
    options = ModelOptions(model=(str(file),), cache_dir=str(tmp_path / "cache"))
    (model,) = resolve_all(options, SilentProgress(), sources=[EMBEDDED_IMAGES])
    assert model.name == "mine"
    loaded = opened(Path(model.folder))
    assert loaded.pipeline == SD
    for name, other in others.items():
        assert states_equal(loaded.parts[name].state_dict(), other.state_dict()), name
    assert resolve_all(options, SilentProgress(), sources=[EMBEDDED_IMAGES]) == (model,)
    assert asked == ["stable-diffusion-v1-5/stable-diffusion-v1-5"]


def test_a_file_with_less_says_how_to_give_it(
    sd: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_on_the_hub(sd[0], monkeypatch)
    file = tmp_path / "unet.safetensors"
    whole = ldm_checkpoint(sd[1])
    save_file({name: whole[name] for name in whole if name.startswith("model.diff")}, file)
    options = ModelOptions(model=(str(file),), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(WeightsError, match=r"unet\.safetensors does not hold a whole model .*"):
        resolve_all(options, SilentProgress(), sources=[EMBEDDED_IMAGES])
    with pytest.raises(WeightsError, match="not a known single-file model"):
        resolve_all(options, SilentProgress())

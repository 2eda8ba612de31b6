"""LoRA per row: reading every kind of file, mixing in a batch, and refusing what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.denoiser_families import build, conditioning_of, sample_of
from support.diffusers_pipelines import components
from support.lora_files import kohya_keys, layers, peft_keys, save_adapter
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.core.options.config import AdapterOptions, Config
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters, adapter_bytes
from triptych.modalities.diffusion.engine.caches.decisions import GateSignal
from triptych.modalities.diffusion.engine.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.loading.components import Components
from triptych.modalities.diffusion.wire import AdapterUse

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
FLUX = "FluxTransformer2DModel"
UNET = "UNet2DConditionModel"
MIXES = [FLUX, "SD3Transformer2DModel", "PixArtTransformer2DModel", UNET, "WanTransformer3DModel"]
ENDS = ("to_q", "to_out.0", "net.0.proj", "proj_in", "conv1", "time_emb_proj", "linear_1", "proj")
A, B = AdapterUse("a", 0.8), AdapterUse("b", -1.5)


def opened(folder: Path, part: str, module: nn.Module, *paths: str, **options: Any) -> Adapters:
    """Adapters `a`, of all layers with such names, and `b`, of every second."""
    chosen = layers(module, *(paths or ENDS))
    save_adapter(folder / "a.safetensors", peft_keys(part, module, chosen))
    save_adapter(folder / "b.safetensors", peft_keys(part, module, chosen[::2], rank=2, seed=1))
    places = tuple(str(folder / f"{name}.safetensors") for name in "ab")
    config = Config(adapters=AdapterOptions(lora_paths=places, **options))
    pipeline = "StableDiffusionPipeline" if part == "unet" else "FluxPipeline"
    return Adapters.open(config, Components(pipeline=pipeline, parts={part: module}))


def adapted_model(folder: Path, name: str, **options: Any) -> DenoiseModel:
    module = build(name)
    model = open_model(module)
    part = "unet" if "UNet" in name else "transformer"
    model.adapters = opened(folder, part, module, **options)
    return model


def batch_of(name: str, uses: list[tuple[AdapterUse, ...]]) -> Batch:
    """A row for each, every one with its own latents, time and prompt."""
    return Batch(
        samples=torch.stack([sample_of(name, row) for row in range(len(uses))]),
        times=torch.tensor([900.0 - 100 * row for row in range(len(uses))]),
        conditioning=[
            replace(conditioning_of(name, row), adapters=use) for row, use in enumerate(uses)
        ],
    )


def test_a_run_without_adapters_has_no_hook_anywhere(tmp_path: Path) -> None:
    model = adapted_model(tmp_path, FLUX)
    seen: list[int] = []

    def count(module: nn.Module, *_: object) -> None:
        seen.append(sum(len(inner._forward_hooks) for inner in model.module.modules()))

    handle = model.module.register_forward_pre_hook(count)
    model.velocity(batch_of(FLUX, [(), ()]))
    model.velocity(batch_of(FLUX, [(), (A,)]))
    handle.remove()
    assert seen[0] == 0 < seen[1]
    assert not any(inner._forward_hooks for inner in model.module.modules())


@pytest.mark.parametrize("name", MIXES)
def test_a_row_alone_is_the_row_among_others(name: str, tmp_path: Path) -> None:
    model = adapted_model(tmp_path, name)
    uses: list[tuple[AdapterUse, ...]] = [(A,), (), (A, B), (replace_scale(A, 0.3),)]
    mixed = batch_of(name, uses)
    together = model.velocity(mixed)
    plain = model.velocity(batch_of(name, [()] * len(uses)))
    for row, use in enumerate(uses):
        alone = model.velocity(mixed.select([row]))[0]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-5)
        assert torch.allclose(together[row], plain[row], atol=1e-5) == (not use)


def replace_scale(use: AdapterUse, scale: float) -> AdapterUse:
    return AdapterUse(use.name, scale)


def test_a_model_asked_in_parts_is_adapted_in_each(tmp_path: Path) -> None:
    model = adapted_model(tmp_path, FLUX)
    assert isinstance(model, SpanModel)
    batch = batch_of(FLUX, [(A,), (), (B,)])
    whole = model.velocity(batch)
    probed = model.probe(batch, GateSignal.FIRST_RESIDUAL)
    velocity, hidden = model.span(batch, probed)
    torch.testing.assert_close(velocity, whole)
    torch.testing.assert_close(model.head(batch, hidden), whole, atol=1e-5, rtol=1e-5)


def test_rows_whose_parts_cannot_be_distinguished_do_not_share_a_run(tmp_path: Path) -> None:
    name = "ZImageTransformer2DModel"
    model = adapted_model(tmp_path, name)
    shape, given = sample_of(name, 0).shape, conditioning_of(name, 0)
    keys = {model.batch_key(shape, replace(given, adapters=uses)) for uses in [(), (A,), (B,)]}
    assert len(keys) == 3


@pytest.mark.parametrize(("most", "num_groups"), [(2, 1), (1, 2)])
def test_a_run_has_no_more_adapters_than_allowed(
    most: int, num_groups: int, tmp_path: Path
) -> None:
    model = adapted_model(tmp_path, FLUX, max_num_loras=most)
    shape, given = sample_of(FLUX, 0).shape, conditioning_of(FLUX, 0)
    keys = [model.batch_key(shape, replace(given, adapters=uses)) for uses in [(), (A,), (B,)]]
    assert len(set(keys)) == num_groups


def test_each_alpha_counts_for_its_own_module(tmp_path: Path) -> None:
    """Equal to weights with `alpha / rank * up @ down` in them."""
    parts = components("StableDiffusionPipeline")
    unet = parts["unet"]
    paths = layers(unet, "to_q", "conv1")[:6]
    tensors = kohya_keys("lora_unet", unet, paths)
    for index, name in enumerate(name for name in tensors if name.endswith(".alpha")):
        tensors[name] = torch.tensor(1.0 + index)
    adapters = one(tmp_path, tensors, parts)
    batch = batch_of(UNET, [(AdapterUse("one"),)])
    arguments = {
        "sample": batch.samples,
        "timestep": batch.times,
        "encoder_hidden_states": torch.ones(1, 3, 16),
    }
    with adapters.applied([(AdapterUse("one"),)]), torch.no_grad():
        ours = unet(**arguments).sample
    with torch.no_grad():
        for index, path in enumerate(paths):
            name = f"lora_unet_{path.replace('.', '_')}"
            down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
            change = torch.einsum("or...,ri...->oi...", up.flatten(1), down)
            unet.get_submodule(path).weight += (1.0 + index) / len(down) * change
        merged = unet(**arguments).sample
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=1e-5)


def one(folder: Path, tensors: dict[str, Tensor], parts: dict[str, Any], **metadata: Any) -> Any:
    """An adapter called `one` beside an SD 1.5's parts."""
    place = save_adapter(folder / "one.safetensors", tensors, **metadata)
    config = Config(adapters=AdapterOptions(lora_paths=(str(place),)))
    return Adapters.open(config, Components(pipeline="StableDiffusionPipeline", parts=parts))


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return components("StableDiffusionPipeline")


def test_unknown_names_and_unfit_scales_are_the_requests_mistake(tmp_path: Path) -> None:
    adapters = opened(tmp_path, "transformer", build(FLUX))
    assert adapters.names == ("a", "b")
    assert adapters.check([B, A, replace_scale(B, 2.0)]) == (A, AdapterUse("b", 0.5))
    assert adapters.check([replace_scale(A, 0.0)]) == ()
    with pytest.raises(InvalidRequest, match="no adapter 'c'; adapters: a, b"):
        adapters.check([AdapterUse("c")])
    for scale in (float("nan"), float("inf"), 1e6):
        with pytest.raises(InvalidRequest, match="scale"):
            adapters.check([AdapterUse("a", scale)])


def test_memory_is_known_before_and_after(tmp_path: Path) -> None:
    adapters = opened(tmp_path, "transformer", build(FLUX))
    places = tuple(str(tmp_path / f"{name}.safetensors") for name in "ab")
    config = Config(adapters=AdapterOptions(lora_paths=places))
    expected_bytes = adapter_bytes(config, dtype=lambda stored: stored)
    assert expected_bytes == adapters.num_bytes > 0


def test_a_high_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="adapter a: Its rank is 4; --max-lora-rank allows 3"):
        opened(tmp_path, "transformer", build(FLUX), max_lora_rank=3)


def test_what_does_not_fit_is_refused_by_name(parts: dict[str, Any], tmp_path: Path) -> None:
    unet = parts["unet"]
    good = peft_keys("unet", unet, layers(unet, "attn1.to_q")[:1])
    down, up = good
    wrong = {
        "lacks its lora_B": {down: good[down]},
        "is not a single number": {**good, down.replace("lora_A.weight", "alpha"): torch.ones(2)},
        "not part of a LoRA": {**good, "unet.conv_in.weight": torch.ones(1)},
        "changes unet.nowhere": {k.replace("down_blocks", "nowhere"): v for k, v in good.items()},
        "changes text_encoder_2.": {"text_encoder_2" + k[4:]: v for k, v in good.items()},
        "is DoRA": {**good, down.replace("lora_A.weight", "dora_scale"): torch.ones(1)},
        "is LoKr": {"unet.conv_in.lokr_w1": torch.ones(2, 2)},
        r"has shape \[4, 9\]": {down: torch.ones(4, 9), up: good[up]},
    }
    for message, tensors in wrong.items():
        with pytest.raises(WeightsError, match=f"adapter one: .*{message}"):
            one(tmp_path, tensors, parts)


def test_a_damaged_or_unsafe_file_is_refused_by_name(parts: dict[str, Any], tmp_path: Path) -> None:
    good = peft_keys("unet", parts["unet"], layers(parts["unet"], "attn1.to_q")[:1])
    one(tmp_path, good, parts)
    file = tmp_path / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=r"adapter one: one\.safetensors is truncated"):
        Adapters.open(
            Config(adapters=AdapterOptions(lora_paths=(str(file),))),
            Components(pipeline="StableDiffusionPipeline", parts=parts),
        )
    pickled = file.with_suffix(".bin")
    pickled.write_bytes(b"\x80\x04")
    with pytest.raises(WeightsError, match=r"one\.bin is not a safetensors file"):
        Adapters.open(
            Config(adapters=AdapterOptions(lora_paths=(str(pickled),))),
            Components(pipeline="StableDiffusionPipeline", parts=parts),
        )


def test_damaged_metadata_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    good = peft_keys("unet", parts["unet"], layers(parts["unet"], "attn1.to_q")[:1])
    file = tmp_path / "one.safetensors"
    for text in ("{", "[]", '{"unet.lora_alpha": NaN}'):
        save_file(good, file, metadata={"lora_adapter_metadata": text})
        with pytest.raises(WeightsError, match=r"adapter one: Its metadata .* is damaged"):
            Adapters.open(
                Config(adapters=AdapterOptions(lora_paths=(str(file),))),
                Components(pipeline="StableDiffusionPipeline", parts=parts),
            )

"""Adapters that come and go in a pipeline, with the embedded model: diffusers' names, our bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.samples import SAMPLES, importing_samples
from triptych.core.errors import Conflict, InvalidRequest, NotFound
from triptych.core.options.config import Config
from triptych.modalities.diffusion.api import adapters
from triptych.modalities.diffusion.api.adapters import ImageAdapterNames
from triptych.modalities.diffusion.api.pipeline import ImagePipeline

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
OPTIONS: dict[str, Any] = {"size": (64, 64), "num_steps": 2, "seed": 1, "cache": "off"}
PROMPT = "a red apple"


def lora(folder: Path, name: str, seed: int) -> Path:
    """A LoRA of the transformer, as the sample writes it."""
    with importing_samples(SAMPLES):
        file: Path = import_module("image_adapters").write_random_adapter(
            folder / f"{name}.safetensors", seed
        )
    return file


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora(tmp_path_factory.mktemp("loras"), "ink", 1)


@pytest.fixture(scope="module")
def generate(declared: Path) -> Iterator[ImagePipeline]:
    with ImagePipeline.from_pretrained(progress=False, lora_paths=[f"ink={declared}"]) as pipeline:
        yield pipeline
        assert pipeline.adapters == ("ink",)


def shown(generate: ImagePipeline, **options: Any) -> bytes:
    return generate(PROMPT, **OPTIONS, **options)[0].encode()


def adapter_bytes(generate: ImagePipeline) -> int:
    by_owner = generate._host.client._engine.ledger.by_owner()  # type: ignore[attr-defined]
    return by_owner.get(f"{generate.name}/adapters", 0)


def test_a_loaded_adapter_is_that_of_the_start(
    generate: ImagePipeline, declared: Path, tmp_path: Path
) -> None:
    plain, inked = shown(generate), shown(generate, adapters={"ink": 0.7})
    held = adapter_bytes(generate)
    generate.load_lora_weights(declared, adapter_name="same")
    assert adapter_bytes(generate) == 2 * held > 0
    generate.load_lora_weights(lora(tmp_path, "gold", 2).parent, weight_name="gold.safetensors")
    assert generate.get_active_adapters() == ["same"]
    generate.set_adapters("same", 0.7)
    assert shown(generate) == inked != plain == shown(generate, adapters={})
    generate.set_adapters(["same", "default_0"], [None, 0.5])
    both = shown(generate)
    assert both == shown(generate, adapters={"same": 1.0, "default_0": 0.5}) not in {plain, inked}
    generate.delete_adapters("default_0")
    assert generate.get_active_adapters() == ["same"]
    generate.unload_lora_weights()
    assert (generate.get_active_adapters(), adapter_bytes(generate)) == ([], held)
    assert shown(generate) == plain


def test_a_name_gets_the_content_that_it_has_now(generate: ImagePipeline, tmp_path: Path) -> None:
    images = []
    for seed in (3, 4):
        generate.load_lora_weights(lora(tmp_path, "style", seed), "style")
        images.append(shown(generate))
        generate.unload_lora_weights()
    assert images[0] != images[1]


def test_an_adapter_in_use_is_unloaded_when_its_images_have_ended(
    generate: ImagePipeline, tmp_path: Path
) -> None:
    generate.load_lora_weights(lora(tmp_path, "style", 5), "style")
    expected, began, goes_on = shown(generate), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        began.set()
        assert goes_on.wait(60)

    found: list[bytes] = []
    drawing = threading.Thread(
        target=lambda: found.append(shown(generate, callback_on_step_end=wait))
    )
    drawing.start()
    assert began.wait(60)
    unloading = threading.Thread(target=generate.unload_lora_weights)
    unloading.start()
    unloading.join(0.3)
    assert unloading.is_alive()
    goes_on.set()
    drawing.join(60)
    unloading.join(60)
    assert not unloading.is_alive()
    assert found == [expected]


async def test_one_of_two_loads_under_a_name_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[Any] = []

    class Client:
        async def submit(self, model: str, request: Any, *, job_id: str) -> AsyncIterator[Any]:
            loads.append(request)
            await asyncio.sleep(0)
            for output in ():
                yield output

    client: Any = Client()
    names = ImageAdapterNames(client, Config())
    monkeypatch.setattr(names, "_read", lambda place: adapters._Loaded(place, place))
    found = await asyncio.gather(
        *(names.load("m", "style", place) for place in "xy"), return_exceptions=True
    )
    assert [type(each) for each in found] == [type(None), Conflict]
    assert [each.digest for each in loads] == ["x"]
    with pytest.raises(Conflict):
        await names.load("m", "style", "y")


def test_what_cannot_be_is_refused_by_name(generate: ImagePipeline, tmp_path: Path) -> None:
    held, path = adapter_bytes(generate), lora(tmp_path, "style", 6)
    with pytest.raises(Conflict, match="An adapter is called 'ink'"):
        generate.load_lora_weights(path, "ink")
    with pytest.raises(InvalidRequest, match="nowhere"):
        generate.load_lora_weights(tmp_path / "nowhere.safetensors", "style")
    save_file({"transformer.x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "half.safetensors")
    with pytest.raises(InvalidRequest, match="lacks its lora_B"):
        generate.load_lora_weights(tmp_path / "half.safetensors", "style")
    with pytest.raises(NotFound, match="'ink' was loaded"):
        generate.delete_adapters("ink")
    with pytest.raises(InvalidRequest, match="no adapter 'style'"):
        generate.set_adapters("style")
    with pytest.raises(InvalidRequest, match="a number for each adapter"):
        generate.set_adapters("ink", {"transformer": 1.0})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="1 adapters need 1 weights"):
        generate.set_adapters("ink", [1.0, 2.0])
    assert adapter_bytes(generate) == held


def test_samples_of_the_pipeline_run(
    generate: ImagePipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [lora(tmp_path, name, seed) for seed, name in enumerate(("wool", "clay"))]
    with importing_samples(SAMPLES):
        import_module("image_adapters").show(generate, files)
        import_module("image_steps").show(generate)
    printed = capsys.readouterr().out
    assert "['wool']" in printed
    assert "sketch: 4 of 8 steps computed" in printed

"""Image models in the hub's layout: everything arrives, nothing else is opened or run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.diffusers_pipelines import SCHEDULERS, components
from support.image_folders import FLUX, keep, save_pipeline, states_equal
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.pipeline_index import read_pipeline
from triptych.core.weights.resolve import folder_digest
from triptych.modalities.diffusion.engine.loading.components import (
    Components,
    component_bytes,
    open_components,
)
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.source import EMBEDDED_IMAGES
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def opened(folder: Path, dtype: torch.dtype | None = None) -> Components:
    return open_components(
        folder,
        ModelOptions(),
        device=torch.device("cpu"),
        dtype=lambda stored: dtype or stored,
        report=lambda share: None,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("flux")
    return folder, save_pipeline(folder)


@pytest.fixture
def folder(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved[0], tmp_path / "flux"))


def test_every_tensor_and_token_arrives(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, parts = saved
    reports: list[float] = []
    loaded = open_components(
        folder,
        ModelOptions(),
        device=torch.device("cpu"),
        dtype=keep,
        report=reports.append,
    )
    assert loaded.pipeline == FLUX
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            assert states_equal(loaded.parts[name].state_dict(), part.state_dict()), name
            assert not loaded.parts[name].training
        else:
            assert loaded.parts[name]("a cat").input_ids == part("a cat").input_ids
    assert loaded.parts["scheduler"]["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert reports == sorted(reports)
    assert reports[-1] == pytest.approx(1)
    assert open_recipe(loaded.pipeline, loaded.parts).pixel_multiple == 16


def test_memory_is_known_before_it_is_taken(saved: tuple[Path, dict[str, Any]]) -> None:
    folder = saved[0]
    sizes = component_bytes(folder, ModelOptions(), dtype=lambda _: torch.bfloat16)
    loaded = opened(folder, torch.bfloat16).parts
    assert set(sizes) == {"text_encoder", "text_encoder_2", "transformer", "vae"}
    for name, num_bytes in sizes.items():
        held = {weight.data_ptr(): weight.nbytes for weight in loaded[name].parameters()}
        assert sum(held.values()) == num_bytes, name
        assert loaded[name].dtype is torch.bfloat16


def test_shards_and_half_precision_variants_are_found(
    saved: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    """Sharded, and only there under a variant's name."""
    place = folder / "transformer"
    tensors = load_file(place / WEIGHTS)
    (place / WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {}
    for number, chosen in enumerate((names[::2], names[1::2]), 1):
        shard = f"diffusion_pytorch_model.fp16-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, place / shard)
        shards |= dict.fromkeys(chosen, shard)
    index = place / "diffusion_pytorch_model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": shards}))
    loaded = opened(folder).parts["transformer"]
    assert states_equal(loaded.state_dict(), saved[1]["transformer"].state_dict())


def test_parts_that_do_not_generate_are_not_opened(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    index["is_distilled"] = True
    (folder / "model_index.json").write_text(json.dumps(index))
    loaded = opened(folder).parts
    assert "safety_checker" not in loaded
    assert "image_encoder" not in loaded
    assert loaded["is_distilled"] is True


def test_a_processors_tokenizer_reads_prompts_where_there_is_no_other(tmp_path: Path) -> None:
    name = "QwenImage21Pipeline"
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    index: dict[str, Any] = {
        "_class_name": name,
        "processor": ["transformers", "Qwen3VLProcessor"],
        "sample_sigmas": [1.0, 0.4],
        "scheduler": ["diffusers", parts["scheduler"]["_class_name"]],
    }
    for part in ("text_encoder", "transformer", "vae"):
        parts[part].save_pretrained(tmp_path / part)
        library = "transformers" if part == "text_encoder" else "diffusers"
        index[part] = [library, type(parts[part]).__name__]
    for part in ("tokenizer", "processor"):
        parts[part].save_pretrained(tmp_path / "processor")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(parts["scheduler"]))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    loaded = opened(tmp_path)
    recipe = open_recipe(loaded.pipeline, loaded.parts)
    request = ImageRequest(prompt="A red apple", width=64, height=64)
    assert recipe.spacing(request).sigmas == (1.0, 0.4)
    prompts = recipe.prompts(request)
    ours, expected = (each.encode_all(prompts)[0] for each in (recipe, open_recipe(name, parts)))
    assert states_equal(ours, expected)


def test_the_digest_is_over_all_parts(folder: Path) -> None:
    before = folder_digest(folder, ModelOptions())
    assert before == folder_digest(folder, ModelOptions())
    for name in ("vae/config.json", "tokenizer/tokenizer.json", "scheduler/scheduler_config.json"):
        file = folder / name
        file.write_text(file.read_text() + "\n")
        after = folder_digest(folder, ModelOptions())
        assert after != before, name
        before = after


def test_an_installation_without_the_embedded_model_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triptych.core.weights.progress import SilentProgress
    from triptych.modalities.diffusion import source

    monkeypatch.setattr(source, "FOLDER", tmp_path)
    with pytest.raises(WeightsError, match="triptych-images is missing from this installation"):
        EMBEDDED_IMAGES.fetch(ModelOptions(), SilentProgress(), lambda _: pytest.fail("no need"))


# -- what is wrong with it ---------------------------------------------------------------------


def spoil_index(folder: Path, **fields: Any) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **fields}))


CANARY = "from pathlib import Path\nPath(__file__).with_name('canary').touch()\n"


@pytest.mark.parametrize(
    "evil",
    [
        {"transformer": ["evil", "Evil"]},
        {"transformer": ["diffusers", "Evil"]},
        {"transformer": ["transformers", "pipeline"]},
        {"vae": ["diffusers", "DiffusionPipeline"]},
        {"text_encoder": ["os", "system"]},
        {"text_encoder": ["transformers", "AutoModel"]},
        {"tokenizer": ["transformers", "AutoTokenizer"]},
        {"evil": ["evil", "Evil"]},
        {"_class_name": ["evil", "Evil"]},
        {"vae": ["diffusers"]},
    ],
)
def test_unknown_classes_are_refused_and_never_imported(
    evil: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (folder, folder / "transformer"):
        (place / "evil.py").write_text(CANARY)
        monkeypatch.syspath_prepend(place)
    spoil_index(folder, **evil)
    with pytest.raises(WeightsError, match=r"model_index\.json"):
        opened(folder)
    assert not list(folder.rglob("canary"))


def test_configurations_cannot_choose_code(folder: Path) -> None:
    """Keys that make libraries fetch or import code are dropped, in nested parts too."""
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        (folder / name / "evil.py").write_text(CANARY)
        file = folder / name / "config.json"
        config = json.loads(file.read_text())
        config |= {
            "auto_map": {"AutoModel": "evil.Evil"},
            "_attn_implementation": "evil/kernels",
            "_attn_implementation_internal": "evil/kernels",
            "attn_implementation": "evil/kernels",
        }
        file.write_text(json.dumps(config))
    loaded = opened(folder).parts
    assert loaded["text_encoder"].config._attn_implementation in ("sdpa", "eager")
    assert not list(folder.rglob("canary"))


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    for part, file_name in (("transformer", WEIGHTS), ("text_encoder_2", "model.safetensors")):
        file = folder / part / file_name
        whole = load_file(file)
        first = next(name for name in sorted(whole) if "layer" in name or "block" in name)
        spoilt = {
            "missing": {name: tensor for name, tensor in whole.items() if name != first},
            "extra": {**whole, "stowaway.weight": torch.ones(1)},
            "misshapen": {**whole, first: torch.ones(3, 3)},
        }
        for kind, tensors in spoilt.items():
            save_file(tensors, file, metadata={"format": "pt"})
            named = "stowaway.weight" if kind == "extra" else first.replace(".", r"\.")
            with pytest.raises(WeightsError, match=rf"(?s){part}: .*{named}") as found:
                opened(folder)
            assert file_name in found.value.message
        save_file(whole, file, metadata={"format": "pt"})


def test_damaged_files_are_named(folder: Path) -> None:
    file = folder / "vae" / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(WeightsError, match=rf"vae: {WEIGHTS} is truncated"):
        opened(folder)
    file.unlink()
    (folder / "vae" / "diffusion_pytorch_model.bin").write_bytes(content)
    with pytest.raises(WeightsError, match=r"vae: .*\.bin has an unsafe format"):
        opened(folder)
    with pytest.raises(WeightsError, match=r"vae: .*\.bin has an unsafe format"):
        folder_digest(folder, ModelOptions())


def test_unusable_configurations_are_named(folder: Path) -> None:
    file = folder / "transformer" / "config.json"
    whole = file.read_text()
    for text, message in (
        ("{", "transformer: config.json is damaged"),
        (json.dumps({**json.loads(whole), "num_attention_heads": "two"}), "transformer: config"),
        (
            json.dumps({**json.loads(whole), "quantization_config": {"quant_method": "evil"}}),
            "transformer: .*quantization_config",
        ),
    ):
        file.write_text(text)
        with pytest.raises(WeightsError, match=message):
            opened(folder)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", json.dumps({"vae": ["diffusers", "AutoencoderKL"]})):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(WeightsError, match=r"model_index\.json"):
            read_pipeline(tmp_path)

"""Files of every architecture, made from tiny models: tensors and configurations come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from support.decoder_rig import Rig, load_decoder
from support.gguf_families import FAMILIES, fields_of
from support.gguf_models import as_published, write_model
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.gguf.describe import ARCHITECTURES
from triptych.core.weights.progress import SilentProgress

FUSED = ("experts.gate_up_proj", "experts.down_proj", "input_linear", "output_linear")


def test_no_architecture_is_forgotten() -> None:
    named = {name.partition("+")[0] for name in FAMILIES}
    assert named == set(ARCHITECTURES)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_tensors_and_configuration_come_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    file, model = write_model(family, name.partition("+")[0], tmp_path)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(file, folder, SilentProgress())
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        ours = {each: checkpoint.read(each).float() for each in checkpoint.tensors}
        config = checkpoint.config
    assert config["architectures"] == [family.model]
    parsed = getattr(transformers, family.model).config_class(
        **{key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    )
    expected_fields, found = fields_of(model.config), fields_of(parsed)
    assert {key: found.get(key) for key in expected_fields} == expected_fields
    for place, tensor in theirs.items():
        expected = unfused(as_published(place), tensor, family.model)
        for key, value in expected.items():
            assert torch.allclose(ours.pop(key), value, rtol=0, atol=2e-7), key
    assert not ours
    if is_native(config):
        check_answer(folder, model)


def check_answer(folder: Path, model: Any) -> None:
    """Our decoder scores tokens as the class does, whose file it was."""
    decoder = load_decoder(folder)
    layout = decoder.config.kv_layout(16, torch.float32)
    rig = Rig(decoder, layout, native=None, max_length=64, max_batch_size=1)
    row = rig.open([*range(3, 40)])
    rig.prefill(row)
    with torch.inference_mode():
        expected_V = model.eval()(torch.tensor([row.tokens[: row.num_prompt_tokens]])).logits[0, -1]
    torch.testing.assert_close(row.logits[37], expected_V, atol=1e-3, rtol=1e-3)


def unfused(name: str, tensor: torch.Tensor, model: str) -> dict[str, torch.Tensor]:
    """A tensor as converted files have it: one for each expert."""
    stem = name.removesuffix(".weight").removesuffix("_bias")
    if not stem.endswith(FUSED) or "shared" in stem:
        return {name: tensor}
    ending = ".bias" if name.endswith("_bias") else ".weight"
    stem = stem.replace("input_linear", "experts.gate_up_proj")
    module, part = stem.replace("output_linear", "experts.down_proj").rsplit(".", 1)
    if model in ("GptOssForCausalLM", "Llama4ForCausalLM") and ending == ".weight":
        tensor = tensor.mT
    if part == "down_proj":
        return {f"{module}.{e}.{part}{ending}": each for e, each in enumerate(tensor)}
    alternate = model == "GptOssForCausalLM"
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if alternate else tensor.chunk(2, dim=1)
    halves = {"gate_proj": gate, "up_proj": up}
    return {
        f"{module}.{e}.{half}{ending}": each
        for half, value in halves.items()
        for e, each in enumerate(value)
    }

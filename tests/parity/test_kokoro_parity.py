"""Kokoro against the reference implementation, on random weights that both load from one hub file.

The live half needs the reference's source: `pip install --no-deps kokoro==0.9.4`, or its unpacked
wheel on PYTHONPATH. Of that only the network is imported, not the package's own start-up with its
many requirements. The recorded half compares with what that network gave when it was last run.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.modalities.tts.models.kokoro.config import KOKORO_82M, read_kokoro_config
from triptych.modalities.tts.models.kokoro.convert import hub_tensors
from triptych.modalities.tts.models.kokoro.model import KokoroModel, Sentence

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference's own

# The reference fixes the widths of its decoder, so only the rest can be small.
CONFIG = {
    **KOKORO_82M,
    "n_layer": 2,
    "dropout": 0.2,
    "n_mels": 80,
    "plbert": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_hidden_layers": 3,
    },
}
IDS = (50, 60, 3, 70, 156, 90, 61, 16, 44, 5)
NUM_PHASES = 11


def weights_like(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Weights of a plausible size, that speak: voiced pitch, a few frames a phoneme."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        fan_in = max(shape[1:].numel(), 1)
        noise = torch.randn(shape, generator=generator)
        is_scale = name.endswith(("norm.weight", "LayerNorm.weight", "layer_norm.weight", "gamma"))
        if is_scale or "alpha" in name or name.endswith("weight_g"):
            weights[name] = 1 + 0.1 * noise
        else:
            weights[name] = noise * (0.1 if len(shape) == 1 else fan_in**-0.5)
    weights["predictor.F0_proj.bias"].fill_(160.0)
    weights["predictor.F0_proj.weight"].mul_(10)
    weights["predictor.duration_proj.linear_layer.bias"].sub_(2.5)
    weights["decoder.generator.conv_post.weight_g"].mul_(0.3)
    return weights


def without_phases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Deaf to the source's phases, which jump where rounding tips an angle from -pi to pi."""
    for name in weights:
        if ".noise_convs." in name and name.endswith("weight"):
            weights[name][:, NUM_PHASES:] = 0
    return weights


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    """The module `kokoro.model`, beside stand-ins for what it imports and these tests never use."""
    found = importlib.util.find_spec("kokoro")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the reference is absent: pip install --no-deps kokoro==0.9.4")
    package, log, attr = ModuleType("kokoro"), ModuleType("loguru"), ModuleType("attr")
    package.__path__ = list(found.submodule_search_locations)
    log.logger = SimpleNamespace(debug=lambda *_: None)  # type: ignore[attr-defined]
    attr.attr = None  # type: ignore[attr-defined]
    before = dict(sys.modules)
    sys.modules.update({"kokoro": package, "loguru": log, "attr": attr})
    yield importlib.import_module("kokoro.model")
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in {"kokoro", "loguru", "attr"}:
            del sys.modules[name]


class Pair:
    """The reference and ours with the same weights, by way of one file in the hub's layout."""

    def __init__(self, reference: ModuleType, folder: Path, *, hears_phases: bool) -> None:
        shapes = {
            name: tensor.shape
            for name, tensor in self._theirs(reference, None).state_dict().items()
            if "position_ids" not in name
        }
        weights = weights_like(shapes)
        self.weights = weights if hears_phases else without_phases(weights)
        save_hub_file(self.weights, folder)
        self.theirs = self._theirs(reference, folder / "kokoro.pth")
        self.ours = KokoroModel(read_kokoro_config(CONFIG)).eval()
        self.ours.load_state_dict(hub_tensors(folder))

    def to(self, dtype: torch.dtype) -> Pair:
        self.theirs.to(dtype)
        self.theirs.decoder.generator.stft.window = torch.hann_window(20, dtype=dtype)
        self.ours.to(dtype)
        return self

    @staticmethod
    def _theirs(reference: ModuleType, file: Path | None) -> Any:
        def load(*_: object, **__: object) -> dict[str, Any]:
            return {}

        with pytest.MonkeyPatch.context() as patch:
            if file is None:
                patch.setattr(reference.torch, "load", load)
            model = reference.KModel(repo_id="here", config=CONFIG, model=str(file or "nowhere"))
        return model.eval()


def save_hub_file(weights: dict[str, Tensor], folder: Path) -> None:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        module, _, rest = name.partition(".")
        parts.setdefault(module, {})[f"module.{rest}"] = tensor
    torch.save(parts, folder / "kokoro.pth")


def silent(seed: int, num_samples: int) -> Tensor:
    return torch.zeros(num_samples, 9)


def style(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(256, generator=generator, dtype=torch.float64).to(dtype)


def ours_says(model: KokoroModel, speed: float, dtype: torch.dtype) -> Tensor:
    sentence = Sentence(phoneme_ids=IDS, style_Y=style(dtype), speed=speed)
    with torch.inference_mode():
        return model.render([model.plan(sentence, silent)])[0]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("speed", [1.0, 1.7])
@pytest.mark.usefixtures("quiet", "double")
def test_speech_is_the_references(reference: ModuleType, tmp_path: Path, speed: float) -> None:
    """In double: in single, rounding of the pitch adds up to phases some milliradians apart."""
    pair = Pair(reference, tmp_path, hears_phases=False).to(torch.float64)
    ids = torch.tensor([[0, *IDS, 0]])
    theirs, _ = pair.theirs.forward_with_tokens(ids, style(torch.float64)[None], speed)
    assert float(theirs.std()) > 0.05
    ours = ours_says(pair.ours, speed, torch.float64)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("quiet", "double")
def test_source_is_the_references(reference: ModuleType, tmp_path: Path) -> None:
    pair = Pair(reference, tmp_path, hears_phases=True).to(torch.float64)
    pitch_P = torch.tensor([0.0, 90.0, 210.0, 5.0, 180.0, 181.0, 0.0, 0.0])
    theirs, _, _ = pair.theirs.decoder.generator.m_source(
        pitch_P.repeat_interleave(300)[None, :, None]
    )
    ours = pair.ours.decoder.generator.m_source(pitch_P, torch.zeros(8 * 300, 9))
    torch.testing.assert_close(ours, theirs[0, :, 0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("speed", [1.0, 1.7])
def test_speech_from_one_source_is_the_references_in_single(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """All but the source, whose signal both are given, phases included."""
    pair = Pair(reference, tmp_path, hears_phases=True)
    ours, theirs = pair.ours.decoder.generator, pair.theirs.decoder.generator

    def signal(*, num_samples: int) -> Tensor:
        return 0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(2))

    monkeypatch.setattr(ours.m_source, "forward", lambda p, _: signal(num_samples=300 * len(p)))
    monkeypatch.setattr(
        theirs.m_source,
        "forward",
        lambda f0: (signal(num_samples=f0.shape[1])[None, :, None], None, None),
    )
    ids = torch.tensor([[0, *IDS, 0]])
    speech, _ = pair.theirs.forward_with_tokens(ids, style(torch.float32)[None], speed)
    ours_S = ours_says(pair.ours, speed, torch.float32)
    torch.testing.assert_close(ours_S, speech, atol=1e-4, rtol=0)

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

import pytest
import torch
from torch import Tensor

from support.kokoro_models import write_hub_folder
from triptych.modalities.tts.configs.kokoro import KOKORO_82M, read_kokoro_config
from triptych.modalities.tts.engine.models.kokoro.convert import hub_tensors
from triptych.modalities.tts.engine.models.kokoro.layers import finish
from triptych.modalities.tts.engine.models.kokoro.model import KokoroModel, SentenceRequest

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
NUM_MAGNITUDES = 11
RECORDED_LENGTH = 28_800
RECORDED_SAMPLES = (
    -0.008597023270,
    -0.098075846373,
    -0.249130189878,
    -0.174751988374,
    -0.197105038187,
    -0.088830909989,
    -0.003900585568,
    -0.065596072637,
)
"""The first of every eighth of what the reference made of `our_model`."""


def our_model(*, uses_phases: bool) -> KokoroModel:
    """Weights of a plausible size, that speak: voiced pitch, a few frames a phoneme.

    Without phases the generator ignores those of its source, which jump wherever rounding tips
    an angle from -pi to pi.
    """
    model = KokoroModel(read_kokoro_config(CONFIG)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        is_scale = "alpha" in name or (parameter.ndim == 1 and name.endswith("weight"))
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 and not is_scale else 0.1
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(spread * noise + float(is_scale))
    model.predictor.F0_proj.get_parameter("bias").fill_(160.0)
    model.predictor.F0_proj.weight.mul_(10)
    model.predictor.duration_proj.bias.sub_(2.5)
    model.decoder.generator.conv_post.weight.mul_(0.3)
    if not uses_phases:
        for conv in model.decoder.generator.noise_convs:
            conv.get_parameter("weight")[:, NUM_MAGNITUDES:] = 0
    return model


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

    def __init__(self, reference: ModuleType, folder: Path, *, uses_phases: bool) -> None:
        model = our_model(uses_phases=uses_phases)
        write_hub_folder(folder, model, CONFIG)
        file = str(folder / "kokoro-v1_0.pth")
        self.theirs = reference.KModel(repo_id="here", config=CONFIG, model=file).eval()
        self.ours = model
        self.ours.load_state_dict(
            {name: tensor for name, tensor in hub_tensors(folder).items() if "voices." not in name}
        )

    def to(self, dtype: torch.dtype) -> Pair:
        self.theirs.to(dtype)
        self.theirs.decoder.generator.stft.window = torch.hann_window(20, dtype=dtype)
        self.ours.to(dtype)
        return self


def silent(seed: int, num_samples: int) -> Tensor:
    return torch.zeros(num_samples, 9)


def style(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(256, generator=generator, dtype=torch.float64).to(dtype)


def ours_says(model: KokoroModel, speed: float, dtype: torch.dtype) -> Tensor:
    sentence = SentenceRequest(phoneme_ids=IDS, style_Y=style(dtype), speed=speed)
    with torch.inference_mode():
        return finish(model.render([finish(model.plan(sentence, silent))]))[0]


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
    pair = Pair(reference, tmp_path, uses_phases=False).to(torch.float64)
    ids = torch.tensor([[0, *IDS, 0]])
    theirs, _ = pair.theirs.forward_with_tokens(ids, style(torch.float64)[None], speed)
    assert float(theirs.std()) > 0.05
    ours = ours_says(pair.ours, speed, torch.float64)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("quiet", "double")
def test_source_is_the_references(reference: ModuleType, tmp_path: Path) -> None:
    pair = Pair(reference, tmp_path, uses_phases=True).to(torch.float64)
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
    pair = Pair(reference, tmp_path, uses_phases=True)
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


@pytest.mark.usefixtures("double")
def test_speech_is_what_the_reference_gave() -> None:
    """Recorded from the reference in double, with `test_speech_is_the_references` at speed 1."""
    model = our_model(uses_phases=False).double()
    pcm_S = ours_says(model, 1.0, torch.float64)
    recorded = torch.tensor(RECORDED_SAMPLES)
    assert len(pcm_S) == RECORDED_LENGTH
    torch.testing.assert_close(pcm_S[:: RECORDED_LENGTH // 8][:8], recorded, atol=1e-6, rtol=0)

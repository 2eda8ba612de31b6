"""Silero's network against torch's layers, and on real weights against the package's ONNX file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.hearing import context_of, random_weights
from triptych.core.media.audio.intake import ClipLimits, read_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.weights.onnx_graph import OnnxGraph
from triptych.core.weights.packages import fetch_file
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.talk.hearing.source import PACKAGE
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.hearing.voice_activity import (
    CONTEXT,
    FRAME,
    VoiceNetwork,
    VoiceState,
    VoiceStream,
)
from triptych.modalities.talk.ports import SpeechStarted, SpeechStopped, TurnOptions

LIMITS = ClipLimits(max_bytes=2**20, max_seconds=10)


def speech_like(num_frames: int) -> Pcm:
    """Bursts of a changing tone in noise."""
    rng = np.random.default_rng(1)
    time_S = np.arange(num_frames * FRAME) / 16000
    loudness = 0.02 + 0.3 * (np.sin(2 * np.pi * 1.3 * time_S) > 0)
    tone = np.sin(2 * np.pi * (140 * time_S + 20 * np.sin(9 * time_S)))
    noisy = tone + 0.3 * rng.standard_normal(len(time_S))
    return np.asarray(loudness * noisy, np.float32)


def by_torch(weights: dict[str, Tensor], pcm_S: Pcm) -> list[float]:
    """The network of the package's tinygrad_model.py in torch's words."""
    cell = torch.nn.LSTMCell(128, 128)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cell.load_state_dict({name: weights[f"decoder.rnn.{name}"] for name in names})
    state, found = (torch.zeros(1, 128), torch.zeros(1, 128)), []
    whole = torch.from_numpy(context_of(pcm_S))
    for at in range(CONTEXT, len(whole), FRAME):
        frame = functional.pad(whole[None, at - CONTEXT : at + FRAME], (0, 64), mode="reflect")
        rows = functional.conv1d(frame[None], weights["stft.forward_basis_buffer"], stride=128)
        rows = (rows[:, :129] ** 2 + rows[:, 129:] ** 2).sqrt()
        for n, stride in enumerate((1, 2, 2, 1)):
            layer = f"encoder.{n}.reparam_conv"
            rows = functional.conv1d(
                rows, weights[f"{layer}.weight"], weights[f"{layer}.bias"], stride, padding=1
            ).relu()
        state = cell(rows[..., 0], state)
        weight, bias = weights["decoder.decoder.2.weight"], weights["decoder.decoder.2.bias"]
        logit = functional.conv1d(state[0][..., None].relu(), weight, bias)
        found.append(float(logit.sigmoid()))
    return found


def test_the_network_is_that_of_the_package() -> None:
    weights, pcm_S = random_weights(), speech_like(40)
    found = VoiceNetwork(weights).probabilities(VoiceState.empty(), pcm_S)
    with torch.no_grad():
        expected = by_torch({k: torch.from_numpy(v) for k, v in weights.items()}, pcm_S)
    assert np.ptp(found) > 0.05
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_pieces_of_any_length_give_equal_probabilities() -> None:
    network, pcm_S = VoiceNetwork(random_weights()), speech_like(30)
    cuts = [0, 1, 511, 512, 1400, 1400, 9000, len(pcm_S)]
    stream, whole = VoiceStream(network), VoiceStream(network).push(pcm_S)
    pieces = [stream.push(pcm_S[a:b]) for a, b in pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-6)


@pytest.mark.embedded
def test_released_weights_match_the_released_model_on_speech(tmp_path: Path) -> None:
    """The recording is question 5 of samples/benchmarks/talk_questions.py: a pause, and noise."""
    onnxruntime = pytest.importorskip("onnxruntime")
    file = fetch_file(PACKAGE, tmp_path / "fetched", SilentProgress())
    data = Path(__file__).with_name("question.opus").read_bytes()
    whole_S = read_clip(data, sample_rate=16000, limits=LIMITS)
    graph, pcm_S = OnnxGraph(file), whole_S[: len(whole_S) // FRAME * FRAME]
    weights = {name.removeprefix("model."): graph.tensor(name) for name in graph.floats}
    found = VoiceNetwork(weights).probabilities(VoiceState.empty(), pcm_S)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    whole, state, expected = context_of(pcm_S), np.zeros((2, 1, 128), np.float32), []
    for at in range(CONTEXT, len(whole), FRAME):
        frame = whole[None, at - CONTEXT : at + FRAME]
        probability, state = session.run(
            None, {"input": frame, "state": state, "sr": np.array(16000)}
        )
        expected.append(float(probability[0, 0]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    started, stopped = VoiceTurnDetector(VoiceNetwork(weights), TurnOptions()).push(whole_S)
    assert isinstance(started, SpeechStarted)
    assert isinstance(stopped, SpeechStopped)
    assert started.at_ms == pytest.approx(610 - 300, abs=200)
    assert stopped.at_ms == pytest.approx(3381, abs=130)

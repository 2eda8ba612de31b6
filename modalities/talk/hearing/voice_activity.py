"""Silero's voice-activity detection, in NumPy.

Owns the network: 512 samples at 16 kHz, after 64 of context, give the probability of speech. Its
architecture is that of the package silero-vad (MIT, `silero_vad_16k_op15.onnx`): a convolution as
the spectrum, four convolutions, an LSTM cell, a sigmoid. Knows no turns. Shape suffixes: N frames,
S samples, T windows of the spectrum, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from triptych.core.media.audio.resampling import Pcm

FRAME = 512
"""Samples per frame: 32 ms."""
CONTEXT = 64
"""Samples before a frame that the network sees, too."""
_WINDOW, _HOP, _PADDED = 256, 128, 64
_NUM_WINDOWS = 4
_NUM_BINS = _WINDOW // 2 + 1
_WIDTH = 128
_NUM_SPLITS = 8
_MAX_FRAMES = 128
"""Frames at once: more would only take memory."""
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class VoiceState:
    """The network's memory of one stream: its last samples, and the state of its cell."""

    context_S: Pcm
    hidden_C: Floats
    cell_C: Floats

    @classmethod
    def empty(cls) -> VoiceState:
        """The state before the first frame."""
        return cls(*(np.zeros(size, np.float32) for size in (CONTEXT, _WIDTH, _WIDTH)))


class VoiceNetwork:
    """The weights, shared by all streams. Calls change nothing here, so threads may share it.

    Every product is a stack of small ones, which BLAS computes on the calling thread: waking other
    threads for them takes longer than the work, and milliseconds on a busy machine.
    """

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        self._spectrum = np.ascontiguousarray(weights["stft.forward_basis_buffer"][:, 0].T)
        convolutions = [
            (weights[f"encoder.{n}.reparam_conv.weight"], weights[f"encoder.{n}.reparam_conv.bias"])
            for n in range(4)
        ]
        # Kernels as matrices over neighbouring rows. The third sees two rows after one of zeros,
        # the fourth one row between zeros: their other taps are always multiplied by zero.
        taps = (slice(0, 3), slice(0, 3), slice(1, 3), slice(1, 2))
        self._kernels = [
            (np.ascontiguousarray(weight.transpose(2, 1, 0)[used].reshape(-1, len(bias))), bias)
            for (weight, bias), used in zip(convolutions, taps, strict=True)
        ]
        self._input_gates = _split_gates(weights["decoder.rnn.weight_ih"])
        self._hidden_gates = _split_gates(weights["decoder.rnn.weight_hh"])
        self._gate_bias = weights["decoder.rnn.bias_ih"] + weights["decoder.rnn.bias_hh"]
        self._out = np.ascontiguousarray(weights["decoder.decoder.2.weight"].reshape(-1))
        self._out_bias = weights["decoder.decoder.2.bias"]

    @classmethod
    def load(cls, file: Path) -> VoiceNetwork:
        """Read the converted weights (see `source`)."""
        return cls(load_file(file))

    def probabilities(self, state: VoiceState, pcm_S: Pcm) -> Floats:
        """The probabilities [N] of speech in whole frames of one stream, whose state moves on."""
        frames_NS = _frames(state, pcm_S)
        features = self._encode(frames_NS)[:, :, None]
        gates = (features @ self._input_gates).reshape(len(frames_NS), -1) + self._gate_bias
        hidden_NC = np.empty((len(gates), _WIDTH), np.float32)
        hidden_C, cell_C = state.hidden_C, state.cell_C
        for n, given_C in enumerate(gates):
            from_hidden = (hidden_C[None] @ self._hidden_gates).reshape(-1)
            entry, forget, candidate, out = (given_C + from_hidden).reshape(4, _WIDTH)
            cell_C = _sigmoid(forget) * cell_C + _sigmoid(entry) * np.tanh(candidate)
            hidden_C = hidden_NC[n] = _sigmoid(out) * np.tanh(cell_C)
        state.hidden_C, state.cell_C = hidden_C, cell_C
        logits_N: Floats = (np.maximum(hidden_NC, 0) * self._out).sum(1) + self._out_bias
        return _sigmoid(logits_N)

    def _encode(self, frames_NS: Floats) -> Floats:
        """The features [N, 1, C] of frames with their context: what needs no earlier frame."""
        num = len(frames_NS)
        halves = _windows(frames_NS).reshape(2 * num, _NUM_WINDOWS // 2, _WINDOW)
        spectrum = (halves @ self._spectrum).reshape(num, _NUM_WINDOWS, -1)
        rows = np.zeros((num, _NUM_WINDOWS + 2, _NUM_BINS), np.float32)
        np.hypot(spectrum[..., :_NUM_BINS], spectrum[..., _NUM_BINS:], out=rows[:, 1:-1])
        first = self._convolve(0, _neighbours(rows, 1))
        rows = np.zeros((num, _NUM_WINDOWS + 1, _WIDTH), np.float32)
        rows[:, 1:] = first
        second = self._convolve(1, _neighbours(rows, 2))
        third = self._convolve(2, second.reshape(num, 1, -1))
        return self._convolve(3, third)

    def _convolve(self, layer: int, rows: Floats) -> Floats:
        kernel, bias = self._kernels[layer]
        found: Floats = np.maximum(rows @ kernel + bias, 0)
        return found


class VoiceStream:
    """One stream of sound, in pieces of any length. It begins with `num_before` silent samples."""

    def __init__(self, network: VoiceNetwork, num_before: int = 0) -> None:
        self._network = network
        self._state = VoiceState.empty()
        self._rest_S: Pcm = np.zeros(num_before, np.float32)

    def push(self, pcm_S: Pcm) -> Floats:
        """The probabilities [N] of speech in the frames that these samples complete."""
        return self.listen(pcm_S)[0]

    def listen(self, pcm_S: Pcm) -> tuple[Floats, Floats]:
        """As `push`, and the levels [N] of the frames: their root mean squares."""
        joined_S = np.concatenate([self._rest_S, pcm_S])
        whole_S, self._rest_S = np.split(joined_S, [len(joined_S) // FRAME * FRAME])
        blocks = range(0, len(whole_S), _MAX_FRAMES * FRAME)
        pieces = [whole_S[at : at + _MAX_FRAMES * FRAME] for at in blocks]
        found = [self._network.probabilities(self._state, piece_S) for piece_S in pieces]
        levels: Floats = np.sqrt(np.square(whole_S.reshape(-1, FRAME)).mean(1))
        return np.concatenate([np.zeros(0, np.float32), *found]), levels


def _split_gates(weight: Floats) -> Floats:
    """The matrix of the four gates as a stack [8, C, 64]."""
    stacked = weight.T.reshape(_WIDTH, _NUM_SPLITS, -1).transpose(1, 0, 2)
    return np.ascontiguousarray(stacked)


def _frames(state: VoiceState, pcm_S: Pcm) -> Floats:
    """Frames with the context before them [N, CONTEXT + FRAME]; remembers the last context."""
    assert len(pcm_S) % FRAME == 0, "only whole frames"
    joined = np.concatenate([state.context_S, pcm_S], dtype=np.float32)
    state.context_S = joined[len(joined) - CONTEXT :].copy()
    framed: Floats = np.lib.stride_tricks.sliding_window_view(joined, CONTEXT + FRAME)[::FRAME]
    return framed


def _windows(frames_NS: Floats) -> Floats:
    """The windows of the spectrum [N, T, S]; the end of a frame is reflected."""
    padded = np.pad(frames_NS, ((0, 0), (0, _PADDED)), mode="reflect")
    windows: Any = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW, axis=1)[:, ::_HOP]
    return np.asarray(windows)


def _neighbours(rows_NTC: Floats, stride: int) -> Floats:
    """Three neighbouring rows each, side by side, `stride` rows apart [N, T, 3 C]."""
    num, num_rows, width = rows_NTC.shape
    flat = rows_NTC.reshape(num, num_rows * width)
    found: Any = np.lib.stride_tricks.sliding_window_view(flat, 3 * width, axis=1)
    return np.asarray(found[:, :: stride * width])


def _sigmoid(values: Floats) -> Floats:
    found: Floats = 0.5 * np.tanh(0.5 * values) + 0.5
    return found

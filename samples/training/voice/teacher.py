"""The teacher: hibari's network, with its internal states as outputs.

Owns the changes to the graph and its frame: the durations of its symbols in units of two frames,
its last hidden state before the spectral head, that head's matrix, and the pitch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hibari
import numpy as np
import onnxruntime
from numpy.typing import NDArray

FRAMES_PER_UNIT = 2
MAX_LEAD_UNITS = 2
"""How much silence is kept before the first sound: it adds to the latency."""

_DURATIONS = "/Cast_32_output_0"
_HIDDEN = "/dec_norm/LayerNormalization_output_0"
_HEAD = "/head/Transpose_output_0"


@dataclass(frozen=True, slots=True)
class Reading:
    """The teacher's outputs for one sentence: N symbols, F frames of 12.5 ms."""

    ids_N: NDArray[np.int16]
    units_N: NDArray[np.int16]
    f0_F: NDArray[np.float32]
    hidden_FC: NDArray[np.float16]


class Teacher:
    """Phonemes and the teacher's outputs, one sentence at a time."""

    def __init__(self) -> None:
        import onnx  # the recipe's own need, not the package's

        self.hibari = hibari.Hibari()
        self._graph = onnx.load(self.hibari.model_path)
        for name, kind in ((_DURATIONS, onnx.TensorProto.INT64), (_HIDDEN, onnx.TensorProto.FLOAT)):
            self._graph.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            self._graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def symbols(self, sentence: str) -> list[int]:
        """Ids of the sentence's phonemes with padding around; of its first part, if it is long."""
        parts = self.hibari.phonemize(sentence)
        return list(self.hibari.ids(parts[0])) if parts else []

    def read(self, ids: list[int]) -> Reading:
        """Run the teacher on a sentence; leading silence is cut."""
        feed = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        outputs: list[Any] = self._session.run([_DURATIONS, _HIDDEN, "f0"], feed)
        units_N, hidden_FC, f0_F = outputs[0].reshape(-1), outputs[1][0], outputs[2][0]
        cut = max(int(units_N[0]) - MAX_LEAD_UNITS, 0)
        units_N[0] -= cut
        first = cut * FRAMES_PER_UNIT
        return Reading(
            np.asarray(ids, np.int16),
            units_N.astype(np.int16),
            f0_F[first:].astype(np.float32),
            hidden_FC[first:].astype(np.float16),
        )

    def spectra(self, ids: list[int]) -> list[NDArray[np.float32]]:
        """The teacher's own spectral frames, for its own synthesis: every student's upper bound."""
        feed = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        names = ["lh", "theta", "ln", "lr", "phi", "f0"]
        return [output[0] for output in self._session.run(names, feed)]

    def head(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The spectral head: weight [hidden, 5 * bins] and bias."""
        from onnx import numpy_helper

        tensors = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in self._graph.graph.initializer
            if tensor.name.startswith(_HEAD) or tensor.name.endswith("head.bias")
        }
        bias = next(value for name, value in tensors.items() if name.endswith("head.bias"))
        zero = tensors[f"{_HEAD}_zero_point"].astype(np.float32)
        steps = tensors[f"{_HEAD}_quantized"].astype(np.float32) - zero
        return steps * tensors[f"{_HEAD}_scale"], bias


def asset(name: str) -> Path:
    """A file of the teacher's package."""
    return Path(hibari.__file__).parent / "assets" / name

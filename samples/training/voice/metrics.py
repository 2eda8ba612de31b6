"""Speech quality by models: Whisper's word error rate, and DNSMOS.

Owns the two metrics. Whisper tiny.en is the package's default recognizer; DNSMOS P.835 (Reddy
et al., 2022) comes with the package `speechmos`, whose network is called here without its imports.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchaudio import functional as audio
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from triptych.core.options.config import ModelOptions
from triptych.core.weights.packages import run_installer
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.asr.source import WHISPER_TINY

RATE = 16_000
_DNSMOS_S = 9.01
# From network to opinion score, by the authors: signal, background, overall.
_POLYNOMIALS = (
    (-0.08397278, 1.22083953, 0.0052439),
    (-0.13166888, 1.60915514, -0.39604546),
    (-0.06766283, 1.11546468, 0.04602535),
)


def resample(pcm_S: Tensor, rate: int) -> NDArray[np.float32]:
    """Resample to the rate of both metrics."""
    samples: NDArray[np.float32] = audio.resample(pcm_S.float(), rate, RATE).numpy()
    return samples


class Listener:
    """Transcribes greedily."""

    def __init__(self) -> None:
        folder, _ = WHISPER_TINY.fetch(ModelOptions(), SilentProgress(), run_installer)
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._features = WhisperFeatureExtractor()
        self._normalize = EnglishTextNormalizer({})

    @torch.inference_mode()
    def text(self, pcm_S: NDArray[np.float32]) -> str:
        """The words in up to 30 s of sound."""
        heard = self._features(pcm_S, sampling_rate=RATE, return_tensors="pt").input_features
        ids = self._model.generate(heard, do_sample=False, max_length=128)[0].tolist()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()

    def word_errors(self, said: str, heard: str) -> tuple[int, int]:
        """Insertions, deletions and substitutions; and the number of reference words."""
        reference, words = self._normalize(said).split(), self._normalize(heard).split()
        row = list(range(len(words) + 1))
        for number, wanted in enumerate(reference, 1):
            diagonal, row[0] = row[0], number
            for index, word in enumerate(words, 1):
                best = min(row[index] + 1, row[index - 1] + 1, diagonal + (wanted != word))
                diagonal, row[index] = row[index], best
        return row[-1], len(reference)


class Judge:
    """DNSMOS: (signal, background, overall) from 1 to 5."""

    def __init__(self) -> None:
        spec = find_spec("speechmos")
        if spec is None or spec.origin is None:
            raise SystemExit("DNSMOS is missing: pip install '.[recipes]'")
        model = Path(spec.origin).parent / "dnsmos_models" / "sig_bak_ovr.onnx"
        self._session = onnxruntime.InferenceSession(str(model))

    def __call__(self, pcm_S: NDArray[np.float32]) -> tuple[float, ...]:
        """Of the first nine seconds, repeated where there are fewer."""
        length = int(_DNSMOS_S * RATE)
        looped = np.tile(pcm_S, -(-length // len(pcm_S)))[:length]
        name = self._session.get_inputs()[0].name
        scores: Any = self._session.run(None, {name: looped[None].astype(np.float32)})[0]
        return tuple(
            float(np.polyval(polynomial, score))
            for polynomial, score in zip(_POLYNOMIALS, scores[0], strict=True)
        )

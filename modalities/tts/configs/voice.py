"""The configuration of the embedded voice, as its `config.json` states it.

Owns the sizes of both models. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from triptych.core.errors import WeightsError

MODEL_TYPE = "triptych_voice"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """The codec: one step of codes makes `frames_per_step` spectral frames of `hop` samples."""

    sample_rate: int = 24_000
    hop: int = 300
    n_fft: int = 1200
    frames_per_step: int = 4
    num_codebooks: int = 32
    num_levels: int = 9
    step_dim: int = 384
    num_step_layers: int = 2
    frame_dim: int = 256
    frame_intermediate: int = 768
    num_frame_layers: int = 4
    pitch_dim: int = 192

    @property
    def num_bins(self) -> int:
        """Frequency bins of a spectral frame."""
        return self.n_fft // 2 + 1

    @property
    def step_s(self) -> float:
        """Seconds of sound in a step."""
        return self.frames_per_step * self.hop / self.sample_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class AcousticConfig:
    """The speech-token decoder over phoneme symbols; `acoustic.py` explains the fields."""

    num_symbols: int = 178
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    symbol_dim: int = 64
    num_symbols_before: int = 3
    num_symbols_after: int = 5
    max_held: int = 15
    max_advance: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceConfig:
    """The contents of the embedded voice's `config.json`."""

    codec: CodecConfig = field(default_factory=CodecConfig)
    acoustic: AcousticConfig = field(default_factory=AcousticConfig)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> VoiceConfig:
        """Read the contents of config.json. Raises `WeightsError` for another model's."""
        if values.get("model_type") != MODEL_TYPE:
            raise WeightsError(f"config.json is not of a {MODEL_TYPE} model.")
        try:
            return cls(
                codec=CodecConfig(**values["codec"]), acoustic=AcousticConfig(**values["talker"])
            )
        except (KeyError, TypeError) as error:
            raise WeightsError(f"config.json does not describe the voice: {error}.") from None

    def to_json(self) -> dict[str, Any]:
        """The values that `read` reads."""
        return {
            "model_type": MODEL_TYPE,
            "codec": asdict(self.codec),
            "talker": asdict(self.acoustic),
        }

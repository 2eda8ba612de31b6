"""The checked configuration of a Whisper folder: special tokens, languages, sizes.

Owns reading config.json and generation_config.json for both processes. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert, describe_mismatch
from triptych.core.weights.layout import read_json
from triptych.modalities.asr.traits import Task, Traits

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160
FRAMES_PER_S = SAMPLE_RATE // HOP_SAMPLES
"""Frame rate of the log-mel spectrogram. The encoder halves it; timestamps count its positions."""
FRAMES_PER_POSITION = 2

MAX_PART_S = 600
"""Seconds of audio in one engine request, which bounds the engine's memory per recording."""

MULTILINGUAL_VOCABULARY = 51_865
"""The smallest multilingual vocabulary; the English models have one token less."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Fields = TypeVar("Fields", bound=msgspec.Struct)


class _Config(msgspec.Struct):
    """The fields of config.json that are read."""

    vocab_size: Count
    num_mel_bins: Count
    d_model: Count
    encoder_layers: Count
    encoder_attention_heads: Count
    encoder_ffn_dim: Count
    decoder_layers: Count
    decoder_attention_heads: Count
    max_source_positions: Count
    max_target_positions: Count
    median_filter_width: Count = 7


class _Generation(msgspec.Struct):
    """The fields of generation_config.json that are read."""

    no_timestamps_token_id: int
    decoder_start_token_id: int
    eos_token_id: int | list[int]
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    max_initial_timestamp_index: int | None = None
    alignment_heads: list[tuple[int, int]] | None = None
    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}


def _read(file: str, values: Mapping[str, Any], kind: type[Fields]) -> Fields:
    try:
        return convert(values, kind)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, values)
        raise WeightsError(f"{file} is not usable for speech recognition: {reason}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSpec:
    """The token ids and sizes of one Whisper model. Without `languages` it is English-only."""

    config: _Config
    start_id: int
    end_id: int
    no_timestamps_id: int
    suppressed_ids: tuple[int, ...]
    suppressed_first_ids: tuple[int, ...]
    max_first_timestamp: int | None
    alignment_heads: tuple[tuple[int, int], ...]
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> WhisperSpec:
        """The spec of a resolved folder. Raises `WeightsError` if it is not a Whisper model."""
        config = read_json(folder / "config.json")
        return cls.of(config, read_json(folder / "generation_config.json"))

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> WhisperSpec:
        """The spec of two configs. Raises `WeightsError`."""
        sizes = _read("config.json", config, _Config)
        given = _read("generation_config.json", generation, _Generation)
        for heads in (sizes.encoder_attention_heads, sizes.decoder_attention_heads):
            if sizes.d_model % heads:
                raise WeightsError(
                    f"config.json: d_model {sizes.d_model} does not split into {heads} heads."
                )
        if sizes.vocab_size >= MULTILINGUAL_VOCABULARY and not given.lang_to_id:
            raise WeightsError(
                "generation_config.json has no languages (lang_to_id), but the model is"
                " multilingual: copy that file from its base model."
            )
        ends = given.eos_token_id
        return cls(
            config=sizes,
            start_id=given.decoder_start_token_id,
            end_id=ends[0] if isinstance(ends, list) else ends,
            no_timestamps_id=given.no_timestamps_token_id,
            suppressed_ids=tuple(given.suppress_tokens or ()),
            suppressed_first_ids=tuple(given.begin_suppress_tokens or ()),
            max_first_timestamp=given.max_initial_timestamp_index,
            alignment_heads=tuple(given.alignment_heads or _upper_heads(sizes)),
            languages={token.strip("<|>"): at for token, at in given.lang_to_id.items()},
            tasks=given.task_to_id,
        )

    @property
    def traits(self) -> Traits:
        """The options that a request may have."""
        return Traits(
            family="Whisper",
            languages=tuple(self.languages) or ("en",),
            translates="translate" in self.tasks,
            max_prompt_tokens=self.max_prompt_tokens,
            continues_text=True,
            can_sample=True,
            has_word_times=True,
        )

    @property
    def first_timestamp_id(self) -> int:
        """The token for the start of a window; later tokens count positions."""
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        """The token predicted after the start token if there is no speech."""
        return self.no_timestamps_id - 1

    @property
    def previous_id(self) -> int:
        """The token that opens the text of earlier windows."""
        return self.no_timestamps_id - 2

    @property
    def window_frames(self) -> int:
        """Frames of the encoder's input."""
        return self.config.max_source_positions * FRAMES_PER_POSITION

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of earlier text in a window's prompt."""
        return self.config.max_target_positions // 2 - 1

    @property
    def max_new_tokens(self) -> int:
        """The most tokens sampled for one window."""
        return self.config.max_target_positions // 2

    def start_ids(self, language: str, task: Task) -> tuple[int, ...]:
        """The tokens that start a transcript in `language`, which the model must support."""
        if not self.languages:
            return (self.start_id,)
        return (self.start_id, self.languages[language], self.tasks[task])

    def timestamp_id(self, time_s: float) -> int:
        """The token of a time in a window (seconds)."""
        return self.first_timestamp_id + round(time_s * FRAMES_PER_S / FRAMES_PER_POSITION)

    def is_timestamp(self, token_id: int) -> bool:
        """Whether a token is a timestamp."""
        return token_id >= self.first_timestamp_id

    def is_text(self, token_id: int) -> bool:
        """Whether a token is text: all special tokens follow the end token."""
        return token_id < self.end_id


def _upper_heads(sizes: _Config) -> list[tuple[int, int]]:
    """All heads of the upper half of the layers, for models without known alignment heads."""
    layers = range(sizes.decoder_layers // 2, sizes.decoder_layers)
    return [(layer, head) for layer in layers for head in range(sizes.decoder_attention_heads)]

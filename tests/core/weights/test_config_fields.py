"""Which fields of a `config.json` reach a configuration class of transformers."""

from __future__ import annotations

import transformers

from triptych.core.weights.config_fields import LEGACY, KnownFields
from triptych.modalities.vlm.configs.config import read_config

DOTS = {
    "model_type": "dots3_note",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 32,
    "sliding_window_size": 128,
    "vision_config": {},
    "audio_config": {},
    "_attn_implementation": "sdpa",
    "auto_map": {"AutoConfig": "x.Y"},
}
"""As published: the fields of its text are at the top level, some with older names."""


def test_older_names_are_known_and_others_are_not() -> None:
    known = KnownFields.of(transformers.Dots3NoteTextConfig) | LEGACY
    others = {"model_type", "vision_config", "audio_config", "_attn_implementation", "auto_map"}
    assert known.of_file(DOTS).keys() | others == DOTS.keys() | {"model_type"}
    assert not known.of_file(DOTS).keys() & others - {"model_type"}


def test_a_vision_model_takes_older_names_of_its_text() -> None:
    text = read_config(DOTS).text_config
    assert (text.sliding_window, text.mlp_layer_types.count("dense")) == (128, 2)
    assert text.per_layer_config[2].num_attention_heads == 32

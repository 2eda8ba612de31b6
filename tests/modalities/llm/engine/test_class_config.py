"""Configurations of transformers: what is no language model, or none that chats, is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers

from triptych.core.errors import WeightsError
from triptych.modalities.llm.engine.class_config import read_class
from triptych.modalities.llm.engine.fallback import FallbackBlueprint

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
ODD = (0, -1, "x", None, [], {}, [1, 2], 1.5, True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": ["llama"]}, "no language model that transformers knows"),
        ({"model_type": "gemma4_assistant"}, "drafts tokens for another model"),
        ({"model_type": "emu3"}, "images become tokens of its vocabulary"),
        ({"model_type": "moss_transcribe_diarize"}, "parts for .* sound"),
        (
            {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
            "its decoder reads an encoder's states",
        ),
        (
            {"model_type": "olmo2", "architectures": ["Olmo2ForSequenceClassification"]},
            "an encoder or a classifier",
        ),
        ({"model_type": "llama4_text", "floor_scale": "x"} | SIZES, "floor_scale"),
    ],
)
def test_what_does_not_chat_is_called_what_it_is(config: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        read_class(config)


def test_an_encoder_is_refused_before_its_weights_load() -> None:
    with pytest.raises(WeightsError, match="is_decoder is false"):
        opened({"model_type": "bert"} | SIZES)


@pytest.mark.parametrize("family", ["olmo2", "bloom", "gemma3_text"])
def test_odd_values_are_refused_in_one_sentence_or_served(family: str) -> None:
    """Every field in turn has a value of another type or size."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    known = {name: value for name, value in SIZES.items() if name in kind.__dataclass_fields__}
    plain = {"model_type": family, **kind(**known).to_dict()}
    odd = zip(sorted(plain), itertools.cycle(ODD), strict=False)
    refusals = [refusal_of(plain | {name: value}) for name, value in odd]
    assert len([*filter(None, refusals)]) > 5
    assert not any("\n" in refusal for refusal in refusals)


def refusal_of(config: dict[str, Any]) -> str:
    try:
        opened(config)
    except WeightsError as error:
        return error.message
    return ""


def opened(config: dict[str, Any]) -> None:
    cpu = torch.device("cpu")
    blueprint = FallbackBlueprint(config, max_length=0, dtype=torch.float32, device=cpu)
    blueprint.kv_layout(16, torch.float32)
    blueprint.activation_bytes(16, 2)

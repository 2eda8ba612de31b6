"""Context lengths under all their names."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from triptych.core.text.context_length import context_length


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 2048),
        ({"max_position_embeddings": None, "seq_length": 512}, 512),
        ({"n_positions": 1024, "n_ctx": 7}, 1024),
        ({"max_seq_len": 4096}, 4096),
        ({"max_position_embeddings": 8192, "max_seq_len": 4096}, 8192),
    ],
)
def test_fields(config: dict[str, Any], length: int) -> None:
    assert context_length(config.get) == length


@pytest.mark.parametrize(
    "config",
    [transformers.GPT2Config(n_positions=64), transformers.MptConfig(max_seq_len=64)],
    ids=["gpt2", "mpt"],
)
def test_json_and_transformers_own_configuration_agree(config: Any) -> None:
    assert context_length(config.to_dict().get) == 64
    assert context_length(lambda name: getattr(config, name, None)) == 64

"""Tiny models of transformers' causal types, with random weights.

Owns the construction of a model from `tiny_models.toml`, which has the sizes.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.modalities.llm.engine.class_config import CAUSAL_CLASSES

VOCAB_SIZE = 97
"""That of the table."""
MOST_PARAMETERS = 3_000_000
"""A type without a table of its own may ignore the generic sizes; its model is then not made."""
_SEED = 3


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def class_of(model_type: str) -> Any:
    """Transformers' class of a type."""
    return getattr(transformers, CAUSAL_CLASSES[model_type])


def tiny_config(model_type: str) -> Any:
    """The tiny configuration of a type."""
    kind, own = CONFIG_MAPPING[model_type], dict(_tables()["types"].get(model_type, {}))
    own.pop("seed", None)
    known = {*kind.__dataclass_fields__, *kind.attribute_map} - set(own.pop("unset", ()))
    fields = {name: value for name, value in _tables()["generic"].items() if name in known}
    for group in _tables()["groups"].values():
        if model_type in group["types"]:
            fields |= group["fields"]
    return kind(**fields | own, attn_implementation="eager")


def tiny_model(model_type: str) -> Any:
    """A model of a type with random weights. Raises `ValueError` if it would not be tiny."""
    config, kind = tiny_config(model_type), class_of(model_type)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in kind(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters")
    torch.manual_seed(_tables()["types"].get(model_type, {}).get("seed", _SEED))
    model = kind(config).eval()
    model.config.use_cache = False  # the reference computes all tokens at once
    return model


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word for each id."""
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.save_pretrained(folder)

"""The families that our decoder runs, by architecture.

Owns the table from architecture name to reader. A family is a set of defaults and one function for
the differences of its layers, in the file of its group; the rest is shared (`decoders.hf_config`,
`decoders.tensor_names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families import (
    cohere,
    corrected_mixtures,
    deepseek,
    gemma,
    gpt_oss,
    kimi_linear,
    llama,
    llama4,
    mamba,
    mixtures,
    olmo,
    phi,
    qwen,
    recurrent,
    relatives,
    state_space,
)
from triptych.core.runtime.decoders.hf_config import NotNativeError, Reader
from triptych.core.runtime.layers.decoder_layer import DecoderConfig

FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        **llama.READERS,
        **qwen.READERS,
        **recurrent.READERS,
        **mamba.READERS,
        **state_space.READERS,
        **gemma.READERS,
        **mixtures.READERS,
        **phi.READERS,
        **olmo.READERS,
        **cohere.READERS,
        **relatives.READERS,
        **corrected_mixtures.READERS,
        **gpt_oss.READERS,
        **llama4.READERS,
        **deepseek.READERS,
        **kimi_linear.READERS,
    }
)
"""The reader of each architecture. SmolLM2 and most related models declare themselves Llama."""
_OTHER_NAMES = ("exaone", "sarvam_moe")
"""Types that declare an architecture here, but whose files have other names of tensors."""


def read_decoder_config(config: Mapping[str, Any], *, max_length: int = 0) -> DecoderConfig:
    """Translate a `config.json`. `max_length` is the context served; 0 means the model's own.

    Raises `WeightsError` for an unsupported architecture (naming the supported ones) and for fields
    that are missing, out of range or not supported.
    """
    reader = FAMILIES.get(architecture_of(config))
    if reader is None:
        raise WeightsError(
            f"Architecture {architecture_of(config)!r} is not supported by the native"
            f" decoder, which runs {', '.join(FAMILIES)}. Use --model-impl transformers for others."
        )
    return reader(config, max_length)


def is_native(config: Mapping[str, Any], max_length: int = 0) -> bool:
    """Whether our decoder runs this architecture, in the variant of the configuration.

    `max_length` is the context served, which matters to some; 0 means the model's own.
    """
    reader = FAMILIES.get(architecture_of(config))
    if reader is None or config.get("model_type") in _OTHER_NAMES:
        return False
    try:
        reader(config, max_length)
    except NotNativeError:
        return False
    except WeightsError:  # it is reported where the model is loaded
        return True
    return True


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture that a `config.json` names; empty when it names none."""
    names = config.get("architectures")
    is_named = isinstance(names, list) and names and isinstance(names[0], str)
    return names[0] if is_named and names else ""

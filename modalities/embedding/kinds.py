"""How a model turns texts into vectors or scores: which of four implementations it has.

Owns the choice, from a folder's files alone, and the sizes of models that run as a class of
transformers. Both processes read it; no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.text.context_length import context_length
from triptych.core.weights.layout import count_field
from triptych.modalities.embedding.architecture import is_cross_encoder, is_encoder
from triptych.modalities.embedding.judge import is_judge
from triptych.modalities.embedding.pooling import MODULES, PoolingSpec

_OFFSET = frozenset(("data2vec-text", "ibert", "longformer", "roberta-prelayernorm", "xmod"))
"""Types whose positions begin after the padding id."""
CLASS_ENCODERS = _OFFSET | {
    *("albert", "big_bird", "convbert", "deberta", "deberta-v2", "electra", "ernie", "eurobert"),
    *("fnet", "funnel", "gte", "jina_embeddings_v3", "luke", "megatron-bert", "mobilebert"),
    *("modernbert-decoder", "mt5", "nomic_bert", "nystromformer", "rembert", "roc_bert"),
    *("roformer", "squeezebert", "t5", "umt5", "xlm", "xlm-roberta-xl"),
}
"""Types of encoders that run as transformers' own class."""
_WIDTHS = ("hidden_size", "d_model", "dim", "n_embd", "emb_dim")
_SEES_ALL = ("use_bidirectional_attention", "is_bidirectional")


class ModelKind(Enum):
    """The implementation of a model."""

    PACKED = "packed"
    """Our encoder, for all texts of a step at once."""
    CLASS = "class"
    """A class of transformers, for texts of equal length at once."""
    DECODER = "decoder"
    """A language model in the token engine: the state of a text's last token."""
    JUDGE = "judge"
    """A language model in the token engine: the scores of two tokens that say yes or no."""


def is_embedding_model(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder's model makes vectors or scores, and does not chat."""
    if is_encoder(config) or is_cross_encoder(config) or is_judge(folder, config):
        return True
    return _has_encoder_class(config) or (folder / MODULES).is_file()


def _has_encoder_class(config: Mapping[str, Any]) -> bool:
    """Whether a class of transformers encodes texts; some types also have one that continues them.

    That of ModernBERT's decoders is such a class.
    """
    if config.get("model_type") not in CLASS_ENCODERS:
        return False
    architectures = config.get("architectures") or ()
    return not any(str(name).endswith("ForCausalLM") for name in architectures)


def kind_of(folder: Path, config: Mapping[str, Any]) -> ModelKind:
    """The kind of a folder's model. Raises `WeightsError` for one that cannot be served."""
    _check_vectors(config)
    if is_encoder(config):
        return ModelKind.PACKED
    if is_judge(folder, config):
        return ModelKind.JUDGE
    if is_cross_encoder(config) or config.get("model_type") in CLASS_ENCODERS:
        return ModelKind.CLASS
    spec = PoolingSpec.of(folder, config, "last")
    is_plain = spec.mode == "last" and not spec.dense
    return ModelKind.DECODER if is_plain and not _sees_all(config) else ModelKind.CLASS


def _check_vectors(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or ()
    if any("colbert" in str(name).lower() for name in architectures):
        raise WeightsError("A ColBERT model compares texts token by token, which is not served.")


def _sees_all(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of a decoder's class also see later ones."""
    is_marked = any(config.get(name) for name in _SEES_ALL)
    return is_marked or config.get("is_causal") is False


@dataclass(frozen=True, slots=True)
class ClassSizes:
    """The sizes of a model that runs as a class of transformers."""

    max_length: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ClassSizes:
        """Raises `WeightsError` for a config.json without them."""
        max_length = context_length(config.get)
        if config.get("model_type") in _OFFSET | {"xlm-roberta-xl"}:
            max_length -= int(config.get("pad_token_id") or 0) + 1
        width = next((config[name] for name in _WIDTHS if name in config), 0)
        if not isinstance(width, int) or width < 1:
            raise WeightsError("config.json has no hidden_size.")
        return cls(max_length, width, count_field(config, "vocab_size"))
